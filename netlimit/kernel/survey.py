"""Looks for what on this host gets in the way of limits. Nothing is changed."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from netlimit.conflicts import Fill, HostReport
from netlimit.errors import KernelError
from netlimit.kernel import iptables
from netlimit.state import CHAIN_PREFIX, OFFENDER_PREFIX, SEEN_PREFIX, SET_PREFIX

_RULE_FILES = ("etc/nftables.conf", "etc/sysconfig/nftables.conf", "etc/nftables/*.nft", "etc/nftables.d/*.nft")
_SAVED_FILES = (
    "etc/iptables/rules.v4",
    "etc/iptables/rules.v6",
    "etc/iptables/iptables.rules",
    "etc/iptables/ip6tables.rules",
    "etc/sysconfig/iptables",
    "etc/sysconfig/ip6tables",
)
_UNITS = ("nftables", "netfilter-persistent", "iptables", "ip6tables")
_HASHLIMIT = re.compile(r"--hashlimit-name (\S+)(?:.* --hashlimit-htable-max (\d+))?")
_TIME_ERROR = 5
"""What adjtimex(2) answers where nobody keeps the clock right."""


def look_round(hz: int, foreign: Mapping[str, str], root: Path = Path("/"), thorough: bool = True) -> HostReport:
    """Look round. `foreign` are root qdiscs of others by device; `root` is where files are looked for. What is not
    `thorough` leaves out what takes long: the tables of hashlimit, and the hardware. Raises OSError, KernelError."""
    bridges = tuple(sorted(path.parent.name for path in Path("/sys/class/net").glob("*/bridge")))
    return HostReport(
        hz=hz,
        programs=frozenset(_find_programs()),
        flushing=tuple(_find_files(root, _RULE_FILES, r"^\s*flush ruleset")),
        enabled=tuple(_find_units(root)),
        saved=tuple(_find_files(root, _SAVED_FILES, rf"^(?::{CHAIN_PREFIX}|-A {CHAIN_PREFIX})|-[jg] {CHAIN_PREFIX}")),
        nftables=_run("nft", "-t", "list", "ruleset"),
        legacy=tuple(_read_foreign_rules()),
        connections=Fill(_read_number("nf_conntrack_count"), _read_number("nf_conntrack_max")),
        sets=dict(_read_sets()),
        buckets=dict(_read_buckets()) if thorough else {},
        foreign=foreign,
        offloading=tuple(_find_offloading()) if thorough else (),
        bridges=bridges,
        bridged=_is_bridged() if bridges else None,
        synchronized=_is_synchronized(),
    )


def _find_programs() -> Iterator[str]:
    """The names of what runs in this network namespace."""
    here = os.readlink("/proc/self/ns/net")
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns/net") == here:
                yield (path / "comm").read_text().strip()
        except OSError:  # it has ended
            continue


def _find_files(root: Path, names: tuple[str, ...], pattern: str) -> Iterator[str]:
    """The files that have a line like that, as they are called on the host."""
    for path in (path for name in names for path in sorted(root.glob(name))):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if re.search(pattern, text, re.MULTILINE):
            yield f"/{path.relative_to(root)}"


def _find_units(root: Path) -> Iterator[str]:
    """The systemd units that load rules and are enabled."""
    for unit in _UNITS:
        if next(root.glob(f"etc/systemd/system/*.wants/{unit}.service"), None) is not None:
            yield f"{unit}.service"


def _read_foreign_rules() -> Iterator[str]:
    for family in (4, 6):
        with suppress(KernelError):  # the tool is missing, which the probe tells
            yield from iptables.foreign_rules(family)


def _read_number(name: str) -> int:
    try:
        return int(Path("/proc/sys/net/netfilter", name).read_text())
    except (OSError, ValueError):  # nothing tracks connections here
        return 0


def _read_sets() -> Iterator[tuple[str, Fill]]:
    """Our sets, but for those that forget some when they are full."""
    for block in _run("ipset", "list", "-t").split("\n\n"):
        name, most, held = (
            re.search(pattern, block) for pattern in (r"Name: (\S+)", r"maxelem (\d+)", r"Number of entries: (\d+)")
        )
        if name and most and held and _refuses_more(name[1]):
            yield name[1], Fill(int(held[1]), int(most[1]))


def _refuses_more(name: str) -> bool:
    """Whether a set is one of ours, and does not forget some of what it holds when it is full."""
    return name.startswith(SET_PREFIX) and not name.startswith((OFFENDER_PREFIX, SEEN_PREFIX))


def _read_buckets() -> Iterator[tuple[str, Fill]]:
    """The tables of hashlimit whose size the rules tell, ours and others'."""
    for family, directory in ((4, "ipt_hashlimit"), (6, "ip6t_hashlimit")):
        for name, most in _find_buckets(family):
            try:
                with Path("/proc/net", directory, name).open() as lines:
                    held = sum(1 for _ in lines)
            except OSError:  # it has gone
                continue
            if most:
                yield name, Fill(held, int(most))


def _find_buckets(family: int) -> list[tuple[str, str]]:
    """The names of tables, with the sizes that the rules give them ("": the default)."""
    try:
        return sorted(set(_HASHLIMIT.findall(iptables.save(family))))
    except KernelError:
        return []


def _find_offloading() -> Iterator[str]:
    """Cards, not virtual devices, whose driver takes over tc filters."""
    for path in sorted(Path("/sys/class/net").glob("*/device")):
        device = path.parent.name
        if re.search(r"^hw-tc-offload: on", _run("ethtool", "-k", device), re.MULTILINE):
            yield device


def _is_bridged() -> bool | None:
    """Whether what bridges forward passes iptables; without the module it does not."""
    try:
        return Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text().strip() == "1"
    except OSError:
        return False


def _is_synchronized() -> bool:
    answer: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    return answer != _TIME_ERROR


def _run(*command: str) -> str:
    """What a tool prints; nothing where it is missing or refuses."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
