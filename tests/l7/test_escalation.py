"""A client that keeps being refused is blocked where its packets arrive, for a while."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.contacts import (
    HOP,
    PEER,
    REMEMBERED_SECONDS,
    RESOLVER,
    SYN_SENT,
    UNKNOWN,
    Contacts,
    find_contact,
    find_first_person,
    read_contacts,
)
from netlimit.controller import Controller
from netlimit.errors import RuleError
from netlimit.escalating import LABEL, Blocks
from netlimit.kernel.sockets import Socket
from netlimit.l7 import escalation
from netlimit.l7.counters import open_counters
from netlimit.l7.escalation import MOST_BLOCKS, Askers, Escalator, Refusals
from netlimit.l7.limit import parse_limit
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Descriptor, Entry, Escalation, Mode, Node, OnFailure, OnLimit, Rule, RuleSet
from netlimit.records import LIMITER, HostStatus, SafeReason, State
from netlimit.rules import Rule as AddressRule
from netlimit.rules import parse_rule
from netlimit.spared import Places, Spared
from netlimit.store import Kept, Store
from tests.controller.conftest import Site
from tests.ports import free_port

ESCALATE = Escalation(after=100, within=60, block=600)
RULE = Rule("web", "remote_address", parse_limit("5/minute"), escalate=ESCALATE)
REASON = "10.1.0.7 was refused 100 times within 60 s by the limit remote_address of the domain web."


class Counting:
    """Refusals, by a clock that is set by hand."""

    def __init__(self, most_clients: int = 1000) -> None:
        self.now = 1000.0
        self.refusals = Refusals(lambda: self.now, most_clients)

    def refuse(self, client: str, times: int, rule: Rule = RULE, every: float = 0.0) -> None:
        for _ in range(times):
            self.refusals.note(rule, client)
            self.now += every

    def taken(self) -> list[str]:
        found = []
        while (taken := self.refusals.take()) is not None:
            found.append(taken[0])
        return found


# -- counting


def test_who_is_refused_so_often_is_to_be_blocked() -> None:
    counting = Counting()
    counting.refuse("10.1.0.7", 99)
    counting.refuse("10.1.0.8", 99)
    assert counting.taken() == []
    assert not counting.refusals.waiting.is_set()
    counting.refuse("10.1.0.7", 1)
    assert counting.refusals.waiting.is_set()
    assert counting.refusals.take() == ("10.1.0.7", RULE)
    assert counting.taken() == []
    counting.refuse("10.1.0.7", 99)
    assert counting.taken() == [], "counted anew"
    counting.refuse("10.1.0.7", 1)
    assert counting.taken() == ["10.1.0.7"]


def test_refusals_that_lie_far_apart_do_not_add_up() -> None:
    counting = Counting()
    counting.refuse("10.1.0.7", 2000, every=0.7)  # 86 in a minute
    assert counting.taken() == []
    counting.refuse("10.1.0.7", 400, every=0.5)  # 120 in a minute
    assert counting.taken()[:1] == ["10.1.0.7"]


def test_refusals_on_both_sides_of_a_window_add_up() -> None:
    counting = Counting()
    counting.refuse("10.1.0.9", 1)  # the window begins
    counting.now += 55
    counting.refuse("10.1.0.7", 80)
    counting.now += 6
    counting.refuse("10.1.0.7", 30)
    assert counting.taken() == ["10.1.0.7"]


def test_a_flood_of_addresses_takes_no_more_room_than_that() -> None:
    counting = Counting(most_clients=50)
    counting.refuse("10.1.0.7", 60)
    for number in range(20_000):
        counting.refuse(f"10.2.{number // 250}.{number % 250}", 1)
    (window,) = counting.refusals._windows.values()
    assert len(window.current) + len(window.previous) == 50
    counting.refuse("10.1.0.7", 40)
    assert counting.taken() == ["10.1.0.7"], "who was counted before still is"
    counting.now += 61
    counting.refuse("10.3.0.1", 100)
    assert counting.taken() == ["10.3.0.1"]
    assert len(window.current) + len(window.previous) <= 100


@pytest.mark.parametrize("client", ["", "ann", "10.1.0.7,web", "10.1.0.0/24"])
def test_who_is_no_address_cannot_be_blocked(client: str) -> None:
    counting = Counting()
    counting.refuse(client, 500)
    assert counting.taken() == []


def test_a_limit_that_does_not_escalate_counts_nothing() -> None:
    counting = Counting()
    counting.refuse("10.1.0.7", 500, Rule("web", "plain", parse_limit("5/minute")))
    assert counting.refusals._windows == {}


def test_limits_that_refuse_nobody_any_more_are_forgotten() -> None:
    counting = Counting()
    rules = [Rule("web", f"user=u{number}", parse_limit("5/minute"), escalate=ESCALATE) for number in range(50)]
    for rule in rules:
        counting.refuse("10.1.0.7", 99, rule)
    assert len(counting.refusals._windows) == 50
    counting.now += 121
    counting.refuse("10.1.0.7", 99)
    assert len(counting.refusals._windows) == 1


def test_a_limit_whose_escalation_changes_counts_anew() -> None:
    counting = Counting()
    counting.refuse("10.1.0.7", 99)
    counting.refuse("10.1.0.7", 2, Rule("web", RULE.name, RULE.limit, escalate=Escalation(100, 3600, 600)))
    assert counting.taken() == []


def test_only_so_many_are_blocked_in_a_minute() -> None:
    counting = Counting()
    clients = [f"10.1.{number // 250}.{number % 250}" for number in range(3 * MOST_BLOCKS)]
    for client in clients:
        counting.refuse(client, 100)
    assert counting.taken() == clients[:MOST_BLOCKS]
    counting.now += 59
    assert counting.taken() == []
    counting.now += 2
    assert counting.taken() == clients[MOST_BLOCKS : 2 * MOST_BLOCKS]


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(escalation, "MOST_WAITING", 10)
    counting = Counting()
    for number in range(200):
        counting.refuse(f"10.1.0.{number}", 100)
    assert len(counting.taken()) == 10


# -- by the limiter


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_limiter(rule: Rule, refusals: Refusals, key: str = "remote_address") -> Limiter:
    rules = RuleSet({"web": Node(default={key: Node(rule)})})
    return Limiter(lambda: rules, MemoryStore(Clock(lambda: 10**12, 0)), refusals=refusals)


@pytest.mark.anyio
async def test_the_limiter_counts_whom_it_refuses() -> None:
    counting = Counting()
    limiter = make_limiter(RULE, counting.refusals)
    client = Descriptor((Entry("remote_address", "10.1.0.7"),))
    for _ in range(5 + 99):
        await limiter.decide("web", [client])
    for _ in range(500):
        await limiter.decide("web", [client], hits=0)
    assert counting.taken() == [], "looking is no offence"
    await limiter.decide("web", [client])
    assert counting.taken() == ["10.1.0.7"]


@pytest.mark.anyio
@pytest.mark.parametrize("client", [None, "10.6.6.6"])
async def test_what_a_client_writes_itself_has_no_other_blocked(client: str | None) -> None:
    counting = Counting()
    limiter = make_limiter(RULE, counting.refusals, "api_key")
    for _ in range(300):
        await limiter.decide("web", [Descriptor((Entry("api_key", "10.1.0.7"),))], client=client)
    assert counting.taken() == []


@pytest.mark.anyio
async def test_the_address_that_is_vouched_for_comes_before_what_the_descriptor_tells() -> None:
    counting = Counting()
    limiter = make_limiter(RULE, counting.refusals)
    for _ in range(5 + 100):
        await limiter.decide("web", [Descriptor((Entry("remote_address", "2001:db8::/64"),))], client="2001:db8::7")
    assert counting.taken() == ["2001:db8::/64"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("client", "counted"),
    [
        (("2001:db8::7",), ["2001:db8::7"]),
        (("2001:db8::7", "10.1.0.1", "2001:db8:9::1"), ["2001:db8::7"]),
        (("2001:db8::7", "2001:db8::8"), []),
        (("10.1.0.1",), []),
    ],
)
async def test_of_several_addresses_the_one_whose_block_is_told_is_counted(
    client: tuple[str, ...], counted: list[str]
) -> None:
    """By it alone somebody is blocked in whose /64 others live who must not be."""
    counting = Counting()
    limiter = make_limiter(RULE, counting.refusals)
    for _ in range(5 + 100):
        await limiter.decide("web", [Descriptor((Entry("remote_address", "2001:db8::/64"),))], client=client)
    assert counting.taken() == ["2001:db8::/64"]
    counting.refusals.part("2001:db8::/64", 600)
    for _ in range(100):
        await limiter.decide("web", [Descriptor((Entry("remote_address", "2001:db8::/64"),))], client=client)
    assert counting.taken() == counted


@pytest.mark.anyio
async def test_observing_escalates_nothing() -> None:
    counting = Counting()
    watching = Rule("web", "remote_address", parse_limit("5/minute"), mode=Mode.OBSERVE, escalate=ESCALATE)
    limiter = make_limiter(watching, counting.refusals)
    for _ in range(300):
        assert (await limiter.decide("web", [Descriptor((Entry("remote_address", "10.1.0.7"),))])).allowed
    assert counting.taken() == []


@pytest.mark.anyio
async def test_who_waits_for_his_turn_is_not_refused() -> None:
    counting = Counting()
    queueing = Rule("web", "remote_address", parse_limit("5/minute"), on_limit=OnLimit.QUEUE, escalate=ESCALATE)
    limiter = make_limiter(queueing, counting.refusals)
    for _ in range(300):
        await limiter.decide("web", [Descriptor((Entry("remote_address", "10.1.0.7"),))])
    assert counting.taken() == []


@pytest.mark.anyio
async def test_who_is_refused_because_no_counter_can_be_asked_has_done_nothing() -> None:
    """A Redis that is away would have every client blocked that comes often enough."""
    counting = Counting()
    rule = Rule("web", "remote_address", parse_limit("5/minute"), on_failure=OnFailure.CLOSED, escalate=ESCALATE)
    rules = RuleSet({"web": Node(default={"remote_address": Node(rule)})})
    store = open_counters(f"redis://127.0.0.1:{free_port()}")
    limiter = Limiter(lambda: rules, store, refusals=counting.refusals)
    for _ in range(300):
        assert not (await limiter.decide("web", [Descriptor((Entry("remote_address", "10.1.0.7"),))])).allowed
    await store.aclose()
    assert counting.taken() == []


# -- blocking


class Place:
    """A gateway's database, and who is blocked there."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.moment = datetime(2030, 1, 1, tzinfo=UTC)
        self.blocks = Blocks(store, "gw", (ip_network("192.0.2.0/24"),), lambda: self.moment)

    def rules(self) -> list[Kept]:
        return self.store.select(action="block")[0]

    def block(self, address: str = "10.1.0.7", seconds: int = 600) -> bool:
        return self.blocks.block(address, seconds, REASON)

    def add(self, **fields: object) -> AddressRule:
        return self.store.add([parse_rule(fields, self.moment)], "test", self.moment)[0]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store = Store(f"sqlite:///{tmp_path}/netlimit.db")
    store.upgrade()
    yield Place(store)
    store.close()


def test_a_block_is_a_rule_like_any_other(place: Place) -> None:
    assert place.block()
    (kept,) = place.rules()
    rule = kept.rule
    assert (str(rule), rule.hosts, rule.labels) == ("block from 10.1.0.7 any", ("gw",), (LABEL,))
    assert (rule.comment, rule.expires_at) == (REASON, place.moment + timedelta(seconds=600))
    entry = place.store.audit()[0]
    assert (entry.actor, entry.action) == (LIMITER.name, "add")


@pytest.mark.parametrize(
    ("told", "target"),
    [("::ffff:10.1.0.7", "10.1.0.7/32"), ("2001:DB8:0:0::7", "2001:db8::7/128")],
)
def test_the_address_is_blocked_that_packets_have(place: Place, told: str, target: str) -> None:
    assert place.block(told)
    assert [str(kept.rule.target) for kept in place.rules()] == [target]


def test_the_same_again_extends_it(place: Place) -> None:
    assert place.block()
    place.moment += timedelta(seconds=300)
    assert place.block()
    assert place.block(seconds=1), "never shorter"
    (kept,) = place.rules()
    assert kept.rule.expires_at == place.moment + timedelta(seconds=600)
    place.moment += timedelta(seconds=700)
    assert kept.rule.expired(place.moment)
    assert place.block()
    (kept,) = place.rules()
    assert kept.rule.in_force(place.moment, "gw"), "one that is over comes back"


def test_the_block_of_an_operator_stays_as_it_is(place: Place) -> None:
    own = place.add(target="10.1.0.7", action="block", ttl=60)
    assert place.block()
    assert [kept.rule for kept in place.rules()] == [own]
    place.moment += timedelta(seconds=61)
    assert place.block()
    assert [kept.rule.in_force(place.moment) for kept in place.rules()] == [False, True]


def test_a_block_that_an_operator_has_switched_off_stays_off(place: Place) -> None:
    place.block()
    (kept,) = place.rules()
    place.store.change(kept.rule.id, lambda rule: replace(rule, enabled=False), "test", place.moment)
    place.moment += timedelta(seconds=300)
    assert place.block() is None, "which is no reason to block a part of it"
    assert not place.rules()[0].rule.enabled


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("203.0.113.7", "where an SSH session to gw comes from"),
        ("10.9.1.1", "in the safe set of gw (NETLIMIT_SAFE)"),
        ("10.1.0.1", "an address of gw itself"),
        ("192.0.2.33", "is a proxy (NETLIMIT_TRUSTED_PROXIES)"),
        ("127.0.0.1", "is no client's address"),
        ("::1", "is no client's address"),
        ("0.0.0.0", "is no client's address"),  # noqa: S104
        ("fe80::1", "is no client's address"),
    ],
)
def test_who_must_not_be_locked_out_is_logged_and_not_blocked(
    place: Place, caplog: pytest.LogCaptureFixture, address: str, why: str
) -> None:
    reasons = {
        "203.0.113.7/32": SafeReason("SSH session", place.moment.timestamp()),
        "10.9.0.0/16": SafeReason("settings"),
    }
    safe = tuple(reasons)
    status = HostStatus("gw", "iptables", own=("10.1.0.1", "127.0.0.1"), safe=safe, safe_reasons=reasons)
    place.store.report(status)
    assert not place.block(address)
    assert place.rules() == []
    assert why in caplog.text


@pytest.mark.parametrize(
    ("fields", "blocked"),
    [
        ({}, False),
        ({"protocol": "tcp"}, False),
        ({"protocol": "tcp", "ports": 22}, True),
        ({"direction": "to"}, True),
        ({"hosts": ["elsewhere"]}, True),
        ({"enabled": False}, True),
    ],
)
def test_who_is_allowed_is_not_blocked(place: Place, fields: dict[str, object], blocked: bool) -> None:
    place.add(target="10.1.0.0/24", action="allow", **fields)
    assert place.block() is blocked
    assert place.block("10.1.1.7"), "it lies outside"
    assert len(place.rules()) == 1 + blocked


def test_there_are_never_more_than_so_many(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.escalating.MOST_STANDING", 3)
    assert [place.block(f"10.1.0.{number}") for number in range(5)] == [True] * 3 + [None] * 2
    place.moment += timedelta(seconds=601)
    place.add(target="10.1.0.99", action="block", ttl=1)
    place.moment += timedelta(seconds=2)
    place.blocks.clear()
    assert [str(kept.rule.target) for kept in place.rules()] == ["10.1.0.99/32"], "that one is somebody else's"
    assert place.block("10.1.0.9")


def test_blocks_of_other_gateways_take_no_places_and_go_when_they_are_long_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that is no more clears nothing."""
    monkeypatch.setattr("netlimit.escalating.MOST_STANDING", 3)
    gone = Blocks(place.store, "gone", now=lambda: place.moment)
    assert [gone.block(f"10.2.0.{number}", 600, REASON) for number in range(3)] == [True] * 3
    assert [place.block(f"10.1.0.{number}") for number in range(4)] == [True] * 3 + [None]
    place.moment += timedelta(seconds=1200)
    place.blocks.clear()
    assert len(place.rules()) == 3, "it may still be there"
    place.moment += timedelta(seconds=3600)
    place.blocks.clear()
    assert place.rules() == []


def test_one_ipv6_network_has_not_all_places(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.escalating.MOST_STANDING", 16)
    wanted = [f"2001:db8:1:{number:x}::/64" for number in range(4)]
    assert [place.block(each) for each in wanted] == [True, True, None, None]
    assert place.block("2001:db8:2::/64")
    place.blocks = Blocks(place.store, "gw", now=lambda: place.moment)
    assert place.block(wanted[2]) is None, "after a start as well"
    assert place.block("10.1.0.1")


def test_who_asks_the_limiter_is_not_blocked(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    askers = Askers()
    blocks = Blocks(place.store, "gw", now=lambda: place.moment, askers=askers)
    for peer in ("10.1.0.7", "::ffff:10.1.0.8", "2001:db8::7"):
        askers.note(peer)
    assert not any(blocks.block(client, 600, REASON) for client in ("10.1.0.7", "10.1.0.8", "2001:db8::7"))
    assert "Is it missing in NETLIMIT_TRUSTED_PROXIES?" in caplog.text
    assert blocks.block("10.1.0.9", 600, REASON)


def test_only_so_many_who_ask_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(escalation, "MOST_ASKERS", 10)
    askers = Askers()
    for number in range(100):
        askers.note(f"10.1.0.{number}")
    assert sum(f"10.1.0.{number}" in askers for number in range(100)) == 10


def test_strange_names_are_kept_in_a_readable_form(place: Place) -> None:
    assert place.blocks.block("10.1.0.7", 60, "bad \x07 name " + "x" * 5000)
    assert place.rules()[0].rule.comment.startswith("bad ? name xxx")


class Jammed:
    """Blocks the second client only."""

    def __init__(self) -> None:
        self.blocked: list[str] = []
        self.done = threading.Event()

    def block(self, address: str, seconds: int, reason: str) -> object:
        if address == "10.1.0.7":
            raise RuleError("target", "Somebody else was faster.")
        self.blocked.append(f"{seconds} {reason}")
        self.done.set()
        return None

    def clear(self) -> None:
        raise RuleError("target", "Not now.")


class Sparing:
    """Blocks of everybody but one."""

    def __init__(self, safe: str) -> None:
        self.safe = safe
        self.blocked: list[str] = []

    def block(self, client: str, seconds: int, reason: str) -> bool:
        if client != self.safe:
            self.blocked.append(client)
        return client != self.safe

    def clear(self) -> None:
        pass


def test_who_must_not_be_blocked_takes_no_place_of_those_who_may() -> None:
    """A load test of the host's own, say: it offends again and again."""
    counting, sparing = Counting(), Sparing("10.1.0.1")
    escalator = Escalator(counting.refusals, sparing)
    for number in range(2 * MOST_BLOCKS):
        counting.refuse("10.1.0.1", 100)
        escalator.block_all()
        if number % 2:
            counting.refuse(f"10.1.1.{number}", 100)
            escalator.block_all()
    assert len(sparing.blocked) == MOST_BLOCKS
    sparing.safe = ""
    counting.now += 61
    counting.refuse("10.1.0.1", 100)
    escalator.block_all()
    assert sparing.blocked[-1] == "10.1.0.1", "safe no more"


def test_a_client_that_cannot_be_blocked_keeps_no_other_from_it(caplog: pytest.LogCaptureFixture) -> None:
    counting, jammed = Counting(), Jammed()
    escalator = Escalator(counting.refusals, jammed)
    escalator.start()
    counting.refuse("10.1.0.7", 100)
    counting.refuse("10.1.0.8", 100)
    assert jammed.done.wait(60)
    escalator.stop()
    assert jammed.blocked == ["600 " + REASON.replace("10.1.0.7", "10.1.0.8")]
    assert "Somebody else was faster" in caplog.text


def test_its_packets_die_in_the_kernel(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/netlimit.db")
    store.upgrade()
    site = Site(store)
    site.controller.sync()
    assert site.send("10.1.0.7") == ["accept"]
    counting = Counting()
    counting.refuse("10.1.0.7", 100)
    Escalator(counting.refusals, Blocks(store, "gw", now=site.clock)).block_all()
    site.controller.sync()
    assert site.send("10.1.0.7") == ["drop"]
    assert site.send("10.1.0.8") == ["accept"]
    site.clock.pass_by(seconds=601)
    site.controller.sync()
    assert site.send("10.1.0.7") == ["accept"]
    store.close()


# -- IPv6 blocks, and whom nobody can have blocked


def test_addresses_of_one_ipv6_block_are_one_client() -> None:
    counting = Counting(most_clients=20)
    for number in range(1000):
        counting.refuse(f"2001:db8:0:7::{number:x}", 1)
    counting.refuse("10.1.0.7", 100)
    assert counting.taken() == ["2001:db8:0:7::/64", "10.1.0.7"]


def test_who_has_many_ipv6_blocks_keeps_nobody_else_from_being_blocked() -> None:
    counting = Counting(most_clients=100)
    for number in range(1000):
        counting.refuse(f"2001:db8:0:{number:x}::1", 100)
    for number in range(5):
        counting.refuse(f"10.1.0.{number}", 100)
    assert counting.taken()[-5:] == [f"10.1.0.{number}" for number in range(5)]
    counting.now += 61
    assert len(counting.taken()) <= MOST_BLOCKS // escalation.SHARE


def test_a_block_of_addresses_is_blocked_as_one(place: Place) -> None:
    assert place.block("2001:db8:0:7::/64")
    assert place.block("2001:db8:0:7::/64")
    assert [str(kept.rule.target) for kept in place.rules()] == ["2001:db8:0:7::/64"]


def settle(place: Place) -> None:
    """The gateway lives in a /64 of hosts."""
    place.store.report(HostStatus("gw", "iptables", own=("2001:db8:0:7::1",), networks={"2001:db8:0:7::/64": ("lan",)}))


def test_where_the_gateway_lives_itself_an_address_is_blocked_for_what_it_has_done_itself(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    settle(place)
    counting = Counting()
    escalator = Escalator(counting.refusals, place.blocks)
    for _ in range(3):
        counting.refuse("2001:db8:0:7::2", 99)
        counting.refuse("2001:db8:0:7::3", 1)
        escalator.block_all()
        assert not place.rules() or [str(kept.rule.target) for kept in place.rules()] == ["2001:db8:0:7::2/128"]
    (kept,) = place.rules()
    assert kept.rule.comment.startswith("2001:db8:0:7::2 was refused 100 times within 60 s by")
    assert "::3" not in caplog.text
    assert "The addresses in 2001:db8:0:7::/64 are counted one by one for 10 minutes" in caplog.text


def test_who_has_many_addresses_there_has_nobody_else_blocked(place: Place) -> None:
    settle(place)
    counting = Counting()
    for number in range(1000):
        counting.refuse(f"2001:db8:0:7::{number + 2:x}", 1)
        Escalator(counting.refusals, place.blocks).block_all()
    counting.refuse("2001:db8:0:7::/64", 1000)  # by who asks and knows no more
    counting.refuse("2001:db8:0:8::2", 50)
    counting.refuse("2001:db8:0:8::3", 50)
    Escalator(counting.refusals, place.blocks).block_all()
    assert [str(kept.rule.target) for kept in place.rules()] == ["2001:db8:0:8::/64"]


def test_the_addresses_of_a_block_are_one_client_again_later(place: Place) -> None:
    settle(place)
    counting = Counting()
    escalator = Escalator(counting.refusals, place.blocks)
    counting.refuse("2001:db8:0:7::2", 100)
    escalator.block_all()
    place.store.report(HostStatus("gw", "iptables"))
    counting.now += 601
    counting.refuse("2001:db8:0:7::2", 50)
    counting.refuse("2001:db8:0:7::3", 50)
    escalator.block_all()
    assert [str(kept.rule.target) for kept in place.rules()] == ["2001:db8:0:7::/64"]


def test_addresses_that_must_not_be_blocked_are_tried_no_oftener_than_others_are_blocked() -> None:
    class Refusing(Sparing):
        def block(self, client: str, seconds: int, reason: str) -> bool:
            self.blocked.append(client)
            return False

    counting, refusing = Counting(), Refusing("")
    escalator = Escalator(counting.refusals, refusing)
    for number in range(100):
        counting.refuse(f"2001:db8:0:7::{number + 2:x}", 100)
        escalator.block_all()
    assert len(refusing.blocked) <= 1 + MOST_BLOCKS // escalation.SHARE


@pytest.mark.parametrize(
    ("client", "why"),
    [
        ("10.1.255.255", "a broadcast address of gw"),
        ("10.1.0.0", "a broadcast address of gw"),
        ("255.255.255.255", "no client's address"),
        ("224.0.0.1", "no client's address"),
        ("ff02::1", "no client's address"),
        ("10.255.255.53", "a resolver of this host"),
        ("2001:db8:0:53::/64", "a next hop of its routes"),
        ("2001:db8:0:9::/64", "is a proxy (NETLIMIT_TRUSTED_PROXIES), or has one"),
        ("2001:db8:0:8::/64", "asks the limiter"),
    ],
)
def test_whom_the_host_needs_is_not_blocked(
    place: Place, caplog: pytest.LogCaptureFixture, client: str, why: str
) -> None:
    status = HostStatus("gw", "iptables", networks={"10.1.0.0/16": ("lan",)}, local=("10.1.255.255/32",))
    place.store.report(status)
    contacts = Contacts(lambda: [("10.255.255.53", RESOLVER), ("2001:db8:0:53::1", HOP)])
    askers = Askers()
    askers.note("2001:db8:0:8::1")
    proxies = (ip_network("2001:db8:0:9::1"),)
    blocks = Blocks(place.store, "gw", proxies, lambda: place.moment, askers, contacts)
    assert not blocks.block(client, 600, REASON)
    assert why in caplog.text
    assert blocks.block("10.1.0.9", 600, REASON)


def test_whom_the_host_talks_to_is_found_and_remembered() -> None:
    with socket.create_server(("127.5.5.5", free_port())) as server:
        far = socket.create_connection(server.getsockname(), source_address=("127.5.5.6", 0))
        near, _ = server.accept()
        with far, near:
            found = dict(read_contacts())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("127.5.5.7", 53))
        assert "127.5.5.7" in dict(read_contacts())
    assert "127.5.5.5" in found
    assert "127.5.5.6" not in found, "it has come by itself"
    now, there = [0.0], [[("192.0.2.5", PEER)], []]
    contacts = Contacts(lambda: there.pop(0), lambda: now[0])
    assert find_contact(ip_network("192.0.2.5"), contacts.look()) == f"192.0.2.5 is {PEER}."
    now[0] += 10
    assert find_contact(ip_network("192.0.2.5"), contacts.look())
    there.append([])
    now[0] += REMEMBERED_SECONDS
    assert not find_contact(ip_network("192.0.2.5"), contacts.look())


PERSON, NOBODY = 54_321, 65_534


@contextmanager
def acting_as(user: int) -> Iterator[None]:
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("user", "counts"), [(0, True), (101, True), (61_184, True), (PERSON, False), (NOBODY, False)])
def test_whom_a_user_names_without_an_answer_is_no_contact(root: None, user: int, counts: bool) -> None:
    """To connect() by UDP takes no rights, and sends no packet."""
    with ExitStack() as stack:
        with acting_as(user):
            asking, asking6 = (
                stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                for family in (socket.AF_INET, socket.AF_INET6)
            )
        asking.connect(("127.5.6.1", 53))
        asking6.connect(("::ffff:127.5.6.2", 53))
        found = dict(read_contacts())
    assert ("127.5.6.1" in found, "127.5.6.2" in found) == (counts, counts)


def test_who_has_answered_a_user_is_a_contact(root: None) -> None:
    with ExitStack() as stack:
        with acting_as(PERSON):
            server = stack.enter_context(socket.create_server(("127.5.6.5", free_port())))
            stack.enter_context(socket.create_connection(server.getsockname(), source_address=("127.5.6.6", 0)))
        assert "127.5.6.5" in dict(read_contacts())


def test_whom_a_user_only_begins_to_connect_to_is_no_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(state: int, owner: int, inode: int = 7) -> Socket:
        return Socket(state, "192.0.2.1", 40_000, f"198.51.100.{owner % 200}", 80, owner, inode)

    tcp = [tell(SYN_SENT, PERSON), tell(SYN_SENT, NOBODY), tell(SYN_SENT, 0), tell(SYN_SENT, 55, 0), tell(6, 9, 0)]
    monkeypatch.setattr("netlimit.contacts.read_sockets", lambda states, protocol=6: tcp if SYN_SENT in states else [])
    peers = {far for far, what in read_contacts() if what == PEER}
    assert peers == {"198.51.100.0", "198.51.100.9"}


def test_who_is_a_person_is_as_the_host_says(tmp_path: Path) -> None:
    said = tmp_path / "login.defs"
    said.write_text("# UID_MIN 7\nUID_MIN\t\t 500 \nUID_MAX 60000\n")
    assert (find_first_person(said), find_first_person(tmp_path / "missing")) == (500, 1000)
    said.write_text("UID_MIN many\n")
    assert find_first_person(said) == 1000


ADDRESSES = st.integers(0, 1023).map(lambda n: f"10.0.{n // 256}.{n % 256}") | st.integers(0, 1023).map(
    lambda n: f"2001:db8::{n // 32:x}:0:0:0:{n % 32:x}"
)
NETWORKS = st.builds(
    lambda text, less: f"{text}/{128 - less if ':' in text else max(0, 32 - less)}", ADDRESSES, st.integers(0, 70)
)


@given(own=st.lists(ADDRESSES, max_size=5), networks=st.lists(NETWORKS, max_size=5), target=NETWORKS)
def test_places_are_found_as_if_each_was_looked_at(own: list[str], networks: list[str], target: str) -> None:
    place, found = ip_network(target, strict=False), Places(own, networks)
    assert found.holds_own(place) == any(ip_address(each) in place for each in own)
    edges = []
    for network in (ip_network(each, strict=False) for each in networks):
        if 0 < network.prefixlen <= place.prefixlen:
            edges += [network.network_address, *([network.broadcast_address] if network.version == 4 else [])]
    assert found.holds_edge(place) == any(edge in place for edge in edges)


def test_what_leads_to_no_other_answer_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand blocks at each heartbeat, otherwise."""
    store = Store(f"sqlite:///{tmp_path}/netlimit.db")
    store.upgrade()
    site = Site(store)
    there = [("10.1.0.53", RESOLVER)]
    now = [0.0]
    contacts = Contacts(lambda: list(there), lambda: now[0])
    setup = replace(site.controller._setup, spared=Spared("gw", (), contacts))
    site.controller = Controller(store, site.kernel, setup, site.clock)
    site.controller.sync()
    for number in range(5):
        site.add(target=f"10.1.1.{number}", action="block", labels=dict([LABEL]))
    site.controller.sync()
    site.controller._spare()
    looked: list[str] = []
    look = Spared.find_obstacle
    monkeypatch.setattr(Spared, "find_obstacle", lambda *asked: (looked.append(str(asked[1])), look(*asked))[1])
    now[0] += 100
    site.controller._spare()
    assert looked == []
    there.append(("10.1.1.4", PEER))
    now[0] += 100
    site.controller._spare()
    assert len(looked) >= 5
    site.controller.sync()
    assert (site.send("10.1.1.4"), site.send("10.1.1.3")) == (["accept"], ["drop"])
    there.append(("10.1.1.9", PEER))
    now[0] += 100
    site.controller._spare()
    there.pop()  # he is forgotten, a rule for him comes, and he is seen again before the next look at all
    now[0] += REMEMBERED_SECONDS
    site.add(target="10.1.1.9", action="block", labels=dict([LABEL]))
    site.controller.sync()
    assert site.send("10.1.1.9") == ["drop"]
    there.append(("10.1.1.9", PEER))
    now[0] += 100
    site.controller._spare()
    site.controller.sync()
    assert site.send("10.1.1.9") == ["accept"]
    store.close()


def test_nobody_waits_for_what_takes_long_to_read() -> None:
    """Any user can open sockets by the hundred thousand, and the kernel lists them all."""
    known, asked, now = ip_network("192.0.2.5"), list[threading.Event](), [0.0]
    begun = threading.Semaphore(0)

    def read() -> Iterator[tuple[str, str]]:
        asked.append(threading.Event())
        begun.release()
        asked[-1].wait(60)
        yield str(known.network_address), PEER

    contacts = Contacts(read, lambda: now[0])
    assert [find_contact(known, contacts.look()) for _ in range(100)] == [UNKNOWN] * 100
    assert begun.acquire(timeout=60)
    assert len(asked) == 1, "one reading goes on at a time"
    asked[0].set()
    while find_contact(known, contacts.look()) == UNKNOWN:
        time.sleep(0.01)
    now[0] += 3600
    assert [find_contact(known, contacts.look()) for _ in range(100)] == [f"{known.network_address} is {PEER}."] * 100
    assert begun.acquire(timeout=60)
    asked[1].set()
    assert len(asked) == 2


def test_those_who_were_seen_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.contacts.MOST", 10)
    there = [(f"192.0.2.{number}", PEER) for number in range(100)] + [("10.255.255.53", RESOLVER)]
    found = Contacts(lambda: there).look()
    assert found == dict([(f"192.0.2.{n}", f"192.0.2.{n} is {PEER}.") for n in range(91, 100)]
                         + [("10.255.255.53", f"10.255.255.53 is {RESOLVER}.")])  # fmt: skip


def test_the_controller_does_not_enforce_a_block_of_whom_the_host_talks_to(tmp_path: Path) -> None:
    """Whoever has put it there: the limiter of another version, or one that was told lies."""
    store = Store(f"sqlite:///{tmp_path}/netlimit.db")
    store.upgrade()
    site = Site(store)
    now, there = [0.0], [("10.1.0.53", RESOLVER)]
    contacts = Contacts(lambda: list(there), lambda: now[0])
    setup = replace(site.controller._setup, spared=Spared("gw", (), contacts))
    site.controller = Controller(store, site.kernel, setup, site.clock)
    site.controller.sync()
    labels = dict([LABEL])
    led_to = site.add(target="10.1.0.53", action="block", labels=labels)
    site.add(target="10.1.0.54", action="block", labels=labels)
    site.controller.sync()
    assert (site.send("10.1.0.53"), site.send("10.1.0.54")) == (["accept"], ["drop"])
    said = store.marked("gw")[led_to.id]
    assert (said.state, RESOLVER in said.message) == (State.ERROR, True)
    there[:] = [("10.1.0.54", PEER)]  # it has begun to talk to him
    now[0] += 3600
    site.controller._spare()
    site.controller.sync()
    assert (site.send("10.1.0.53"), site.send("10.1.0.54")) == (["drop"], ["accept"])
    site.add(target="10.1.0.55", action="block")
    there.append(("10.1.0.55", PEER))
    site.controller.sync()
    assert site.send("10.1.0.55") == ["drop"], "an operator may block whom he likes"
    store.close()
