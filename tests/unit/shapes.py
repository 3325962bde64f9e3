"""A gateway that shapes, so small that its rules meet all the time, and what may become of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address

from hypothesis import strategies as st

from netlimit.compile import Compilation
from netlimit.errors import RuleError
from netlimit.kernel.base import observe, read_entries
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.packet import Packet
from netlimit.plan import Plan, diff
from netlimit.rules import Rule, parse_rule
from netlimit.state import State
from netlimit.traffic import Traffic
from netlimit.tree import FIRST_CHILD, LAST_CHILD, Device, QueueClass, Route, Topology, Usage
from tests.unit.strategies import NOW, OWN
from tests.unit.strategies import rules as limiting_rules

LAN, WAN, OTHER = Device(2, True), Device(3, True), Device(4, True)
NEAR = (Route("10.1.0.0/16", ("lan",), True), Route("fd00:1::/32", ("lan",), True))
FAR = (Route("10.2.0.0/16", ("wan",), True), Route("fd00:2::/64", ("wan",), True))
HOME = Topology({"lan": LAN, "wan": WAN}, (*NEAR, *FAR, Route("0.0.0.0/0", ("wan",)), Route("::/0", ("wan",))))
"""Clients behind `lan`, everything else behind `wan`."""
UPLINKS = Topology(
    {"lan": LAN, "wan": WAN, "other": OTHER},
    (*NEAR, *FAR, Route("0.0.0.0/0", ("wan", "other")), Route("::/0", ("other",))),
)
WITHOUT_WAN = Topology({"lan": LAN}, NEAR)
TOPOLOGIES = (HOME, UPLINKS, WITHOUT_WAN)

gateway_facts = Facts(own=own_addresses((*OWN[4], *OWN[6])), safe=parse_safe(("10.1.9.0/24",)), topology=HOME)
INSIDE = ("10.1.0.2", "10.1.0.3", "10.1.0.9", "10.1.1.2", "10.1.9.9", "fd00:1::2", "fd00:1::3")
OUTSIDE = ("10.2.0.2", "192.0.2.7", "192.0.2.8", "fd00:2::2")
TARGETS = (
    *("10.1.0.0/16", "10.1.0.0/16", "10.1.0.0/24", "10.1.0.0/24", "10.1.0.0/31", "10.1.0.2/31", "10.1.0.2", "10.1.0.3"),
    *("10.1.1.2", "10.1.9.9", "10.1.0.1", "10.2.0.1", "0.0.0.0/0", "128.0.0.0/1", "10.0.0.0/8", "192.0.2.0/24"),
    *("192.0.2.7", "fd00:1::/64", "fd00:1::2", "::/0", "fd00:1::1"),
)
SELECTORS: tuple[dict[str, object], ...] = (
    *({}, {}, {}, {}, {"interface": "lan"}, {"interface": "wan"}),
    *({"protocol": "tcp"}, {"protocol": "udp", "ports": 53}, {"protocol": "udp", "ports": "50-60"}),
)
RATES = ("100 kbit/s", "1 Mbit/s", "2 Mbit/s", "7 Mbit/s")


@st.composite
def shaping_rules(draw: Callable[..., object]) -> Rule:
    """One rule that would be accepted, without an id."""
    fields: dict[str, object] = {"action": "shape", "target": draw(st.sampled_from(TARGETS))}
    fields["rate"] = draw(st.sampled_from(RATES))
    fields["direction"] = draw(st.sampled_from(["to", "to", "to", "from"]))
    fields.update(draw(st.sampled_from(SELECTORS)))  # type: ignore[call-overload]
    fields.update(draw(st.sampled_from([{}, {}, {"ceil": "10 Mbit/s"}, {"burst": "50 kB"}])))  # type: ignore[call-overload]
    fields.update(draw(st.sampled_from([{}, {}, {}, {"ttl": "1h"}, {"ttl": "2h"}])))  # type: ignore[call-overload]
    forced_by = draw(st.sampled_from([None, None, "root"]))
    for per in draw(st.permutations(["host", "target", "/24", "/31", "/1"])):  # type: ignore[attr-defined]
        try:
            return replace(parse_rule({**fields, "per": per}, NOW), forced_by=forced_by)
        except RuleError:  # no such block in the target
            continue
    raise AssertionError("`per: target` always works")


@dataclass(frozen=True)
class Step:
    """Something that happens: `what` is the name of a method of `Gateway`, with its arguments."""

    what: str
    arguments: tuple[object, ...] = ()

    def __repr__(self) -> str:
        words = (f"{each.id}: {each}" if isinstance(each, Rule) else str(each) for each in self.arguments)
        return " ".join([self.what, *words])


def _numbered(rules: st.SearchStrategy[Rule]) -> st.SearchStrategy[Step]:
    return st.builds(lambda rule, number: Step("put", (replace(rule, id=number),)), rules, st.integers(1, 9))


_SEEN = st.lists(st.sampled_from((*INSIDE, *OUTSIDE)), min_size=1, max_size=4, unique=True).map(tuple)
_RULES = _numbered(shaping_rules())
CHANGES = st.one_of(
    *(_RULES, _RULES, _RULES, _RULES),
    _numbered(limiting_rules(("10.1.0.2", "10.1.0.0/24", "10.2.0.2"))),
    *(st.builds(lambda number: Step("drop", (number,)), st.integers(1, 9)),) * 2,
    *(st.builds(lambda seen: Step("see", (seen,)), _SEEN),) * 2,
    st.builds(lambda share: Step("leave", (share,)), st.integers(1, 3)),
    st.builds(lambda topology: Step("route", (topology,)), st.sampled_from(TOPOLOGIES)),
    st.builds(lambda devices: Step("bar", (devices,)), st.sampled_from(((), ("lan",), ("wan",), ("lan", "wan")))),
)
"""What may happen between two passes."""


TRAFFIC = st.one_of(*(CHANGES,) * 3, st.builds(lambda share: Step("send", (share,)), st.integers(1, 3)))
"""The same, and hosts send: what they are guaranteed depends on that, not on the rules alone."""


def histories(most: int = 12, changes: st.SearchStrategy[Step] = CHANGES) -> st.SearchStrategy[list[list[Step]]]:
    """Passes, each with what has happened before it."""
    return st.lists(st.lists(changes, min_size=1, max_size=4), min_size=1, max_size=most)


class Gateway:
    """A compilation and a kernel, led as the controller leads them."""

    def __init__(self, facts: Facts = gateway_facts) -> None:
        self.compilation = Compilation(facts)
        self.kernel = FakeKernel(now=lambda: 0.0, routes=facts.topology)
        self.rules: dict[int, Rule] = {}
        self.sent: dict[int, int] = {}
        self.looks = 0

    # -- what happens

    def put(self, rule: Rule) -> None:
        """A rule comes, or takes the place of the one with its id; but not the same limit twice, says the store."""
        if any(other.identity == rule.identity for number, other in self.rules.items() if number != rule.id):
            return
        self.rules[rule.id] = rule
        self.compilation.put(rule)

    def drop(self, number: int) -> None:
        self.rules.pop(number, None)
        self.compilation.drop(number)

    def see(self, addresses: Iterable[str]) -> None:
        """Packets of these addresses have come by."""
        lanes = self.compilation.shaping.seen_sets
        seen = {
            name: [each for each in addresses if ip_address(each).version == lane.family]
            for name, lane in lanes.items()
        }
        self.compilation.shaping.welcome(seen)

    def leave(self, share: int) -> None:
        """Some of those that came by themselves are idle."""
        shaping = self.compilation.shaping
        for device in shaping.trees:
            shaping.dismiss(device, set(sorted(shaping.passing(device))[::share]))

    def send(self, share: int) -> None:
        """Some hosts, and some who share a class, have sent at whatever rate, since somebody looked a quarter of a
        minute ago."""
        self.looks += 1
        for device, tree in self.compilation.shaping.trees.items():
            leaves = sorted(number for number, each in tree.classes.items() if each.leaf)
            self.sent |= {number: self.sent.get(number, 0) + 10**9 for number in leaves[::share]}
            usages = {number: Usage(0, self.sent.get(number, 0), 0, 0, 0, 0) for number in leaves}
            self.compilation.shaping.look(device, usages, 15.0 * self.looks)

    def route(self, topology: Topology) -> None:
        """Devices and routes are others now."""
        self.kernel.routes = topology
        self.compilation.protect(replace(self.compilation.facts, topology=topology))

    def bar(self, devices: Iterable[str]) -> None:
        """Somebody is in the way on the ingress of these devices now."""
        self.kernel.obstacles = dict.fromkeys(devices, "a filter of somebody else.")
        self.compilation.protect(replace(self.compilation.facts, barred=self.kernel.barred()))

    def take(self, steps: Iterable[Step]) -> None:
        """Let it all happen; then rules that had no place are tried again."""
        for step in steps:
            getattr(self, step.what)(*step.arguments)
        self.retry()

    def retry(self) -> None:
        for number in sorted({*self.compilation.problems, *self.compilation.shaping.find_growing()}):
            self.compilation.put(self.rules[number])

    def restart(self) -> None:
        """The controller begins anew, with the numbers that the store has kept and the classes that hosts have."""
        self.compilation = Compilation(self.compilation.facts, self.compilation.numbers.kept)
        for _, rule in sorted(self.rules.items()):
            self.compilation.put(rule)
        lanes = self.compilation.shaping.lanes
        found = self.kernel.readings(lane.name for lane in lanes if not lane.incoming)
        found |= self.kernel.ingress_readings(lane.name for lane in lanes if lane.incoming)
        self.compilation.shaping.adopt({name: read_entries(held) for name, held in found.items()})

    # -- passes

    def plan(self) -> Plan:
        """What a quick pass would do."""
        desired, known = self.compilation.state, self.compilation.settled
        transition = self.compilation.transition(known.structure)
        return diff(desired, known, transition, self.compilation.touched, self.compilation.touched_classes)

    def plan_all(self) -> Plan:
        """What is to be done, by all that the kernel holds."""
        found, desired = self.observed, self.compilation.state
        return diff(desired, found, self.compilation.transition(found.structure))

    def sync(self) -> None:
        """A quick pass."""
        self.apply(self.plan())
        self.compilation.settle()

    def apply(self, plan: Plan) -> None:
        for step in plan.steps:
            self.kernel.apply(step)

    @property
    def observed(self) -> State:
        ingress = self.compilation.state.ingress
        return observe(self.kernel, (lane.name for lane in (ingress.lanes if ingress else ())))

    def check(self) -> None:
        """The kernel holds what it shall, all of it, and nothing else."""
        desired, found = self.compilation.state, self.observed
        assert found.structure == desired.structure
        assert {name: found.entries.get(name, {}) for name in desired.entries} == desired.entries
        assert found.trees == desired.trees
        assert found.programs == desired.programs
        lanes = {lane.name for lane in desired.ingress.lanes} if desired.ingress else set()
        assert {name for name, held in self.kernel.lanes.items() if held} <= lanes

    # -- looking

    @property
    def traffics(self) -> Iterator[Traffic]:
        for device in self.compilation.shaping._devices.values():
            yield from device.lanes.values()

    def owners(self) -> dict[int, int]:
        """The rule of each class in which packets wait."""
        owners = {}
        for number, held in self.compilation.shaping.classes().items():
            owners |= {name: number for _, name in held}
        for traffic in self.traffics:
            owners |= {place.number: place.rule.id for place in traffic.places.values()}
        return owners

    def describe(self) -> object:
        """All that matters, without numbers: who has a class with which values, and what it hangs on."""
        assert self.compilation.state
        trees: dict[str, dict[str, tuple[str, QueueClass]]] = {}
        for name, tree in self.compilation.shaping.trees.items():
            labels = self._label(name)
            trees[name] = {
                labels[number]: (labels.get(each.parent, "none"), each._replace(parent=0))
                for number, each in tree.classes.items()
            }
        places = {
            (traffic.lane.name, target): (place.rule.id, place.learns)
            for traffic in self.traffics
            for target, place in traffic.places.items()
        }
        ingress = self.compilation.shaping.ingress
        return trees, places, ingress, sorted(self.compilation.problems)

    def _label(self, name: str) -> dict[int, str]:
        device = self.compilation.shaping._devices[name]
        labels = {number: f"{number & 0xFFFF:x}" for number in device.branches.classes}
        for traffic in device.lanes.values():
            lane = traffic.lane.name
            labels |= {number: f"{lane} {target} around others" for target, number in traffic.inner.items()}
            labels |= {place.number: f"{lane} {target}" for target, place in traffic.places.items()}
            after = {target: place.after for target, place in traffic.places.items() if place.after}
            labels |= {place.number: f"{lane} {target} afterwards" for target, place in after.items()}
        for traffic in device.lanes.values():
            for under, shards in traffic._shards.items():
                for place, shard in enumerate(shards):
                    labels[shard.under] = f"{traffic.lane.name} hosts {place} under {labels[under]}"
                    labels[shard.handle << 16 | 0xFFFF] = f"top of {labels[shard.under]}"
        return labels


def is_host(number: int) -> bool:
    """Whether a class is one of those for hosts."""
    return FIRST_CHILD <= number >> 16 <= LAST_CHILD and number & 0xFFFF != 0xFFFF


def shape(number: int, target: str, rate: str = "1 Mbit/s", **fields: object) -> Rule:
    """A shaping rule towards a target, unless said otherwise."""
    rule = parse_rule({"target": target, "rate": rate, "action": "shape", "direction": "to", **fields}, NOW)
    return replace(rule, id=number)


def packets(topology: Topology) -> Iterator[Packet]:
    """What comes by: between inside and outside either way, and to the host itself."""
    for protocol, port in (("udp", 53), ("tcp", 80)):
        for inside in INSIDE:
            for outside in OUTSIDE:
                if (":" in inside) != (":" in outside):
                    continue
                near, far = ip_address(inside), ip_address(outside)
                if "wan" in topology.devices:
                    yield Packet(near, far, protocol, port, in_interface="lan", out_interface="wan")
                    yield Packet(far, near, protocol, port, in_interface="wan", out_interface="lan")
            own = ip_address("fd00:1::1" if ":" in inside else "10.1.0.1")
            yield Packet(ip_address(inside), own, protocol, port, in_interface="lan")
            yield Packet(own, ip_address(inside), protocol, port, out_interface="lan")


def find_classes(kernel: FakeKernel, probes: Iterable[Packet]) -> Mapping[Packet, int | None]:
    """The class in which each packet waits."""
    return {packet: kernel.find_class(packet) for packet in probes}
