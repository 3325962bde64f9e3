"""What Alembic runs to take a step: always on a connection that the store has opened and locked."""

from __future__ import annotations

from alembic import context

from netlimit.store.tables import metadata

connection = context.config.attributes["connection"]
if connection is None:
    raise RuntimeError("Migrations run through `netlimit db upgrade`, which opens the database as it must be.")

context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
