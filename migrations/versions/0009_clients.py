"""Clients of the API: since when they are seen, by which token, and of which role."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("clients", sa.Column("since", sa.BigInteger()))
    op.add_column("clients", sa.Column("token", sa.Text()))
    op.add_column("clients", sa.Column("role", sa.Text()))


def downgrade() -> None:
    with op.batch_alter_table("clients") as batch:
        for name in ("role", "token", "since"):
            batch.drop_column(name)
