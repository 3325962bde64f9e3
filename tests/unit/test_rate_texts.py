"""Rates: from text to exact numbers, and back."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netlimit.errors import RuleError
from netlimit.rates import PERIODS, Kind, format_number, parse_burst, parse_rate


@pytest.mark.parametrize(
    ("text", "per_second", "kind", "canonical"),
    [
        ("200 packets/s", 200, Kind.PACKETS, "200 packets/s"),
        ("200pkt/sec", 200, Kind.PACKETS, "200 packets/s"),
        ("2 kpkts/s", 2000, Kind.PACKETS, "2000 packets/s"),
        ("1.5 kpackets/s", 1500, Kind.PACKETS, "1500 packets/s"),
        ("10 connections/min", Fraction(1, 6), Kind.CONNECTIONS, "10 connections/min"),
        ("1 conn/h", Fraction(1, 3600), Kind.CONNECTIONS, "1 connections/h"),
        ("0.5 packets/s", Fraction(1, 2), Kind.PACKETS, "30 packets/min"),
        ("0.25 packets/s", Fraction(1, 4), Kind.PACKETS, "15 packets/min"),
        ("50 connections", 50, Kind.CONCURRENT, "50 connections"),
        ("20 Mbit/s", 2_500_000, Kind.BYTES, "20 Mbit/s"),
        ("20000 kbit/s", 2_500_000, Kind.BYTES, "20 Mbit/s"),
        ("1 bit/s", Fraction(1, 8), Kind.BYTES, "1 bit/s"),
        ("5 MB/s", 5_000_000, Kind.BYTES, "5 MB/s"),
        ("1 MiB/s", 2**20, Kind.BYTES, "1048576 B/s"),
        ("1.5 GiB/min", Fraction(3 * 2**29, 60), Kind.BYTES, None),
        ("1 Tbit/day", Fraction(10**12, 8 * 86400), Kind.BYTES, "1 Tbit/day"),
        ("8 Mibit/s", 2**20, Kind.BYTES, None),
    ],
)
def test_conversions_are_exact(text: str, per_second: Fraction, kind: Kind, canonical: str | None) -> None:
    rate = parse_rate(text)
    assert rate.per_second == per_second
    assert rate.kind is kind
    if canonical is not None:
        assert rate.text == canonical


FACTORS = {
    "packets": 1,
    "connections": 1,
    "bit": Fraction(1, 8),
    "kbit": 125,
    "Mbit": 125_000,
    "Gbit": 125_000_000,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}


@example(976562501, "GiB", "day")  # 19 digits in bytes
@given(st.integers(1, 10**9), st.sampled_from(sorted(FACTORS)), st.sampled_from(sorted(PERIODS)))
def test_the_canonical_text_reads_back_to_the_same_rate(amount: int, unit: str, period: str) -> None:
    rate = parse_rate(f"{amount} {unit}/{period}")
    assert parse_rate(rate.text) == rate
    assert rate.per_second == Fraction(amount, PERIODS[period]) * FACTORS[unit]


@given(st.decimals(min_value="0.001", max_value="1000", places=3), st.sampled_from(["packets", "connections"]))
def test_a_fraction_is_held_exactly_or_refused(amount: object, unit: str) -> None:
    try:
        rate = parse_rate(f"{amount} {unit}/s")
    except RuleError as error:
        sentence = str(error)
        assert "not a whole number in any period" in sentence
    else:
        assert rate.per_second == Fraction(str(amount))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fast", "cannot be read"),
        ("", "cannot be read"),
        ("-5 packets/s", "cannot be read"),
        ("1e3 packets/s", "cannot be read"),
        ("2k packets/s", "cannot be read"),
        ("200/s", "has no unit"),
        ("200", "has no unit"),
        ("200 packets", "lacks a period"),
        ("20 Mbit", 'write for example "20 Mbit/s"'),
        ("0 packets/s", 'use the action "block"'),
        ("0 connections", 'use the action "block"'),
        ("200 packets/fortnight", "use /s, /min, /h or /day"),
        ("200 packets/", "use /s, /min, /h or /day"),
        ("200 frames/s", "'frames', which is no unit known here"),
        ("20 mbit/s", "'mbit', which is no unit known here"),
        ("3 Kipackets/s", "which is no unit known here"),
        ("0.33333 packets/s", "not a whole number in any period"),
        ("0.5 connections", "not a whole number in any period"),
        ("999999999999999999999 Gbit/s", "larger than any network can carry"),
        ("9" * 22 + " B/s", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rate(text)
    assert sentence in str(error.value)
    assert error.value.field == "rate"


@pytest.mark.parametrize(
    ("value", "kind", "burst"),
    [
        (100, Kind.PACKETS, 100),
        ("100", Kind.PACKETS, 100),
        ("100 packets", Kind.PACKETS, 100),
        ("2 MB", Kind.BYTES, 2_000_000),
        ("8 kbit", Kind.BYTES, 1000),
        ("1 KiB", Kind.BYTES, 1024),
        ("7 conns", Kind.CONNECTIONS, 7),
    ],
)
def test_bursts_are_read_in_the_unit_of_the_rate(value: int | str, kind: Kind, burst: int) -> None:
    assert parse_burst(value, kind) == burst


@pytest.mark.parametrize(
    ("value", "kind", "sentence"),
    [
        ("2 MB", Kind.PACKETS, "is in bytes, but the rate counts packets"),
        ("5 packets", Kind.BYTES, "is in packets, but the rate counts bytes"),
        (0, Kind.PACKETS, "at least 1"),
        (-3, Kind.PACKETS, "at least 1"),
        ("1 bit", Kind.BYTES, "not a whole number of bytes"),
        ("0.5", Kind.CONNECTIONS, "not a whole number of connections"),
        ("a lot", Kind.PACKETS, "cannot be read"),
    ],
)
def test_wrong_bursts_are_told_in_a_sentence(value: int | str, kind: Kind, sentence: str) -> None:
    with pytest.raises(RuleError, match=sentence) as error:
        parse_burst(value, kind)
    assert error.value.field == "burst"


def test_numbers_are_written_without_what_says_nothing() -> None:
    assert [format_number(Fraction(n)) for n in ("5", "1/2", "1/3", "200.50")] == ["5", "0.5", "0.333", "200.5"]
