"""Create the tables of accounts, keys, charges, the ledger and approved providers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables in an empty database."""
    _who()
    _charges()
    _ledger()


def _who() -> None:
    op.create_table(
        "accounts",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("balance_micro", sa.BigInteger, nullable=False),
        sa.Column("created_s", sa.BigInteger, nullable=False),
        sa.CheckConstraint("balance_micro >= 0", name="no_debts"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_hash", sa.LargeBinary(32), primary_key=True),
        sa.Column("account", sa.String(64), sa.ForeignKey("accounts.name"), nullable=True),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("hint", sa.String(8), nullable=False),
        sa.Column("created_s", sa.BigInteger, nullable=False),
        sa.Column("revoked_s", sa.BigInteger, nullable=True),
    )
    op.create_table(
        "providers",
        sa.Column("identity", sa.LargeBinary(32), primary_key=True),
        sa.Column("name", sa.String(255), nullable=False, unique=True),
        sa.Column("approved_s", sa.BigInteger, nullable=False),
        sa.Column("revoked_s", sa.BigInteger, nullable=True),
    )


def _charges() -> None:
    op.create_table(
        "charges",
        sa.Column("request_id", sa.String(64), primary_key=True),
        sa.Column("account", sa.String(64), sa.ForeignKey("accounts.name"), nullable=False),
        sa.Column("instance", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=True),
        sa.Column("body_mac", sa.LargeBinary(32), nullable=True),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reserved_micro", sa.BigInteger, nullable=False),
        sa.Column("settled_micro", sa.BigInteger, nullable=False),
        sa.Column("paid_micro", sa.BigInteger, nullable=False),
        sa.Column("delivered", sa.Boolean, nullable=False),
        sa.Column("provider", sa.String(255), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("served", sa.Integer, nullable=False),
        sa.Column("created_s", sa.BigInteger, nullable=False),
        sa.Column("ended_s", sa.BigInteger, nullable=True),
        sa.UniqueConstraint("account", "idempotency_key", name="once"),
        sa.CheckConstraint("settled_micro <= reserved_micro", name="never_more_than_held"),
    )
    op.create_index("charges_by_account", "charges", ["account", "created_s"])
    op.create_index("charges_by_state", "charges", ["state", "instance"])
    op.create_index("charges_by_key", "charges", ["idempotency_key"])


def _ledger() -> None:
    counted = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "ledger",
        sa.Column("number", counted, primary_key=True, autoincrement=True),
        sa.Column("account", sa.String(64), sa.ForeignKey("accounts.name"), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("amount_micro", sa.BigInteger, nullable=False),
        sa.Column("at_s", sa.BigInteger, nullable=False),
    )
    op.create_index("ledger_by_account", "ledger", ["account"])
