"""The networks that a gateway is attached to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("hosts", sa.Column("networks", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    op.drop_column("hosts", "networks")
