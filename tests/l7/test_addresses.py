"""IP rules in the limiter: which of them hit a client, whose bucket it is, and what is charged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.explain import explain
from netlimit.fallback import find_obstacle
from netlimit.l7.addresses import FREE, LEASE_SECONDS, AddressRules, Standing, make_rule
from netlimit.l7.gate import Charge, Gate
from netlimit.l7.limit import LARGEST_AMOUNT, Algorithm
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Descriptor, Entry, Mode, Node, RuleSet
from netlimit.l7.rules import Rule as LimitRule
from netlimit.l7.service.leases import Leases, write_lease
from netlimit.packet import Packet
from netlimit.rules import Action, Rule, parse_rule
from tests.unit.strategies import INSIDE, NOW, OUTSIDE, OWN, SAFE, TARGETS, keep, rule_sets

ELSEWHERE = {4: "198.51.100.77", 6: "2001:db8:77::7"}
"""A server that no rule speaks of."""
NOBODY_KNOWN = ("203.0.113.5", "2001:db8:5::5")


def make(*wanted: dict[str, object]) -> list[Rule]:
    """Rules with ids from 1."""
    return keep(parse_rule(fields, NOW) for fields in wanted)


def put(*wanted: dict[str, object], assigned: Iterable[int] | None = None, safe: tuple[str, ...] = ()) -> AddressRules:
    rules = make(*wanted)
    return AddressRules(rules, set(assigned if assigned is not None else (rule.id for rule in rules)), safe=safe)


def ids(standing: Standing) -> list[int]:
    return [int(hit.match.rule.name) for hit in standing.hits]


@settings(max_examples=300)
@given(
    rule_sets(12),
    st.sampled_from([*INSIDE[4], *INSIDE[6], *OUTSIDE[4], *OUTSIDE[6], *OWN[4], *OWN[6], *NOBODY_KNOWN]),
    st.sets(st.integers(1, 12)),
)
def test_the_limiter_does_what_explain_says(rules: list[Rule], address: str, assigned: set[int]) -> None:
    meant = [rule for rule in rules if find_obstacle(rule) is None]
    src = ip_address(address)
    packet = Packet(src, ip_address(ELSEWHERE[src.version]), "tcp", in_interface="lan", out_interface="wan", opens=True)
    own = (*OWN[4], *OWN[6])
    told = explain(meant, packet, own, dict.fromkeys(SAFE, "settings"))
    hitting = [step.rule for step in told.steps if step.hits and step.rule is not None]

    standing = AddressRules(rules, assigned, own, SAFE).find_limits(address)

    decided = hitting[0].id if told.verdict in ("blocked", "allowed") and hitting[0].id in assigned else None
    assert (standing.blocked is not None) == (told.verdict == "blocked" and decided is not None)
    assert (standing.allowed is not None) == (told.verdict == "allowed" and decided is not None)
    if decided is not None:
        assert standing.rule is not None
        assert standing.rule.name == str(decided)
    limits = [rule.id for rule in hitting if rule.action.limits]
    assert ids(standing) == [rule_id for rule_id in limits if rule_id in assigned], (
        "in the order in which they are asked"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_finds_its_own_addresses_and_no_others(target: str) -> None:
    (rule,) = make({"target": target, "rate": "1 packets/min", "per": "target"})
    rules = AddressRules([rule], {1})
    for address in (*INSIDE[4], *INSIDE[6], *OUTSIDE[4], *OUTSIDE[6], *NOBODY_KNOWN):
        assert ids(rules.find_limits(address)) == ([1] if ip_address(address) in rule.target else [])


@pytest.mark.parametrize(
    ("per", "alike", "others"),
    [
        ("host", ("10.1.2.3", "10.1.2.3"), ("10.1.2.3", "10.1.2.4")),
        ("/24", ("10.1.2.3", "10.1.2.200"), ("10.1.2.3", "10.1.3.3")),
        ("target", ("10.1.2.3", "10.1.200.3"), None),
        ("peer", ("10.1.2.3", "10.1.200.3"), None),
    ],
)
def test_whose_bucket_it_is(per: str, alike: tuple[str, str], others: tuple[str, str] | None) -> None:
    rules = put({"target": "10.1.0.0/16", "rate": "5 packets/s", "per": per})

    def key(address: str) -> str:
        (hit,) = rules.find_limits(address).hits
        return hit.match.key

    assert key(alike[0]) == key(alike[1])
    if others is not None:
        assert key(others[0]) != key(others[1])


def test_addresses_are_told_in_every_form() -> None:
    rules = put({"target": "10.1.0.0/16", "action": "block"}, {"target": "2001:db8::/32", "action": "block"})
    for text in ("10.1.2.3", "::ffff:10.1.2.3", "::ffff:a01:203", "2001:DB8::1", "2001:db8:0:0:0:0:0:1"):
        assert rules.find_limits(text).blocked is not None, text
    for text in ("", "unknown", "10.1.2", "10.1.2.3:80", "10.1.2.3 ", "2001:db8::1%eth0", "é", "10.1.2.3\0"):
        assert rules.find_limits(text) is FREE, text


def test_loopback_is_never_touched() -> None:
    rules = put({"target": "0.0.0.0/0", "action": "block"}, {"target": "::/0", "action": "block"})
    assert all(rules.find_limits(text) is FREE for text in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"))
    assert rules.find_limits("203.0.113.1").blocked is not None


def test_what_others_enforce_takes_precedence_and_is_not_enforced() -> None:
    wanted: tuple[dict[str, object], ...] = (
        {"target": "10.1.0.0/16", "rate": "5 packets/s", "per": "host"},
        {"target": "10.1.0.2", "rate": "50 packets/s"},
        {"target": "10.1.0.3", "action": "allow"},
        {"target": "10.1.0.4", "action": "block"},
    )
    rules = put(*wanted, assigned={1})
    assert ids(rules.find_limits("10.1.0.1")) == [1]
    assert [rules.find_limits(f"10.1.0.{n}") for n in (2, 3, 4)] == [Standing(), FREE, FREE]
    assert AddressRules(make(*wanted)).find_limits("10.1.0.1") is FREE, "nothing is assigned"


def test_what_a_rule_comes_to() -> None:
    def come_to(**fields: object) -> tuple[LimitRule, Charge]:
        return make_rule(parse_rule({"target": "10.0.0.1", **fields}, NOW))

    rule, charge = come_to(rate="200 packets/s")
    assert rule.limit is not None
    assert (rule.limit.amount, rule.limit.seconds, rule.limit.burst, charge) == (200, 1, 20, Charge.REQUEST)
    rule, charge = come_to(rate="30 connections/min", burst=7)
    assert rule.limit is not None
    assert (rule.limit.amount, rule.limit.seconds, rule.limit.burst, charge) == (30, 60, 7, Charge.REQUEST)
    rule, charge = come_to(rate="20 Mbit/s")
    assert rule.limit is not None
    assert (rule.limit.amount, rule.limit.seconds, charge) == (2_500_000, 1, Charge.BODY)
    rule, charge = come_to(rate="20001 bit/s")
    assert rule.limit is not None
    assert (rule.limit.amount, rule.limit.seconds) == (20001, 8), "exactly"
    rule, charge = come_to(rate="1 TB/day")
    assert rule.limit is not None
    assert (rule.limit.amount, rule.limit.seconds) == (11_574_074, 1)
    assert rule.limit.amount <= LARGEST_AMOUNT
    rule, charge = come_to(rate="50 connections", action="observe")
    assert rule.concurrency is not None
    assert (rule.concurrency.amount, rule.concurrency.seconds, charge) == (50, LEASE_SECONDS, Charge.FLIGHT)
    assert (rule.concurrency.algorithm, rule.mode) == (Algorithm.CONCURRENCY, Mode.OBSERVE)


def test_counts_go_on_when_rules_change() -> None:
    rules = make({"target": "10.1.0.1", "action": "block"}, {"target": "10.1.0.2", "action": "block"})
    before = AddressRules(rules, {1, 2})
    tally = before.find_limits("10.1.0.1").blocked
    assert tally is not None
    tally.note(10, refused=True)
    after = AddressRules([replace(rules[0], comment="again")], {1}, counts=before.counts)
    assert after.find_limits("10.1.0.1").blocked is tally


# -- asked


class Door:
    """A gate, with time that stands still until it is told to go on."""

    def __init__(self, *wanted: dict[str, object]) -> None:
        self.now = 10**12
        self.rules = put(*wanted)
        self.store = MemoryStore(Clock(lambda: self.now, 0))
        self.gate = Gate(lambda: self.rules, self.store)

    async def send(self, address: str, times: int, size: int = 0) -> int:
        return sum([(await self.gate.ask(address, size)).allowed for _ in range(times)])

    def counted(self, rule_id: int) -> tuple[int, int, int, int]:
        count = self.rules.counts[rule_id]
        return count.requests, count.bytes, count.refused, count.refused_bytes


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_every_host_has_its_bucket_and_it_fills_again() -> None:
    door = Door({"target": "10.1.0.0/24", "rate": "10 packets/s", "burst": 4, "per": "host"})
    assert await door.send("10.1.0.1", 10, size=7) == 4
    assert await door.send("10.1.0.2", 4) == 4
    assert await door.send("10.2.0.1", 50) == 50
    assert door.counted(1) == (14, 70, 6, 42)
    refused = await door.gate.ask("10.1.0.1")
    assert refused.decision is not None
    assert not refused.blocked
    door.now += int(refused.decision.retry_after * 10**9)
    assert await door.send("10.1.0.1", 2) == 1


@pytest.mark.anyio
async def test_a_flooder_does_not_eat_what_is_for_all() -> None:
    door = Door(
        {"target": "10.1.0.0/24", "rate": "1 packets/min", "burst": 5, "per": "host"},
        {"target": "10.1.0.0/24", "rate": "20 packets/min", "burst": 20, "per": "target"},
    )
    assert await door.send("10.1.0.1", 1000) == 5
    assert door.counted(2)[:3:2] == (5, 0), "the budget of all was not asked about the others"
    assert await door.send("10.1.0.2", 5) == 5
    assert [await door.send(f"10.1.0.{n}", 5) for n in (3, 4, 5)] == [5, 5, 0]


@pytest.mark.anyio
async def test_who_is_blocked_and_who_is_exempt() -> None:
    door = Door(
        {"target": "10.1.0.0/16", "action": "block"},
        {"target": "10.1.0.0/24", "action": "allow"},
        {"target": "10.1.0.1", "action": "block"},
        {"target": "10.1.0.0/16", "rate": "1 packets/h", "per": "host"},
    )
    for address, blocked, by in (("10.1.9.9", True, 1), ("10.1.0.2", False, 2), ("10.1.0.1", True, 3)):
        passages = [await door.gate.ask(address, 10) for _ in range(3)]
        assert [each.blocked for each in passages] == [blocked] * 3
        assert door.counted(by) == ((3, 30, 3, 30) if blocked else (3, 30, 0, 0))
    assert door.counted(4) == (0, 0, 0, 0)


@pytest.mark.anyio
async def test_bytes_are_charged_for_bodies() -> None:
    door = Door({"target": "10.1.0.1", "rate": "10 kB/s"})
    depth = door.rules.find_limits("10.1.0.1").hits[0].limit.capacity
    assert await door.send("10.1.0.1", 100) == 100, "without a body there is nothing to charge"
    assert await door.send("10.1.0.1", 30, size=1000) == depth // 1000
    door.now += 10 * 10**9
    assert await door.send("10.1.0.1", 2, size=10**9) == 1, "what no bucket could hold takes a full one"
    assert door.counted(1)[0] == 132


@pytest.mark.anyio
async def test_requests_in_flight() -> None:
    door = Door({"target": "10.1.0.0/24", "rate": "2 connections", "per": "host"})
    first = await door.gate.ask("10.1.0.1")
    assert len(first.leases) == 1
    assert await door.send("10.1.0.1", 3) == 1
    await door.store.release(first.leases)
    assert await door.send("10.1.0.1", 3) == 1
    door.now += (LEASE_SECONDS + 1) * 10**9
    assert await door.send("10.1.0.1", 3) == 2, "nobody has said that they ended"


@pytest.mark.anyio
async def test_observing_counts_and_refuses_nothing_and_looking_counts_nothing() -> None:
    door = Door({"target": "10.1.0.1", "rate": "5 packets/s", "action": "observe"})
    assert await door.send("10.1.0.1", 20) == 20
    assert door.counted(1)[:3:2] == (20, 15)
    door = Door({"target": "10.1.0.1", "rate": "5 packets/s"}, {"target": "10.1.0.2", "action": "block"})
    for address, allowed in (("10.1.0.1", True), ("10.1.0.2", False)):
        assert [(await door.gate.ask(address, 9, hits=0)).allowed for _ in range(9)] == [allowed] * 9
    assert door.counted(1) == door.counted(2) == (0, 0, 0, 0)


@pytest.mark.anyio
async def test_a_request_of_which_one_limit_refuses_holds_no_lease_of_another() -> None:
    door = Door(
        {"target": "10.1.0.1", "rate": "1 connections"},
        {"target": "10.1.0.0/24", "rate": "1 connections", "per": "target"},
    )
    holder = await door.gate.ask("10.1.0.2")
    assert holder.allowed
    assert not (await door.gate.ask("10.1.0.1")).allowed
    await door.store.release(holder.leases)
    assert (await door.gate.ask("10.1.0.1")).allowed


@pytest.mark.anyio
async def test_gateways_that_have_one_redis_have_buckets_of_their_own() -> None:
    """As in the kernel; and the first rule of one database is not that of another."""
    door = Door()
    for gateway, target, client in (("gw1", "10.1.0.0/24", "10.1.0.1"), ("gw2", "10.2.0.0/24", "10.2.0.1")):
        rules = make({"target": target, "rate": "3 packets/h", "per": "target"})
        door.rules = AddressRules(rules, {1}, gateway=gateway)
        assert await door.send(client, 5) == 3


# -- in front of the other rules


def make_limiter(door: Door) -> Limiter:
    rule = LimitRule("web", "user", make_rule(parse_rule({"target": "10.0.0.1", "rate": "3 packets/h"}, NOW))[0].limit)
    rules = RuleSet({"web": Node(default={"user": Node(rule)})})
    return Limiter(lambda: rules, door.store, gate=door.gate)


@pytest.mark.anyio
@pytest.mark.parametrize("told", ["client", "descriptor"])
async def test_the_limiter_asks_them_first(told: str) -> None:
    door = Door({"target": "10.1.0.1", "rate": "2 packets/h"}, {"target": "10.1.0.9", "action": "block"})
    limiter = make_limiter(door)
    user = Descriptor((Entry("user", "ann"),))

    async def send(address: str) -> tuple[bool, bool, list[bool]]:
        if told == "client":
            verdict = await limiter.decide("web", [user], client=address)
        else:
            verdict = await limiter.decide("web", [user, Descriptor((Entry("remote_address", address),))])
        return verdict.allowed, verdict.blocked, [status.allowed for status in verdict.statuses]

    refused = [False] if told == "client" else [True, False]
    passed = [True] * len(refused)
    assert await send("10.1.0.9") == (False, True, refused)
    assert [await send("10.1.0.1") for _ in range(3)] == [(True, False, passed)] * 2 + [(False, False, refused)]
    assert (await send("10.1.0.2"))[0], "what IP rules refused was not counted for the user"
    assert not (await send("10.1.0.2"))[0]


@pytest.mark.anyio
async def test_what_another_rule_refuses_holds_no_lease() -> None:
    door = Door({"target": "10.1.0.1", "rate": "1 connections"})
    limiter = make_limiter(door)
    user = Descriptor((Entry("user", "ann"),))
    for _ in range(3):
        verdict = await limiter.decide("web", [user], client="10.1.0.1")
        assert verdict.allowed
        await limiter.release(verdict)
    assert not (await limiter.decide("web", [user], client="10.1.0.1")).allowed
    bob = Descriptor((Entry("user", "bob"),))
    assert (await limiter.decide("web", [bob], client="10.1.0.1")).allowed


def test_action_of_every_rule_has_a_meaning() -> None:
    """No action is forgotten: what limits, allows or blocks can be handed over, what shapes cannot."""
    given: dict[Action, dict[str, object]] = {Action.ALLOW: {}, Action.BLOCK: {}, Action.SHAPE: {"rate": "5 Mbit/s"}}
    for action in Action:
        fields = given.get(action, {"rate": "5 packets/s"})
        obstacle = find_obstacle(parse_rule({"target": "10.0.0.1", "action": action, **fields}, NOW))
        assert (obstacle is not None) == (action is Action.SHAPE)


@pytest.mark.anyio
async def test_a_descriptor_tells_how_large_a_body_is() -> None:
    door = Door({"target": "10.1.0.1", "rate": "10 kB/s"})
    limiter = make_limiter(door)
    client = Descriptor((Entry("remote_address", "10.1.0.1"),))

    async def send(text: str) -> bool:
        return (await limiter.decide("web", [client, Descriptor((Entry("content_length", text),))])).allowed

    assert await send("10000000000")
    assert not await send("1000")
    for nothing in ("", "0", "-5", "many", "0" * 50):
        assert await send(nothing), nothing
    assert door.counted(1)[:3:2] == (7, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("told", ["0000020000", "00000000000000020000", "0" * 5000 + "20000", "9" * 50, "9" * 5000])
async def test_a_length_is_read_however_many_digits_it_has(told: str) -> None:
    """Servers take zeros before it, and what no bucket could hold takes a full one."""
    limiter = make_limiter(Door({"target": "10.1.0.1", "rate": "10 kB/s"}))
    client = Descriptor((Entry("remote_address", "10.1.0.1"),))
    length = Descriptor((Entry("content_length", told),))
    assert [(await limiter.decide("web", [client, length])).allowed for _ in range(2)] == [True, False]


@pytest.mark.anyio
async def test_who_holds_a_lease_can_give_it_back() -> None:
    door = Door({"target": "10.1.0.1", "rate": "1 connections"})
    limiter = make_limiter(door)
    leases = Leases(lambda: RuleSet({}), limiter.find_flight)
    verdict = await limiter.decide("web", [Descriptor((Entry("remote_address", "10.1.0.1"),))])
    assert not (await door.gate.ask("10.1.0.1")).allowed
    await door.store.release(leases.read([write_lease(ask) for ask in verdict.leases]))
    assert (await door.gate.ask("10.1.0.1")).allowed
