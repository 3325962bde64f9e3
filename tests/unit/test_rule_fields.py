"""Rules: what is read from the fields that a client sends, and the sentence for everything that is wrong."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from ipaddress import ip_network

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netlimit.errors import RuleError
from netlimit.rules import FIELDS, Action, Direction, OnFailure, Protocol, Rule, parse_ports, parse_rule

NOW = datetime(2030, 1, 1, tzinfo=UTC)
RATE = "100 packets/s"


def parse(**fields: object) -> Rule:
    return parse_rule({"target": "10.1.2.3", **fields}, NOW)


def refuse(field: str, **fields: object) -> str:
    """The sentence of a refusal."""
    with pytest.raises(RuleError) as error:
        parse(**fields)
    assert error.value.field == field
    sentence = str(error.value)
    assert sentence.endswith((".", "?"))
    return sentence


def test_the_defaults() -> None:
    rule = parse(rate=RATE)
    assert (rule.action, rule.direction, rule.per, rule.on_failure) == (
        *(Action.DROP, Direction.FROM, "host", OnFailure.CLOSED),
    )
    assert rule.enabled
    assert rule.expires_at is None
    assert rule.selector.protocol is Protocol.ANY
    assert str(rule) == "drop from 10.1.2.3 any 100 packets/s per host"


def test_every_field() -> None:
    rule = parse(
        name="web",
        target="2001:db8::/48",
        direction="to",
        protocol="tcp",
        ports=[80, "8000-8100", 443],
        source_ports="1024-65535",
        interface="wan",
        rate="20 Mbit/s",
        per="/64",
        action="reject",
        on_failure="open",
        enabled=False,
        ttl="2h",
        hosts=["gw2", "gw1", "gw2"],
        labels={"b": "2", "a": "1"},
        comment="as agreed",
    )
    assert rule.target == ip_network("2001:db8::/48")
    assert rule.selector.ports == ((80, 80), (443, 443), (8000, 8100))
    assert rule.selector.source_ports == ((1024, 65535),)
    assert (rule.per, rule.action, rule.hosts) == ("/64", Action.REJECT, ("gw1", "gw2"))
    assert rule.labels == (("a", "1"), ("b", "2"))
    assert rule.expires_at == NOW + timedelta(hours=2)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (None, "needs a target"),
        ("", "needs a target"),
        (7, "needs a target"),
        ("example.org", "no IPv4 or IPv6 address"),
        ("10.1.2", "no IPv4 or IPv6 address"),
        ("10.1.2.3/33", "no IPv4 or IPv6 address"),
        ("10.1.2.3/16", "has host bits set; did you mean 10.1.0.0/16, or the one address 10.1.2.3?"),
        ("2001:db8::1/64", "did you mean 2001:db8::/64, or the one address 2001:db8::1?"),
        ("10.1.0.0/255.255.0.0", "has a mask; write it as 10.1.0.0/16"),
        ("fe80::1%eth0", "name the interface in `interface` instead"),
    ],
)
def test_targets_that_are_none(target: object, sentence: str) -> None:
    assert sentence in refuse("target", target=target, rate=RATE)


@pytest.mark.parametrize(
    ("fields", "field", "sentence"),
    [
        ({}, "rate", 'The action "drop" needs a rate'),
        ({"rate": 5}, "rate", "`rate` is 5; it must be text"),
        ({"rate": RATE, "colour": "red"}, "colour", "There is no field 'colour' in a rule; known are action,"),
        ({"rate": RATE, "action": "slow"}, "action", '`action` is "slow"; it can be "drop", "reject"'),
        ({"rate": RATE, "direction": "out"}, "direction", '"from", "to"'),
        ({"rate": RATE, "protocol": "sctp"}, "protocol", '"any", "tcp", "udp", "icmp"'),
        ({"rate": RATE, "on_failure": "shut"}, "on_failure", '"closed", "open"'),
        ({"rate": RATE, "ports": 53}, "ports", '`ports` needs the protocol "tcp" or "udp"; it is "any"'),
        ({"rate": RATE, "source_ports": 53, "protocol": "icmp"}, "source_ports", 'it is "icmp"'),
        ({"rate": RATE, "protocol": "udp", "ports": 65536}, "ports", "ports are 0 to 65535"),
        ({"rate": RATE, "protocol": "udp", "ports": "9-5"}, "ports", "is no port"),
        ({"rate": RATE, "protocol": "udp", "ports": "http"}, "ports", "is no port"),
        ({"rate": RATE, "protocol": "udp", "ports": True}, "ports", "is no port"),
        ({"rate": RATE, "protocol": "udp", "ports": list(range(1, 33, 2))}, "ports", "at most 15 ports"),
        ({"rate": RATE, "interface": "a name too long"}, "interface", "no name of an interface"),
        ({"rate": RATE, "interface": "eth0; reboot"}, "interface", "no name of an interface"),
        ({"rate": RATE, "burst": "a lot"}, "burst", "cannot be read"),
        ({"rate": RATE, "burst": 2.5}, "burst", "cannot be read"),
        ({"rate": "10000 packets/s", "burst": 10}, "burst", "too small for 10000 packets/s"),
        ({"rate": "1 packets/day", "burst": 5}, "burst", "takes more than a day to fill"),
        ({"rate": "5 MB/s", "burst": "1 MB"}, "burst", "too small for 5 MB/s"),
        ({"rate": "5 MB/s", "burst": "9 MB"}, "burst", "too large for 5 MB/s"),
        ({"rate": "50 connections", "burst": 5}, "burst", "have no burst"),
        (
            {"rate": "100 packets/s", "burst": 1_000_001},
            "burst",
            "more than the kernel can be told; use 1000000 at most",
        ),
        ({"rate": "2000000 packets/s"}, "rate", "the fastest that works is 1000000 packets/s"),
        ({"rate": "8 kbit/s"}, "rate", "The slowest that works is 12 kbit/s"),
        ({"rate": "100 Gbit/s"}, "rate", "about 20 Gbit/s"),
        ({"rate": "99999999999 connections"}, "rate", "the most that works is 4294967295"),
        ({"rate": "5 connections/s", "protocol": "icmp"}, "rate", "ICMP has no connections"),
        ({"rate": RATE, "ceil": "200 packets/s"}, "ceil", 'Only the action "shape" takes a ceil'),
        ({"action": "shape"}, "rate", 'The action "shape" needs a rate'),
        (
            {"rate": RATE, "action": "shape"},
            "rate",
            "queues bytes, and cannot count 100 packets/s; give a rate in bits",
        ),
        ({"rate": "5 connections", "action": "shape"}, "rate", "queues bytes, and cannot count 5 connections"),
        ({"rate": "101 Gbit/s", "action": "shape"}, "rate", "The most that works is 100 Gbit/s"),
        ({"rate": "7 kbit/s", "action": "shape"}, "rate", "hold 7 kbit/s; the least that works is 8 kbit/s"),
        ({"rate": "8 kbit/s", "action": "shape", "ceil": "9 packets/s"}, "ceil", "9 packets/s is not in bits or bytes"),
        ({"rate": "8 kbit/s", "action": "shape", "ceil": "fast"}, "ceil", "'fast'"),
        ({"rate": "8 kbit/s", "action": "shape", "ceil": 5}, "ceil", "`ceil` is 5; it must be text"),
        ({"rate": "8 kbit/s", "action": "shape", "ceil": "1 Tbit/s"}, "ceil", "The most that works is 100 Gbit/s"),
        ({"rate": "2 Mbit/s", "action": "shape", "ceil": "1 Mbit/s"}, "ceil", "1 Mbit/s is below the rate 2 Mbit/s"),
        (
            {"rate": "2 Mbit/s", "action": "shape", "per": "peer"},
            "per",
            "queues to a target and its hosts, not to peers",
        ),
        ({"rate": "8 kbit/s", "action": "shape", "burst": 60_001}, "burst", "The most that works is 60000 bytes"),
        ({"rate": "99 Gbit/s", "action": "shape", "burst": "5 GB"}, "burst", "most that works is 4294967295 bytes"),
        ({"action": "allow", "rate": RATE}, "rate", 'The action "allow" takes no rate'),
        ({"action": "block", "burst": 5}, "burst", 'The action "block" takes no burst'),
        ({"action": "block", "per": "host"}, "per", 'The action "block" takes no per'),
        ({"action": "block", "ceil": "1 Mbit/s"}, "ceil", 'The action "block" takes no ceil'),
        ({"rate": RATE, "per": "user"}, "per", '"/n" with n from 32 to 32'),
        ({"rate": RATE, "per": "/33"}, "per", "with n from 32 to 32"),
        ({"rate": RATE, "per": 24}, "per", "must be text"),
        ({"rate": RATE, "enabled": "yes"}, "enabled", "must be true or false"),
        ({"rate": RATE, "ttl": "soon"}, "ttl", "is no length of time"),
        ({"rate": RATE, "ttl": 0}, "ttl", "is no length of time"),
        ({"rate": RATE, "ttl": True}, "ttl", "is no length of time"),
        ({"rate": RATE, "ttl": "1h", "expires_at": "2030-01-31"}, "ttl", "either `ttl` or `expires_at`"),
        ({"rate": RATE, "expires_at": "tomorrow"}, "expires_at", "is no time"),
        ({"rate": RATE, "expires_at": "1970-01-01T00:00:00Z"}, "expires_at", "no end that a rule can have"),
        ({"rate": RATE, "expires_at": "1970-01-01T02:00:00+02:00"}, "expires_at", "no end that a rule can have"),
        ({"rate": RATE, "expires_at": "1969-12-31"}, "expires_at", "no end that a rule can have"),
        ({"rate": RATE, "name": "Web Site"}, "name", "does not fit"),
        ({"rate": RATE, "hosts": "gw1"}, "hosts", "is a list"),
        ({"rate": RATE, "hosts": ["gw 1"]}, "hosts", "no name of a gateway"),
        ({"rate": RATE, "labels": ["a"]}, "labels", "an object of texts"),
        ({"rate": RATE, "labels": {"a b": "c"}}, "labels", "does not fit"),
        ({"rate": RATE, "labels": {f"a{number}": "" for number in range(129)}}, "labels", "128 at most"),
        ({"rate": RATE, "labels": {f"a{number}": "x" * 255 for number in range(17)}}, "labels", "4096 letters"),
        ({"rate": RATE, "hosts": [f"gw{number}" for number in range(257)]}, "hosts", "256 at most"),
        ({"rate": RATE, "comment": "x" * 1001}, "comment", "at most 1000 letters"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(fields: dict[str, object], field: str, sentence: str) -> None:
    assert sentence in refuse(field, **fields)


@pytest.mark.parametrize("target", ["10.1.0.0/16", "2001:db8::/64", "0.0.0.0/0"])
def test_a_subnet_must_say_whose_bucket_it_is(target: str) -> None:
    assert f"{target} is a subnet: say whose bucket" in refuse("per", target=target, rate=RATE)


def test_verdicts_need_no_per() -> None:
    assert parse(target="10.1.0.0/16", action="block").per is None


@pytest.mark.parametrize(
    ("target", "per"),
    [("10.0.0.0/8", "host"), ("0.0.0.0/0", "host"), ("0.0.0.0/0", "/30"), ("2001:db8::/32", "/128"), ("::/0", "host")],
)
def test_more_buckets_than_the_kernel_holds_are_refused_and_what_is_proposed_works(target: str, per: str) -> None:
    sentence = refuse("per", target=target, rate=RATE, per=per)
    proposal = re.search(r"`per: (/\d+)` works", sentence)
    assert proposal is not None
    rule = parse(target=target, rate=RATE, per=proposal[1])
    assert 2 ** (int(proposal[1][1:]) - rule.target.prefixlen) <= 2**20


def test_concurrent_connections_need_no_table_of_buckets() -> None:
    assert parse(target="0.0.0.0/0", rate="50 connections", per="host").per == "host"


def test_everything_has_no_peers() -> None:
    assert "Everything has no peers" in refuse("per", target="0.0.0.0/0", rate=RATE, per="peer")


def test_a_bucket_as_large_as_the_target_is_the_target() -> None:
    assert parse(target="10.1.0.0/16", rate=RATE, per="/16").per == "target"
    assert parse(target="10.1.0.0/16", rate=RATE, per="/24").per == "/24"


@given(st.integers(1, 2 * 10**6))
def test_what_is_proposed_for_a_rate_that_cannot_be_held_is_accepted(amount: int) -> None:
    try:
        rule = parse(rate=f"{amount} packets/s")
    except RuleError as error:
        proposals = re.findall(r"(\d+ packets/s)", str(error).partition("work")[2])
        assert proposals
        for proposal in proposals:
            assert parse(rate=proposal).bucket is not None
    else:
        assert rule.bucket is not None
        assert abs(rule.bucket.per_second / amount - 1) <= Fraction(1, 100)


@example(2454737990)  # one of the nearest would be beyond the fastest
@given(st.integers(1500, 25 * 10**8))
def test_what_is_proposed_for_bytes_that_cannot_be_held_is_accepted(amount: int) -> None:
    try:
        rule = parse(rate=f"{amount} B/s")
    except RuleError as error:
        sentence = str(error)
        proposals = re.findall(r"(\d[\d.]* [kMGT]?bit/s)", sentence.partition("nearest that work")[2])
        assert proposals, sentence
        for proposal in proposals:
            assert parse(rate=proposal).bucket is not None
    else:
        assert rule.bucket is not None
        assert abs(rule.bucket.per_second / amount - 1) <= Fraction(1, 100)


@pytest.mark.parametrize(
    ("value", "ports"),
    [
        (None, ()),
        (53, ((53, 53),)),
        ("80,443", ((80, 80), (443, 443))),
        ([80, "8000-8100"], ((80, 80), (8000, 8100))),
        ("8000:8100", ((8000, 8100),)),
        ([1, 2, 3], ((1, 3),)),
        (["10-20", "15-30", 31], ((10, 31),)),
        (0, ((0, 0),)),
    ],
)
def test_ports_are_sorted_and_merged(value: object, ports: tuple[tuple[int, int], ...]) -> None:
    assert parse_ports("ports", value) == ports


@pytest.mark.parametrize(
    ("at", "moment"),
    [
        ("2030-01-31T18:00:00Z", datetime(2030, 1, 31, 18, tzinfo=UTC)),
        ("2030-01-31T18:00:00+09:00", datetime(2030, 1, 31, 9, tzinfo=UTC)),
        ("2030-01-31T18:00:00", datetime(2030, 1, 31, 18, tzinfo=UTC)),
    ],
)
def test_times_are_kept_in_utc(at: str, moment: datetime) -> None:
    assert parse(rate=RATE, expires_at=at).expires_at == moment


def test_a_rule_is_in_force_while_it_is_enabled_and_not_expired_on_its_hosts() -> None:
    rule = parse(rate=RATE, ttl=60, hosts=["gw1"])
    assert rule.in_force(NOW)
    assert rule.in_force(NOW, "gw1")
    assert not rule.in_force(NOW, "gw2")
    assert rule.in_force(NOW + timedelta(seconds=59))
    assert not rule.in_force(NOW + timedelta(seconds=60))
    assert not parse(rate=RATE, enabled=False).in_force(NOW)


def test_what_is_shaped_may_borrow_and_save_up() -> None:
    rule = parse(action="shape", rate="2 Mbit/s", ceil="50 Mbit/s", burst="15 MB")
    assert (str(rule.rate and rule.rate.text), str(rule.ceil and rule.ceil.text)) == ("2 Mbit/s", "50 Mbit/s")
    assert (rule.burst, rule.per, rule.bucket) == (15_000_000, "host", None)
    assert parse(action="shape", rate="2 Mbit/s", ceil="2 Mbit/s").ceil == rule.rate


def test_a_budget_for_one_address_is_a_queue_for_a_host() -> None:
    assert parse(action="shape", rate="2 Mbit/s", per="target").per == "host"
    assert parse(rate=RATE, per="target").per == "target"


@pytest.mark.parametrize("target", ["0.0.0.0/0", "10.0.0.0/8", "2001:db8::/32"])
def test_what_is_shaped_needs_no_table_of_buckets(target: str) -> None:
    """Only hosts that appear get a class."""
    assert parse(target=target, action="shape", rate="2 Mbit/s", per="host").per == "host"


def test_two_rules_are_the_same_limit_whatever_their_rate() -> None:
    assert parse(rate=RATE).identity == parse(rate="5 packets/s", action="reject").identity
    assert parse(rate=RATE).identity != parse(rate="5 Mbit/s").identity
    assert parse(action="allow").identity == parse(action="block").identity
    assert parse(rate=RATE, action="observe").identity != parse(rate=RATE).identity


ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=3),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    st.from_regex(r"[0-9]{1,12} ?(packets|Mbit|kB|connections)(/(s|min|day))?", fullmatch=True),
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), ANY_VALUE), st.sampled_from(["10.0.0.0/8", "::1", "10.1.1.1"]))
def test_whatever_is_sent_there_is_a_rule_or_a_sentence(fields: dict[str, object], target: str) -> None:
    try:
        rule = parse_rule({"target": target, **fields}, NOW)
    except RuleError as error:
        field, sentence = error.field, str(error)
        assert field
        assert sentence
    else:
        assert isinstance(rule, Rule)
