"""Look up API keys and approved providers, as the database has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from sqlalchemy import bindparam, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from convoy.api.keys.key_file import new_key
from convoy.api.refusals import Forbidden, WrongKey
from convoy.errors import ConfigError
from convoy.fleet.books.keys import NO_TERMS, Grant, KeyFacts, KeyTerms, Scope, hash_key, hint_of
from convoy.fleet.books.price import MAX_MICRO
from convoy.fleet.books.store import NO_ACCOUNT, Store
from convoy.fleet.books.tables import ACCOUNTS, API_KEYS, PROVIDERS

# The statement is made once, because every request needs it.
_TERMS = tuple(API_KEYS.c[one.name] for one in fields(KeyTerms))
_LOOK_UP = select(API_KEYS.c.account, API_KEYS.c.scope, API_KEYS.c.revoked_s, *_TERMS).where(
    API_KEYS.c.key_hash == bindparam("hash")
)
_IDENTITY_BYTES = 32
_MAX_LABEL = 64
_OF_ALL_SCOPES = frozenset({"expires_s", "requests_per_minute"})


@dataclass(frozen=True, slots=True)
class Approved:
    """Describe a provider that an administrator approved."""

    identity: bytes
    name: str
    approved_s: int
    revoked_s: int | None


class Directory:
    """Read and write API keys and providers. Threads may share it."""

    def __init__(self, store: Store, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._now = now

    def make_key(
        self,
        scope: Scope,
        account: str | None,
        label: str = "",
        terms: KeyTerms = NO_TERMS,
        key: str | None = None,
    ) -> str:
        """Return a new key, which is shown here and never again. Raises `ConfigError` for an unknown account.

        ``key`` is one that `new_key` made before for this purpose.
        """
        if (account is None) == (scope is Scope.CONSUMER):
            raise ConfigError("a consumer's key belongs to an account, and no other key does")
        if len(label) > _MAX_LABEL or not label.isprintable():
            raise ConfigError(f"a label of {len(label)} characters, expected at most {_MAX_LABEL}")
        self._check_terms(scope, terms)
        key = key or new_key()
        with self._store.write() as db:
            if account is not None:
                known = db.scalar(select(ACCOUNTS.c.name).where(ACCOUNTS.c.name == account))
                if known is None:
                    raise ConfigError(f"there is no account {account}", hint=NO_ACCOUNT)
            db.execute(
                insert(API_KEYS).values(
                    key_hash=hash_key(key),
                    account=account,
                    scope=scope.value,
                    label=label,
                    hint=hint_of(key),
                    created_s=int(self._now()),
                    **asdict(terms),
                )
            )
        return key

    def _check_terms(self, scope: Scope, terms: KeyTerms) -> None:
        for name, value in asdict(terms).items():
            if value is not None and not 1 <= value <= MAX_MICRO:
                raise ConfigError(f"{name} is {value}, expected 1 to {MAX_MICRO}")
            if value is not None and scope is not Scope.CONSUMER and name not in _OF_ALL_SCOPES:
                raise ConfigError(
                    f"a key of scope {scope.value} uses no tokens and no money: leave {name} out"
                )
        if terms.expires_s is not None and terms.expires_s <= self._now():
            raise ConfigError("the key would have expired already", hint="give a time that is to come")

    def look_up(self, key: str, scope: Scope) -> str | None:
        """Return the account of a consumer's key, or None for an administrator's. Raises as `grant`."""
        return self.grant(key, scope).account

    def grant(self, key: str, scope: Scope) -> Grant:
        """Return the rights of a key. Raises `Unauthenticated` or `Forbidden`."""
        digest = hash_key(key)
        with self._store.read() as db:
            found = db.execute(_LOOK_UP, {"hash": digest}).one_or_none()
        if found is None or found.revoked_s is not None:
            raise WrongKey(
                "the API key is not known here" if found is None else "the API key was revoked",
                hint="the coordinator's operator makes one: `convoy coordinator keys --add ACCOUNT`",
            )
        if found.scope != scope.value:
            raise Forbidden(f"the API key has scope {found.scope}, and this wants {scope.value}")
        terms = KeyTerms(*found[-len(_TERMS) :])
        if terms.expires_s is not None and self._now() >= terms.expires_s:
            raise WrongKey("the API key has expired", hint="the coordinator's operator makes another one")
        return Grant(found.account, digest, terms)

    def revoke_key(self, account: str | None, hint: str) -> int:
        """Revoke the keys of an account that begin with ``hint``; return how many were valid before.

        ``account`` None means the administrators' keys.
        """
        columns = API_KEYS.c
        of_account = columns.account.is_(None) if account is None else columns.account == account
        with self._store.write() as db:
            done = db.execute(
                update(API_KEYS)
                .where(of_account, columns.hint == hint, columns.revoked_s.is_(None))
                .values(revoked_s=int(self._now()))
            )
        return int(done.rowcount)

    def keys(self) -> list[KeyFacts]:
        """Return all keys, the oldest first."""
        columns = API_KEYS.c
        wanted = select(
            *(columns.account, columns.scope, columns.label, columns.hint),
            *(columns.created_s, columns.revoked_s, columns.spent_micro, *_TERMS),
        )
        with self._store.read() as db:
            rows = db.execute(wanted.order_by(columns.created_s, columns.hint)).all()
        return [
            KeyFacts(account, Scope(scope), label, hint, created_s, revoked_s, KeyTerms(*terms), spent)
            for account, scope, label, hint, created_s, revoked_s, spent, *terms in rows
        ]

    def approve(self, identity: bytes, name: str) -> None:
        """Approve a provider under a name, or approve it again. A revoked provider's name is free.

        Raises `ConfigError` for a name that another provider has.
        """
        if len(identity) != _IDENTITY_BYTES or not (1 <= len(name) <= 255 and name.isprintable()):
            raise ConfigError(f"a provider's key of {len(identity)} bytes and name of {len(name)} characters")
        values = {"name": name, "approved_s": int(self._now()), "revoked_s": None}
        try:
            with self._store.write() as db:
                columns = PROVIDERS.c
                gone = (columns.name == name, columns.identity != identity, columns.revoked_s.is_not(None))
                db.execute(delete(PROVIDERS).where(*gone))
                again = db.execute(update(PROVIDERS).where(PROVIDERS.c.identity == identity).values(**values))
                if not again.rowcount:
                    db.execute(insert(PROVIDERS).values(identity=identity, **values))
        except IntegrityError:
            raise ConfigError(
                f"another provider is called {name} already",
                hint=f"`convoy coordinator providers --revoke {name}` puts that one out, and frees the name",
            ) from None

    def revoke_provider(self, name: str) -> bool:
        """Revoke a provider, and return whether there was one."""
        with self._store.write() as db:
            done = db.execute(
                update(PROVIDERS)
                .where(PROVIDERS.c.name == name, PROVIDERS.c.revoked_s.is_(None))
                .values(revoked_s=int(self._now()))
            )
        return bool(done.rowcount)

    def provider_name(self, identity: bytes) -> str | None:
        """Return the name under which a key was approved; None for one that was not, or is not any more."""
        columns = PROVIDERS.c
        wanted = select(columns.name).where(columns.identity == identity, columns.revoked_s.is_(None))
        with self._store.read() as db:
            name: str | None = db.scalar(wanted)
        return name

    def providers(self) -> list[Approved]:
        """Return all providers that were ever approved, by name."""
        columns = PROVIDERS.c
        wanted = select(columns.identity, columns.name, columns.approved_s, columns.revoked_s)
        with self._store.read() as db:
            rows = db.execute(wanted.order_by(columns.name)).all()
        return [Approved(bytes(identity), *rest) for identity, *rest in rows]
