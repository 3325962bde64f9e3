"""Stamps: revisions are told from those of the same number that another server has given."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table, column in (("clock", "stamp"), ("clock", "limits_stamp"), ("revisions", "stamp")):
        op.add_column(table, sa.Column(column, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    for table, column in (("revisions", "stamp"), ("clock", "limits_stamp"), ("clock", "stamp")):
        op.drop_column(table, column)  # not in a batch: the triggers of the audit ask the clock
