"""Insert, or overwrite what has the same primary key: the one statement that SQLAlchemy leaves to the dialects."""

from __future__ import annotations

from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert


def upsert(connection: Connection, table: Table) -> PostgresInsert | SqliteInsert:
    """A statement to execute with rows that name every column of the table."""
    kind = SqliteInsert if connection.dialect.name == "sqlite" else PostgresInsert
    statement = kind(table)
    overwritten = {column.name: statement.excluded[column.name] for column in table.c if not column.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=overwritten)
