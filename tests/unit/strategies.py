"""Random rule sets and packets in a world so small that they meet all the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from ipaddress import ip_address, ip_network

from hypothesis import strategies as st

from netlimit.errors import RuleError
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.packet import Packet
from netlimit.rules import Rule, parse_rule

NOW = datetime(2030, 1, 1, tzinfo=UTC)

OWN = {4: ("10.1.0.1", "10.2.0.1"), 6: ("fd00:1::1", "fd00:2::1")}
"""The gateway, on `lan` and `wan`."""
NEEDED = ("10.2.0.4", "fd00:2::4")
"""With whom the gateway itself talks, as with a default gateway."""
SAFE = ("10.1.9.0/24", "10.2.0.9", "10.2.0.0/31", "fd00:1::9", "fd00:2::/127", *NEEDED)
"""What no rule may touch; some networks hold an address of the gateway's own."""
INSIDE = {
    4: ("10.1.0.2", "10.1.0.3", "10.1.1.2", "10.1.9.9", "10.77.0.5"),
    6: ("fd00:1::2", "fd00:1::3", "fd00:1:0:1::2", "fd00:1::9"),
}
OUTSIDE = {
    4: ("10.2.0.2", "10.2.0.3", "10.2.0.9", "10.2.0.4", "192.0.2.7"),
    6: ("fd00:2::2", "fd00:2::3", "fd00:2::4", "2001:db8::7"),
}
TARGETS = (
    *("0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/24", "10.1.0.0/31", "10.1.0.2", "10.1.0.3", "10.1.1.2"),
    *("10.1.0.1", "10.2.0.1", "10.1.9.0/24", "10.1.9.9", "10.2.0.0/16", "10.2.0.2", "10.2.0.9", "192.0.2.0/24"),
    *("::/0", "fd00::/16", "fd00:1::/32", "fd00:1::/64", "fd00:1::2", "fd00:1::9", "fd00:1::1", "fd00:2::/64"),
    *("fd00:2::2", "fd00:2::1", "2001:db8::/32", *NEEDED),
)
SELECTORS: tuple[dict[str, object], ...] = (
    {},
    {},
    {},
    {"protocol": "tcp"},
    {"protocol": "udp"},
    {"protocol": "icmp"},
    {"protocol": "udp", "ports": 53},
    {"protocol": "tcp", "ports": "80-90"},
    {"protocol": "udp", "source_ports": [1024, 5000]},
    {"interface": "lan"},
    {"interface": "wan"},
    {"protocol": "udp", "interface": "lan", "ports": 53},
)
LIMITS: tuple[dict[str, object], ...] = (
    {"rate": "1 packets/min"},
    {"rate": "2 packets/min"},
    {"rate": "30 packets/min", "burst": 3},
    {"rate": "12 kbit/s"},
    {"rate": "16 kbit/s"},
    {"rate": "1 connections/min"},
    {"rate": "2 connections/min"},
    {"rate": "1 connections"},
    {"rate": "2 connections"},
)
MARKS = (0, 0, 7, 0x1000000, 0x2000000, 0x2000007, 0xFE000000, 0xFF000000, 0xFFFFFFFF)
"""What others may have written on a packet."""
EXHAUSTING = 4
"""A packet that is sent once more than this has found every bucket of LIMITS empty."""

facts = Facts(
    own=own_addresses((*OWN[4], *OWN[6])),
    safe=parse_safe(SAFE),
    needed=frozenset(parse_safe(NEEDED)),
    management=(22, 8750),
)


@st.composite
def rules(draw: Callable[..., object], targets: tuple[str, ...] = TARGETS) -> Rule:
    """One rule that would be accepted, without an id."""
    fields: dict[str, object] = {"target": draw(st.sampled_from(targets))}
    fields["direction"] = draw(st.sampled_from(["from", "to"]))
    fields.update(draw(st.sampled_from(SELECTORS)))
    action = draw(st.sampled_from(["drop", "drop", "drop", "reject", "observe", "allow", "block"]))
    fields["action"] = action
    forced_by = draw(st.sampled_from([None, None, "root"]))
    if action in ("allow", "block"):
        return replace(parse_rule(fields, NOW), forced_by=forced_by)
    fields.update(draw(st.sampled_from(LIMITS)))
    if fields.get("protocol") == "icmp" and "connections" in str(fields["rate"]):
        fields["rate"] = "1 packets/min"
    for per in draw(st.permutations(["host", "target", "peer", _block(str(fields["target"]))])):
        try:
            return replace(parse_rule({**fields, "per": per}, NOW), forced_by=forced_by)
        except RuleError:  # more buckets than the kernel holds, or peers of everything
            continue
    raise AssertionError("`per: target` always works")


def rule_sets(most: int = 10, targets: tuple[str, ...] = TARGETS) -> st.SearchStrategy[list[Rule]]:
    """Rules that the store would keep side by side, with ids from 1."""
    return st.lists(rules(targets), max_size=most).map(keep)


@st.composite
def cases(draw: Callable[..., object], most: int = 8) -> tuple[Packet, list[Rule]]:
    """A packet, and rules most of which speak of one of its ends."""
    packet = draw(packets())
    near = tuple(t for t in TARGETS if any(end in ip_network(t) for end in (packet.src, packet.dst)))
    return packet, draw(rule_sets(most, (*near, *near, *near, draw(st.sampled_from(TARGETS)))))


def keep(candidates: Iterable[Rule]) -> list[Rule]:
    """Number them, and leave out what would be refused as the same limit twice."""
    kept = {rule.identity: rule for rule in candidates}
    return [replace(rule, id=number) for number, rule in enumerate(kept.values(), start=1)]


@st.composite
def packets(draw: Callable[..., object]) -> Packet:
    """A packet that this gateway could see: forwarded either way, to it, or from it."""
    family = draw(st.sampled_from([4, 4, 6]))
    inside, outside = draw(st.sampled_from(INSIDE[family])), draw(st.sampled_from(OUTSIDE[family]))
    lan, wan = OWN[family]
    src, dst, enters, leaves = draw(
        st.sampled_from(
            [
                (inside, outside, "lan", "wan"),
                (inside, outside, "lan", "wan"),
                (outside, inside, "wan", "lan"),
                (inside, lan, "lan", None),
                (inside, wan, "lan", None),
                (outside, wan, "wan", None),
                (lan, inside, None, "lan"),
                (wan, outside, None, "wan"),
            ]
        )
    )
    protocol = draw(st.sampled_from(["udp", "udp", "tcp", "icmp", "gre"]))
    ported = protocol in ("udp", "tcp")
    opens = draw(st.booleans()) if ported else False
    here = protocol == "tcp" and not opens and (enters is None or leaves is None)
    return Packet(
        src=ip_address(src),
        dst=ip_address(dst),
        protocol=protocol,
        port=draw(st.sampled_from([53, 80, 9000, 22])) if ported else None,
        source_port=draw(st.sampled_from([1024, 5000, 40000, 22])) if ported else None,
        in_interface=enters,
        out_interface=leaves,
        length=1500,
        opens=opens,
        icmp_type=draw(st.sampled_from([128, 128, 135])),
        hop_limit=draw(st.sampled_from([64, 255])),
        established=here and (enters is None or bool(draw(st.booleans()))),
        mark=draw(st.sampled_from(MARKS)),
    )


def show_connection(packet: Packet) -> str:
    """The connection with this host that a packet belongs to, as a set has it."""
    if packet.out_interface is None:
        return f"{packet.src},tcp:{packet.source_port},{packet.dst}"
    return f"{packet.dst},tcp:{packet.port},{packet.src}"


def _block(target: str) -> str:
    """A prefix length a little longer than the target's."""
    network = ip_network(target)
    return f"/{min(network.prefixlen + 8, network.max_prefixlen)}"
