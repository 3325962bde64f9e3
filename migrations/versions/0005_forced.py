"""That a rule was forced, and by whom. Of rules that are there nobody knows it: they spare who is safe from now on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rules", sa.Column("forced_by", sa.Text()))


def downgrade() -> None:
    with op.batch_alter_table("rules") as batch:
        batch.drop_column("forced_by")
