"""What on a host gets in the way of limits, and what to do about it: told from what was found there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

NEARLY = 0.9
"""The share of a table from which on it counts as nearly full."""
USUAL_HZ = 250
_TABLE = re.compile(r"^(table ip6? (?:raw|mangle|filter|security|nat)) \{(.*?)^\}", re.MULTILINE | re.DOTALL)
_TWIN = re.compile(r"chain (?:PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING) \{")
"""What iptables-nft makes has chains in capitals."""
_FLOWTABLE = re.compile(r"^\s*flowtable (\S+) \{(.*?)^\s*\}", re.MULTILINE | re.DOTALL)
_DEVICES = re.compile(r"devices = \{ (.*?) \}")


class Severity(StrEnum):
    """How bad it is: `serious` keeps rules from holding now, `warning` can, a `note` is good to know."""

    SERIOUS = "serious"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: a short name, what it is, and what to do about it."""

    name: str
    severity: Severity
    what: str
    advice: str

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


@dataclass(frozen=True, slots=True)
class HostReport:
    """What was found on a host.

    `programs` are names of running processes. `flushing` are files that flush all nftables rules when they are loaded,
    `enabled` the systemd units that load rules at boot, `saved` files of saved rules that hold chains of ours.
    `nftables` is what `nft list ruleset` prints, `legacy` the rules of others in the legacy tables. `bridges` are
    devices, `bridged` whether what they forward passes iptables (None: unknown). `foreign` are root qdiscs of others by
    device, as tc says them, `offloading` the devices whose hardware may forward by itself. `sets` are ipsets of ours
    that refuse more when they are full, `buckets` the tables of hashlimit.
    """

    hz: int = USUAL_HZ
    programs: frozenset[str] = frozenset()
    flushing: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    nftables: str = ""
    legacy: tuple[str, ...] = ()
    connections: Fill = field(default_factory=lambda: Fill(0, 0))
    sets: Mapping[str, Fill] = field(default_factory=dict)
    buckets: Mapping[str, Fill] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)
    offloading: tuple[str, ...] = ()
    bridges: tuple[str, ...] = ()
    bridged: bool | None = None
    synchronized: bool = True


def find_conflicts(report: HostReport) -> list[Finding]:
    """Everything that there is to say of a host, the worst first."""
    parts = (_find_firewalls, _find_flushes, _find_tables, _find_offload, _find_full, _find_queues, _find_ground)
    found = [finding for part in parts for finding in part(report)]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def is_serious(finding: Finding) -> bool:
    """Whether it keeps rules from holding."""
    return finding.severity is Severity.SERIOUS


# -- who else writes rules ------------------------------------------------------------------------------------------


def _find_firewalls(report: HostReport) -> Iterator[Finding]:
    if "firewalld" in report.programs:
        yield Finding(
            "firewalld",
            Severity.NOTE,
            "firewalld runs. With its iptables back end a reload flushes the legacy tables, and so our chains and the "
            "jumps to them in PREROUTING, FORWARD and OUTPUT; the controller puts them back within two seconds. With "
            "its nftables back end it does not touch them.",
            "Set FirewallBackend=nftables in /etc/firewalld/firewalld.conf, or reload it as seldom as can be.",
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
            f"{path} holds saved chains of ours. At boot there is no set of ours yet: iptables-restore stops at the "
            "first rule that names one, and leaves that table and those after it unloaded, with any firewall in them.",
            f"Save without ours: iptables-legacy-save | grep -v NL- > {path} (ip6tables-legacy-save for IPv6).",
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
        )
    if any("FLOWOFFLOAD" in rule for rule in report.legacy):
        yield Finding(
            "flow offload",
            Severity.SERIOUS,
            "A rule with -j FLOWOFFLOAD forwards what belongs to known flows past all chains of ours: after the first "
            "packets of a flow no limit sees it.",
            "Remove that rule (on OpenWrt: `uci set firewall.@defaults[0].flow_offloading=0`).",
        )
    if report.offloading:
        yield Finding(
            "hardware offload",
            Severity.WARNING,
            f"The hardware of {', '.join(report.offloading)} may take over tc filters (hw-tc-offload): what it "
            "forwards by itself passes no chain and no queue of ours.",
            "; ".join(f"ethtool -K {device} hw-tc-offload off" for device in report.offloading) + ".",
        )


# -- what is full ---------------------------------------------------------------------------------------------------


def _find_full(report: HostReport) -> Iterator[Finding]:
    if report.connections.share >= NEARLY:
        yield Finding(
            "connection table",
            Severity.SERIOUS,
            f"The connection table is nearly full ({report.connections}): the kernel drops what begins a new "
            "connection, whoever sends it, and limits on connections count wrong.",
            f"sysctl -w net.netfilter.nf_conntrack_max={2 * report.connections.most}, and find who opens so many.",
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
        if fill.share >= NEARLY:
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


def _find_ground(report: HostReport) -> Iterator[Finding]:
    if report.hz < USUAL_HZ:
        yield Finding(
            "clock tick",
            Severity.NOTE,
            f"This kernel ticks {report.hz} times a second. A token bucket is refilled once a tick: a limit in packets "
            f"needs a burst of at least its rate divided by {report.hz}, which netlimit sees to.",
            f"A kernel with CONFIG_HZ={USUAL_HZ} or 1000 allows smaller bursts.",
        )
    if report.bridges and report.bridged is False:
        yield Finding(
            "bridge",
            Severity.NOTE,
            f"What {', '.join(report.bridges)} forwards between ports does not pass iptables, and so no limit of ours "
            "but those of queues.",
            "If it shall be limited: modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1 "
            "net.bridge.bridge-nf-call-ip6tables=1.",
        )
    if report.bridges and report.bridged:
        yield Finding(
            "bridge",
            Severity.NOTE,
            f"What {', '.join(report.bridges)} forwards between ports passes iptables too (bridge-nf-call-iptables), "
            "and limits count it.",
            "If it shall not be limited: sysctl -w net.bridge.bridge-nf-call-iptables=0.",
        )
    if not report.synchronized:
        yield Finding(
            "clock",
            Severity.WARNING,
            "The clock of this host is not synchronized: rules begin and end by it.",
            "Let chrony or systemd-timesyncd run.",
        )
