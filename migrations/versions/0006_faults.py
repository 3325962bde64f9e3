"""How many errors that nobody expected a controller has gone on after."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("hosts", sa.Column("faults", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("hosts", "faults")
