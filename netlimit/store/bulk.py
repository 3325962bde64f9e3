"""Writing many rows by the driver's own fast way: SQLAlchemy would spend more time on each row than SQLite does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from sqlalchemy import Column, Connection

from netlimit.errors import StoreError
from netlimit.store.homes import name_tables

_ROWS_A_STATEMENT = 200
"""SQLite's driver lets other threads run after each statement, and then waits for them: so not too many of those."""


def write(connection: Connection, columns: Sequence[Column[Any]], rows: Iterable[Sequence[Any]]) -> None:
    """Insert rows of plain values (times as microseconds) into the table of `columns`. Raises StoreError unless all are
    kept."""
    table = columns[0].table.name
    into = f"{name_tables(connection, (table,))} ({', '.join(column.name for column in columns)})"
    cursor: Any = connection.connection.cursor()
    try:
        if connection.dialect.name == "sqlite":
            given, kept = _insert(cursor, into, len(columns), iter(rows))
        else:
            given, kept = _copy(cursor, into, rows)
    finally:
        cursor.close()
    check_kept(table, given, kept)


def check_kept(table: str, given: int, kept: int) -> None:
    """Raise StoreError unless so many rows of a table were written, or removed, as was asked for: a trigger can see to
    it that a statement does nothing, and says nothing."""
    if kept != given:
        raise StoreError(
            f"The database has done only {kept} of {given} changes of its table {table}, without a word: somebody has "
            "given it a trigger or a rule that takes them away. Nothing was changed; find out who, and remove it."
        )


def _copy(cursor: Any, into: str, rows: Iterable[Sequence[Any]]) -> tuple[int, int]:
    given = 0
    with cursor.copy(f"COPY {into} FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
            given += 1
    return given, cursor.rowcount


def _insert(cursor: Any, into: str, width: int, rows: Iterator[Sequence[Any]]) -> tuple[int, int]:
    given = kept = 0
    marks = f"({', '.join('?' * width)})"
    while chunk := list(islice(rows, _ROWS_A_STATEMENT)):
        given += len(chunk)
        values = ", ".join([marks] * len(chunk))
        cursor.execute(f"INSERT INTO {into} VALUES {values}", list(chain.from_iterable(chunk)))  # noqa: S608  our own names
        kept += cursor.rowcount
    return given, kept
