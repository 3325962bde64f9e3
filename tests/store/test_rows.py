from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import IPv4Network, IPv6Network

from hypothesis import given
from hypothesis import strategies as st

from netlimit.malformed import Malformed, find_flaw
from netlimit.rates import parse_rate
from netlimit.rules import Action, Direction, OnFailure, PortRange, Protocol, Rule, Selector, Target
from netlimit.store.columns import EPOCH, Moment, to_microseconds
from netlimit.store.rows import RULE_COLUMNS, WRITTEN_COLUMNS, from_row, to_fields, to_row, with_number
from tests.store.examples import NOW, rule

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
WORDS = st.text("abcXYZ019._/-", min_size=1, max_size=8)
RATES = st.sampled_from(["1 packets/day", "0.5 packets/s", "20 Mbit/s", "5 MB/s", "3 MiB/min", "50 connections"])


@st.composite
def networks(draw: st.DrawFn) -> Target:
    bits = draw(st.sampled_from([32, 128]))
    length = draw(st.integers(0, bits))
    address = draw(st.integers(0, 2**bits - 1)) >> (bits - length) << (bits - length)
    return IPv4Network((address, length)) if bits == 32 else IPv6Network((address, length))


def ports() -> st.SearchStrategy[tuple[PortRange, ...]]:
    port = st.integers(0, 65535)
    return st.lists(st.tuples(port, port).map(lambda pair: (min(pair), max(pair))), max_size=3).map(tuple)


RULES = st.builds(
    Rule,
    target=networks(),
    action=st.sampled_from(Action),
    direction=st.sampled_from(Direction),
    selector=st.builds(
        Selector,
        protocol=st.sampled_from(Protocol),
        ports=ports(),
        source_ports=ports(),
        interface=st.none() | WORDS,
    ),
    rate=st.none() | RATES.map(parse_rate),
    burst=st.none() | st.integers(1, 2**40),
    per=st.sampled_from([None, "host", "target", "peer", "/24"]),
    ceil=st.none() | RATES.map(parse_rate),
    on_failure=st.sampled_from(OnFailure),
    enabled=st.booleans(),
    expires_at=st.none() | st.datetimes(timezones=st.just(UTC)),
    hosts=st.lists(WORDS, max_size=3, unique=True).map(lambda names: tuple(sorted(names))),
    name=st.none() | WORDS,
    labels=st.dictionaries(WORDS, TEXT, max_size=3).map(lambda labels: tuple(sorted(labels.items()))),
    comment=TEXT,
    id=st.integers(1, 2**50),
    revision=st.integers(1, 2**50),
)
MOMENT = Moment()


def as_read(row: tuple[object, ...]) -> list[object]:
    """What the database gives back for a row that was written."""
    types = [column.type for column in RULE_COLUMNS]
    return [
        MOMENT.process_result_value(value, None) if isinstance(kind, Moment) else value  # type: ignore[arg-type]
        for kind, value in zip(types, row, strict=False)
    ]


@given(RULES)
def test_a_rule_comes_back_from_its_row(kept: Rule) -> None:
    row = to_row(kept)
    assert len(row) == len(WRITTEN_COLUMNS)
    read = from_row(as_read(row))
    if find_flaw(kept) or kept.expires_at == EPOCH:  # nobody could have kept it
        assert isinstance(read, Malformed)
        assert (read.id, read.revision, read.hosts) == (kept.id, kept.revision, kept.hosts)
        assert to_row(read)[:14] == row[:14]
    else:
        assert read == kept
    assert row[-1] == kept.identity
    assert row[2] == str(kept.target)


@given(st.datetimes(timezones=st.just(UTC)))
def test_times_are_exact(moment: datetime) -> None:
    assert MOMENT.process_result_value(to_microseconds(moment), None) == moment  # type: ignore[arg-type]


def test_times_begin_in_1970() -> None:
    assert to_microseconds(EPOCH) == 0
    assert to_microseconds(datetime(1970, 1, 2, tzinfo=UTC)) == 86_400_000_000


@given(RULES)
def test_a_number_is_all_that_with_number_changes(kept: Rule) -> None:
    numbered = with_number(kept, 7, 9)
    assert (numbered.id, numbered.revision) == (7, 9)
    assert with_number(numbered, kept.id, kept.revision) == kept


def test_the_audit_says_what_an_operator_would_write() -> None:
    kept = rule("10.0.0.0/24", per="/28", protocol="udp", ports=[53], ttl="1h", hosts=["gw1"], labels={"a": "b"})
    assert to_fields(kept) == {
        "target": "10.0.0.0/24",
        "action": "drop",
        "direction": "from",
        "protocol": "udp",
        "ports": "53",
        "rate": "100 packets/s",
        "per": "/28",
        "on_failure": "closed",
        "enabled": True,
        "expires_at": NOW.replace(hour=8).isoformat(),
        "hosts": ["gw1"],
        "labels": {"a": "b"},
    }
