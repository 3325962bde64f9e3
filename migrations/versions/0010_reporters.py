"""Which controller has reported of a gateway last, so that two of one name are noticed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("hosts", sa.Column("reporter", sa.Text()))


def downgrade() -> None:
    with op.batch_alter_table("hosts") as batch:
        batch.drop_column("reporter")
