"""Writing many rows by the driver's own fast way: SQLAlchemy would spend more time on each row than SQLite does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from sqlalchemy import Column, Connection

_ROWS_A_STATEMENT = 200
"""SQLite's driver lets other threads run after each statement, and then waits for them: so not too many of those."""


def write(connection: Connection, columns: Sequence[Column[Any]], rows: Iterable[Sequence[Any]]) -> None:
    """Insert rows of plain values (times as microseconds) into the table of `columns`."""
    into = f"{columns[0].table.name} ({', '.join(column.name for column in columns)})"
    cursor: Any = connection.connection.cursor()
    try:
        if connection.dialect.name == "sqlite":
            _insert(cursor, into, len(columns), iter(rows))
        else:
            with cursor.copy(f"COPY {into} FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
    finally:
        cursor.close()


def _insert(cursor: Any, into: str, width: int, rows: Iterator[Sequence[Any]]) -> None:
    marks = f"({', '.join('?' * width)})"
    while chunk := list(islice(rows, _ROWS_A_STATEMENT)):
        values = ", ".join([marks] * len(chunk))
        cursor.execute(f"INSERT INTO {into} VALUES {values}", list(chain.from_iterable(chunk)))  # noqa: S608  our own names
