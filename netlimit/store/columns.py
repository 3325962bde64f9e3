"""Types of columns that read whatever stands there: a row that somebody has written by hand, or another version, must
end nobody. What cannot be read comes back as something that is easily told, and is nothing dangerous."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Float, Integer, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from netlimit.plain import decode

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""1970, which is what a time that cannot be read comes back as: long past."""
_MICROSECOND = timedelta(microseconds=1)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class Unreadable(dict[str, Any]):
    """What a document comes back as that is none: it holds nothing."""


def to_microseconds(moment: datetime) -> int:
    """How a time is kept: microseconds since 1970 (UTC)."""
    return (moment - EPOCH) // _MICROSECOND


class Moment(TypeDecorator[datetime]):
    """An aware time, kept as whole microseconds since 1970 (UTC): exact, sortable, the same in every database."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        """Turn a time into microseconds."""
        return None if value is None else to_microseconds(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Turn microseconds into a time."""
        if value is None:
            return None
        try:
            return EPOCH + timedelta(microseconds=value)
        except (TypeError, OverflowError):
            return EPOCH


class Whole(TypeDecorator[int]):
    """A whole number; 0 where there is none. SQLite keeps anything in any column."""

    impl = BigInteger
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        """Take nothing but whole numbers."""
        return _read_whole(value)


class Small(TypeDecorator[int]):
    """The same, of the database's usual size."""

    impl = Integer
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        """Take nothing but whole numbers."""
        return _read_whole(value)


class Amount(TypeDecorator[float]):
    """A number; 0 where there is none, or none that one can reckon with."""

    impl = Float
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        """Take nothing but numbers."""
        return value if value is None or (isinstance(value, int | float) and math.isfinite(value)) else 0.0


class Words(TypeDecorator[str]):
    """A text; bytes are shown as one."""

    impl = Text
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        """Take bytes as text."""
        return decode(value) if isinstance(value, bytes) else value


class Flag(TypeDecorator[bool]):
    """True or false; what is neither comes back as it is."""

    impl = Boolean
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bool | None:
        """Write nothing else."""
        return value if value is None or isinstance(value, bool) else False

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """SQLAlchemy would take whatever is not empty for true."""
        return lambda value: bool(value) if value in (0, 1) else value


class Document(TypeDecorator[Any]):
    """JSON; `Unreadable` where it is none. Half a surrogate pair, which JSON can spell and no answer can carry, is
    replaced."""

    impl = JSON
    cache_ok = True

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Read what can be read."""
        read = super().result_processor(dialect, coltype)

        def process(value: Any) -> Any:
            try:
                found = read(value) if read else value
                return _replace_halves(found) if isinstance(value, str) and _HALF.search(value) else found
            except (ValueError, TypeError, RecursionError):
                return Unreadable()

        return process


def _replace_halves(document: Any) -> Any:
    return json.loads(json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"))


def _read_whole(value: Any) -> int | None:
    """PostgreSQL gives sums of whole numbers as decimals."""
    if value is None or isinstance(value, int):
        return value
    return int(value) if isinstance(value, Decimal) else 0
