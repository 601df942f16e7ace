"""Keep the accounts' balances, the amounts held for requests in flight, and the final charges.

A request's worst-case cost is taken from its account's balance before the request is sent anywhere. Once it
is over, all but its real cost is given back. Every change of a balance is an entry, and both are one
transaction. So at whatever moment the coordinator dies, each amount is held or settled. The amounts that it
held are given back when it starts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlalchemy import Connection, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from convoy.api.refusals import Conflict, NoBalance
from convoy.errors import ConfigError, RequestError
from convoy.fleet.books.price import MAX_MICRO
from convoy.fleet.books.store import NO_ACCOUNT, Store
from convoy.fleet.books.tables import ACCOUNTS, API_KEYS, CHARGES, LEDGER

RESERVED, SETTLED, RELEASED = "reserved", "settled", "released"
# The limit of an Idempotency-Key.
MAX_KEY_CHARS = 128
# The most answers for one key, none of which was delivered completely.
MAX_SERVED = 4
# A key and the HMAC of its body are kept this long.
KEY_LIFE_S = 24 * 3600

# The statements are made once, because composing one costs more than SQLite takes for running it.
_BALANCE = select(ACCOUNTS.c.balance_micro).where(ACCOUNTS.c.name == bindparam("of"))
_ADD = (
    update(ACCOUNTS)
    .where(ACCOUNTS.c.name == bindparam("of"))
    .values(balance_micro=ACCOUNTS.c.balance_micro + bindparam("amount"))
)
_TAKE = (
    update(ACCOUNTS)
    .where(ACCOUNTS.c.name == bindparam("of"), ACCOUNTS.c.balance_micro >= bindparam("amount"))
    .values(balance_micro=ACCOUNTS.c.balance_micro - bindparam("amount"))
)
_SPENT = select(API_KEYS.c.spent_micro, API_KEYS.c.spend_limit_micro).where(
    API_KEYS.c.key_hash == bindparam("key")
)
_SPEND = (
    update(API_KEYS)
    .where(API_KEYS.c.key_hash == bindparam("key"))
    .values(spent_micro=API_KEYS.c.spent_micro + bindparam("amount"))
)
_SPEND_WITHIN = _SPEND.where(API_KEYS.c.spent_micro + bindparam("amount") <= API_KEYS.c.spend_limit_micro)
_ENTER = insert(LEDGER).inline()
_HOLD = insert(CHARGES).inline()
_HELD = (
    select(CHARGES.c.account, CHARGES.c.reserved_micro, CHARGES.c.paid_micro, CHARGES.c.key_hash)
    .where(CHARGES.c.request_id == bindparam("request"), CHARGES.c.state == RESERVED)
    .with_for_update()
)
_LOCK = select(ACCOUNTS.c.name).where(ACCOUNTS.c.name == bindparam("of")).with_for_update()
_KEYED = select(
    *(CHARGES.c.request_id, CHARGES.c.state, CHARGES.c.body_mac, CHARGES.c.served),
    *(CHARGES.c.settled_micro, CHARGES.c.paid_micro, CHARGES.c.delivered),
    *(CHARGES.c.instance, CHARGES.c.created_s),
).where(CHARGES.c.account == bindparam("of"), CHARGES.c.idempotency_key == bindparam("key"))
_END = (
    update(CHARGES)
    .where(CHARGES.c.request_id == bindparam("request"))
    .values(
        state=bindparam("new_state"),
        settled_micro=bindparam("cost"),
        delivered=bindparam("whole"),
        provider=bindparam("by"),
        prompt_tokens=bindparam("prompt"),
        completion_tokens=bindparam("completion"),
        ended_s=bindparam("at"),
    )
)


@dataclass(frozen=True, slots=True)
class Hold:
    """Describe an amount to hold for a request.

    ``body_mac``: a key means one body alone; None without a key. ``spends`` is the hash of the API key with
    the spend limit that the amount counts against.
    """

    request_id: str
    account: str
    model: str
    amount_micro: int
    body_mac: bytes | None = None
    idempotency_key: str | None = None
    spends: bytes | None = None


@dataclass(frozen=True, slots=True)
class Bill:
    """Hold the final counts of a request. ``cost_micro`` is never more than the amount held.

    ``delivered``: it was answered completely, so that the same key asks for another answer.
    """

    provider: str
    prompt_tokens: int
    completion_tokens: int
    cost_micro: int
    delivered: bool = True


@dataclass(frozen=True, slots=True)
class _Earlier:
    """Hold the earlier use of a key: the number of partial answers, and their total cost."""

    request_id: str | None = None
    served: int = 0
    paid_micro: int = 0


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """Sum the settled requests of an account and a model."""

    account: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost_micro: int


class Ledger:
    """Change balances. Threads may share it: the database isolates them.

    ``instance`` names this coordinator.
    """

    def __init__(self, store: Store, instance: str, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._instance = instance
        self._now = now

    def open_account(self, name: str) -> None:
        """Open an empty account. Raises `ConfigError` for a name that is taken or invalid."""
        if not (1 <= len(name) <= 64 and name.isascii() and name.isprintable()):
            raise ConfigError(
                f"an account's name of {len(name)} characters, expected 1 to 64 that are printed"
            )
        try:
            with self._store.write() as db:
                db.execute(insert(ACCOUNTS).values(name=name, balance_micro=0, created_s=self._second()))
        except IntegrityError:
            raise ConfigError(f"there is an account {name} already", hint="choose another name") from None

    def credit(self, account: str, amount_micro: int) -> int:
        """Add to a balance, and return the new one.

        Raises `ConfigError` for an unknown account or an invalid amount.
        """
        if not 0 < amount_micro <= MAX_MICRO:
            raise ConfigError(f"a credit of {amount_micro}, expected 1 to {MAX_MICRO}")
        with self._store.write() as db:
            balance = self._balance(db, account)
            if balance + amount_micro > MAX_MICRO:
                raise ConfigError(
                    f"{account} would have {balance + amount_micro}, and the limit is {MAX_MICRO}"
                )
            self._add(db, account, amount_micro, "credit", None)
            return balance + amount_micro

    def balance(self, account: str) -> int:
        """Return the amount that may still be held. Raises `ConfigError` for an unknown account."""
        with self._store.read() as db:
            return self._balance(db, account)

    def balances(self) -> dict[str, int]:
        """Return the balance of every account, by name."""
        wanted = select(ACCOUNTS.c.name, ACCOUNTS.c.balance_micro).order_by(ACCOUNTS.c.name)
        with self._store.read() as db:
            return {name: int(balance) for name, balance in db.execute(wanted)}

    def reserve(self, hold: Hold) -> None:
        """Hold the amount.

        If an earlier answer for the same key was not delivered completely, its cost is taken off: all tries
        together cost as much as the dearest one. After a complete answer, the key asks for a new answer at
        its full price.

        Raises `NoBalance`. Raises `Conflict` for a key with a request that is still in flight, that had
        another body, or that was served too often.
        """
        # A reservation that a power loss removes was never held, so only settling waits for the disk.
        with self._store.write(survives_power=False) as db:
            self.reserve_in(db, hold)

    def settle(self, request_id: str, bill: Bill) -> int:
        """Give back all but the cost, and return the charge.

        The charge is never more than was held, and 0 if nothing is.
        """
        with self._store.write() as db:
            return self.settle_in(db, request_id, bill)

    def release(self, request_id: str) -> None:
        """Give back all, because the request was not served. Does nothing if nothing is held for it."""
        with self._store.write(survives_power=False) as db:
            self.release_in(db, request_id)

    # The methods that end in `_in` run within a transaction that other changes share. They raise before they
    # write, so that a failing one undoes no other.

    def undelivered(self, request_id: str) -> None:
        """Note that the end of an answer that was settled did not reach its reader."""
        with self._store.write(survives_power=False) as db:
            self.undelivered_in(db, request_id)

    def forget_keys(self) -> int:
        """Forget the keys that are a day old, and the HMACs of their bodies; return how many."""
        columns = CHARGES.c
        with self._store.write(survives_power=False) as db:
            done = db.execute(
                update(CHARGES)
                .where(columns.idempotency_key.is_not(None), columns.state != RESERVED)
                .where(columns.created_s <= self._second() - KEY_LIFE_S)
                .values(idempotency_key=None, body_mac=None)
            )
        return int(done.rowcount)

    def reserve_in(self, db: Connection, hold: Hold) -> None:
        """Reserve within a transaction, as `reserve`."""
        if not 0 <= hold.amount_micro <= MAX_MICRO:
            raise RequestError(f"a request would hold {hold.amount_micro}, and the limit is {MAX_MICRO}")
        earlier = self._earlier(db, hold)
        amount_micro = max(0, hold.amount_micro - earlier.paid_micro)
        self._check_spend(db, hold.spends, amount_micro)
        self._take(db, replace(hold, amount_micro=amount_micro))
        self._spend(db, hold.spends, amount_micro)
        # The Idempotency-Key belongs to the new request from here on.
        if earlier.request_id is not None:
            wanted = update(CHARGES).where(CHARGES.c.request_id == earlier.request_id)
            db.execute(wanted.values(idempotency_key=None, body_mac=None))
        held = {
            "request_id": hold.request_id,
            "account": hold.account,
            "instance": self._instance,
            "idempotency_key": hold.idempotency_key,
            "body_mac": None if hold.idempotency_key is None else hold.body_mac,
            "model": hold.model,
            "state": RESERVED,
            "reserved_micro": amount_micro,
            "settled_micro": 0,
            "paid_micro": earlier.paid_micro,
            "delivered": False,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "served": earlier.served + 1,
            "created_s": self._second(),
            "key_hash": hold.spends,
        }
        db.execute(_HOLD, held)

    def undelivered_in(self, db: Connection, request_id: str) -> None:
        """Note within a transaction, as `undelivered`."""
        wanted = update(CHARGES).where(CHARGES.c.request_id == request_id, CHARGES.c.state == SETTLED)
        db.execute(wanted.values(delivered=False))

    def settle_in(self, db: Connection, request_id: str, bill: Bill) -> int:
        """Settle within a transaction, as `settle`."""
        charge = self._held(db, request_id)
        if charge is None:
            return 0
        account, held, paid, spends = charge
        # Earlier partial answers for the same key are paid already.
        cost = max(0, min(bill.cost_micro - paid, held))
        self._end(db, request_id, SETTLED, replace(bill, cost_micro=cost))
        self._add(db, account, held - cost, "release", request_id)
        self._unspend(db, spends, held - cost)
        return cost

    def release_in(self, db: Connection, request_id: str) -> None:
        """Release within a transaction, as `release`."""
        charge = self._held(db, request_id)
        if charge is not None:
            self._end(db, request_id, RELEASED, None)
            account, held, _, spends = charge
            self._add(db, account, held, "release", request_id)
            self._unspend(db, spends, held)

    def recover(self) -> int:
        """Give back the amounts that this coordinator held when it ended; return the number of requests."""
        with self._store.write() as db:
            broken = db.scalars(
                select(CHARGES.c.request_id).where(
                    CHARGES.c.state == RESERVED, CHARGES.c.instance == self._instance
                )
            ).all()
            for request_id in broken:
                self.release_in(db, request_id)
        return len(broken)

    def usage(self, account: str | None = None) -> list[AccountUsage]:
        """Return the usage of answered requests by account and model, for all accounts or for ``account``."""
        columns = CHARGES.c
        sums = [
            func.count(),
            func.sum(columns.prompt_tokens),
            func.sum(columns.completion_tokens),
            func.sum(columns.settled_micro),
        ]
        query = (
            select(columns.account, columns.model, *sums)
            .where(columns.state == SETTLED)
            # A request without tokens was refused by an engine.
            .where(columns.prompt_tokens + columns.completion_tokens > 0)
            .group_by(columns.account, columns.model)
            .order_by(columns.account, columns.model)
        )
        if account is not None:
            query = query.where(columns.account == account)
        with self._store.read() as db:
            return [
                AccountUsage(name, model, *(int(one) for one in rest))
                for name, model, *rest in db.execute(query)
            ]

    def check(self) -> list[str]:
        """Return the accounts with a balance that is not the sum of their entries.

        A sound ledger has none.
        """
        sums = select(LEDGER.c.account, func.sum(LEDGER.c.amount_micro)).group_by(LEDGER.c.account)
        with self._store.read() as db:
            entries: dict[str, int] = {name: int(total) for name, total in db.execute(sums)}
            balances = db.execute(select(ACCOUNTS.c.name, ACCOUNTS.c.balance_micro)).all()
        return sorted(name for name, balance in balances if balance != entries.get(name, 0))

    def _take(self, db: Connection, hold: Hold) -> None:
        # One statement decides and takes, so that two requests cannot have the same money.
        taken = db.execute(_TAKE, {"of": hold.account, "amount": hold.amount_micro})
        if taken.rowcount != 1:
            raise NoBalance(
                f"this request may cost {hold.amount_micro}, and {hold.account} has "
                f"{self._balance(db, hold.account)}",
                hint="a smaller max_tokens costs less",
            )
        self._enter(db, hold.account, -hold.amount_micro, "reserve", hold.request_id)

    def _check_spend(self, db: Connection, key: bytes | None, amount_micro: int) -> None:
        """Check the spend limit before anything is written. Raises `NoBalance`."""
        if key is None:
            return
        spent, limit = db.execute(_SPENT, {"key": key}).one()
        if limit is not None and spent + amount_micro > limit:
            raise NoBalance(
                f"this request may cost {amount_micro}, and {max(0, limit - spent)} of {limit} are left to "
                "this API key",
                hint="a smaller max_tokens costs less",
            )

    def _spend(self, db: Connection, key: bytes | None, amount_micro: int) -> None:
        """Add to the key's spending. Raises `NoBalance`, which undoes the whole transaction.

        With PostgreSQL another request may have spent the rest meanwhile.
        """
        if key is not None:
            within = db.execute(_SPEND_WITHIN, {"key": key, "amount": amount_micro})
            if within.rowcount != 1:
                raise NoBalance("the spend limit of this API key was reached meanwhile")

    def _unspend(self, db: Connection, key: bytes | None, amount_micro: int) -> None:
        if key is not None:
            db.execute(_SPEND, {"key": key, "amount": -amount_micro})

    def _earlier(self, db: Connection, hold: Hold) -> _Earlier:
        """Return the earlier use of the request's key. Raises `Conflict`."""
        if hold.idempotency_key is None:
            return _Earlier()
        # A simultaneous request with the same key waits for this lock, and then sees the first one's entry.
        db.execute(_LOCK, {"of": hold.account})
        found = db.execute(_KEYED, {"of": hold.account, "key": hold.idempotency_key}).one_or_none()
        if found is None:
            return _Earlier()
        if found.state == RESERVED:
            raise Conflict("a request with this Idempotency-Key is under way")
        served = int(found.served) - (found.state == RELEASED)
        is_old = found.created_s <= self._second() - KEY_LIFE_S
        # A key without an answer may be used for any body.
        if is_old or not served:
            return _Earlier(found.request_id)
        # Another coordinator of this database has another secret, so its HMACs cannot be compared here.
        if found.instance == self._instance and found.body_mac != hold.body_mac:
            raise Conflict("this Idempotency-Key was used with another body")
        if found.delivered:
            return _Earlier(found.request_id)
        if served >= MAX_SERVED:
            raise Conflict(f"a request with this Idempotency-Key was served {served} times")
        paid = int(found.paid_micro) + int(found.settled_micro)
        return _Earlier(found.request_id, served, paid)

    def _held(self, db: Connection, request_id: str) -> tuple[str, int, int, bytes | None] | None:
        """Return the request's account, held amount, earlier payment under its key, and spending API key."""
        found = db.execute(_HELD, {"request": request_id}).one_or_none()
        return None if found is None else (found[0], found[1], found[2], found[3])

    def _end(self, db: Connection, request_id: str, state: str, bill: Bill | None) -> None:
        values = {
            "request": request_id,
            "new_state": state,
            "cost": 0 if bill is None else bill.cost_micro,
            "whole": bill is not None and bill.delivered,
            "by": None if bill is None else bill.provider,
            "prompt": 0 if bill is None else bill.prompt_tokens,
            "completion": 0 if bill is None else bill.completion_tokens,
            "at": self._second(),
        }
        db.execute(_END, values)

    def _balance(self, db: Connection, account: str) -> int:
        found = db.scalar(_BALANCE, {"of": account})
        if found is None:
            raise ConfigError(f"there is no account {account}", hint=NO_ACCOUNT)
        return int(found)

    def _add(
        self, db: Connection, account: str, amount_micro: int, kind: str, request_id: str | None
    ) -> None:
        db.execute(_ADD, {"of": account, "amount": amount_micro})
        self._enter(db, account, amount_micro, kind, request_id)

    def _enter(
        self, db: Connection, account: str, amount_micro: int, kind: str, request_id: str | None
    ) -> None:
        entry = {
            "account": account,
            "request_id": request_id,
            "kind": kind,
            "amount_micro": amount_micro,
            "at_s": self._second(),
        }
        db.execute(_ENTER, entry)

    def _second(self) -> int:
        return int(self._now())
