"""What the kernel holds of ours: sets with their entries, chains with their rules, and the hooks that lead to them.

Every object renders itself as the tools print it (`ipset save`, `iptables-save`); that text is what a plan shows,
what is written, and what is compared when it is read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from netlimit.ingress import Ingress
from netlimit.packet import Side
from netlimit.tree import INGRESS_DEVICE, Tree

SET_PREFIX = "nl-"
CHAIN_PREFIX = "NL-"
LONGEST_TIMEOUT = 2_147_483
"""Seconds; what an ipset entry can hold."""
OFFENDER_PREFIX = "nl-off"
OFFENDER_SECONDS = 60
ROLLING_SLOTS = 8192
"""Room for as many as such a set takes, in 64 kB: one that packets fill does not grow."""
LANE_PREFIX = f"{SET_PREFIX}q"
SEEN_PREFIX = "nl-seen"
SLOT_ROOM = 12
"""Entries that a slot of a set takes (AHASH_MAX_SIZE in the kernel): one that packets fill does not grow by itself."""
OPEN_PREFIX = "nl-open"
LED_PREFIX = "nl-led"
SAFE_PREFIX = "nl-safe"
PEER_PREFIX = "nl-peer"
_LIMITING = tuple(f"{SET_PREFIX}{kind}{family}-" for kind in "ld" for family in (4, 6))
PROTOCOL_NUMBERS = {
    "igmp": "2",
    "ipencap": "4",
    "rdp": "27",
    "dccp": "33",
    "ipv6": "41",
    "rsvp": "46",
    "gre": "47",
    "eigrp": "88",
    "ospf": "89",
    "ipip": "94",
    "pim": "103",
    "ipcomp": "108",
    "vrrp": "112",
    "l2tp": "115",
    "isis": "124",
    "udplite": "136",
}
"""Protocols that iptables prints by name or by number, as its version and /etc/protocols have it: we say numbers."""
_EXEMPTING = tuple(SET_PREFIX + name for name in ("a", "safe", "exempt", "open"))

Table = Literal["raw", "mangle", "filter", "security"]
Hook = Literal["PREROUTING", "INPUT", "FORWARD", "OUTPUT"]
TABLES: tuple[Table, ...] = ("raw", "mangle", "filter", "security")


@dataclass(frozen=True, slots=True)
class IpSet:
    """An ipset: `kind` "net", "ip" or "ip,port,ip" (the far address, protocol and far port, and the near address of
    connections); `marks` for skbinfo; `timeout` the default in seconds (0: entries stay).

    `size` is the most entries it takes (maxelem); with `rolling`, a full set forgets some rather than refuse more.
    A set of kind "ip" with a `netmask` keeps the network of that prefix length in which an address is (0: the address).
    With `slots`, packets alone fill it: it never grows beyond that many slots (12 entries each), and where there is no
    room, an address is not remembered.
    """

    name: str
    family: int
    kind: Literal["net", "ip", "ip,port,ip"] = "net"
    marks: bool = False
    timeout: int = 0
    size: int = 65536
    rolling: bool = False
    netmask: int = 0
    slots: int = 0

    def __str__(self) -> str:
        family = "inet" if self.family == 4 else "inet6"
        netmask = f" netmask {self.netmask}" if self.netmask else ""
        if self.slots:
            netmask += f" hashsize {self.slots}"
        text = f"{self.name} hash:{self.kind} family {family} maxelem {self.size}{netmask} timeout {self.timeout}"
        return f"{text} counters" + (" forceadd" if self.rolling else "") + (" skbinfo" if self.marks else "")

    @property
    def lives(self) -> bool:
        """Whether its entries come and go with the traffic, and not with the rules: they are no drift."""
        return self.rolling or self.kind == "ip,port,ip" or self.slots > 0

    @property
    def room(self) -> int:
        """How many entries it takes."""
        return min(self.size, self.slots * SLOT_ROOM) if self.slots else self.size


class Entry(NamedTuple):
    """What a set keeps beside an address: a mark with its mask (0/0: none), when it ends (Unix time, 0: never), and
    the class that the packet gets as its priority (0: none). `foreign` is what we never write, as ipset says it: with
    `nomatch`, the set does not hold the address."""

    mark: int = 0
    mask: int = 0
    expires: int = 0
    prio: int = 0
    foreign: str = ""


# -- what a rule in a chain asks of a packet ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Has:
    """An end of the packet is one address, or in one subnet (`key`, as a set has it)."""

    side: Side
    key: str

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        longest = 128 if ":" in self.key else 32
        return f"-{self.side[0]}", self.key if "/" in self.key else f"{self.key}/{longest}"


@dataclass(frozen=True, slots=True)
class Enters:
    """The packet came in by this interface, or by one whose name begins so (`eth+`)."""

    interface: str

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-i", self.interface


@dataclass(frozen=True, slots=True)
class Leaves:
    """The packet goes out by this interface, or by one whose name begins so (`eth+`)."""

    interface: str

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-o", self.interface


@dataclass(frozen=True, slots=True)
class Is:
    """The transport protocol, or anything but it."""

    protocol: str
    inverted: bool = False

    def args(self) -> tuple[str, ...]:
        """As iptables prints it, but for names that not every version of it knows."""
        return (*(("!",) if self.inverted else ()), "-p", PROTOCOL_NUMBERS.get(self.protocol, self.protocol))


@dataclass(frozen=True, slots=True)
class Ports:
    """Destination or source ports, as ranges."""

    ranges: tuple[tuple[int, int], ...]
    side: Side = "dst"

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        ports = ",".join(str(low) if low == high else f"{low}:{high}" for low, high in self.ranges)
        return "-m", "multiport", "--dports" if self.side == "dst" else "--sports", ports


@dataclass(frozen=True, slots=True)
class Led:
    """NAT leads the packet's connection to another end than it was opened to (DNAT, REDIRECT). `answers`: and it is an
    answer."""

    inverted: bool = False
    answers: bool = False

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        way = ("--ctdir", "REPLY") if self.answers else ()
        return "-m", "conntrack", *(("!",) if self.inverted else ()), "--ctstate", "DNAT", *way


@dataclass(frozen=True, slots=True)
class Diverted:
    """NAT has given the packet its destination: it goes to where its connection is led (DNAT), or, of `answers`, back
    to whom another's address has stood for (SNAT)."""

    answers: bool = False

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        state, way = ("SNAT", "REPLY") if self.answers else ("DNAT", "ORIGINAL")
        return "-m", "conntrack", "--ctstate", state, "--ctdir", way


@dataclass(frozen=True, slots=True)
class SentPorts:
    """The packet was sent to a port from `low` to `high`, before NAT led it to another end."""

    low: int
    high: int

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        ports = str(self.low) if self.low == self.high else f"{self.low}:{self.high}"
        return "-m", "conntrack", "--ctstate", "DNAT", "--ctorigdstport", ports, "--ctdir", "ORIGINAL"


@dataclass(frozen=True, slots=True)
class Syn:
    """A TCP packet that asks for a connection."""

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "tcp", "--tcp-flags", "FIN,SYN,RST,ACK", "SYN"


@dataclass(frozen=True, slots=True)
class Continues:
    """A TCP packet that neither asks for a connection nor grants one; unless `resets`, no reset of one either."""

    resets: bool = True

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "tcp", "--tcp-flags", "SYN" if self.resets else "SYN,RST", "NONE"


@dataclass(frozen=True, slots=True)
class EndsNothing:
    """A TCP packet by which neither end says that it has done, or that there is no connection."""

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "tcp", "--tcp-flags", "FIN,RST", "NONE"


@dataclass(frozen=True, slots=True)
class HasSocket:
    """The packet is for a socket of this host (xt_socket). A rule that asks for it, even one that no packet comes to,
    makes the kernel put fragments together before they meet any rule. Only in PREROUTING and INPUT."""

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "socket"


@dataclass(frozen=True, slots=True)
class Connected:
    """The packet belongs to a TCP connection in a set of kind "ip,port,ip": `side` tells where its far end stands."""

    name: str
    side: Side

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        here = "dst" if self.side == "src" else "src"
        return "-m", "set", "--match-set", self.name, f"{self.side},{self.side},{here}"


@dataclass(frozen=True, slots=True)
class Reaches:
    """The packet is for an address and port in a set of kind "ip,port,ip", with the address at both places."""

    name: str

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "set", "--match-set", self.name, "dst,dst,dst"


@dataclass(frozen=True, slots=True)
class HopLimit:
    """The packet's hop limit (of IPv4: its time to live) is this, or is `below` it."""

    value: int
    family: int = 6
    below: bool = False

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        name = "ttl" if self.family == 4 else "hl"
        return "-m", name, f"--{name}-{'lt' if self.below else 'eq'}", str(self.value)


@dataclass(frozen=True, slots=True)
class IsOwn:
    """An end of the packet is an address of this host's own (with `broadcast`, or of its networks), or is not. The
    kernel knows them at any moment."""

    side: Side
    inverted: bool = False
    broadcast: bool = False

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        types = "LOCAL,BROADCAST" if self.broadcast else "LOCAL"
        return "-m", "addrtype", *(("!",) if self.inverted else ()), f"--{self.side}-type", types


@dataclass(frozen=True, slots=True)
class Opens:
    """The first packet of a flow of anything but TCP, where a SYN tells: NEW, or RELATED where a helper of connection
    tracking expects it, and not yet in the connection table. Of what the kernel does not track, because somebody's rule
    says so, every packet is one: which is the first of its flow nobody knows.

    The states alone would count every datagram of a UDP flow that nobody has answered, and errors of ICMP: these are
    RELATED too, but to a flow that is in the table.
    """

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "conntrack", "--ctstate", "NEW,RELATED,UNTRACKED", "!", "--ctstatus", "CONFIRMED"


@dataclass(frozen=True, slots=True)
class Invalid:
    """A packet of which connection tracking knows no flow, for it takes it to be malformed."""

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "conntrack", "--ctstate", "INVALID"


@dataclass(frozen=True, slots=True)
class Ended:
    """The packet belongs to a TCP connection that connection tracking takes for over (CLOSE), and keeps for a while: it
    has no word for that state, but no other lives so short unless somebody has set it so. A SYN does not change it."""

    SECONDS: ClassVar[int] = 10
    """net.netfilter.nf_conntrack_tcp_timeout_close, as the kernel has it. Where it is longer, that is told: connections
    that are being opened live for 60 s, and to ask for so much would take their repeated SYNs for over."""

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "conntrack", "--ctstate", "ESTABLISHED", "--ctexpire", f"0:{self.SECONDS}"


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The packet belongs to a flow that connection tracking has in its table: one packet of it has gone on before. What
    is dropped never comes there, and what is not tracked, or INVALID, is of none."""

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "conntrack", "--ctstatus", "CONFIRMED"


@dataclass(frozen=True, slots=True)
class Icmp6:
    """An ICMPv6 type."""

    type: int

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "icmp6", "--icmpv6-type", str(self.type)


@dataclass(frozen=True, slots=True)
class InSet:
    """An end of the packet is in a set; a match counts on the entry, unless it is `quiet`."""

    name: str
    side: Side
    inverted: bool = False
    quiet: bool = False

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        inverted = ("!",) if self.inverted else ()
        quiet = ("!", "--update-counters") if self.quiet else ()
        return ("-m", "set", *inverted, "--match-set", self.name, self.side, *quiet)


@dataclass(frozen=True, slots=True)
class Marked:
    """The bits of the packet's mark under `mask` are `value`."""

    value: int
    mask: int

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-m", "mark", "--mark", f"{self.value:#x}/{self.mask:#x}"


@dataclass(frozen=True, slots=True)
class Above:
    """The packet finds its token bucket empty (xt_hashlimit).

    `above` sets the rate and `above_shown` is how iptables prints it. `sides` names the
    ends that tell buckets apart, with the prefix length of each (32 or 128: each address). `slots` is the size of the
    hash table, `most` how many buckets it takes.
    """

    name: str
    above: str
    above_shown: str
    burst: str | None
    sides: tuple[tuple[Side, int], ...]
    expire_ms: int
    per_second: float
    depth: int
    bytes: bool
    longest: int
    slots: int = 8192
    most: int = 2**20

    COLLECT_MS: ClassVar[int] = 10_000

    def args(self, shown: bool = True) -> tuple[str, ...]:
        """As iptables prints it, or (not `shown`) as it must be told."""
        words = ["-m", "hashlimit", "--hashlimit-above", self.above_shown if shown else self.above]
        if self.burst is not None:
            words += ["--hashlimit-burst", self.burst]
        words += ["--hashlimit-mode", ",".join(f"{side}ip" for side, _ in self.sides)]
        words += ["--hashlimit-name", self.name, "--hashlimit-htable-size", str(self.slots)]
        words += ["--hashlimit-htable-max", str(self.most), "--hashlimit-htable-gcinterval", str(self.COLLECT_MS)]
        words += ["--hashlimit-htable-expire", str(self.expire_ms)]
        for side, length in self.sides:
            if length != self.longest:
                words += [f"--hashlimit-{side}mask", str(length)]
        return tuple(words)


@dataclass(frozen=True, slots=True)
class Crowded:
    """More than `above` connections exist for the address at `side`, seen through a prefix length (xt_connlimit)."""

    above: int
    length: int
    side: Side

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        words = ["-m", "connlimit", "--connlimit-above", str(self.above), "--connlimit-mask", str(self.length)]
        return (*words, "--connlimit-saddr" if self.side == "src" else "--connlimit-daddr")


Match = (
    Has
    | Enters
    | Leaves
    | Is
    | Ports
    | Led
    | Diverted
    | SentPorts
    | Syn
    | Continues
    | EndsNothing
    | HasSocket
    | Connected
    | Reaches
    | HopLimit
    | IsOwn
    | Opens
    | Invalid
    | Ended
    | Confirmed
    | Icmp6
    | InSet
    | Marked
    | Above
    | Crowded
)


# -- and what it does with it ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """DROP, RETURN; ACCEPT: the packet leaves the table, and meets no rule of others behind ours in it."""

    name: Literal["DROP", "RETURN", "ACCEPT"]

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-j", self.name


@dataclass(frozen=True, slots=True)
class Jump:
    """Go on in another chain of ours; `goto` does not come back to this one."""

    chain: str
    goto: bool = False

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-g" if self.goto else "-j", self.chain


@dataclass(frozen=True, slots=True)
class SetMark:
    """Give the packet's mark a value under a mask."""

    value: int
    mask: int

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-j", "MARK", "--set-xmark", f"{self.value:#x}/{self.mask:#x}"


@dataclass(frozen=True, slots=True)
class SetClass:
    """Give the packet a class, as its priority. Only on the way out: FORWARD and OUTPUT."""

    number: int

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-j", "CLASSIFY", "--set-class", f"{self.number >> 16:04x}:{self.number & 0xFFFF:04x}"


@dataclass(frozen=True, slots=True)
class MapMark:
    """Give the packet the mark of the entry that its address has in a set; a hit counts on the entry."""

    name: str
    side: Side

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-j", "SET", "--map-set", self.name, self.side, "--map-mark"


@dataclass(frozen=True, slots=True)
class MapPriority:
    """Give the packet the class (as its priority) and the mark of the entry that its address has in a set; a hit
    counts on the entry. Only on the way out: FORWARD and OUTPUT."""

    name: str
    side: Side

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-j", "SET", "--map-set", self.name, self.side, "--map-mark", "--map-prio"


@dataclass(frozen=True, slots=True)
class AddTo:
    """Remember the address in a set; with `refresh`, one that is there anew, from now on."""

    name: str
    side: Side
    refresh: bool = False

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-j", "SET", "--add-set", self.name, self.side, *(("--exist",) if self.refresh else ())


@dataclass(frozen=True, slots=True)
class Reject:
    """Drop the packet and tell its sender."""

    reply: str

    def args(self) -> tuple[str, ...]:
        """As iptables prints it."""
        return "-j", "REJECT", "--reject-with", self.reply


Effect = Verdict | Jump | SetMark | SetClass | MapMark | MapPriority | AddTo | Reject


@dataclass(frozen=True, slots=True)
class ChainRule:
    """A rule in a chain. `text` is what `iptables-save` prints; two rules are the same if that is."""

    text: str
    matches: tuple[Match, ...] = field(default=(), compare=False, repr=False)
    effect: Effect | None = field(default=None, compare=False, repr=False)

    @property
    def told(self) -> tuple[str, ...]:
        """The words by which iptables is told the rule: what it prints of a rate would be another one."""
        assert self.effect is not None
        parts = (part.args(shown=False) if isinstance(part, Above) else part.args() for part in self.matches)
        return (*(word for words in parts for word in words), *self.effect.args())


def chain_rule(effect: Effect, *matches: Match) -> ChainRule:
    """Put a rule together; `matches` stand in the order in which iptables prints them: -s, -d, -i, -o, -p, the rest."""
    words = [word for part in (*matches, effect) for word in part.args()]
    return ChainRule(" ".join(words), matches, effect)


class ChainId(NamedTuple):
    """Where a chain is."""

    family: int
    table: Table
    name: str

    def __str__(self) -> str:
        return f"{'iptables' if self.family == 4 else 'ip6tables'} -t {self.table} {self.name}"


Chains = Mapping[ChainId, tuple[ChainRule, ...]]
Entries = Mapping[str, Mapping[str, Entry]]


@dataclass(frozen=True, slots=True)
class Structure:
    """Sets without their entries, our chains, and what stands first in the kernel's own chains (`hooks`)."""

    sets: Mapping[str, IpSet] = field(default_factory=dict)
    chains: Chains = field(default_factory=dict)
    hooks: Chains = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """All of ours that a kernel holds, or shall hold. Every set of the structure, and every lane of the ingress, has
    its entries, if only none. `trees` are by device. What a kernel holds of the ingress is known by `programs` alone:
    the digest of the program on each device. Where there is none on any other, one on the IFB device, by which nothing
    comes in, holds the entries."""

    structure: Structure = field(default_factory=Structure)
    entries: Entries = field(default_factory=dict)
    trees: Mapping[str, Tree] = field(default_factory=dict)
    ingress: Ingress | None = None
    found_programs: Mapping[str, str] = field(default_factory=dict)

    @property
    def programs(self) -> Mapping[str, str]:
        """The digest of the ingress program on each device."""
        if self.ingress is None:
            return self.found_programs
        return dict.fromkeys(self.ingress.devices or (INGRESS_DEVICE,), self.ingress.digest)

    def __str__(self) -> str:
        """A golden text: the whole state, sorted."""
        lines = []
        for name, ipset in sorted(self.structure.sets.items()):
            lines.append(f"create {ipset}")
            for key, entry in sorted(self.entries.get(name, {}).items()):
                lines.append(f"add {name} {show_entry(key, entry)}")
        for hook, rules in sorted(self.structure.hooks.items()):
            lines += [f"{hook}: {rule.text}" for rule in rules]
        for chain, rules in sorted(self.structure.chains.items()):
            lines += [f"{chain}: {rule.text}" for rule in rules] or [f"{chain}:"]
        if self.ingress is not None:
            lines += [f"ingress {line}" for line in self.ingress.lines()]
            for lane in self.ingress.lanes:
                entries = sorted(self.entries[lane.name].items())
                lines += [f"ingress add {lane.name} {show_entry(key, entry)}" for key, entry in entries]
        for device, tree in sorted(self.trees.items()):
            lines += [f"tc {device}: {line}" for line in tree.lines()]
        return "\n".join(lines)


def exempts(name: str) -> bool:
    """Whether the addresses in a set are spared by rules: what is safe or allowed."""
    return name.startswith(_EXEMPTING)


def limits(name: str) -> bool:
    """Whether the addresses in a set are limited, or counted when they are."""
    return name.startswith(_LIMITING)


def leads(name: str) -> bool:
    """Whether the entries of a set lead to classes, those of the queues of a device."""
    return name.startswith(LANE_PREFIX)


def show_entry(key: str, entry: Entry) -> str:
    """An entry with its mark, its class, what others have added, and when it ends."""
    mark = f" skbmark {entry.mark:#x}/{entry.mask:#x}" if entry.mask else ""
    prio = f" skbprio {entry.prio >> 16:x}:{entry.prio & 0xFFFF:x}" if entry.prio else ""
    foreign = f" {entry.foreign}" if entry.foreign else ""
    return key + mark + prio + foreign + (f" until {entry.expires}" if entry.expires else "")
