"""Rates as an operator writes them: "200 packets/s", "20 Mbit/s", "10 connections/min", "50 connections".

Conversions are exact: amounts are integers or fractions, never floats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from netlimit.errors import RuleError


class Kind(StrEnum):
    """What a rate counts. Limits of different kinds are different limits, and all of them apply."""

    PACKETS = "packets"
    BYTES = "bytes"
    CONNECTIONS = "connections"
    """New connections a period."""
    CONCURRENT = "concurrent"
    """Connections that exist at once; has no period."""


PERIODS = {"s": 1, "min": 60, "h": 3600, "day": 86400}
_PERIOD_NAMES = {
    "s": "s", "sec": "s", "second": "s", "m": "min", "min": "min", "minute": "min",
    "h": "h", "hour": "h", "d": "day", "day": "day",
}  # fmt: skip
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_COUNTED = {
    "packet": "packets", "packets": "packets", "pkt": "packets", "pkts": "packets",
    "connection": "connections", "connections": "connections", "conn": "connections", "conns": "connections",
}  # fmt: skip
_MOST = 10**21
"""No amount is as large: each can be written with as many digits as are read."""
_QUANTITY = re.compile(r"\s*([0-9]{1,21}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")
EXAMPLES = '"200 packets/s", "20 Mbit/s", "5 MB/s", "10 connections/min" or "50 connections"'


MANY_CONNECTIONS = 10_000
"""At once, by one count: 50 µs for each that comes beyond it, at 5 ns for each that it holds (nf_conncount's list)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount of a unit in a period.

    `amount` is a whole number of `unit` ("packets", "bits", "bytes", "connections") in `seconds` seconds;
    `seconds` is None for concurrent connections. `text` is the canonical form and reads back to the same rate.
    """

    amount: int
    unit: str
    seconds: int | None
    text: str

    @property
    def kind(self) -> Kind:
        """What is counted."""
        if self.unit in ("bits", "bytes"):
            return Kind.BYTES
        if self.unit == "packets":
            return Kind.PACKETS
        return Kind.CONCURRENT if self.seconds is None else Kind.CONNECTIONS

    @property
    def per_second(self) -> Fraction:
        """Packets, bytes (not bits) or connections a second; the bare number for concurrent connections."""
        amount = Fraction(self.amount, 8) if self.unit == "bits" else Fraction(self.amount)
        return amount / (self.seconds or 1)


@lru_cache(maxsize=16384)
def parse_rate(text: str) -> Rate:
    """Read a rate. Raises RuleError (field `rate`) with what would be accepted."""
    quantity, slash, period = text.partition("/")
    amount, unit = _parse_quantity("rate", quantity, text)
    if unit is None:
        raise RuleError("rate", f"The rate {text!r} has no unit; write for example {EXAMPLES}.")
    seconds = _parse_period(period, text) if slash else None
    if seconds is None and unit != "connections":
        raise RuleError(
            "rate",
            f'The rate {text!r} lacks a period; write for example "{text.strip()}/s" (s, min, h or day).',
        )
    if amount == 0:
        raise RuleError("rate", f'The rate {text!r} is zero; to let nothing through, use the action "block".')
    whole, seconds = _to_whole(amount, seconds, text)
    if whole >= _MOST:
        raise RuleError("rate", f"The rate {text!r} is larger than any network can carry.")
    return Rate(whole, unit, seconds, format_rate(whole, unit, seconds))


def parse_burst(value: int | str, kind: Kind) -> int:
    """Read a burst: a whole number in the unit of the rate (packets, bytes, connections), or text like "2 MB".

    Raises RuleError (field `burst`).
    """
    if isinstance(value, int):
        if abs(value) >= 10**18:
            raise RuleError("burst", "The burst is larger than any kernel can hold.")
        amount, unit = Fraction(value), None
    else:
        amount, unit = _parse_quantity("burst", value, value)
    if unit == "bits":
        amount, unit = amount / 8, "bytes"
    wanted = "connections" if kind is Kind.CONCURRENT else kind.value
    if unit not in (None, wanted):
        raise RuleError("burst", f"The burst {value!r} is in {unit}, but the rate counts {wanted}.")
    if amount.denominator != 1 or amount < 1:
        raise RuleError("burst", f"The burst {value!r} is not a whole number of {wanted} of at least 1.")
    return int(amount)


def format_rate(amount: int | Fraction, unit: str, seconds: int | None) -> str:
    """Write a rate in its canonical form: the largest SI prefix that keeps the number whole, the period's name."""
    names = {"bits": "bit", "bytes": "B"}
    if unit in names:
        prefix = next(p for p in ("T", "G", "M", "k", "") if amount % _PREFIXES[p] == 0)
        quantity = f"{format_number(Fraction(amount) / _PREFIXES[prefix])} {prefix}{names[unit]}"
    else:
        quantity = f"{format_number(Fraction(amount))} {unit}"
    if seconds is None:
        return quantity
    period = next((name for name, length in PERIODS.items() if length == seconds), f"{seconds}s")
    return f"{quantity}/{period}"


def format_number(value: Fraction) -> str:
    """Write a number with at most three decimals and none that say nothing."""
    return str(int(value)) if value.denominator == 1 else f"{float(value):.3f}".rstrip("0").rstrip(".")


def _parse_quantity(field: str, text: str, whole: str) -> tuple[Fraction, str | None]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        example = EXAMPLES if field == "rate" else '100, "100 packets" or "2 MB"'
        raise RuleError(field, f"The {field} {whole!r} cannot be read; write for example {example}.")
    amount, name = Fraction(match[1]), match[2]
    if not name:
        return amount, None
    for prefix, factor in _PREFIXES.items():
        rest = name.removeprefix(prefix)
        if prefix and rest == name:
            continue
        if rest in ("bit", "bits"):
            return amount * factor, "bits"
        if rest in ("B", "byte", "bytes"):
            return amount * factor, "bytes"
        if rest in _COUNTED and "i" not in prefix:
            return amount * factor, _COUNTED[rest]
    raise RuleError(
        field,
        f"The {field} {whole!r} is in {name!r}, which is no unit known here; use packets, connections, "
        "bit, kbit, Mbit, Gbit (powers of 1000), B, kB, MB, GB, or KiB, MiB, GiB (powers of 1024).",
    )


def _parse_period(text: str, whole: str) -> int:
    name = _PERIOD_NAMES.get(text.strip().lower())
    if name is None:
        raise RuleError("rate", f"The period of {whole!r} is not known; use /s, /min, /h or /day.")
    return PERIODS[name]


def _to_whole(amount: Fraction, seconds: int | None, text: str) -> tuple[int, int | None]:
    """A fraction of a unit is kept exactly by asking for more of them in a longer period: 0.5/s is 30/min."""
    if amount.denominator == 1:
        return int(amount), seconds
    for longer in PERIODS.values():
        if seconds is not None and longer > seconds and (amount * longer / seconds).denominator == 1:
            return int(amount * longer / seconds), longer
    raise RuleError("rate", f"The rate {text!r} is not a whole number in any period from s to day; round it.")
