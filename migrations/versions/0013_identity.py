"""What tells one database from every other, and what a gateway says that does not go by the one it reports to.

A database in which nothing was ever changed is named at once. One that has rules may be an old one that somebody has
put back: the first controller that goes by it names it, as its copy knows it.
"""

from __future__ import annotations

from secrets import token_hex

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("clock", sa.Column("identity", sa.Text()))
    op.execute(f"UPDATE clock SET identity = '{token_hex(16)}' WHERE revision = 0")  # noqa: S608  # hexadecimal digits
    op.add_column("hosts", sa.Column("refused", sa.Text()))


def downgrade() -> None:
    op.drop_column("hosts", "refused")
    op.drop_column("clock", "identity")  # not in a batch: the triggers of the audit ask the clock
