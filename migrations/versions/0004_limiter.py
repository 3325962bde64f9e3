"""The limiter: its rules as documents, one for each domain, and a revision of their own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limit_documents",
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("domain", name="pk_limit_documents"),
    )
    op.add_column("clock", sa.Column("limits", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("clock", "limits")  # not in a batch: the triggers of the audit ask this table
    op.drop_table("limit_documents")
