"""The addresses of other gateways that a gateway knows, for one that begins on the copy."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("hosts", sa.Column("peers", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    with op.batch_alter_table("hosts") as batch:
        batch.drop_column("peers")
