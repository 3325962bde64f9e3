"""Looks for what on this host gets in the way of limits. Nothing is changed."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TypeVar

from netlimit.conflicts import Fill, HostReport
from netlimit.errors import KernelError
from netlimit.kernel import ipset, iptables
from netlimit.kernel.addresses import read_firsts, read_own
from netlimit.kernel.ingress import (
    Hooks,
    find_ahead,
    find_diverting,
    find_editing,
    find_handing,
    find_looping,
    find_mirroring,
    find_redirecting,
    find_returning,
    find_rewriting,
    read_clsacts,
    read_ifbs,
)
from netlimit.kernel.marks import read_routing_marks
from netlimit.kernel.queues import find_charged
from netlimit.kernel.rerouting import find_rerouting
from netlimit.kernel.sockets import LISTENING, read_sockets
from netlimit.kernel.tools import ask, run
from netlimit.plain import decode, decode_name, name_of, read_text
from netlimit.state import CHAIN_PREFIX, SET_PREFIX
from netlimit.tree import Topology

_RULE_FILES = ("etc/nftables.conf", "etc/sysconfig/nftables.conf", "etc/nftables/*.nft", "etc/nftables.d/*.nft")
_SAVED_FILES = (
    "etc/iptables/rules.v4",
    "etc/iptables/rules.v6",
    "etc/iptables/iptables.rules",
    "etc/iptables/ip6tables.rules",
    "etc/sysconfig/iptables",
    "etc/sysconfig/ip6tables",
)
_SAVED_SETS = "etc/iptables/ipsets", "etc/sysconfig/ipset", "etc/sysconfig/ipset.d/*.set", "etc/ipset.conf"
_OURS = rf"^(?::{CHAIN_PREFIX}|-A {CHAIN_PREFIX})|-[jg] {CHAIN_PREFIX}"
_UNITS = ("nftables", "netfilter-persistent", "iptables", "ip6tables")
_TIME_ERROR = 5
"""What adjtimex(2) answers where nobody keeps the clock right."""
_PART, _LONGEST = 2**20, 0.5
"""Bytes that are read at once of what the kernel may have much of, and seconds after which the rest of it is not."""
_PATIENCE = 10.0
"""Seconds that a tool may take."""
_TRANSLATORS = "jool", "jool_siit"
_BRIDGES = Path("/proc/sys/net/bridge")
_BROUTE = Path("/sys/module/ebtable_broute")
_NO_DEVICES = frozenset(("all", "default", "lo"))
"""What stands among devices in /proc/sys/net/ipv6/conf, and loopback."""
_NOTHING: tuple[str, ...] = ()
_NO_RULES: tuple[tuple[int, str, tuple[str, ...]], ...] = ()
_NO_TABLES: tuple[tuple[int, tuple[str, ...]], ...] = ()
T = TypeVar("T")

log = logging.getLogger(__name__)


NFTABLES = "nft", "-t", "list", "ruleset"
"""How the rules of nftables are listed, without what their sets hold."""
TWINS = {
    f"{family} {table}": (f"{tool}-nft-save", "-t", table)
    for family, tool in (("ip", "iptables"), ("ip6", "ip6tables"))
    for table in ("nat", "mangle")
}
"""How tables of iptables-nft are listed: of some of their targets nft does not say where they lead, or what they do."""


def look_round(
    hz: int,
    foreign: Mapping[str, str],
    root: Path = Path("/"),
    thorough: bool = True,
    list_nftables: Callable[[], str] | None = None,
    list_twin: Callable[[str], str] | None = None,
    read_topology: Callable[[], Topology] = Topology,
    read_hooks: Callable[[], Hooks] = lambda: Hooks({}, {}),
) -> HostReport:
    """Look round. `foreign` are root qdiscs of others by device; `root` is where files are looked for. What is not
    `thorough` leaves out what takes long: the tables of hashlimit, the multicast groups, and the hardware; and qdiscs
    of ours. `list_nftables`, and `list_twin` for a table of TWINS, are for who does not want to wait for the end of it;
    `read_topology` and `read_hooks` tell of routes, and of what is on the ingress, which are read anyway.

    It only advises: what cannot be read, for whatever reason, is left out, and told as unknown."""
    look = _Look()
    bridges = look.at("bridges", lambda: tuple(_find_bridges()), _NOTHING)
    joining = look.at("the ports of bridges", lambda: tuple(_find_joining()), _NOTHING) if bridges else ()
    nftables = look.at("the rules of nftables", list_nftables or (lambda: ask(*NFTABLES, patience=_PATIENCE)), "")
    rules = look.at("the rules of others", lambda: tuple(_read_foreign_rules()), _NO_RULES)
    ask_twin = list_twin or (lambda table: ask(*TWINS[table], patience=_PATIENCE))
    twins = look.at(
        "the nat tables of iptables-nft",
        lambda: tuple(_read_twins(nftables, ask_twin, "nat", "PREROUTING|INPUT|OUTPUT|POSTROUTING")),
        _NO_TABLES,
    )
    mangle = tuple(printed for _, table, printed in rules if table == "mangle")
    hooks = look.at(
        "who is in the way on the ingress", lambda: _cut(read_hooks(), read_topology().entered), Hooks({}, {})
    )
    nat = (*((family, printed) for family, table, printed in rules if table == "nat"), *twins)
    return HostReport(
        hz=hz,
        programs=look.at("the programs that run", lambda: frozenset(_find_programs()), frozenset()),
        flushing=tuple(look.through("files that flush rules", root, _RULE_FILES, r"^\s*flush ruleset")),
        enabled=look.at("units that load rules", lambda: tuple(_find_units(root)), ()),
        saved=tuple(look.through("saved rules", root, _SAVED_FILES, _OURS)),
        saved_sets=tuple(look.through("saved sets", root, _SAVED_SETS, rf"^(?:create|add) {SET_PREFIX}")),
        nftables=nftables,
        legacy=tuple(rule for *_, printed in rules for rule in printed),
        nat=tuple(printed for family, printed in nat if family == 4),
        nat6=tuple(printed for family, printed in nat if family == 6),
        mangle=mangle,
        rerouting=look.at(
            "what is routed once more", lambda: tuple(_find_rerouting(nftables, mangle, ask_twin)), _NOTHING
        ),
        mapping=look.at("what sets give packets", lambda: tuple(_find_mapping(nftables, ask_twin)), _NOTHING),
        own=look.at("the addresses of this host", lambda: frozenset(read_own()), frozenset()),
        firsts=look.at("which address comes first on devices", read_firsts, ()),
        listening=look.at("at which addresses programs listen", lambda: frozenset(_find_listening()), frozenset()),
        connections=look.at("the connections that are tracked", _read_connections, Fill(0, 0)),
        closing=look.at(
            "how long reset connections are remembered", lambda: _read_number("nf_conntrack_tcp_timeout_close"), 0
        ),
        sets=look.at("how full sets are", lambda: dict(_read_sets()), {}),
        buckets=look.at("how full tables of hashlimit are", lambda: dict(_read_buckets()), {}) if thorough else {},
        foreign=foreign,
        ahead=look.at("filters on the ingress of devices", find_ahead, {}),
        barred={device: why for device, why in hooks.barred.items() if device not in hooks.programs},
        skipped={device: why for device, why in hooks.barred.items() if device in hooks.programs},
        clsacts=look.at("which qdiscs are ours", read_clsacts, ()) if thorough else (),
        charged=look.at("what is charged to sockets", find_charged, {}) if thorough else {},
        redirecting=look.at("what filters lead away", find_redirecting, {}),
        diverting=look.at("what filters have leave by another device", find_diverting, {}),
        translators=look.at("which modules translate", lambda: tuple(_find_translators()), _NOTHING),
        rewriting=look.at("which filters translate addresses", find_rewriting, {}),
        handing=look.at("which filters hand packets to other devices", find_handing, {}),
        looping=look.at("which filters hand packets to loopback", find_looping, {}),
        mirroring=look.at("which filters hand copies to other devices", find_mirroring, {}),
        returning=look.at("which filters hand back what leaves", find_returning, {}),
        editing=look.at("which filters write into packets", find_editing, {}),
        above=look.at("which devices stand on others", lambda: dict(_find_above()), {}),
        ifbs=look.at("which devices are of the kind ifb", read_ifbs, frozenset()),
        offloading=look.at("what cards forward", lambda: tuple(_find_offloading()), ()) if thorough else (),
        bridges=bridges,
        joining=joining,
        brouting=look.at("the broute table of ebtables", _list_broute, "") if joining else "",
        bridged=(look.at("what bridges hand to iptables", lambda: dict(_find_bridged()), None) if bridges else None),
        source_routed=look.at("whether source routes are followed", _is_source_routed, False),
        segments=look.at("which routes end tunnels", lambda: read_topology().segments, _NOTHING),
        local=look.at("what ends here by a route", lambda: read_topology().ending, _NOTHING),
        diversions=look.at("which routes lead into tunnels", lambda: read_topology().diversions, ()),
        waypoints=look.at(
            "whether routing headers are followed", lambda: tuple(dict.fromkeys(_find_waypoints())), _NOTHING
        ),
        labelled=look.at("whether labels of MPLS are followed", lambda: tuple(_find_labelled()), _NOTHING),
        unspeakable=look.at(
            "which devices have odd names", lambda: tuple(sorted(read_topology().unspeakable)), _NOTHING
        ),
        namespaces=look.at("who may make namespaces", are_namespaces_free, False),
        synchronized=look.at("whether the clock is kept right", _is_synchronized, True),
        groups=(
            look.at("which multicast addresses devices listen to", lambda: frozenset(_find_groups()), frozenset())
            if thorough
            else frozenset()
        ),
        unknown=tuple(look.unknown),
    )


class _Look:
    """Looks at one thing after the other. `unknown` are those that could not be read, each with the reason."""

    def __init__(self) -> None:
        self.unknown: list[str] = []

    def at(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        """What `read` gives, or something else where it fails."""
        try:
            return read()
        except KernelError as error:
            self.unknown.append(f"{what} ({error.reason})")
        except Exception as error:
            log.debug("The survey failed.", exc_info=True)
            self.unknown.append(f"{what} ({type(error).__name__}: {error})")
        return otherwise

    def through(self, what: str, root: Path, names: Iterable[str], pattern: str) -> Iterator[str]:
        """The files that have a line like that, as they are called on the host."""
        for path in (path for name in names for path in sorted(root.glob(name))):
            called = f"/{path.relative_to(root)}"
            try:
                text = read_text(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                advice = "; `netlimit doctor`, as root, reads it" if isinstance(error, PermissionError) else ""
                self.unknown.append(f"{what} ({called}: {error.strerror}{advice})")
                continue
            if re.search(pattern, text, re.MULTILINE):
                yield called


def _cut(hooks: Hooks, entered: Collection[str]) -> Hooks:
    """Who is in the way where packets come in, if programs of ours are anywhere."""
    there = {device: why for device, why in hooks.barred.items() if device in entered and hooks.programs}
    return Hooks(hooks.programs, there)


def _find_bridges() -> Iterator[str]:
    yield from sorted(name_of(path.parent) for path in Path("/sys/class/net").glob("*/bridge"))


def _find_joining() -> Iterator[str]:
    """The bridges that have ports."""
    yield from sorted({name_of(path.parent.parent) for path in Path("/sys/class/net").glob("*/brif/*")})


def _list_broute(module: Path = _BROUTE) -> str:
    """The broute table, as ebtables lists it. Nothing is asked where the kernel has none loaded, for asking loads it.
    Raises KernelError."""
    return ask("ebtables-legacy", "-t", "broute", "-L", patience=_PATIENCE) if module.exists() else ""


def _find_programs() -> Iterator[str]:
    """The names of what runs in this network namespace."""
    here = os.readlink("/proc/self/ns/net")
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns/net") == here:
                yield decode_name((path / "comm").read_bytes().rstrip(b"\n"))
        except OSError:  # it has ended
            continue


def _find_groups() -> Iterator[tuple[str, str]]:
    """The multicast addresses that devices listen to, each with the device."""
    device = ""
    for line in _read_some(Path("/proc/net/igmp")).splitlines()[1:]:
        words = line.split()
        if line[:1].isspace():
            yield str(IPv4Address(bytes.fromhex(words[0])[::-1])), device  # the byte order of the host
        else:
            device = words[1].rstrip(":")
    six = Path("/proc/net/igmp6")
    for line in _read_some(six).splitlines() if six.exists() else ():
        words = line.split()
        yield str(IPv6Address(bytes.fromhex(words[2]))), words[1]


def _find_units(root: Path) -> Iterator[str]:
    """The systemd units that load rules and are enabled."""
    for unit in _UNITS:
        if next(root.glob(f"etc/systemd/system/*.wants/{unit}.service"), None) is not None:
            yield f"{unit}.service"


def _read_foreign_rules() -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """The rules of others in the legacy tables: each table's family and name with them."""
    for family in (4, 6):
        for table, rules in iptables.foreign_rules(family).items():
            yield family, table, tuple(rules)


def _read_twins(
    nftables: str, ask_twin: Callable[[str], str], table: str, chains: str = "OUTPUT"
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The rules of a table of iptables-nft, by family, where it has one of these chains."""
    for name in (name for name in TWINS if name.endswith(f" {table}")):
        if re.search(rf"^table {name} \{{\n(?:\t.*\n|\n)*?\tchain (?:{chains}) \{{", nftables, re.MULTILINE):
            rules = tuple(line for line in ask_twin(name).splitlines() if line.startswith("-A "))
            yield 6 if name.startswith("ip6 ") else 4, rules


def _find_rerouting(
    nftables: str, mangle: tuple[tuple[str, ...], ...], ask_twin: Callable[[str], str]
) -> Iterator[str]:
    """The rules by which what this host sends is routed once more; nothing is asked where no routing rule goes by
    marks."""
    if asked := frozenset(read_routing_marks()):
        twins = (rules for _, rules in _read_twins(nftables, ask_twin, "mangle"))
        yield from find_rerouting(nftables, (*mangle, *twins), asked)


def _find_mapping(nftables: str, ask_twin: Callable[[str], str]) -> Iterator[str]:
    """The rules of iptables-nft that give packets what a set has for them; nft does not say what of it."""
    if re.search(r'\bxt target "?SET\b', nftables):
        for _, rules in _read_twins(nftables, ask_twin, "mangle", r"\S+"):
            yield from (rule for rule in rules if " --map-" in rule)


def _find_above() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Devices that have others on them, with those."""
    for path in Path("/sys/class/net").iterdir():
        names = [name_of(each).removeprefix("upper_") for each in path.glob("upper_*")]
        if names:
            yield name_of(path), tuple(sorted(names))


def _find_listening() -> Iterator[tuple[str, int]]:
    """The addresses and ports of TCP where something listens, but for what does so at all addresses."""
    for each in read_sockets([LISTENING]):
        if not ip_address(each.near).is_unspecified:
            yield each.near, each.near_port


def _read_connections() -> Fill:
    return Fill(_read_number("nf_conntrack_count"), _read_number("nf_conntrack_max"))


def _read_number(name: str) -> int:
    try:
        return int(read_text(Path("/proc/sys/net/netfilter", name)))
    except FileNotFoundError:  # nothing tracks connections here
        return 0


def _read_sets() -> Iterator[tuple[str, Fill]]:
    """Our sets, but for those that forget some when they are full."""
    for name, held, most in ipset.find_fills():
        yield name, Fill(held, most)


def _read_buckets() -> Iterator[tuple[str, Fill]]:
    """The tables of hashlimit whose size the rules tell, ours and others'."""
    for family, directory in ((4, "ipt_hashlimit"), (6, "ip6t_hashlimit")):
        for name, most in sorted(iptables.find_buckets(family).items()):
            try:
                held = _count_lines(Path("/proc/net", directory, name), int(most or 0))
            except FileNotFoundError:  # it has gone
                continue
            if most:
                yield name, Fill(held, int(most))


def _count_lines(path: Path, enough: int) -> int:
    """Count lines up to so many; a table of a million is read in no time that anybody waits for. Raises OSError."""
    held = 0
    for part in _read_parts(path):
        held += part.count(b"\n")
        if held >= enough:
            break
    return held


def _read_some(path: Path) -> str:
    """What a file of the kernel holds that any user may make long. Raises OSError."""
    return decode(b"".join(_read_parts(path)))


def _read_parts(path: Path) -> Iterator[bytes]:
    end = time.monotonic() + _LONGEST
    with path.open("rb", buffering=0) as file:
        while part := file.read(_PART):
            yield part
            if time.monotonic() > end:
                raise TimeoutError(f"{path} has more than can be read in {_LONGEST:g} s")


def _find_offloading() -> Iterator[str]:
    """Cards, not virtual devices, whose driver takes over tc filters."""
    for path in sorted(Path("/sys/class/net").glob("*/device")):
        device = path.parent.name  # as Python reads it: so it is given back
        if re.search(r"^hw-tc-offload: on", run("ethtool", "-k", device, patience=_PATIENCE).output, re.MULTILINE):
            yield name_of(device)


def _find_bridged() -> Iterator[tuple[str, frozenset[int]]]:
    """Of which address families what each bridge forwards passes iptables; without the module it does of none, whatever
    is set. One switch is for all bridges, and one for each: either is enough."""
    asked = {4: "iptables", 6: "ip6tables"} if _BRIDGES.exists() else {}
    for path in Path("/sys/class/net").glob("*/bridge"):
        yield (
            name_of(path.parent),
            frozenset(
                family
                for family, table in asked.items()
                if _is_on(_BRIDGES / f"bridge-nf-call-{table}") or _is_on(path / f"nf_call_{table}")
            ),
        )


def _find_translators() -> Iterator[str]:
    """The modules of the kernel that are loaded and translate between IPv6 and IPv4."""
    yield from (name for name in _TRANSLATORS if Path("/sys/module", name).exists())


def _is_source_routed() -> bool:
    """Whether packets of IPv4 that name their way themselves are led on; each device may still say no."""
    try:
        return read_text("/proc/sys/net/ipv4/conf/all/accept_source_route").strip() != "0"
    except FileNotFoundError:
        return False


def _find_waypoints() -> Iterator[str]:
    """The devices by which IPv6 packets may come of which a routing header leads on from here."""
    place = Path("/proc/sys/net/ipv6/conf")
    for key in ("seg6_enabled", "rpl_seg_enabled"):
        if _is_on(place / "all" / key):
            paths = sorted(place.glob(f"*/{key}"))
            yield from (name_of(path.parent) for path in paths if path.parent.name not in _NO_DEVICES and _is_on(path))


def _find_labelled() -> Iterator[str]:
    """The devices by which packets may come of which a label of MPLS leads on from here."""
    place = Path("/proc/sys/net/mpls")
    if _is_on(place / "platform_labels"):
        yield from (name_of(path.parent) for path in sorted(place.glob("conf/*/input")) if _is_on(path))


def are_namespaces_free(settings: Path = Path("/proc/sys")) -> bool:
    """Whether users without rights may make user namespaces, and so network namespaces."""
    if _is_on(settings / "kernel/apparmor_restrict_unprivileged_userns"):
        return False
    debian = settings / "kernel/unprivileged_userns_clone"
    return _is_on(settings / "user/max_user_namespaces") and (_is_on(debian) or not debian.exists())


def _is_on(path: Path) -> bool:
    try:
        return read_text(path).strip() != "0"
    except FileNotFoundError:  # the device has gone
        return False


def _is_synchronized() -> bool:
    answer: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    return answer != _TIME_ERROR
