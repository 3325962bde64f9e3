"""The tables of iptables as the kernel keeps them: whether anything in them has changed, how many rules each chain has,
and where our jumps stand.

What stands in a table is bytes of others. Their comments can hold anything, lines that look like rules too, so that
nothing is removed by what a tool prints.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import socket
import struct
from bisect import bisect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from netlimit.kernel.tools import NoAnswer
from netlimit.plain import decode_name, read_text

_GET_INFO, _GET_ENTRIES = 64, 65
"""IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES (linux/netfilter_ipv4/ip_tables.h); the same numbers for IPv6."""
_NAME = 32
_INFO = struct.Struct("=32s13I")
"""struct ipt_getinfo: the name of the table, then hooks, and last how many entries there are, and their size."""
_LENGTH = struct.Struct("=2xH")
_ATTEMPTS = 10


class _Family(NamedTuple):
    """How tables of an address family are asked for, where they are listed, and in an entry (struct ipt_entry) the
    places of its lengths and of its counters."""

    domain: int
    level: int
    names: str
    lengths: int
    counters: int


_FAMILIES = {
    4: _Family(socket.AF_INET, socket.SOL_IP, "/proc/net/ip_tables_names", 88, 96),
    6: _Family(socket.AF_INET6, socket.IPPROTO_IPV6, "/proc/net/ip6_tables_names", 140, 152),
}
NAMES = tuple(about.names for about in _FAMILIES.values())
"""Where the kernel lists tables: for root alone, whatever the capabilities (`netlimit.kernel.proc_files`)."""
_COUNTERS = bytes(16)
_HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_TARGET = struct.Struct("=2x29sx")
"""struct xt_entry_target: the name; empty for what comes with iptables itself. What it is told comes after it."""
_MATCH = struct.Struct("=H29sx")
"""struct xt_entry_match: how long it is, and the name."""
_VERDICT = struct.Struct("=i")
_CHAIN = struct.Struct("=30s")
_libc = ctypes.CDLL(None, use_errno=True)


class TableChanged(Exception):
    """Somebody changed a table between the moment in which it was read and that in which it was to be written."""


class Layout(NamedTuple):
    """What stands in a table: the chains that users have made, and where jumps (or gotos) to chains with some prefix
    stand in the kernel's own chains, counted from 0. `held` are the chains with that prefix to which chains of others
    lead: those cannot go."""

    chains: frozenset[str]
    jumps: Mapping[str, tuple[int, ...]]
    held: frozenset[str] = frozenset()


class Outline(NamedTuple):
    """What stands where in a table: its layout, the chains with the prefix, and, by chain, the kernel's own too, where
    its rules begin in what the kernel holds. The last of a chain, which says what becomes of all else, is no rule."""

    layout: Layout
    ours: frozenset[str]
    rules: Mapping[str, tuple[int, ...]]
    held: memoryview


def read_layout(family: int, table: str, prefix: str) -> Layout:
    """Read where jumps to chains with a prefix stand. Raises OSError."""
    return read_outline(family, table, prefix).layout


def read_outline(family: int, table: str, prefix: str) -> Outline:
    """Read what stands where. A name that begins with the prefix and goes on with what we never write is none of ours.
    Raises OSError."""
    about = _FAMILIES[family]
    with socket.socket(about.domain, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        info, held = _read_table(sock.fileno(), about.level, table)
    chains, targets, heads = _list_entries(about, held)
    own = re.compile(re.escape(prefix.encode()) + rb"[\w.-]+")
    ours = {start for start, name in chains.items() if own.fullmatch(name)}
    valid, begins, ends = info[1], info[2:7], info[7:12]
    jumps: dict[str, tuple[int, ...]] = {}
    for number, hook in enumerate(_HOOKS):
        if valid & 1 << number:
            stands = [target for start, target in targets if begins[number] <= start < ends[number]]
            jumps[hook] = tuple(index for index, target in enumerate(stands) if target in ours)
    names = frozenset(decode_name(name) for name in chains.values())
    kept = frozenset(decode_name(chains[start]) for start in _find_held(chains, ours, begins, targets))
    layout = Layout(names, {hook: found for hook, found in jumps.items() if found}, kept)
    hooks = {begins[number]: hook for number, hook in enumerate(_HOOKS) if valid & 1 << number}
    starts = hooks | {start: decode_name(name) for start, name in chains.items()}
    rules = _part(starts, [start for start, _ in targets if start not in heads])
    return Outline(layout, frozenset(decode_name(chains[start]) for start in ours), rules, held)


def list_extensions(family: int, outline: Outline, start: int) -> frozenset[str]:
    """The names of the matches and of the target of the rule that begins there; what they are told may be forged in
    what a tool prints, and these not."""
    about, held = _FAMILIES[family], outline.held
    target, _ = struct.unpack_from("=HH", held, start + about.lengths)
    names = [_TARGET.unpack_from(held, start + target)[0]]
    place = start + about.counters + len(_COUNTERS)
    while place < start + target:
        length, name = _MATCH.unpack_from(held, place)
        names.append(name)
        place += length
    return frozenset(decode_name(name) for name in names)


def find_reached(family: int, outline: Outline, hook: str) -> frozenset[str]:
    """The chains to which packets may come from one of the kernel's own, and that one."""
    begins = {rules[0]: chain for chain, rules in outline.rules.items() if rules}
    reached, new = set[str](), {hook}
    while new:
        reached |= new
        starts = (start for chain in new for start in outline.rules.get(chain, ()))
        led = {_read_target(_FAMILIES[family], outline.held, start)[1] for start in starts}
        new = {begins[place] for place in led if place in begins} - reached
    return frozenset(reached)


def _part(starts: Mapping[int, str], entries: list[int]) -> dict[str, tuple[int, ...]]:
    """The rules of each chain, of all entries but the heads of chains."""
    parts: dict[str, list[int]] = {}
    part: list[int] = []
    for entry in entries:
        if entry in starts:
            part = parts[starts[entry]] = []
        part.append(entry)
    return {chain: tuple(part[:-1]) for chain, part in parts.items()}


def _find_held(
    chains: Mapping[int, bytes], ours: set[int], hooks: tuple[int, ...], targets: list[tuple[int, int | None]]
) -> Iterator[int]:
    """Those of our chains to which chains of others lead, but the kernel's own (`hooks`): each by where it begins."""
    starts = sorted({*chains, *hooks})
    for start, target in targets:
        if target in ours:
            owner = starts[bisect(starts, start) - 1]
            if owner in chains and owner not in ours:
                yield target


def _list_entries(
    about: _Family, table: memoryview
) -> tuple[dict[int, bytes], list[tuple[int, int | None]], frozenset[int]]:
    """The chains that users have made, by where their first rule is, each entry with where it jumps to, and those that
    are no rules but heads of chains, or the end."""
    chains: dict[int, bytes] = {}
    targets: list[tuple[int, int | None]] = []
    heads: set[int] = set()
    start = 0
    while start < len(table):
        target, length = struct.unpack_from("=HH", table, start + about.lengths)
        name, leads = _read_target(about, table, start)
        if name == b"ERROR":  # what a chain begins with, and the table ends with
            heads.add(start)
            chains[start + length] = _CHAIN.unpack_from(table, start + target + _TARGET.size)[0].partition(b"\0")[0]
        targets.append((start, leads))
        start += length
    chains.pop(len(table), None)
    return chains, targets, frozenset(heads)


def _read_target(about: _Family, table: memoryview, start: int) -> tuple[bytes, int | None]:
    """The target of the entry that begins there: its name, and where it jumps to."""
    target, _ = struct.unpack_from("=HH", table, start + about.lengths)
    name = _TARGET.unpack_from(table, start + target)[0].partition(b"\0")[0]
    verdict = _VERDICT.unpack_from(table, start + target + _TARGET.size)[0] if not name else -1
    return name, verdict if verdict >= 0 else None


def digest_tables(family: int) -> bytes:
    """A digest of all tables of a family that are in use, without what they have counted. Raises what `list_tables`
    does."""
    about = _FAMILIES[family]
    digest = hashlib.blake2b()
    names = list_tables(family)
    if not names:  # then the host may not know the family at all
        return digest.digest()
    with socket.socket(about.domain, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        for name in names:
            digest.update(name.encode())
            for entry in _read_entries(sock.fileno(), about, name):
                digest.update(entry)
    return digest.digest()


def list_tables(family: int) -> list[str]:
    """The tables that are in use; none where the kernel has not been asked for any since it started. Raises OSError,
    and NoAnswer where it does not show them to this user. No other question tells: asked for a table by its name, the
    kernel makes one."""
    names = _FAMILIES[family].names
    try:
        return sorted(read_text(names).split())
    except FileNotFoundError:
        return []
    except PermissionError:
        raise NoAnswer(
            f"list the tables of IPv{family}",
            f"only root may read {names} at this moment; `netlimit prepare`, as root, lets the controller read it (its "
            "unit does so when it starts)",
        ) from None


def has_rules(family: int, name: str) -> bool:
    """Whether a table holds any rule, or a chain of a user's; one that is not in use holds none, and is not made.
    Raises what `list_tables` does."""
    if name not in list_tables(family):
        return False
    about = _FAMILIES[family]
    with socket.socket(about.domain, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        _, hooks, *_, entries, _ = _INFO.unpack(_ask(sock.fileno(), about.level, _GET_INFO, name, _INFO.size - _NAME))
    heads = hooks.bit_count() + 1  # the policy of each of the kernel's own chains, and the end of the table
    return bool(entries > heads)


def _read_entries(descriptor: int, about: _Family, name: str) -> Iterator[memoryview]:
    _, table = _read_table(descriptor, about.level, name)
    start = 0
    while start < len(table):
        length: int = _LENGTH.unpack_from(table, start + about.lengths)[0]
        table[start + about.counters : start + about.counters + len(_COUNTERS)] = _COUNTERS
        yield table[start : start + length]
        start += length


def _read_table(descriptor: int, level: int, name: str) -> tuple[tuple[Any, ...], memoryview]:
    """What the kernel says about a table, and its entries. It can grow between one question and the other."""
    for attempt in range(_ATTEMPTS):
        info = _INFO.unpack(_ask(descriptor, level, _GET_INFO, name, _INFO.size - _NAME))
        try:
            held = _ask(descriptor, level, _GET_ENTRIES, name, info[-1] + 8, struct.pack("=I", info[-1]))
            return info, memoryview(held)[_NAME + 8 :]
        except OSError as error:
            if error.errno != errno.EAGAIN or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _ask(descriptor: int, level: int, question: int, name: str, room: int, words: bytes = b"") -> bytearray:
    """getsockopt(2), which tells the kernel of which table it shall speak. Python's own cannot."""
    buffer = bytearray((name.encode().ljust(_NAME, b"\0") + words).ljust(_NAME + room, b"\0"))
    held = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    length = ctypes.c_uint32(len(buffer))
    if _libc.getsockopt(descriptor, level, question, held, ctypes.byref(length)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer
