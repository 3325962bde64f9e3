"""Shaping: what waited is counted, and the root qdiscs of others are kept to be put back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COUNTED = ("delayed", "raw_delayed", "queued_packets", "queued_bytes")


def upgrade() -> None:
    with op.batch_alter_table("counters") as batch:
        for name in COUNTED:
            batch.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "saved_roots",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("handle", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("host", "device", name="pk_saved_roots"),
    )


def downgrade() -> None:
    op.drop_table("saved_roots")
    with op.batch_alter_table("counters") as batch:
        for name in COUNTED:
            batch.drop_column(name)
