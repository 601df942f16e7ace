"""Define the coordinator's tables. They outlive the coordinator; its connections live in memory alone.

Amounts are whole millionths of a unit, and times whole seconds of Unix time. No text of a request or an
answer is ever stored, and of an API key only a hash. Of a body that came with an Idempotency-Key there is an
HMAC, for a day.
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
    # The balance without the amounts that reservations hold.
    Column("balance_micro", BigInteger, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    CheckConstraint("balance_micro >= 0", name="no_debts"),
)

API_KEYS = Table(
    "api_keys",
    METADATA,
    Column("key_hash", LargeBinary(32), primary_key=True),
    # An administrator's key has no account.
    Column("account", String(64), ForeignKey("accounts.name"), nullable=True),
    Column("scope", String(16), nullable=False),
    Column("label", String(64), nullable=False),
    # The key's first characters, to tell it from others.
    Column("hint", String(8), nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("revoked_s", BigInteger, nullable=True),
    Column("expires_s", BigInteger, nullable=True),
    Column("requests_per_minute", BigInteger, nullable=True),
    Column("tokens_per_minute", BigInteger, nullable=True),
    Column("concurrent_requests", BigInteger, nullable=True),
    Column("spend_limit_micro", BigInteger, nullable=True),
    # The settled and the held amounts together, for a key with a spend limit.
    Column("spent_micro", BigInteger, nullable=False, server_default="0"),
)

CHARGES = Table(
    "charges",
    METADATA,
    Column("request_id", String(64), primary_key=True),
    Column("account", String(64), ForeignKey("accounts.name"), nullable=False),
    # The coordinator that holds it.
    Column("instance", String(64), nullable=False),
    Column("idempotency_key", String(128), nullable=True),
    # The secret of the HMAC is not in the database. The HMAC is kept for a day at most.
    Column("body_mac", LargeBinary(32), nullable=True),
    Column("model", String(255), nullable=False),
    # One of reserved, settled, released.
    Column("state", String(16), nullable=False),
    Column("reserved_micro", BigInteger, nullable=False),
    Column("settled_micro", BigInteger, nullable=False),
    # The cost of earlier, incomplete answers for the same Idempotency-Key.
    Column("paid_micro", BigInteger, nullable=False),
    # Delivered completely, as far as can be known.
    Column("delivered", Boolean, nullable=False),
    Column("provider", String(255), nullable=True),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    # How often an answer was given for its key.
    Column("served", Integer, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("ended_s", BigInteger, nullable=True),
    # The API key, if it has a spend limit.
    Column("key_hash", LargeBinary(32), nullable=True),
    UniqueConstraint("account", "idempotency_key", name="once"),
    CheckConstraint("settled_micro <= reserved_micro", name="never_more_than_held"),
)
Index("charges_by_account", CHARGES.c.account, CHARGES.c.created_s)
Index("charges_by_state", CHARGES.c.state, CHARGES.c.instance)
# The index finds keys that are a day old.
Index("charges_by_key", CHARGES.c.idempotency_key)

# Append-only: an account's balance is the sum of its entries.
LEDGER = Table(
    "ledger",
    METADATA,
    Column("number", _COUNTED, primary_key=True, autoincrement=True),
    Column("account", String(64), ForeignKey("accounts.name"), nullable=False),
    Column("request_id", String(64), nullable=True),
    # One of credit, reserve, release.
    Column("kind", String(16), nullable=False),
    Column("amount_micro", BigInteger, nullable=False),
    Column("at_s", BigInteger, nullable=False),
)
Index("ledger_by_account", LEDGER.c.account)

PROVIDERS = Table(
    "providers",
    METADATA,
    # The provider's Ed25519 public key.
    Column("identity", LargeBinary(32), primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("approved_s", BigInteger, nullable=False),
    Column("revoked_s", BigInteger, nullable=True),
)
