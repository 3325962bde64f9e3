"""The time by the database's clock, which is one for all who report to it: those of gateways may differ.

A SQLite file has the clock of its host.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, select, type_coerce
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from netlimit.liveness import AHEAD
from netlimit.store.columns import Moment

_MICROSECOND = timedelta(microseconds=1)


class _Microseconds(FunctionElement[int]):
    """Those since 1970, as times are kept."""

    type = BigInteger()
    inherit_cache = True


@compiles(_Microseconds, "sqlite")
def _ask_sqlite(element: _Microseconds, compiler: Any, **options: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"


@compiles(_Microseconds, "postgresql")
def _ask_postgres(element: _Microseconds, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS BIGINT)"


def now() -> ColumnElement[datetime]:
    """The moment of a statement."""
    return type_coerce(_Microseconds(), Moment())


def ago(span: timedelta) -> ColumnElement[datetime]:
    """So long before it."""
    return type_coerce(_Microseconds() - span // _MICROSECOND, Moment())


def is_recent(moment: ColumnElement[datetime], within: timedelta) -> ColumnElement[bool]:
    """Whether a moment is no longer past; one that is yet to come is no proof of anything."""
    return moment.between(ago(within), ago(-AHEAD))


def read(connection: Connection) -> datetime:
    """What the clock shows."""
    return connection.execute(select(now())).scalar_one()
