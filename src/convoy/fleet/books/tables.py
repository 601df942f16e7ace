"""The coordinator's tables. What is written here outlives it; who is connected does not and is in memory.

Amounts are whole millionths of a unit, times whole seconds of Unix time. No text of a request or an answer is
ever stored, and of an API key only a hash. Of a body that came with an Idempotency-Key there is an HMAC, for
a day.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

METADATA = MetaData()

# SQLite counts rows by itself for INTEGER alone.
_COUNTED = BigInteger().with_variant(Integer, "sqlite")

ACCOUNTS = Table(
    "accounts",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("balance_micro", BigInteger, nullable=False),  # what is not held by a reservation
    Column("created_s", BigInteger, nullable=False),
    CheckConstraint("balance_micro >= 0", name="no_debts"),
)

API_KEYS = Table(
    "api_keys",
    METADATA,
    Column("key_hash", LargeBinary(32), primary_key=True),
    Column("account", String(64), ForeignKey("accounts.name"), nullable=True),  # none: an administrator's
    Column("scope", String(16), nullable=False),
    Column("label", String(64), nullable=False),
    Column("hint", String(8), nullable=False),  # the key's first characters, to tell it from others
    Column("created_s", BigInteger, nullable=False),
    Column("revoked_s", BigInteger, nullable=True),
    Column("expires_s", BigInteger, nullable=True),
    Column("requests_per_minute", BigInteger, nullable=True),
    Column("tokens_per_minute", BigInteger, nullable=True),
    Column("concurrent_requests", BigInteger, nullable=True),
    Column("spend_limit_micro", BigInteger, nullable=True),
    # What was settled and is held, where there is a spend limit.
    Column("spent_micro", BigInteger, nullable=False, server_default="0"),
)

CHARGES = Table(
    "charges",
    METADATA,
    Column("request_id", String(64), primary_key=True),
    Column("account", String(64), ForeignKey("accounts.name"), nullable=False),
    Column("instance", String(64), nullable=False),  # the coordinator that holds it
    Column("idempotency_key", String(128), nullable=True),
    Column("body_mac", LargeBinary(32), nullable=True),  # under a secret that is not in here; a day at most
    Column("model", String(255), nullable=False),
    Column("state", String(16), nullable=False),  # reserved, settled, released
    Column("reserved_micro", BigInteger, nullable=False),
    Column("settled_micro", BigInteger, nullable=False),
    Column("paid_micro", BigInteger, nullable=False),  # under its key before, for answers that were not whole
    Column("delivered", Boolean, nullable=False),  # whole, as far as can be known
    Column("provider", String(255), nullable=True),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("served", Integer, nullable=False),  # how often an answer was given for its key
    Column("created_s", BigInteger, nullable=False),
    Column("ended_s", BigInteger, nullable=True),
    Column("key_hash", LargeBinary(32), nullable=True),  # of a key with a spend limit
    UniqueConstraint("account", "idempotency_key", name="once"),
    CheckConstraint("settled_micro <= reserved_micro", name="never_more_than_held"),
)
Index("charges_by_account", CHARGES.c.account, CHARGES.c.created_s)
Index("charges_by_state", CHARGES.c.state, CHARGES.c.instance)
Index("charges_by_key", CHARGES.c.idempotency_key)  # for those that are a day old

# Append-only: an account's balance is the sum of its entries.
LEDGER = Table(
    "ledger",
    METADATA,
    Column("number", _COUNTED, primary_key=True, autoincrement=True),
    Column("account", String(64), ForeignKey("accounts.name"), nullable=False),
    Column("request_id", String(64), nullable=True),
    Column("kind", String(16), nullable=False),  # credit, reserve, release
    Column("amount_micro", BigInteger, nullable=False),
    Column("at_s", BigInteger, nullable=False),
)
Index("ledger_by_account", LEDGER.c.account)

PROVIDERS = Table(
    "providers",
    METADATA,
    Column("identity", LargeBinary(32), primary_key=True),  # its Ed25519 public key
    Column("name", String(255), nullable=False, unique=True),
    Column("approved_s", BigInteger, nullable=False),
    Column("revoked_s", BigInteger, nullable=True),
)
