"""Writing many rows by the driver's own fast way: SQLAlchemy would spend more time on each row than SQLite does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Column, Connection


def write(connection: Connection, columns: Sequence[Column[Any]], rows: Iterable[Sequence[Any]]) -> None:
    """Insert rows of plain values (times as microseconds) into the table of `columns`."""
    into = f"{columns[0].table.name} ({', '.join(column.name for column in columns)})"
    cursor: Any = connection.connection.cursor()
    try:
        if connection.dialect.name == "sqlite":
            marks = ", ".join("?" * len(columns))
            cursor.executemany(f"INSERT INTO {into} VALUES ({marks})", rows)  # noqa: S608  names of our own tables
        else:
            with cursor.copy(f"COPY {into} FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
    finally:
        cursor.close()
