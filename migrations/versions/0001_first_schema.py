"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", ID, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("rule_id", sa.BigInteger()),
        sa.Column("before", sa.JSON(none_as_null=True)),
        sa.Column("after", sa.JSON(none_as_null=True)),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "clock",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("last_rule", sa.BigInteger(), nullable=False),
        sa.Column("pruned", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_clock"),
    )
    op.create_table(
        "counters",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("rule_id", ID, nullable=False),
        sa.Column("matched_packets", sa.BigInteger(), nullable=False),
        sa.Column("matched_bytes", sa.BigInteger(), nullable=False),
        sa.Column("dropped_packets", sa.BigInteger(), nullable=False),
        sa.Column("dropped_bytes", sa.BigInteger(), nullable=False),
        sa.Column("raw_matched_packets", sa.BigInteger(), nullable=False),
        sa.Column("raw_matched_bytes", sa.BigInteger(), nullable=False),
        sa.Column("raw_dropped_packets", sa.BigInteger(), nullable=False),
        sa.Column("raw_dropped_bytes", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("as_of", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("host", "rule_id", name="pk_counters"),
    )
    op.create_index("ix_counters_rule_id", "counters", ["rule_id"])
    op.create_table(
        "hosts",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("applied_revision", sa.BigInteger(), nullable=False),
        sa.Column("hz", sa.Integer(), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("own", sa.JSON(), nullable=False),
        sa.Column("safe", sa.JSON(), nullable=False),
        sa.Column("notes", sa.JSON(), nullable=False),
        sa.Column("drift", sa.BigInteger(), nullable=False),
        sa.Column("last_error", sa.Text()),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("host", name="pk_hosts"),
    )
    op.create_table(
        "numbers",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("limit_group", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("host", "limit_group", "profile", name="pk_numbers"),
    )
    op.create_table(
        "pauses", sa.Column("host", sa.Text(), nullable=False), sa.PrimaryKeyConstraint("host", name="pk_pauses")
    )
    op.create_table(
        "requests",
        sa.Column("id", ID, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("argument", sa.JSON(), nullable=False),
        sa.Column("asked_at", sa.BigInteger(), nullable=False),
        sa.Column("answer", sa.JSON(none_as_null=True)),
        sa.PrimaryKeyConstraint("id", name="pk_requests"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "rule_states",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("rule_id", ID, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("host", "rule_id", name="pk_rule_states"),
    )
    op.create_index("ix_rule_states_rule_id", "rule_states", ["rule_id"])
    op.create_table(
        "rules",
        sa.Column("id", ID, autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("direction", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("ports", sa.Text(), nullable=False),
        sa.Column("source_ports", sa.Text(), nullable=False),
        sa.Column("interface", sa.Text()),
        sa.Column("rate", sa.Text()),
        sa.Column("burst", sa.BigInteger()),
        sa.Column("per", sa.Text()),
        sa.Column("ceil", sa.Text()),
        sa.Column("on_failure", sa.Text(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("expires_at", sa.BigInteger()),
        sa.Column("hosts", sa.Text(), nullable=False),
        sa.Column("name", sa.Text()),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rules"),
    )
    op.create_index("ix_rules_identity_revision", "rules", ["identity", "revision"])
    named = sa.text("name IS NOT NULL")
    op.create_index("ix_rules_name", "rules", ["name"], unique=True, sqlite_where=named, postgresql_where=named)
    op.create_index("ix_rules_revision", "rules", ["revision"])
    op.create_index("ix_rules_target", "rules", ["target"])
    op.create_table(
        "tokens",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger()),
        sa.Column("revoked_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("name", name="uq_tokens_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "tombstones",
        sa.Column("rule_id", ID, autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("rule_id", name="pk_tombstones"),
    )
    op.create_index("ix_tombstones_revision", "tombstones", ["revision"])
    op.create_table(
        "rule_hosts",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("rule_id", ID, nullable=False),
        sa.ForeignKeyConstraint(["rule_id"], ["rules.id"], name="fk_rule_hosts_rule_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("host", "rule_id", name="pk_rule_hosts"),
    )
    op.create_index("ix_rule_hosts_rule_id", "rule_hosts", ["rule_id"])
    op.create_table(
        "rule_labels",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("rule_id", ID, nullable=False),
        sa.ForeignKeyConstraint(["rule_id"], ["rules.id"], name="fk_rule_labels_rule_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("key", "value", "rule_id", name="pk_rule_labels"),
    )
    op.create_index("ix_rule_labels_rule_id", "rule_labels", ["rule_id"])
    op.execute("INSERT INTO clock (id, revision, last_rule, pruned) VALUES (1, 0, 0, 0)")


def downgrade() -> None:
    for table in (
        "rule_labels",
        "rule_hosts",
        "tombstones",
        "tokens",
        "rules",
        "rule_states",
        "requests",
        "pauses",
        "numbers",
        "hosts",
        "counters",
        "clock",
        "audit",
    ):
        op.drop_table(table)
