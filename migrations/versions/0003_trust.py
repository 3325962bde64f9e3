"""Trust: revisions to undo, windows of confirmation, who asked from where, repairs, clients of the API."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# The audit is append-only: lines go only when clock.audit_pruned says that they may, and none changes.
SQLITE_TRIGGERS = (
    "CREATE TRIGGER audit_no_change BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END",
    "CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit WHEN OLD.id > (SELECT audit_pruned FROM clock) "
    "BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END",
    # INSERT OR REPLACE deletes without asking the trigger for that.
    "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) "
    "BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END",
)
POSTGRES_TRIGGERS = (
    """
    CREATE FUNCTION netlimit_keep_audit() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'DELETE' THEN
            IF OLD.id <= (SELECT audit_pruned FROM clock) THEN RETURN OLD; END IF;
        END IF;
        RAISE EXCEPTION 'the audit is append-only';
    END $$
    """,
    "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE ON audit "
    "FOR EACH ROW EXECUTE FUNCTION netlimit_keep_audit()",
    "CREATE TRIGGER audit_no_truncate BEFORE TRUNCATE ON audit "
    "FOR EACH STATEMENT EXECUTE FUNCTION netlimit_keep_audit()",
)

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "revisions",
        sa.Column("revision", ID, autoincrement=False, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("address", sa.Text()),
        sa.Column("request", sa.Text()),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("rules", sa.Integer(), nullable=False),
        sa.Column("returned_to", sa.BigInteger()),
        sa.PrimaryKeyConstraint("revision", name="pk_revisions"),
    )
    op.create_table(
        "undo",
        sa.Column("revision", ID, nullable=False),
        sa.Column("first_rule", ID, nullable=False),
        sa.Column("last_rule", ID, nullable=False),
        sa.Column("before", sa.JSON(none_as_null=True)),
        sa.PrimaryKeyConstraint("revision", "first_rule", name="pk_undo"),
    )
    op.create_table(
        "windows",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("base", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Integer(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("paused", sa.JSON(), nullable=False),
        sa.Column("outcome", sa.Text()),
        sa.Column("ended_at", sa.BigInteger()),
        sa.Column("revision", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_windows"),
    )
    op.create_table(
        "guards",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("host", name="pk_guards"),
    )
    op.create_table(
        "repairs",
        sa.Column("id", ID, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("found", sa.Text(), nullable=False),
        sa.Column("took", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_repairs"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "clients",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("host", "address", name="pk_clients"),
    )
    with op.batch_alter_table("hosts") as batch:
        batch.add_column(sa.Column("repairs", sa.JSON(none_as_null=True)))
        batch.add_column(sa.Column("applying", sa.JSON(none_as_null=True)))
        batch.add_column(sa.Column("safe_reasons", sa.JSON(none_as_null=True)))
        batch.add_column(sa.Column("management", sa.JSON(none_as_null=True)))
        for name in ("desired", "enforced", "degraded", "drifted", "lifted"):
            batch.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("audit") as batch:
        batch.add_column(sa.Column("address", sa.Text()))
        batch.add_column(sa.Column("request", sa.Text()))
    with op.batch_alter_table("clock") as batch:
        batch.add_column(sa.Column("oldest", sa.BigInteger(), nullable=False, server_default="0"))
        batch.add_column(sa.Column("audit_pruned", sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("tokens") as batch:
        batch.add_column(sa.Column("handle", sa.Text()))
    op.create_index("ix_tokens_handle", "tokens", ["handle"], unique=True)
    for statement in SQLITE_TRIGGERS if op.get_bind().dialect.name == "sqlite" else POSTGRES_TRIGGERS:
        op.execute(statement)
    # Before this, nothing was kept to undo.
    op.execute("UPDATE clock SET oldest = revision")


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for name in ("change", "delete", "replace"):
            op.execute(f"DROP TRIGGER audit_no_{name}")
    else:
        op.execute("DROP TRIGGER audit_append_only ON audit")
        op.execute("DROP TRIGGER audit_no_truncate ON audit")
        op.execute("DROP FUNCTION netlimit_keep_audit")
    op.drop_index("ix_tokens_handle", "tokens")
    with op.batch_alter_table("tokens") as batch:
        batch.drop_column("handle")
    with op.batch_alter_table("clock") as batch:
        batch.drop_column("audit_pruned")
        batch.drop_column("oldest")
    with op.batch_alter_table("audit") as batch:
        batch.drop_column("request")
        batch.drop_column("address")
    with op.batch_alter_table("hosts") as batch:
        for name in (
            "repairs",
            "applying",
            "desired",
            "enforced",
            "degraded",
            "drifted",
            "lifted",
            "safe_reasons",
            "management",
        ):
            batch.drop_column(name)
    for table in ("clients", "repairs", "guards", "windows", "undo", "revisions"):
        op.drop_table(table)
