"""Insert, or change what has the same primary key: the one statement that SQLAlchemy leaves to the dialects."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert


def upsert(connection: Connection, table: Table) -> PostgresInsert | SqliteInsert:
    """A statement to execute with rows that name every column of the table."""
    statement = _insert(connection, table)
    overwritten = {column.name: statement.excluded[column.name] for column in table.c if not column.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=overwritten)


def add_up(connection: Connection, table: Table, summed: Collection[str]) -> PostgresInsert | SqliteInsert:
    """The same, but the columns `summed` are added to what is there; a column `since` stays as it is."""
    statement = _insert(connection, table)
    changed = {
        column.name: column + statement.excluded[column.name]
        if column.name in summed
        else statement.excluded[column.name]
        for column in table.c
        if not column.primary_key and column.name != "since"
    }
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed)


def _insert(connection: Connection, table: Table) -> PostgresInsert | SqliteInsert:
    kind = SqliteInsert if connection.dialect.name == "sqlite" else PostgresInsert
    return kind(table)
