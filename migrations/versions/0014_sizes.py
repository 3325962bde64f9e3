"""How large each change is that can be undone: they are bounded by that, too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("revisions", sa.Column("size", sa.BigInteger(), nullable=False, server_default="0"))
    length = "length(before)" if op.get_bind().dialect.name == "sqlite" else "octet_length(before::text)"
    kept = f"SELECT coalesce(sum({length}), 0) FROM undo WHERE undo.revision = revisions.revision"  # noqa: S608
    op.execute(f"UPDATE revisions SET size = ({kept})")  # noqa: S608  # our own words, as above


def downgrade() -> None:
    with op.batch_alter_table("revisions") as batch:
        batch.drop_column("size")
