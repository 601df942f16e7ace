"""What accounts have, what is held for requests under way, and what they came to.

A request's worst-case cost is taken from its account's balance before it is sent anywhere, and once it is
over all but its real cost is given back. Every change of a balance is an entry, and both are one transaction,
so whenever the coordinator dies each amount is held or settled. What it held is given back when it starts
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlalchemy import Connection, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from convoy.errors import ConfigError, RequestError
from convoy.fleet.books.price import MAX_MICRO
from convoy.fleet.books.store import Store
from convoy.fleet.books.tables import ACCOUNTS, CHARGES, LEDGER
from convoy.serve.refusals import Conflict, NoBalance

RESERVED, SETTLED, RELEASED = "reserved", "settled", "released"
MAX_KEY_CHARS = 128  # of an Idempotency-Key
MAX_SERVED = 16  # answers for one key, where the first one was whole
MAX_SERVED_ANEW = 4  # where each holds anew: its reader left, or nobody here knows that the bodies are alike

# Made once: to put a statement together costs more than SQLite takes for it.
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
_ENTER = insert(LEDGER).inline()
_HOLD = insert(CHARGES).inline()
_HELD = (
    select(CHARGES.c.account, CHARGES.c.reserved_micro, CHARGES.c.paid_micro)
    .where(CHARGES.c.request_id == bindparam("request"), CHARGES.c.state == RESERVED)
    .with_for_update()
)
_LOCK = select(ACCOUNTS.c.name).where(ACCOUNTS.c.name == bindparam("of")).with_for_update()
_KEYED = select(
    *(CHARGES.c.request_id, CHARGES.c.state, CHARGES.c.body_hash, CHARGES.c.served),
    *(CHARGES.c.settled_micro, CHARGES.c.paid_micro, CHARGES.c.retry_is_free),
).where(CHARGES.c.account == bindparam("of"), CHARGES.c.idempotency_key == bindparam("key"))
_END = (
    update(CHARGES)
    .where(CHARGES.c.request_id == bindparam("request"))
    .values(
        state=bindparam("new_state"),
        settled_micro=bindparam("cost"),
        retry_is_free=bindparam("free"),
        provider=bindparam("by"),
        prompt_tokens=bindparam("prompt"),
        completion_tokens=bindparam("completion"),
        ended_s=bindparam("at"),
    )
)


@dataclass(frozen=True, slots=True)
class Hold:
    """What is to be held for a request. ``body_hash``: a key means one body alone."""

    request_id: str
    account: str
    model: str
    amount_micro: int
    body_hash: bytes
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class Bill:
    """What a request came to; ``cost_micro`` is never more than what was held.

    ``retry_is_free``: it was answered whole, and its body is known to be the one that its key was used with.
    """

    provider: str
    prompt_tokens: int
    completion_tokens: int
    cost_micro: int
    retry_is_free: bool = True


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What a key was used for: how often it was answered, and what those answers cost together."""

    request_id: str | None = None
    served: int = 0
    paid_micro: int = 0
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Of an account and a model, all that was settled."""

    account: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost_micro: int


class Ledger:
    """Threads may share it: the database is what keeps them apart. ``instance`` names this coordinator."""

    def __init__(self, store: Store, instance: str, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._instance = instance
        self._now = now

    def open_account(self, name: str) -> None:
        """With nothing in it. Raises `ConfigError` for a name that is taken, or is none."""
        if not (1 <= len(name) <= 64 and name.isascii() and name.isprintable()):
            raise ConfigError(
                f"an account's name of {len(name)} characters, expected 1 to 64 that are printed"
            )
        try:
            with self._store.write() as db:
                db.execute(insert(ACCOUNTS).values(name=name, balance_micro=0, created_s=self._second()))
        except IntegrityError:
            raise ConfigError(f"there is an account {name} already") from None

    def credit(self, account: str, amount_micro: int) -> int:
        """Add to a balance; the new one. Raises `ConfigError` for no such account, or no sensible amount."""
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
        """What may still be held. Raises `ConfigError` for no such account."""
        with self._store.read() as db:
            return self._balance(db, account)

    def balances(self) -> dict[str, int]:
        """Of every account, by name."""
        wanted = select(ACCOUNTS.c.name, ACCOUNTS.c.balance_micro).order_by(ACCOUNTS.c.name)
        with self._store.read() as db:
            return {name: int(balance) for name, balance in db.execute(wanted)}

    def reserve(self, hold: Hold) -> bool:
        """Hold the amount; False where an earlier request with the same key was charged for it already.

        Then it is to be served once more, for nothing. Where the earlier answer was not whole, what it cost
        is taken off: all of its tries cost together what the dearest would. Raises `NoBalance`, and
        `Conflict` for a key whose request is under way still, had another body, or was served too often.
        """
        # one that is lost with the power was never held, so only what settles waits for the disk
        with self._store.write(survives_power=False) as db:
            return self.reserve_in(db, hold)

    def settle(self, request_id: str, bill: Bill) -> int:
        """Give back all but the cost; what was charged, never more than was held. 0 if nothing is."""
        with self._store.write() as db:
            return self.settle_in(db, request_id, bill)

    def release(self, request_id: str) -> None:
        """Give back all: it was not served. Nothing if nothing is held for it."""
        with self._store.write(survives_power=False) as db:
            self.release_in(db, request_id)

    # The same within a transaction that others share: what these raise, they raise before they write.

    def reserve_in(self, db: Connection, hold: Hold) -> bool:
        """As `reserve`."""
        if not 0 <= hold.amount_micro <= MAX_MICRO:
            raise RequestError(f"a request would hold {hold.amount_micro}, and the limit is {MAX_MICRO}")
        earlier = self._earlier(db, hold)
        if earlier.is_free:
            wanted = update(CHARGES).where(CHARGES.c.request_id == earlier.request_id)
            db.execute(wanted.values(served=CHARGES.c.served + 1))
            return False
        amount_micro = max(0, hold.amount_micro - earlier.paid_micro)
        self._take(db, replace(hold, amount_micro=amount_micro))
        if earlier.request_id is not None:  # its key is this one's from here on
            wanted = update(CHARGES).where(CHARGES.c.request_id == earlier.request_id)
            db.execute(wanted.values(idempotency_key=None))
        held = {
            "request_id": hold.request_id,
            "account": hold.account,
            "instance": self._instance,
            "idempotency_key": hold.idempotency_key,
            "body_hash": hold.body_hash,
            "model": hold.model,
            "state": RESERVED,
            "reserved_micro": amount_micro,
            "settled_micro": 0,
            "paid_micro": earlier.paid_micro,
            "retry_is_free": False,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "served": earlier.served + 1,
            "created_s": self._second(),
        }
        db.execute(_HOLD, held)
        return True

    def settle_in(self, db: Connection, request_id: str, bill: Bill) -> int:
        """As `settle`."""
        charge = self._held(db, request_id)
        if charge is None:
            return 0
        account, held, paid = charge
        cost = max(0, min(bill.cost_micro - paid, held))
        self._end(db, request_id, SETTLED, replace(bill, cost_micro=cost))
        self._add(db, account, held - cost, "release", request_id)
        return cost

    def release_in(self, db: Connection, request_id: str) -> None:
        """As `release`."""
        charge = self._held(db, request_id)
        if charge is not None:
            self._end(db, request_id, RELEASED, None)
            account, held, _ = charge
            self._add(db, account, held, "release", request_id)

    def recover(self) -> int:
        """Give back what this coordinator held when it ended; how many requests that were."""
        with self._store.write() as db:
            broken = db.scalars(
                select(CHARGES.c.request_id).where(
                    CHARGES.c.state == RESERVED, CHARGES.c.instance == self._instance
                )
            ).all()
            for request_id in broken:
                self.release_in(db, request_id)
        return len(broken)

    def usage(self, account: str | None = None) -> list[Usage]:
        """By account and model, of what was answered; of one account where it is named."""
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
            .where(columns.prompt_tokens + columns.completion_tokens > 0)  # else an engine refused it
            .group_by(columns.account, columns.model)
            .order_by(columns.account, columns.model)
        )
        if account is not None:
            query = query.where(columns.account == account)
        with self._store.read() as db:
            return [
                Usage(name, model, *(int(one) for one in rest)) for name, model, *rest in db.execute(query)
            ]

    def check(self) -> list[str]:
        """Accounts whose balance is not the sum of their entries: there are none."""
        sums = select(LEDGER.c.account, func.sum(LEDGER.c.amount_micro)).group_by(LEDGER.c.account)
        with self._store.read() as db:
            entries: dict[str, int] = {name: int(total) for name, total in db.execute(sums)}
            balances = db.execute(select(ACCOUNTS.c.name, ACCOUNTS.c.balance_micro)).all()
        return sorted(name for name, balance in balances if balance != entries.get(name, 0))

    def _take(self, db: Connection, hold: Hold) -> None:
        # one statement decides and takes, so that two requests cannot have the same money
        taken = db.execute(_TAKE, {"of": hold.account, "amount": hold.amount_micro})
        if taken.rowcount != 1:
            raise NoBalance(
                f"this request may cost {hold.amount_micro}, and {hold.account} has "
                f"{self._balance(db, hold.account)}",
                hint="a smaller max_tokens costs less",
            )
        self._enter(db, hold.account, -hold.amount_micro, "reserve", hold.request_id)

    def _earlier(self, db: Connection, hold: Hold) -> _Earlier:
        """With the same key. Raises `Conflict`."""
        if hold.idempotency_key is None:
            return _Earlier()
        # who asks with the same key at once waits here, and then sees what the first one wrote
        db.execute(_LOCK, {"of": hold.account})
        found = db.execute(_KEYED, {"of": hold.account, "key": hold.idempotency_key}).one_or_none()
        if found is None:
            return _Earlier()
        if found.state == RESERVED:
            raise Conflict("a request with this Idempotency-Key is under way")
        served = int(found.served) - (found.state == RELEASED)
        if not served:  # nothing was given for it, so it may be for any body
            return _Earlier(found.request_id)
        if bytes(found.body_hash) != hold.body_hash:
            raise Conflict("this Idempotency-Key was used with another body")
        if served >= (MAX_SERVED if found.retry_is_free else MAX_SERVED_ANEW):
            raise Conflict(f"a request with this Idempotency-Key was served {served} times")
        paid = int(found.paid_micro) + int(found.settled_micro)
        return _Earlier(found.request_id, served, paid, bool(found.retry_is_free))

    def _held(self, db: Connection, request_id: str) -> tuple[str, int, int] | None:
        """Its account, what is held, and what was paid under its key before."""
        found = db.execute(_HELD, {"request": request_id}).one_or_none()
        return None if found is None else (found[0], found[1], found[2])

    def _end(self, db: Connection, request_id: str, state: str, bill: Bill | None) -> None:
        values = {
            "request": request_id,
            "new_state": state,
            "cost": 0 if bill is None else bill.cost_micro,
            "free": bill is not None and bill.retry_is_free,
            "by": None if bill is None else bill.provider,
            "prompt": 0 if bill is None else bill.prompt_tokens,
            "completion": 0 if bill is None else bill.completion_tokens,
            "at": self._second(),
        }
        db.execute(_END, values)

    def _balance(self, db: Connection, account: str) -> int:
        found = db.scalar(_BALANCE, {"of": account})
        if found is None:
            raise ConfigError(f"there is no account {account}")
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
