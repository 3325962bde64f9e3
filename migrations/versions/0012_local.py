"""What ends on a gateway by its routes, for whoever explains what happens to a packet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("hosts", sa.Column("local", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    with op.batch_alter_table("hosts") as batch:
        batch.drop_column("local")
