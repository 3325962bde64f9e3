"""What on a host gets in the way of limits, and what to do about it: told from what was found there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, lru_cache
from ipaddress import ip_network
from typing import NamedTuple

from netlimit.cases import Host
from netlimit.detours import (
    ANY,
    EXTENSION,
    Translation,
    find_brouting,
    find_forwards,
    find_masked,
    find_queued,
    find_raising,
    find_rewriting,
    find_taking,
    find_translations,
    find_untracked_early,
)
from netlimit.duplicates import advise, find_duplicates, say_duplicates
from netlimit.given import find_given
from netlimit.publications import Publications, say_published
from netlimit.published import find_publications
from netlimit.several import name_some, say_more
from netlimit.spans import join, read_address, read_addresses
from netlimit.state import PEER_PREFIX, Ended
from netlimit.tree import Diversion
from netlimit.unchanged import Unchanged

UNKNOWN = "unknown"
"""The name of the finding that tells what could not be found out."""
COPIED_CHAINS = "copied chains"
"""The name of the finding about a second copy of ours, which nobody manages."""
NAMELESS = "devices without a usable name"
"""The name of the finding about devices for which nothing is written."""
NEARLY = 0.9
"""The share of a table from which on it counts as nearly full."""
PEERS_NEARLY = 0.5
"""Beyond it, some slots of a set of peers are full."""
USUAL_HZ = 250
_TABLE = re.compile(r"^(table ip6? (?:raw|mangle|filter|security|nat)) \{(.*?)^\}", re.MULTILINE | re.DOTALL)
_TWIN = re.compile(r"chain (?:PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING) \{")
"""What iptables-nft makes has chains in capitals."""
_PRIORITY = re.compile(
    r"\bmeta priority set\b|-j (?:CLASSIFY|DSCP2PRIO)\b|-j SET\b.* --map-prio\b"
    r"|xt target \"?(?:CLASSIFY|DSCP2PRIO)\b"
)
_CHAIN = re.compile(r"^\s*chain (\S+) \{(.*?)^\s*\}", re.MULTILINE | re.DOTALL)
_BEFORE = "-A PREROUTING ", "-A INPUT "
_HOOK_BEFORE = re.compile(r"\bhook (?:prerouting|input|ingress)\b")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_COMMENT = re.compile(r'\bcomment "(?:[^"\\\n]|\\.)*"')
_LOOPBACK = re.compile(r"(?:(?<!!) -[io] |\b[io]if(?:name)? )\"?lo\"?(?: |$)")
_UNTRACKED = re.compile(r"-j NOTRACK\b|-j CT\b.* --notrack\b|\bnotrack\b|xt target \"?NOTRACK\b")
_POLICY = re.compile(r"^\tct timeout (\S+) \{\n[^}]*?\bclose : (\w+)", re.MULTILINE)
_TIME, _SECONDS = re.compile(r"(\d+)([dhms]?)"), {"d": 86400, "h": 3600, "m": 60, "s": 1}
_CHOOSES_POLICY = re.compile(r"-j CT\b.* --timeout ")
_ZONED = re.compile(r"-j CT\b.* --zone|\bct (?:original |reply )?zone set\b|xt target \"?CT\b")
"""What nft calls `xt target CT` may also be another use of it: only iptables-nft could tell."""
_COPIED = re.compile(r"-j TEE\b|\bdup to (?!\")|xt target \"?TEE\b")
"""With nftables a device stands in quotes: such a copy is the device's, and meets no rule any more."""
_ANSWERED = re.compile(
    r"-j SYNPROXY\b|(?<!jump )(?<!goto )\bsynproxy(?= (?:mss|wscale|timestamp|sack-perm|name)\b|$)"
    r"|xt target \"?SYNPROXY\b"
)
_FLOWTABLE = re.compile(r"^\s*flowtable (\S+) \{(.*?)^\s*\}", re.MULTILINE | re.DOTALL)
_DEVICES = re.compile(r"devices = \{ (.*?) \}")


_SHOWN, _NAMED = 120, 8
"""So many letters of a rule are shown, and so many devices are named where there may be thousands."""


class Severity(StrEnum):
    """How bad it is: `serious` keeps rules from holding now, `warning` can, a `note` is good to know."""

    SERIOUS = "serious"
    WARNING = "warning"
    NOTE = "note"


class Spoiled(StrEnum):
    """The rules that something keeps from holding as they say."""

    EVERY = "every rule"
    SHAPED = "rules that shape"
    INCOMING = "rules that shape what ends on this host"
    SENT = "rates of what is sent to somebody"
    OPENED = "rates of connections"
    OPEN = "connections at once"
    ENTERING = "rules on what comes in by some devices"
    TRANSLATED = "rules to what this host reaches by another address"
    BROUTED = "rules on what comes in by bridges"
    APART = "rules with ports"
    REROUTED = "blocks and limits to what leaves by a device"
    TAKEN = "rules that shape what is for this host, by whatever device"
    HIDDEN = "rules that are asked only once packets are in a tunnel"
    GUIDED = "rules that are asked only once packets have another destination"
    HANDED = "rules that name the device by which packets come in"
    MIRRORED = "rates of what comes in by some devices, and rules that name these"
    MASKED = "rules to those whom this host knows by another address"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: a short name, what it is, what to do about it, and which rules it spoils; where there
    are `devices`, only for what comes in by one of them, where there are `places` (a protocol, and an address or the
    first and the last of several), only for what is sent there."""

    name: str
    severity: Severity
    what: str
    advice: str
    spoils: Spoiled | None = None
    devices: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.what} {self.advice}"


class Fill(NamedTuple):
    """How full a table is: entries, and the most that it takes."""

    entries: int
    most: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.entries / self.most if self.most else 0.0

    def __str__(self) -> str:
        return f"{self.entries:,} of {self.most:,}"


ROUTERS = "other routers"
_ROUTERS = frozenset(
    [
        "keepalived",
        "bird",
        "bird6",
        "vrrpd",
        "zebra",
        "ospfd",
        "ospf6d",
        "bgpd",
        "bfdd",
        "pimd",
        "eigrpd",
        "ripd",
        "ripngd",
        "ldpd",
        "isisd",
    ]
)
_ROUTERS_GROUPS = {
    "VRRP": ("224.0.0.18", "ff02::12"),
    "OSPF": ("224.0.0.5", "224.0.0.6", "ff02::5", "ff02::6"),
    "PIM": ("224.0.0.13", "ff02::d"),
    "RIP": ("224.0.0.9", "ff02::9"),
    "EIGRP": ("224.0.0.10", "ff02::a"),
}
"""Programs of routers, and the multicast addresses at which they listen."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """What was found on a host.

    `programs` are names of running processes. `flushing` are files that flush all nftables rules when they are loaded,
    `enabled` the systemd units that load rules at boot, `saved` files of saved rules that hold chains of ours,
    `saved_sets` such that hold sets of ours.
    `nftables` is what `nft list ruleset` prints, `legacy` the rules of others in the legacy tables, `nat` those in nat
    tables of both kinds of iptables, table by table (`nat6`: of IPv6), `mangle` those in the legacy mangle tables.
    `rerouting` are rules that give what this host sends a mark by which it is routed once more, `mapping` those of
    iptables-nft that give packets what a set has for them. `own` are the addresses of the host, `firsts` by device
    those that a REDIRECT gives to what comes by it, `listening` those with the TCP ports where something listens at one
    address, not at all of them. `bridges` are devices, `joining` those of them that have ports, `brouting` the broute
    table as ebtables lists it, `bridged` by bridge the address families of which what it forwards passes iptables
    (None: unknown). `source_routed`: IPv4 packets may name their way. `closing` are the seconds for which connection
    tracking remembers a connection that was reset (0: it tracks none). `foreign` are root qdiscs of others by device,
    as tc says them, `ahead` the filters of others before ours on the ingress of devices, `barred` what keeps ours from
    being there, `skipped` who is not asked for ours is there all the same, `clsacts` the devices with such a qdisc that
    we use, `charged` those with queues of ours that have no program on their egress, and why, `redirecting` the filters
    that lead what comes in out by another device, `rewriting` those that translate
    its addresses, `editing` those that write something into it, `handing` those that hand it to another device,
    `looping` those that do so to loopback, `mirroring` those that hand a copy of it to one, `diverting` those that have
    what leaves leave by another device, `returning` those that have it, or a copy, come in by one, `translators`
    modules that translate between the families, `above` devices with those that stand on them (bridges, bonds, VLANs),
    `ifbs` devices from which packets come back, `offloading` the devices whose hardware may forward by itself. `sets`
    are ipsets of ours that refuse more when they are full, `buckets` the tables of hashlimit. `groups` are multicast
    addresses that devices listen to, each with the device. `segments` are destinations of SRv6 on this host, `local`
    what ends here by a route, `diversions` routes that put what comes in into tunnels before it is forwarded,
    `waypoints` the devices by which IPv6 packets may come that name their way, `labelled` those by which packets with
    labels of MPLS may. `unspeakable` are devices whose name no tool can be told.
    `namespaces`: any local user may make some. `unknown` is what could not be read, with the reason.
    """

    hz: int = USUAL_HZ
    programs: frozenset[str] = frozenset()
    flushing: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    saved_sets: tuple[str, ...] = ()
    nftables: str = ""
    legacy: tuple[str, ...] = ()
    nat: tuple[tuple[str, ...], ...] = ()
    nat6: tuple[tuple[str, ...], ...] = ()
    mangle: tuple[tuple[str, ...], ...] = ()
    rerouting: tuple[str, ...] = ()
    mapping: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    firsts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    listening: frozenset[tuple[str, int]] = frozenset()
    connections: Fill = field(default_factory=lambda: Fill(0, 0))
    sets: Mapping[str, Fill] = field(default_factory=dict)
    buckets: Mapping[str, Fill] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)
    ahead: Mapping[str, str] = field(default_factory=dict)
    barred: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    clsacts: tuple[str, ...] = ()
    charged: Mapping[str, str] = field(default_factory=dict)
    redirecting: Mapping[str, str] = field(default_factory=dict)
    rewriting: Mapping[str, str] = field(default_factory=dict)
    editing: Mapping[str, str] = field(default_factory=dict)
    handing: Mapping[str, str] = field(default_factory=dict)
    looping: Mapping[str, str] = field(default_factory=dict)
    mirroring: Mapping[str, str] = field(default_factory=dict)
    diverting: Mapping[str, str] = field(default_factory=dict)
    returning: Mapping[str, str] = field(default_factory=dict)
    translators: tuple[str, ...] = ()
    above: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ifbs: frozenset[str] = frozenset()
    offloading: tuple[str, ...] = ()
    bridges: tuple[str, ...] = ()
    joining: tuple[str, ...] = ()
    brouting: str = ""
    bridged: Mapping[str, frozenset[int]] | None = None
    source_routed: bool = False
    closing: int = 0
    segments: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    diversions: tuple[Diversion, ...] = ()
    waypoints: tuple[str, ...] = ()
    labelled: tuple[str, ...] = ()
    unspeakable: tuple[str, ...] = ()
    namespaces: bool = False
    synchronized: bool = True
    groups: frozenset[tuple[str, str]] = frozenset()
    unknown: tuple[str, ...] = ()

    @property
    def translating(self) -> tuple[tuple[str, ...], ...]:
        """The rules in nat tables of both families."""
        return (*self.nat, *self.nat6)


def find_conflicts(report: HostReport, held: Unchanged[HostReport] | None = None) -> list[Finding]:
    """Everything that there is to say of a host, the worst first; what `held` knows is not worked out once more."""
    held = Unchanged() if held is None else held
    parts = (
        _find_firewalls,
        _find_flushes,
        _find_tables,
        _find_copied_chains,
        _find_offload,
        _find_classifiers,
        _find_uncounted,
        _find_counted_twice,
        _find_untracked_early,
        _find_queued,
        _find_ahead,
        _find_barred,
        _find_kept,
        _find_charged,
        _find_redirected,
        _find_brouted,
        _find_rewritten,
        _find_handed,
        _find_looped,
        _find_diverted,
        _find_returned,
        _find_translators,
        _find_translated,
        _find_rerouted,
        _find_taken,
        _find_published,
        _find_given,
        _find_masked,
        _find_segments,
        _find_hidden,
        _find_guided,
        _find_waypoints,
        _find_labelled,
        _find_nameless,
        _find_full,
        _find_queues,
        _find_ground,
        _find_routers,
    )
    found = [finding for part in (*parts, _find_unknown) for finding in held.ask(_list_found(part), report)]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


@cache
def _list_found(part: Callable[[HostReport], Iterator[Finding]]) -> Callable[[HostReport], list[Finding]]:
    return lambda report: [*part(report)]


def is_serious(finding: Finding) -> bool:
    """Whether it keeps rules from holding."""
    return finding.severity is Severity.SERIOUS


def is_told(finding: Finding) -> bool:
    """Whether the status of a gateway tells it too: what keeps rules from holding, what is not known, and devices for
    which nothing is written."""
    return is_serious(finding) or finding.name in (UNKNOWN, NAMELESS)


def _find_unknown(report: HostReport) -> Iterator[Finding]:
    if report.unknown:
        yield Finding(
            UNKNOWN,
            Severity.NOTE,
            f"What could get in the way of limits here is known in part only. Not known: {'; '.join(report.unknown)}.",
            "Limits are in force all the same.",
        )


def _find_nameless(report: HostReport) -> Iterator[Finding]:
    if report.unspeakable:
        yield Finding(
            NAMELESS,
            Severity.WARNING,
            "No tool can be told the names of these devices so that it means them alone: "
            f"{name_some(report.unspeakable, _NAMED)} (a `+` at the end stands for every name that begins so, a `-` "
            "at the beginning for an option; letters beyond A-Z, a-z, 0-9 and _.:@%~=^,+- are not taken). Nothing is "
            "written for them: what leaves by them is not shaped, nor what comes in by them and ends on this host, and "
            "what comes by a VRF of such a name is counted twice. Blocks and limits hold there all the same.",
            "Rename them: `ip link set dev OLD name NEW`.",
        )


def _find_routers(report: HostReport) -> Iterator[Finding]:
    running = sorted(report.programs & _ROUTERS)
    spoken = [
        f"{name} ({', '.join(sorted(where))})"
        for name, addresses in _ROUTERS_GROUPS.items()
        if (where := {device for address, device in report.groups if address in addresses})
    ]
    if not (running or spoken):
        return
    what = f"{', '.join(running) or 'Something'} runs here"
    what += f", and devices listen to what routers say: {', '.join(spoken)}." if spoken else "."
    yield Finding(
        ROUTERS,
        Severity.NOTE,
        f"{what} What keeps gateways alive towards each other is spared by limits and blocks.",
        "That of BGP, and of VRRP or BFD over other routers, is so only between gateways of one database: list other "
        "neighbours in NETLIMIT_SAFE (docs/vrrp.md).",
    )


# -- who else writes rules ------------------------------------------------------------------------------------------


def _find_firewalls(report: HostReport) -> Iterator[Finding]:
    if "firewalld" in report.programs:
        yield Finding(
            "firewalld",
            Severity.NOTE,
            "firewalld runs. With its iptables back end, or where `iptables` is iptables-legacy, a reload flushes the "
            "legacy tables, and so our chains and the jumps to them in PREROUTING, FORWARD and OUTPUT; the controller "
            "puts them back within two seconds. With its nftables back end it does not touch them otherwise.",
            "Set FirewallBackend=nftables in /etc/firewalld/firewalld.conf, and let `iptables` be iptables-nft "
            "(`update-alternatives --set iptables /usr/sbin/iptables-nft`, ip6tables likewise); or reload it as seldom "
            "as can be.",
        )
    if "dockerd" in report.programs:
        yield Finding(
            "docker",
            Severity.NOTE,
            "Docker runs. When it starts and when networks change it puts its rules first in FORWARD of the filter "
            "table; our chains stand first in raw, mangle, filter and security, and where it has taken the place the "
            "controller takes it back within two seconds.",
            'If FORWARD is repaired over and over, set "iptables": false in /etc/docker/daemon.json, or leave it.',
        )


def _find_flushes(report: HostReport) -> Iterator[Finding]:
    for path in report.flushing:
        loaded = any("nftables" in unit for unit in report.enabled)
        yield Finding(
            "flush ruleset",
            Severity.NOTE,
            f"{path} flushes all nftables rules when it is loaded{', which happens at boot' if loaded else ''}. Our "
            "chains are in the legacy tables, which it does not reach; rules of iptables-nft it does.",
            "Replace `flush ruleset` by `flush table` for what the file itself makes, if others need their rules.",
        )
    for path in report.saved:
        yield Finding(
            "saved rules",
            Severity.SERIOUS,
            f"{path} holds saved chains of ours. Where there is no set of ours yet, as at most boots, iptables-restore "
            "stops at the first rule that names one, and leaves that table and those after it unloaded, with any "
            "firewall in them. Where there are (saved sets, or a reload while netlimit runs), our chains are loaded as "
            "they were: in the legacy tables until the controller repairs them, and through iptables-nft as a second "
            "copy, which stays.",
            f"Save without ours: iptables-legacy-save | grep -v NL- > {path} (ip6tables-legacy-save for IPv6).",
        )
    for path in report.saved_sets:
        yield Finding(
            "saved sets",
            Severity.WARNING,
            f"{path} holds saved sets of ours. When it is loaded (ipset-persistent: at boot, and with each reload of "
            "netfilter-persistent), who was limited, blocked or allowed then is so again until the controller repairs "
            "it; and saved chains of ours find their sets.",
            f"Save without ours: ipset save | sed -E '/^(create|add) nl-/d' > {path}",
        )
    for unit in report.enabled:
        if "nftables" not in unit:
            yield Finding(
                "restored rules",
                Severity.NOTE,
                f"{unit} loads saved rules. If it writes to the legacy tables it flushes our chains, which the "
                "controller puts back within two seconds.",
                "Let netlimit start after it.",
            )


def _find_tables(report: HostReport) -> Iterator[Finding]:
    twins = sorted(table for table, body in _TABLE.findall(report.nftables) if _TWIN.search(body))
    if twins:
        others = f" Others have rules there too ({len(report.legacy)})." if report.legacy else ""
        yield Finding(
            "two kinds of iptables",
            Severity.WARNING if report.legacy else Severity.NOTE,
            f"iptables-nft has rules ({', '.join(twins)}), and ours are in the legacy tables.{others} A packet passes "
            "both at each hook, those that were registered first before the others; what one accepts the other may "
            "still drop. `iptables -S` shows only one kind.",
            "Look at ours with iptables-legacy, and keep all other rules in one kind.",
        )


def _find_copied_chains(report: HostReport) -> Iterator[Finding]:
    if copied := tuple(find_duplicates(report.nftables)):
        yield Finding(COPIED_CHAINS, Severity.SERIOUS, say_duplicates(copied), advise(copied), Spoiled.EVERY)


def _find_offload(report: HostReport) -> Iterator[Finding]:
    for name, body in _FLOWTABLE.findall(report.nftables):
        if f"@{name}" not in report.nftables:
            continue
        devices = _DEVICES.search(body)
        where = f" on {devices[1]}" if devices else ""
        yield Finding(
            "flow offload",
            Severity.SERIOUS,
            f"The flowtable {name} of nftables forwards what belongs to known flows{where} past all chains of ours: "
            "after the first packets of a flow no limit sees it.",
            f"Remove the rule `flow add @{name}`, or let it leave out whoever is limited.",
            Spoiled.EVERY,
        )
    if any("FLOWOFFLOAD" in rule for rule in report.legacy):
        yield Finding(
            "flow offload",
            Severity.SERIOUS,
            "A rule with -j FLOWOFFLOAD forwards what belongs to known flows past all chains of ours: after the first "
            "packets of a flow no limit sees it.",
            "Remove that rule (on OpenWrt: `uci set firewall.@defaults[0].flow_offloading=0`).",
            Spoiled.EVERY,
        )
    if report.offloading:
        yield Finding(
            "hardware offload",
            Severity.WARNING,
            f"The hardware of {', '.join(report.offloading)} may take over tc filters (hw-tc-offload): what it "
            "forwards by itself passes no chain and no queue of ours.",
            "; ".join(f"ethtool -K {device} hw-tc-offload off" for device in report.offloading) + ".",
        )


def _find_classifiers(report: HostReport) -> Iterator[Finding]:
    """Who writes the packet priority behind us. What is written before is overwritten by ours."""
    others = (*report.legacy, *report.mapping)
    rules = [rule for rule in others if _PRIORITY.search(rule) and not rule.startswith(_BEFORE)]
    bodies = _CHAIN.findall(report.nftables)
    chains = [name for name, body in bodies if _PRIORITY.search(body) and not _HOOK_BEFORE.search(body)]
    if rules or chains:
        named = [f"`{rules[0]}`"] if rules else [f"chain {chains[0]} of nftables"]
        yield Finding(
            "packet priority",
            Severity.WARNING,
            f"Others write the packet priority behind netlimit ({named[0]}): such packets wait in another class than "
            "that of their rule, or in none.",
            "Take that rule away, or let it leave out what is shaped.",
            Spoiled.SHAPED,
        )


@lru_cache(maxsize=1)
def _list_bare(legacy: tuple[str, ...], nftables: str) -> list[str]:
    """The rules of others that do not speak of loopback, without what stands in quotes."""
    bare = (_strip_quotes(line) for line in (*legacy, *nftables.splitlines()))
    return [rule.strip() for rule in bare if rule is not None]


def _strip_quotes(line: str) -> str | None:
    """A rule without them; none of one that speaks of loopback. Most have nothing that a pattern must look for."""
    if '"' not in line:
        return None if "lo" in line and _LOOPBACK.search(line) else line
    rule = _COMMENT.sub("", line)
    return None if _LOOPBACK.search(rule) else _QUOTED.sub('""', EXTENSION.sub(r"xt target \1", rule))


def _find_counted_twice(report: HostReport) -> Iterator[Finding]:
    """Who has the kernel send by itself what has come by already. In OUTPUT it looks like what IPVS leads on, which is
    asked about nowhere else: so it cannot be spared there."""
    bare = _list_bare(report.legacy, report.nftables)
    if copied := next(filter(_COPIED.search, bare), None):
        yield Finding(
            "copied packets",
            Severity.SERIOUS,
            f"Packets are copied to another host (`{copied[:_SHOWN]}`): this gateway sends each copy itself, to the "
            "same destination, and rates `to` it count copies too, also those of packets that they have dropped.",
            "Mirror where packets leave (`tc filter add dev … egress … action mirred egress mirror dev …`) instead of "
            "by that rule.",
            Spoiled.SENT,
        )
    if answered := next(filter(_ANSWERED.search, bare), None):
        yield Finding(
            "SYNPROXY",
            Severity.SERIOUS,
            f"The kernel opens connections in the place of clients (`{answered[:_SHOWN]}`): rates `to` the server "
            "count the SYN that it sends as well as the client's, each connection twice.",
            "Take that rule away, or give rates `to` such servers twice as much.",
            Spoiled.SENT,
        )


def _find_untracked_early(report: HostReport) -> Iterator[Finding]:
    """Who says that packets are not to be tracked before the kernel puts fragments together: it leaves theirs apart."""
    if rule := find_untracked_early(report.nftables):
        yield Finding(
            "fragments apart",
            Severity.SERIOUS,
            f"Packets are taken out of connection tracking before fragments are put together (`{rule[:_SHOWN]}`, at a "
            "priority below -400): of a datagram in fragments only the first has ports, and rules with ports do not "
            "see the others.",
            "Let that chain have the priority `raw` (-300).",
            Spoiled.APART,
        )


def _find_queued(report: HostReport) -> Iterator[Finding]:
    """Who may have packets begin a table anew. What his program answers no rule tells."""
    found = [*find_queued(report.mangle)]
    if found:
        more = say_more(found, kind="such rule")
        yield Finding(
            "queued packets",
            Severity.WARNING,
            f"Packets wait in the mangle table for what a program says of them (`{found[0][:_SHOWN]}`{more}). Where it "
            "answers with NF_REPEAT (Suricata: `mode: repeat`) they pass our chains there again, and rates count each "
            "of them twice.",
            "Put that rule into the filter table, or let the program accept packets (Suricata: `mode: accept` or "
            "`mode: route`).",
        )


def _tell_devices(found: Mapping[str, str]) -> str:
    """Devices, each with what is there."""
    return "; ".join(f"{device} ({what})" for device, what in sorted(found.items()))


def _find_ahead(report: HostReport) -> Iterator[Finding]:
    """Who may take what comes in before our program on the ingress is asked."""
    if report.ahead:
        named = _tell_devices(report.ahead)
        yield Finding(
            "ingress filter",
            Severity.SERIOUS,
            f"Others have filters on the ingress of {named}: what they take, if only to copy it, never comes to ours, "
            "and is not shaped where it ends on this gateway.",
            "Take them away (`tc filter del dev … ingress pref …`), or limit what ends here instead (`action: drop`).",
            Spoiled.INCOMING,
            tuple(sorted(report.ahead)),
        )


def _find_barred(report: HostReport) -> Iterator[Finding]:
    """Who keeps our program from the ingress of devices, or is not asked where it is. Which rules miss something for
    that, these say themselves."""
    for device, why in list(report.barred.items())[:1]:
        more = say_more(report.barred, kind="such device")
        yield Finding(
            "no program on an ingress",
            Severity.WARNING,
            f"What comes in by {device}{more} and ends on this gateway is not shaped: {why}",
            "",
        )
    for device, why in list(report.skipped.items())[:1]:
        more = say_more(report.skipped, kind="such device")
        yield Finding(
            "chains passed by",
            Severity.SERIOUS,
            f"A program of netlimit is still on the ingress of {device}{more}, and should not be: {why}",
            "A controller takes it away within a second or so; without one, `netlimit apply` does.",
        )


def _find_kept(report: HostReport) -> Iterator[Finding]:
    """What of ours keeps neighbours from adding theirs."""
    if report.clsacts:
        yield Finding(
            "clsact",
            Severity.NOTE,
            f"netlimit uses a clsact qdisc on {name_some(report.clsacts, _NAMED)}: nobody can add one of the kind "
            "ingress there (SQM, wondershaper, `<inbound>` of libvirt, the CNI plugin bandwidth; `Exclusivity flag on, "
            "cannot modify`).",
            "Filters can be added to it as well, not by `parent ffff:` but by `tc filter add dev … ingress …`. Or run "
            "`netlimit teardown`, let the others add theirs, with which netlimit does, too, and then `netlimit apply`.",
        )


def _find_charged(report: HostReport) -> Iterator[Finding]:
    """Where packets that wait are charged to the sockets of this host that they are from."""
    for device, why in sorted(report.charged.items()):
        yield Finding(
            "full sockets",
            Severity.WARNING,
            f"What this gateway itself sends by {device} is charged to the socket that sent it while it waits: one "
            "host that is shaped there, and asks much, can keep a service with a single socket (DNS by UDP, say) from "
            f"answering anybody. {why[:1].upper()}{why[1:]}",
            "Take that away; or have a rule that drops (`action: drop`) hold the UDP of such hosts somewhat below the "
            "rate that they are shaped to.",
        )


def _find_redirected(report: HostReport) -> Iterator[Finding]:
    """Who forwards what comes in before netfilter sees it. An IFB device gives it back."""
    forwards = {device: f"`{rule[:_SHOWN]}`" for device, rule in find_forwards(report.nftables, report.ifbs).items()}
    found = forwards | dict(report.redirecting)
    if found:
        named = _tell_devices(found)
        yield Finding(
            "redirected packets",
            Severity.SERIOUS,
            f"Others lead what comes in by {named} out by another device, past all chains and classes of ours: no "
            "block and no limit sees it.",
            "Take that away (`nft delete rule netdev …`, `tc filter del dev … ingress pref …`), or let it leave out "
            "whoever is limited or blocked.",
            Spoiled.ENTERING,
            tuple(sorted(_find_above(found, report.above))),
        )


def _find_brouted(report: HostReport) -> Iterator[Finding]:
    """Who has ports of bridges take packets themselves. Which ports a rule means is not read: it may mean any."""
    found = [*dict.fromkeys(find_brouting(report.nftables, report.brouting))] if report.joining else []
    if found:
        more = say_more(found, kind="such rule")
        yield Finding(
            "brouted packets",
            Severity.SERIOUS,
            f"Ports of {', '.join(report.joining[:_NAMED])} hand packets to IP themselves (broute: "
            f"`{found[0][:_SHOWN]}`{more}): these do not come in by the bridge, so that rules with its name in "
            "`interface` do not see them, nor is what ends on this gateway shaped.",
            "Leave `interface` out, and limit what ends here instead of shaping it (`action: drop`); or take that rule "
            "away (`ebtables-legacy -t broute -D …`, `nft delete rule bridge …`).",
            Spoiled.BROUTED,
            tuple(sorted(_find_above(report.joining, report.above))),
        )


def _find_rewritten(report: HostReport) -> Iterator[Finding]:
    """Who writes other addresses and ports into packets. What they become connection tracking does not know."""
    rules = [f"`{rule[:_SHOWN]}`" for rule in dict.fromkeys(find_rewriting(report.nftables, report.legacy))]
    found = [*rules, *(f"the filter of {device}, {what}" for device, what in sorted(report.rewriting.items()))]
    if found:
        more = say_more(found)
        yield Finding(
            "rewritten packets",
            Severity.SERIOUS,
            f"Others write other addresses or ports into packets, and connection tracking does not know ({found[0]}"
            f"{more}): rules of ours before that see what was sent, those behind it what it has become.",
            "Translate with NAT (`snat to`, `dnat to`), which rules allow for; or name in rules both what is sent and "
            "what it becomes.",
            Spoiled.EVERY,
        )
    if report.editing:
        named = _tell_devices(report.editing)
        yield Finding(
            "edited packets",
            Severity.WARNING,
            f"Filters write into what comes in by {named} (`pedit`). Where those are addresses or ports, rules do not "
            "see what was sent, but what it has become.",
            "Name in rules what packets become, or translate with NAT.",
        )


def _find_handed(report: HostReport) -> Iterator[Finding]:
    """Who has what comes in, or a copy of it, come in by another device. There an IFB device gives nothing back."""
    if report.handing:
        named = _tell_devices(report.handing)
        yield Finding(
            "handed packets",
            Severity.SERIOUS,
            f"Filters of others hand what comes in by {named} to another device, as if it came in there: rules `from` "
            "with the one in `interface` do not see it.",
            "Name in `interface` the device to which it is handed, or none; or take the filter away (`tc filter del "
            "dev … ingress pref …`).",
            Spoiled.HANDED,
            tuple(sorted(_find_above(report.handing, report.above))),
        )
    if report.mirroring:
        named = _tell_devices(report.mirroring)
        yield Finding(
            "mirrored packets",
            Severity.SERIOUS,
            f"Filters of others hand a copy of what comes in by {named} to another device, as if it came in there: the "
            "copy is led on like the packet. Rates count both, and rules `from` with the one in `interface` do not see "
            "the copy, which passes.",
            "Have copies leave instead (`action mirred egress mirror dev …`), which meet no rule; or take the filter "
            "away (`tc filter del dev … ingress pref …`).",
            Spoiled.MIRRORED,
            tuple(sorted(_find_above(report.mirroring, report.above))),
        )


def _find_looped(report: HostReport) -> Iterator[Finding]:
    """Who has what comes in, or a copy, come in by loopback, of which no rule asks: what a host sends to itself."""
    if report.looping:
        named = _tell_devices(report.looping)
        yield Finding(
            "looped packets",
            Severity.SERIOUS,
            f"Filters of others hand what comes in by {named}, or a copy of it, to loopback, as if this gateway had "
            "sent it to itself: no block and no limit sees what is for the gateway.",
            "Hand it to another device (one end of a veth pair), and name that in `interface`; or take the filter "
            "away (`tc filter del dev … ingress pref …`).",
            Spoiled.ENTERING,
            tuple(sorted(_find_above(report.looping, report.above))),
        )


def _find_diverted(report: HostReport) -> Iterator[Finding]:
    """Who takes what leaves before the queues of its device. An IFB device gives it back, behind them."""
    forwards = find_forwards(report.nftables, report.ifbs, leaving=True)
    found = {device: f"`{rule[:_SHOWN]}`" for device, rule in forwards.items()} | dict(report.diverting)
    if found:
        named = _tell_devices(found)
        yield Finding(
            "diverted packets",
            Severity.SERIOUS,
            f"Others have what leaves by {named} leave by another device, before it comes to queues: what shapes there "
            "does not hold it.",
            "Take that away (`nft delete rule netdev …`, `tc filter del dev … egress pref …`), or name in `interface` "
            "where it really leaves.",
            Spoiled.SHAPED,
        )


def _find_returned(report: HostReport) -> Iterator[Finding]:
    """Who has what leaves, or a copy of it, come in once more."""
    if report.returning:
        named = _tell_devices(report.returning)
        yield Finding(
            "returned packets",
            Severity.SERIOUS,
            f"Filters of others hand what leaves by {named}, or a copy of it, to another device, as if it came in "
            "there: it is led on once more, and again each time it comes by. Rates count it each time, and neither "
            "`interface` nor what shapes there holds it.",
            "Have it leave by another device instead (`action mirred egress …`); or take the filter away (`tc filter "
            "del dev … egress pref …`, or without the word egress where it is in the root qdisc).",
            Spoiled.EVERY,
        )


def _find_translators(report: HostReport) -> Iterator[Finding]:
    """Who takes packets of one family in PREROUTING and sends those of the other one."""
    if report.translators:
        yield Finding(
            "NAT64",
            Severity.WARNING,
            f"The module {' and '.join(report.translators)} translates between IPv6 and IPv4: it takes packets before "
            "they are forwarded, and sends others of the other family past FORWARD. Limits do not see these; blocks "
            "`from` and limits `from … per: peer` do, which stand before it.",
            "Limit where packets come in or leave by another host, or translate by a device of its own (tayga).",
        )


def _find_above(devices: Iterable[str], above: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Devices with all that stand on them: what comes in by these comes in by those first."""
    found, waiting = set[str](), [*devices]
    while waiting:
        device = waiting.pop()
        waiting += () if device in found else above.get(device, ())
        found.add(device)
    return found


def _find_translated(report: HostReport) -> Iterator[Finding]:
    """Who gives what this host sends another destination, once rules `to` have been asked in mangle OUTPUT."""
    found: dict[str, Translation] = {}
    places = dict[tuple[str, str], None]()
    for each in find_translations(report.nftables, report.translating, report.own):
        found.setdefault(str(each), each)
        places[each.protocol, str(each)] = None
    if found:
        place, first = next(iter(found.items()))
        more = say_more(found, kind="such destination")
        yield Finding(
            "translated destinations",
            Severity.WARNING,
            f"What this gateway itself sends is given another destination in nat OUTPUT (`{first.rule[:_SHOWN]}`: to "
            f"{place}{more}): blocks and limits `to` it do not hold for that. For what is forwarded they do.",
            "Block or limit the address that is translated, too, or have programs of this gateway use the real one.",
            Spoiled.TRANSLATED,
            (),
            tuple(places),
        )


def _find_rerouted(report: HostReport) -> Iterator[Finding]:
    """Who has what this host sends leave by another device than the one by which it was about to leave when rules were
    asked. What is shaped is told here alone: on a gateway with several uplinks each rule that shapes would be
    `degraded`, and nearly all that it shapes is forwarded."""
    if report.rerouting:
        more = say_more(report.rerouting, kind="such rule")
        yield Finding(
            "rerouted packets",
            Severity.WARNING,
            f"What this gateway itself sends is given a mark (`{report.rerouting[0][:_SHOWN]}`{more}) by which a "
            "routing rule (`ip rule … fwmark`) may have it leave by another device than before: blocks and limits `to` "
            "with an `interface` look at the first one, and rules that shape give it a queue there. What is forwarded "
            "is held and shaped.",
            "Leave `interface` out of blocks and limits that shall hold for this gateway too; or let its programs set "
            "the mark themselves (SO_MARK), or lead them by source address (`ip rule … from`).",
            Spoiled.REROUTED,
        )


def _find_taken(report: HostReport) -> Iterator[Finding]:
    """Who leads packets to sockets of this host that our program on the ingress has seen before, and let go: it looks
    for a socket where the packet says it is for, and a port that is translated has none."""
    found = [*dict.fromkeys(find_taking(report.nftables, report.translating, report.own))]
    if found:
        more = say_more(found, kind="such rule")
        yield Finding(
            "redirected ports",
            Severity.WARNING,
            "What comes in is given another port, or an address of this gateway, in nat PREROUTING "
            f"(`{found[0][:_SHOWN]}`{more}): where that leads to a socket here, it is not shaped. What is sent to that "
            "port and address itself is, and what is forwarded.",
            "Limit it instead (`action: drop`), in a rule `to` the address and port that it is given, or let the "
            "program listen at the port that is asked for.",
            Spoiled.TAKEN,
        )


def read_given(report: HostReport, published: Publications) -> Publications:
    """Which addresses NAT gives on the way out of a host on which that is published."""
    own = join(map(read_address, report.own))
    return find_given(report.nftables, (*report.nat, *report.nat6), published, own)


def read_publications(report: HostReport) -> Publications:
    """What is published on a host."""
    firsts = tuple((device, join(map(read_address, some))) for device, some in report.firsts)
    host = Host(join(map(read_address, report.own)), firsts, join(map(read_addresses, report.local)))
    return find_publications(report.nftables, report.nat, report.nat6, host)


def _find_published(report: HostReport) -> Iterator[Finding]:
    """Who gives what comes in another destination, before rules `to` the first one are asked."""
    found = read_publications(report)
    if found:
        yield Finding(
            "published ports",
            Severity.WARNING,
            f"{say_published(found)} Blocks and limits `to` the address and port that it was sent to do not meet it.",
            "Name in rules `to` where that leads, with the port there.",
        )


def _find_given(report: HostReport) -> Iterator[Finding]:
    """Whether NAT on the way out is more than is looked through."""
    if not read_given(report, read_publications(report)).whole:
        yield Finding(
            "given addresses",
            Severity.WARNING,
            "The rules of nat POSTROUTING are more than are looked through: of addresses that NAT gives on the way out "
            "it is not known of all that it does. Blocks and limits `from` such an address do not meet what still "
            "has another.",
            "Name in rules `from` the addresses that hosts have before that.",
        )


def _find_segments(report: HostReport) -> Iterator[Finding]:
    if report.segments:
        more = say_more(report.segments)
        yield Finding(
            "SRv6",
            Severity.WARNING,
            f"Routes take packets out of SRv6 tunnels here (`encap seg6local`, {report.segments[0]}{more}): what comes "
            "out passes no PREROUTING, so that no limit of connections sees it, and no limit `from` that is "
            "`per: peer`. All others do, and blocks.",
            "sysctl -w net.netfilter.nf_hooks_lwtunnel=1, which helps for End.DX4 and End.DX6, but not for End.DT6; or "
            "limit with `to`, or where it goes in.",
        )


def _find_labelled(report: HostReport) -> Iterator[Finding]:
    if report.labelled:
        yield Finding(
            "MPLS",
            Severity.WARNING,
            f"Packets with labels of MPLS are taken by {', '.join(report.labelled)} (`net.mpls.conf.….input`): what a "
            "label leads on from here, with the next label or without one, passes no rule at all; nor does any rule "
            "see what a label leads to `dev lo` and is for this gateway itself.",
            "Limit it where it gets its first label or after it has lost the last one. What a label leads to `dev lo` "
            "and is forwarded then is seen by all rules but limits `from` that are `per: peer`.",
        )


def _find_masked(report: HostReport) -> Iterator[Finding]:
    """Who has this host answer to another address than to that from which somebody comes."""
    found = [*find_masked(report.nftables, report.translating)]
    if found:
        more = say_more(found)
        yield Finding(
            "translated sources",
            Severity.WARNING,
            "Who comes to this gateway is given another source address in nat INPUT "
            f"(`{found[0].rule[:_SHOWN]}`: {found[0]}{more}): blocks and limits `to` him do not hold for what it "
            "answers (for what is forwarded they do), and who is logged in or speaks to the API is known by that "
            "address: his own is not safe, nor are his open connections spared.",
            "Let that rule leave out who manages this gateway, or put the addresses from which that is done into "
            "NETLIMIT_SAFE.",
            Spoiled.MASKED,
            (),
            tuple(dict.fromkeys((each.protocol, str(each)) for each in found)),
        )


def _find_hidden(report: HostReport) -> Iterator[Finding]:
    """Who has other packets forwarded than came in: those around them."""
    hidden = [each for each in report.diversions if each.hides]
    if hidden:
        yield Finding(
            "encapsulated packets",
            Severity.WARNING,
            f"Routes put what comes in into tunnels before it is forwarded ({_name_routes(hidden)}), and FORWARD sees "
            "the outer packet alone: limits `from` without `per: peer`, connections at once, what shapes, "
            "and all rules `to` what lies there do not hold for it.",
            "Limit `from … per: peer`, or block `from`: these are asked where packets come in, unless "
            "they wait for a rule that allows `to` somebody, or limits for one that rejects. Or limit before this "
            "gateway, or behind it.",
            Spoiled.HIDDEN,
            (),
            _list_places(hidden),
        )


def _find_guided(report: HostReport) -> Iterator[Finding]:
    """Who has packets forwarded to another destination than they came in with."""
    guided = [each for each in report.diversions if not each.hides]
    if guided:
        yield Finding(
            "encapsulated destinations",
            Severity.WARNING,
            f"Routes give what comes in another destination before it is forwarded ({_name_routes(guided)}): rules "
            "`to` what lies there do not see it, nor do limits of connections.",
            "Limit `from`, or limit `to` the address that it is given.",
            Spoiled.GUIDED,
            (),
            _list_places(guided),
        )


def _name_routes(routes: Sequence[Diversion]) -> str:
    more = say_more(routes)
    return f"`encap {routes[0].encapsulation}`, {routes[0].prefix}{more}"


def _list_places(routes: Iterable[Diversion]) -> tuple[tuple[str, str], ...]:
    """Their destinations, of any protocol, from the first address to the last."""
    networks = (ip_network(each.prefix) for each in routes)
    return tuple(dict.fromkeys((ANY, f"{each[0]}-{each[-1]}") for each in networks))


def _find_waypoints(report: HostReport) -> Iterator[Finding]:
    """Who leads on what was for this host until its routing header was read. Such packets cannot be left out where they
    end here: a header may as well lead from one address of this host to another."""
    if report.waypoints:
        where = name_some(report.waypoints, _NAMED)
        yield Finding(
            "segment routing",
            Severity.WARNING,
            f"IPv6 packets may name this gateway as a part of their way on {where} (seg6_enabled "
            "or rpl_seg_enabled of net.ipv6.conf): they pass INPUT and then FORWARD, and limits `from` without "
            "`per: peer` charge each of them twice.",
            "If it shall be no part of them: sysctl -w net.ipv6.conf.all.seg6_enabled=0 "
            "net.ipv6.conf.all.rpl_seg_enabled=0. Else limit `per: peer`, or give limits of who sends "
            "such packets twice as much.",
        )


def _find_uncounted(report: HostReport) -> Iterator[Finding]:
    """Who keeps connections from being counted: one that is not tracked is none, and each zone counts for itself."""
    bare = _list_bare(report.legacy, report.nftables)
    if untracked := next(filter(_UNTRACKED.search, bare), None):
        yield Finding(
            "untracked packets",
            Severity.SERIOUS,
            f"The kernel does not track all packets (`{untracked[:_SHOWN]}`): what is not tracked passes limits of "
            "connections at once. Rates of connections count each SYN of it, and each packet of anything but TCP.",
            "Take that rule away, or limit packets or new connections (a rate with a period) instead.",
            Spoiled.OPEN,
        )
    if zoned := next(filter(_ZONED.search, bare), None):
        yield Finding(
            "connection zones",
            Severity.SERIOUS,
            f"Connections are tracked in zones (`{zoned[:_SHOWN]}`): connections at once are counted in each zone by "
            "itself, so that a limit allows so many in each.",
            "Limit packets or new connections (a rate with a period) instead, or count in one zone.",
            Spoiled.OPEN,
        )
    if raised := next(find_raising(report.nftables, report.legacy), None):
        yield Finding(
            "raised hop limits",
            Severity.SERIOUS,
            f"Others write another hop limit into what comes in (`{raised[:_SHOWN]}`). Where connections at once are "
            "limited, a FIN or RST that has a hop limit of 1 before that is thrown away, whoever sends it: connections "
            "of all hosts behind here stay open.",
            "Limit packets or new connections (a rate with a period) instead, or take that rule away.",
            Spoiled.OPEN,
        )
    for remembered, where, remedy in _find_remembered(report):
        yield Finding(
            "reset connections",
            Severity.WARNING,
            f"Connection tracking remembers a connection that was reset for {remembered} ({where}). Limits of "
            f"connections at once know such a one only for its last {Ended.SECONDS} s: many SYNs at once within "
            "connections that the server has reset just before pass, and more are open than these limits say.",
            remedy,
            Spoiled.OPEN,
        )


def _find_remembered(report: HostReport) -> Iterator[tuple[str, str, str]]:
    """For longer than `Ended` knows them: for how long, by what, and what helps. A policy of timeouts wins over the
    setting of the kernel."""
    if report.closing > Ended.SECONDS:
        setting = "net.netfilter.nf_conntrack_tcp_timeout_close"
        yield f"{report.closing} s", setting, f"sysctl -w {setting}={Ended.SECONDS}"
    for policy, said in _POLICY.findall(report.nftables):
        seconds = sum(int(number) * _SECONDS[unit or "s"] for number, unit in _TIME.findall(said))
        if seconds > Ended.SECONDS:
            yield f"{seconds} s", f"`ct timeout {policy}` of nftables", f"Let `close` be {Ended.SECONDS} there."
    if chosen := next(filter(_CHOOSES_POLICY.search, report.legacy), None):
        yield (
            "as long as a policy says that netlimit cannot read",
            f"`{chosen[:_SHOWN]}`",
            f"Let its `close` be {Ended.SECONDS} (`nfct timeout get`), and limit packets or new connections beside.",
        )


# -- what is full ---------------------------------------------------------------------------------------------------


def _find_full(report: HostReport) -> Iterator[Finding]:
    if report.connections.share >= NEARLY:
        yield Finding(
            "connection table",
            Severity.SERIOUS,
            f"The connection table is nearly full ({report.connections}): the kernel drops what begins a new "
            "connection, whoever sends it, and limits on connections count wrong.",
            f"sysctl -w net.netfilter.nf_conntrack_max={2 * report.connections.most}, and find who opens so many. If "
            "nothing else needs connection tracking here: rates of connections with `protocol: tcp` do not, either.",
        )
    for name, fill in report.buckets.items():
        if fill.share >= NEARLY:
            yield Finding(
                "hashlimit table",
                Severity.SERIOUS,
                f"The hashlimit table {name} is nearly full ({fill}): when it is, each new address is dropped as if "
                "over its rate.",
                "Limit blocks rather than hosts (`per` with a /24 or /64), or block what sends from so many addresses.",
            )
    for name, fill in report.sets.items():
        if name.startswith(PEER_PREFIX):
            if fill.share >= PEERS_NEARLY:
                yield Finding(
                    "peers",
                    Severity.WARNING,
                    f"The set {name} has room for hardly more peers ({fill}): a limit `per: peer` may miss those that "
                    "are new, and holds for those that are known. A flood with feigned addresses may be the reason.",
                    "Add a budget for all of them (`per: target`), or raise NETLIMIT_SET_SIZE.",
                )
        elif fill.share >= NEARLY:
            yield Finding(
                "set size",
                Severity.SERIOUS if fill.entries >= fill.most else Severity.WARNING,
                f"The set {name} is nearly full ({fill}): rules that need more addresses in it cannot be enforced.",
                "Raise NETLIMIT_SET_SIZE, or name larger subnets.",
            )


# -- queues, and what is below --------------------------------------------------------------------------------------


def _find_queues(report: HostReport) -> Iterator[Finding]:
    owners = sorted(report.programs & {"NetworkManager", "systemd-network", "systemd-networkd", "firewalld"})
    suspects = f" It may come from {' or '.join(owners)}, or from a script (tc, wondershaper)." if owners else ""
    for device, root in sorted(report.foreign.items()):
        yield Finding(
            "foreign qdisc",
            Severity.WARNING,
            f"{device} has a root qdisc of somebody else ({root}): no rule can shape there.{suspects}",
            f"Remove it, or `netlimit apply --take-over {device}` where rules shall shape on it.",
        )


def _find_bridges(bridges: str, families: frozenset[int]) -> Iterator[Finding]:
    beside = " and ".join(f"IPv{family}" for family in (4, 6) if family not in families)
    if beside:
        yield Finding(
            "bridge",
            Severity.WARNING if families else Severity.NOTE,
            f"What {bridges} forwards between ports ({beside}) passes neither iptables nor the queues of the bridge, "
            "and so no limit of ours but the cap of a port.",
            "If it shall be limited: modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1 "
            "net.bridge.bridge-nf-call-ip6tables=1.",
        )
    if families:
        yield Finding(
            "bridge",
            Severity.WARNING,
            f"What {bridges} forwards between ports passes iptables too (br_netfilter), and limits count it, what it "
            "floods (broadcast, multicast) once for each port; but it does not pass the queues of the bridge, and "
            "frames with a VLAN tag or of PPPoE pass no limit: a host on the bridge that is blocked reaches others on "
            "it by tagging its frames with VLAN 0, once or twice.",
            "Where no VLAN passes the bridge, drop them: nft add table bridge tags; nft 'add chain bridge tags bare "
            "{ type filter hook prerouting priority -300; }'; nft 'add rule bridge tags bare ether type "
            "{ 8021q, 8021ad } drop'. If it shall not be limited: " + _advise_keeping((4, 6)),
        )


def _advise_keeping(families: Iterable[int]) -> str:
    """How to have bridges hand nothing of these families over."""
    tables = ["ip6tables" if family == 6 else "iptables" for family in families]
    keys = " ".join(f"net.bridge.bridge-nf-call-{name}=0" for name in tables)
    options = " ".join(f"nf_call_{name} 0" for name in tables)
    return f"sysctl -w {keys}; for each bridge: ip link set BRIDGE type bridge {options}."


def _find_joined(joining: tuple[str, ...], bridged: Mapping[str, frozenset[int]]) -> Iterator[Finding]:
    """Who may have a packet pass iptables several times. Whether packets cross two bridges is not known: what joins
    them may be a pair of devices, or a guest."""
    handing = {family: [each for each in joining if family in bridged.get(each, ())] for family in (4, 6)}
    several = {family: bridges for family, bridges in handing.items() if len(bridges) > 1}
    if several:
        bridges = [each for each in joining if any(each in among for among in several.values())]
        yield Finding(
            "several bridges",
            Severity.WARNING,
            f"Each of the bridges {', '.join(bridges)} hands what it forwards to iptables (br_netfilter): a packet "
            "that crosses two of them (fwbr and vmbr of Proxmox, or a guest that routes between two), or that is "
            "routed here once it has crossed one, is counted at each by rates, `from` as well as `to`.",
            f"If what bridges forward shall not be limited: {_advise_keeping(several)} Else give rates as many times "
            "as much as packets cross bridges.",
        )


def _find_ground(report: HostReport) -> Iterator[Finding]:
    if report.hz < USUAL_HZ:
        yield Finding(
            "clock tick",
            Severity.NOTE,
            f"This kernel ticks {report.hz} times a second. A token bucket is refilled once a tick: a limit in packets "
            f"needs a burst of at least its rate divided by {report.hz}, which netlimit sees to.",
            f"A kernel with CONFIG_HZ={USUAL_HZ} or 1000 allows smaller bursts.",
        )
    if report.bridges and report.bridged is not None:
        known = {each: report.bridged[each] for each in report.bridges if each in report.bridged}
        for families in sorted(set(known.values()), key=sorted):
            yield from _find_bridges(", ".join(each for each in known if known[each] == families), families)
        yield from _find_joined(report.joining, report.bridged)
    if report.source_routed:
        yield Finding(
            "source routes",
            Severity.SERIOUS,
            "This gateway follows the source routes of IPv4 packets (net.ipv4.conf.all.accept_source_route is 1): such "
            "packets are for the gateway itself until they are led on, and meet no rule `to` where they go.",
            "sysctl -w net.ipv4.conf.all.accept_source_route=0",
        )
    if report.namespaces:
        yield Finding(
            "user namespaces",
            Severity.WARNING,
            "Any local user may make namespaces here, and keep those parts of the kernel busy in them that it has once "
            "for all (ipset, iptables, rtnetlink): what is in the kernel holds, but changes and repairs wait for as "
            "long as he likes.",
            "sysctl -w user.max_user_namespaces=0, or kernel.unprivileged_userns_clone=0 where the kernel has that, if "
            "no local user needs containers of his own.",
        )
    if not report.synchronized:
        yield Finding(
            "clock",
            Severity.WARNING,
            "The clock of this host is not synchronized: rules begin and end by it.",
            "Let chrony or systemd-timesyncd run.",
        )
