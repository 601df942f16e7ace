"""Add limits and an expiry to API keys, and the key to each charge."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_LIMITS = (
    *("expires_s", "requests_per_minute", "tokens_per_minute", "concurrent_requests"),
    "spend_limit_micro",
)


def upgrade() -> None:
    """Add the columns. Existing keys get no limits."""
    for name in _LIMITS:
        op.add_column("api_keys", sa.Column(name, sa.BigInteger, nullable=True))
    op.add_column("api_keys", sa.Column("spent_micro", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("charges", sa.Column("key_hash", sa.LargeBinary(32), nullable=True))
