"""What servers say, and what somebody sends in their place."""

from __future__ import annotations

from email.utils import formatdate
from math import isfinite

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.client.advice import LONGEST, Advice, Quota, read_advice
from tests.unit.hostile import damaged

NOW = 1_700_000_000.0
FIELDS = (
    "Retry-After", "X-Ratelimit-Retry-After", "RateLimit", "RateLimit-Policy", "X-RateLimit-Remaining", "Age", "Date",
    "X-RateLimit-Reset", "RateLimit-Remaining", "RateLimit-Reset", "X-RateLimit-Resource", "X-Rate-Limit-Reset",
)  # fmt: skip


def read(*headers: tuple[str, str]) -> Advice:
    raw = [(name.encode(), value.encode("utf-8", "surrogatepass")) for name, value in headers]
    return read_advice(httpx.Headers(raw), NOW)


def quota(policy: str, remaining: int, reset: float, partition: str = "") -> Quota:
    return Quota(policy, partition, remaining, reset)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0),
        (" 1.5 ", 1.5),
        ("0", 0.0),
        ("1, 30, 7", 30.0),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
        ("Tue Nov 14 22:14:50 2023", 90.0),
        ("Tuesday, 14-Nov-23 22:14:50 GMT", 90.0),
        (str(int(NOW) + 90), 90.0),
        (str(int(NOW) - 90), 0.0),
        (str((int(NOW) + 90) * 1000), 90.0),
        ("9" * 9, LONGEST),
        ("9" * 15, LONGEST),
        ("9" * 16, None),
        ("9" * 9000, None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
        ("-5", None),
        ("", None),
        ("soon", None),
        ("1e3", None),
        ("0x10", None),
        ("NaN", None),
        ("٣", None),
    ],
)
def test_retry_after(text: str, seconds: float | None) -> None:
    assert read(("Retry-After", text)).retry_after == seconds


def test_the_longest_of_several_and_the_standard_one_first() -> None:
    assert read(("Retry-After", "3"), ("Retry-After", "5")).retry_after == 5
    assert read(("Retry-After", "3"), ("X-Ratelimit-Retry-After", "5")).retry_after == 3
    assert read(("Retry-After", "soon"), ("X-Ratelimit-Retry-After", "5")).retry_after == 5


def test_dates_count_from_the_servers_own() -> None:
    date = formatdate(NOW + 5000, usegmt=True)
    late = formatdate(NOW + 5030, usegmt=True)
    assert read(("Date", date), ("Retry-After", late)).retry_after == 30
    assert read(("Date", "yesterday"), ("Retry-After", late)).retry_after == 5030


@pytest.mark.parametrize(
    ("text", "quotas"),
    [
        ('"default";r=50;t=30', [quota("default", 50, 30)]),
        ('"a";r=0;t=5, "b";r=1;t=60 ,\t"c";r=2;t=7', [quota("a", 0, 5), quota("b", 1, 60), quota("c", 2, 7)]),
        ('"default";r=3;t=60;pk=:QXBwLTk5OQ==:', [quota("default", 3, 60, ":QXBwLTk5OQ==:")]),
        ('"a, \\"b\\"; c";acme-burst="x;y, z";r=0;flag; t=1', [quota('a, \\"b\\"; c', 0, 1)]),
        ('"late";r=0;t=999999999999999', [quota("late", 0, LONGEST)]),
        ('"a";r=1;r=0;t=1', [quota("a", 0, 1)]),
        ('"a";r=-1;t=5, "b";r=1;t=5', [quota("b", 1, 5)]),
        ('"a";r=1.5;t=5', []),
        ('"a";r="1";t=5', []),
        ('"a";r=1;t=-5', []),
        ('"a";r=1', []),
        ('"a";t=1', []),
        ('"a";r=1;t=5,', []),
        (',"a";r=1;t=5', []),
        ('"a";r=1;t=5 "b";r=1;t=5', []),
        ('"a" ;r=1;t=5', []),
        ('"a;r=1;t=5', []),
        ("default;r=1;t=5", []),
        ('("a" "b");r=1;t=5', []),
        ('"é";r=1;t=5', []),
        ("limit=100, remaining=0, reset=5", []),
        ('"a";r=9999999999999999;t=5', []),
        ('"a";r=1;t=5' + ";x" * 5000, []),
    ],
)  # fmt: skip
def test_the_structured_field(text: str, quotas: list[Quota]) -> None:
    assert list(read(("RateLimit", text)).quotas) == quotas


def test_several_fields_are_one_list_and_a_long_list_is_cut() -> None:
    assert len(read(("RateLimit", '"a";r=1;t=5'), ("RateLimit", '"b";r=1;t=5')).quotas) == 2
    assert len(read(("RateLimit", ", ".join('"a";r=1;t=5' for _ in range(200)))).quotas) == 16


def test_the_policy_tells_what_the_other_field_leaves_out() -> None:
    policy = ("RateLimit-Policy", '"peruser";q=100;w=60;pk=:cHsdsRa894==:, "other";q=1;w=1')
    assert read(policy, ("RateLimit", '"peruser";r=0')).quotas == (quota("peruser", 0, 60, ":cHsdsRa894==:"),)
    assert read(policy, ("RateLimit", '"peruser";r=0;t=3')).quotas == (quota("peruser", 0, 3, ":cHsdsRa894==:"),)
    assert read(policy, ("RateLimit", '"third";r=0')).quotas == ()
    assert read(policy).quotas == ()


def test_retry_after_takes_precedence_where_nothing_remains() -> None:
    told = read(("RateLimit", '"a";r=0;t=5, "b";r=1;t=60'), ("Retry-After", "9"))
    assert told == Advice(9.0, (quota("a", 0, 9), quota("b", 1, 60)))
    assert read(("X-RateLimit-Remaining", "0"), ("Retry-After", "9")).quotas == (quota("", 0, 9),)


@pytest.mark.parametrize("prefix", ["X-RateLimit-", "x-ratelimit-", "X-Rate-Limit-", "RateLimit-"])
def test_the_older_fields(prefix: str) -> None:
    assert read((prefix + "Remaining", "3"), (prefix + "Reset", "30")).quotas == (quota("", 3, 30),)
    assert read((prefix + "Remaining", "10, 0;w=1"), (prefix + "Reset", "1, 30")).quotas == (quota("", 0, 30),)
    assert read((prefix + "Remaining", "0"), (prefix + "Reset", str(int(NOW) + 30))).quotas == (quota("", 0, 30),)
    assert read((prefix + "Remaining", "-1"), (prefix + "Reset", "30")).quotas == ()
    assert read((prefix + "Remaining", "0")).quotas == ()
    named = read((prefix + "Remaining", "0"), (prefix + "Reset", "30"), (prefix + "Resource", "search"))
    assert named.quotas == (quota("search", 0, 30),)


def test_the_structured_field_is_asked_first() -> None:
    older = (("X-RateLimit-Remaining", "0"), ("X-RateLimit-Reset", "30"))
    assert read(*older, ("RateLimit", '"a";r=1;t=5')).quotas == (quota("a", 1, 5),)
    assert read(*older, ("RateLimit", "nonsense")).quotas == (quota("", 0, 30),)


@given(st.lists(st.tuples(
    st.sampled_from(FIELDS),
    damaged("120", "Tue, 14 Nov 2023 22:14:50 GMT", '"default";r=0;t=30;pk=:QQ==:, "b";q=1;w=2', "0, 10;w=1"),
), max_size=6))  # fmt: skip
def test_whatever_is_sent_becomes_bounded_numbers(headers: list[tuple[str, str]]) -> None:
    advice = read(*headers)
    waits = [quota.reset for quota in advice.quotas]
    waits += [advice.retry_after] if advice.retry_after is not None else []
    assert all(isfinite(wait) and 0 <= wait <= LONGEST for wait in waits)
    assert all(quota.remaining >= 0 for quota in advice.quotas)
    assert len(advice.quotas) <= 16


NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)
NUMBERS = st.integers(0, 10**9)


@given(
    st.lists(st.tuples(NAMES, NUMBERS, st.integers(0, int(LONGEST)), st.binary(max_size=6).map(bytes.hex)), max_size=9)
)
def test_what_is_written_as_the_draft_says_is_read(told: list[tuple[str, int, int, str]]) -> None:
    def quote(name: str) -> str:
        return name.replace("\\", "\\\\").replace('"', '\\"')

    text = ", ".join(f'"{quote(name)}";r={left};t={reset};pk=:{key}:' for name, left, reset, key in told)
    quotas = tuple(quota(quote(name), left, reset, f":{key}:") for name, left, reset, key in told)
    assert read(("RateLimit", text)).quotas == quotas


@pytest.mark.parametrize(
    "text", ['"' + "\\" * 8000, '"a";' + " " * 8000, ";" * 8000, '"a";r=1' * 1000, "," * 8000, "1;" * 4000]
)
def test_nothing_takes_long_to_read(text: str) -> None:
    for name in FIELDS:
        assert read((name, text)).quotas == ()
