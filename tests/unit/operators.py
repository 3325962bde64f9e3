"""What operators do, who may force nothing: rules on a gateway and on those who manage it, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from ipaddress import ip_address

from hypothesis import strategies as st

from netlimit.compile import Compilation
from netlimit.errors import RuleError
from netlimit.kernel.base import observe
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.packet import Packet
from netlimit.plan import diff
from netlimit.rules import Rule, parse_rule
from tests.unit.strategies import NOW, OWN

MANAGEMENT = (22, 8750)
SAFE = ("10.1.9.0/30", "10.2.0.9", "fd00:1::9")
LATER = (*SAFE, "10.1.0.3", "fd00:2::3")
"""The safe set once two more have logged in."""
TARGETS = (
    *("10.1.0.1", "10.1.0.1", "10.1.0.1", "10.2.0.1", "10.2.0.1", "10.1.255.255", "255.255.255.255", "224.0.0.1"),
    *("10.1.9.1", "10.1.9.0/30", "10.2.0.9", "10.1.0.3", "10.1.9.0/24", "10.2.0.0/24", "10.1.0.0/31", "10.1.0.0/16"),
    *("10.2.0.0/16", "10.0.0.0/8", "0.0.0.0/1", "128.0.0.0/1", "0.0.0.0/0", "192.0.2.7"),
    *("fd00:1::1", "fd00:1::1", "fd00:2::1", "fd00:1::9", "fd00:2::3", "fd00:1::/64", "fd00::/16", "::/0"),
)
SOURCES = ("0-65535", "1024-65535", "32768-60999", "0-32767", "32768-65535", "1024-40000", "40001-65535")
"""Ports of clients: all, usual ones, and parts that are all together."""
SELECTORS: tuple[dict[str, object], ...] = (
    *({}, {}, {}, {"protocol": "tcp"}, {"protocol": "tcp", "ports": 22}, {"protocol": "tcp", "ports": [22, 8750]}),
    *({"protocol": "tcp", "ports": "1-65535"}, {"protocol": "tcp", "source_ports": 22}, {"protocol": "udp"}),
    *({"protocol": "tcp", "source_ports": "1-65535"}, {"interface": "lan"}, {"interface": "wan"}, {"protocol": "icmp"}),
    {"interface": "lan", "protocol": "tcp", "ports": 22},
    *({"protocol": "tcp", "ports": 22, "source_ports": sources} for sources in SOURCES),
    *({"protocol": "tcp", "ports": sources, "source_ports": 22} for sources in SOURCES),
)
LIMITS = ("1 packets/day", "1 packets/h", "12 kbit/s", "1 connections/day", "1 connections/s", "1 connections")
ACTIONS = ("block", "block", "drop", "drop", "drop", "reject", "observe", "allow")
PERS = ("host", "target", "peer", "/9", "/31", "/64", "/1")
LONG = 1500


@cache
def make_rule(target: str, direction: str, selector: int, action: str, rate: str, pers: tuple[str, ...]) -> Rule:
    """A rule as the API would take it, with the first `per` that fits."""
    fields: dict[str, object] = {"target": target, "direction": direction, "action": action, **SELECTORS[selector]}
    if action in ("block", "allow"):
        return parse_rule(fields, NOW)
    if fields.get("protocol") == "icmp" and "connections" in rate:
        rate = "1 packets/day"
    for per in (*pers, "target"):
        try:
            return parse_rule({**fields, "rate": rate, "per": per}, NOW)
        except RuleError:  # more buckets than the kernel holds, or no such block
            continue
    raise AssertionError("`per: target` always works")


_RULES = st.builds(
    make_rule,
    st.sampled_from(TARGETS),
    st.sampled_from(("from", "to")),
    st.integers(0, len(SELECTORS) - 1),
    st.sampled_from(ACTIONS),
    st.sampled_from(LIMITS),
    st.sampled_from([(one, other) for one in PERS for other in ("host", "/31")]),
)
_ENDING = st.builds(
    lambda rule, hours: replace(rule, expires_at=NOW + timedelta(hours=hours)), _RULES, st.integers(1, 3)
)


def _complete(target: str, direction: str, parts: tuple[dict[str, object], ...]) -> list[Rule]:
    """Blocks that together are one for all that they name."""
    return [parse_rule({"target": target, "direction": direction, "action": "block", **part}, NOW) for part in parts]


_HALVES = ("0-32767", "32768-65535")
PARTS: tuple[tuple[dict[str, object], ...], ...] = (
    tuple({"protocol": "tcp", "ports": 22, "source_ports": half} for half in _HALVES),
    tuple({"protocol": "tcp", "ports": half, "source_ports": 22} for half in _HALVES),
    tuple({"protocol": "tcp", "ports": half} for half in _HALVES),
    tuple({"protocol": protocol} for protocol in ("tcp", "udp")),
    tuple({"interface": device} for device in ("lan", "wan")),
)
NEAR = ("10.1.0.0/16", "10.2.0.0/16")
WHOLE = (
    *(("10.1.0.1",), ("10.2.0.1",), ("10.1.0.1", "10.2.0.1"), ("0.0.0.0/0",), ("0.0.0.0/1", "128.0.0.0/1")),
    *(NEAR, ("10.0.0.0/8",), ("10.1.0.0/17", "10.1.128.0/17", "10.2.0.0/16"), ("10.1.0.1", "0.0.0.0/1")),
)
"""Targets that together are the gateway, or all that there is around it."""


@st.composite
def closures(draw: Callable[..., object]) -> list[Rule]:
    """Blocks by which somebody closes a gateway, or all but closes it, in any order."""
    targets, parts, directions = (draw(st.sampled_from(each)) for each in (WHOLE, PARTS, ("from", "to")))
    most = [rule for target in targets for rule in _complete(target, directions, parts)]  # type: ignore[attr-defined, arg-type]
    others = draw(st.lists(_RULES.filter(lambda rule: rule.action.value in ("block", "allow")), max_size=3))
    return draw(st.permutations([*most, *others]))  # type: ignore[misc, return-value]


@dataclass(frozen=True)
class Step:
    """Something that an operator, the clock or a fault does: the name of a method of `Gateway`, with its arguments."""

    what: str
    arguments: tuple[object, ...] = ()

    def __repr__(self) -> str:
        words = (f"{each.id}: {each}" if isinstance(each, Rule) else str(each) for each in self.arguments)
        return " ".join([self.what, *words])


_PUT = st.builds(
    lambda rule, number: Step("put", (replace(rule, id=number),)), st.one_of(_RULES, _RULES, _ENDING), st.integers(1, 9)
)
_CHANGES = st.one_of(
    *(_PUT,) * 6,
    st.builds(lambda number: Step("drop", (number,)), st.integers(1, 9)),
    st.sampled_from([Step("restart"), Step("wait"), Step("restore"), Step("log_in"), Step("log_out")]),
    st.builds(lambda back: Step("roll_back", (back,)), st.integers(1, 3)),
)


@st.composite
def histories(draw: Callable[..., object], passes: int = 2) -> list[list[Step]]:
    """Passes, each with what has happened before it; the first brings a rule set."""
    first = draw(st.lists(_PUT, min_size=2, max_size=7))
    others = draw(st.lists(st.lists(_CHANGES, min_size=1, max_size=3), max_size=passes - 1))
    return [first, *others]  # type: ignore[list-item, misc]


class Gateway:
    """A controller's compilation and its kernel, led as the controller leads them."""

    def __init__(self) -> None:
        self.now = NOW
        self.kernel = FakeKernel(now=lambda: self.now.timestamp())
        own = own_addresses((*OWN[4], *OWN[6]))
        self.facts = Facts(own=own, safe=parse_safe(SAFE), management=MANAGEMENT)
        self.compilation = Compilation(self.facts)
        self.rules: dict[int, Rule] = {}
        self.past: list[dict[int, Rule]] = [{}]

    # -- what happens

    def put(self, rule: Rule) -> None:
        """Add a rule, or edit the one of its id; but not the same limit twice, says the store."""
        if not any(other.identity == rule.identity for number, other in self.rules.items() if number != rule.id):
            self._exchange({**self.rules, rule.id: rule})

    def drop(self, number: int) -> None:
        """Remove a rule."""
        self._exchange({held: rule for held, rule in self.rules.items() if held != number})

    def roll_back(self, back: int) -> None:
        """Return to an earlier revision."""
        self._exchange(self.past[max(0, len(self.past) - 1 - back)])

    def restore(self) -> None:
        """Bring back a backup, of the first revision that had rules."""
        self._exchange(self.past[min(1, len(self.past) - 1)])

    def restart(self) -> None:
        """The controller begins anew, with the numbers that the store has kept."""
        self.compilation = Compilation(self.facts, self.compilation.numbers.kept)
        for _, rule in sorted(self.rules.items()):
            self._compile(rule)

    def wait(self) -> None:
        """An hour and a half pass: rules end in the kernel first, then the controller takes them out."""
        self.now += timedelta(minutes=90)
        for rule in self.rules.values():
            self._compile(rule)

    def log_in(self) -> None:
        """Two more are safe."""
        self._protect(LATER)

    def log_out(self) -> None:
        """They are safe no more."""
        self._protect(SAFE)

    def _exchange(self, rules: dict[int, Rule]) -> None:
        before, self.rules = self.rules, dict(rules)
        self.past.append(self.rules)
        for number in before.keys() - rules.keys():
            self.compilation.drop(number)
        for number, rule in rules.items():
            if before.get(number) != rule:
                self._compile(rule)

    def _compile(self, rule: Rule) -> None:
        if rule.in_force(self.now):
            assert self.compilation.put(rule) is None
        else:
            self.compilation.drop(rule.id)

    def _protect(self, safe: tuple[str, ...]) -> None:
        self.facts = replace(self.facts, safe=parse_safe(safe))
        self.compilation.protect(self.facts)
        for _, rule in sorted(self.rules.items()):
            self._compile(rule)

    # -- passes

    def take(self, steps: Iterable[Step]) -> Iterator[object]:
        """Let it all happen, and bring the kernel there, step by step: what was done in each."""
        for step in steps:
            getattr(self, step.what)(*step.arguments)
        found = observe(self.kernel)
        plan = diff(self.compilation.state, found, self.compilation.transition(found.structure))
        for each in plan.steps:
            self.kernel.apply(each)
            yield each
        self.compilation.settle()

    # -- packets

    def exhaust(self) -> None:
        """Strangers use up every bucket that they can."""
        for packet in _STRANGERS:
            self.kernel.trace(packet)
            self.kernel.trace(packet)

    def find_lost(self, hosts: Iterable[str] = ()) -> list[Packet]:
        """What is taken from those who are safe (or these of them): packets to the ports by which the gateway is
        managed, and its replies."""
        safe = hosts or [str(net.network_address + (1 if net.num_addresses > 1 else 0)) for net in self.facts.safe]
        return [packet for host in safe for packet in _manage(host) if not self._passes(packet)]

    def _passes(self, packet: Packet) -> bool:
        return self.kernel.trace(packet) == "accept" and self.kernel.trace(packet) == "accept"


@cache
def _manage(host: str) -> tuple[Packet, ...]:
    """What passes between somebody and every address of the gateway: new connections, open ones that netfilter knows
    nothing of, and what the gateway answers."""
    there = ip_address(host)
    device = "lan" if host.startswith(("10.1.", "fd00:1:")) else "wan"
    packets = []
    for own in OWN[there.version]:
        here = ip_address(own)
        for port in MANAGEMENT:
            ask = Packet(there, here, "tcp", port, 40000, device, None, LONG, opens=True)
            answer = Packet(here, there, "tcp", 40000, port, None, device, LONG)
            packets += [ask, replace(ask, opens=False), answer]
        packets += [Packet(there, here, "icmp", in_interface=device, length=LONG)]
        packets += [Packet(here, there, "udp", 40000, 161, None, device, LONG)]
    return tuple(packets)


def _visit() -> Iterator[Packet]:
    for family, stranger in ((4, "10.1.0.2"), (4, "192.0.2.7"), (6, "fd00:1::2")):
        for own in OWN[family]:
            there, here = ip_address(stranger), ip_address(own)
            device = "wan" if stranger == "192.0.2.7" else "lan"
            yield Packet(there, here, "tcp", 22, 40000, device, None, LONG, opens=True)
            yield Packet(here, there, "tcp", 40000, 22, None, device, LONG)


_STRANGERS = tuple(_visit())
