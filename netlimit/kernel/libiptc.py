"""Writes tables through python-iptables, the library over libiptc.

It loses errors and keeps tables open; this module is the only one that knows it. Handles belong to the network
namespace in which they were opened, so a process serves one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any

from netlimit.errors import KernelError
from netlimit.kernel.libraries import confine_search
from netlimit.kernel.tables import Layout, TableChanged, read_layout
from netlimit.plan import SwitchTable
from netlimit.state import (
    CHAIN_PREFIX,
    Above,
    ChainRule,
    Effect,
    Enters,
    Has,
    Is,
    Jump,
    Leaves,
    Match,
    Verdict,
)

_HASHLIMIT_REVISION = 3
_BURST_OFFSET = 32 + 256 + 8  # struct xt_entry_match, then name[255] aligned to 8, then cfg.avg
_NOTES: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}
"""What extensions write down while their options are read, by the address of their description, which stays."""
_IP6T_F_PROTO = 0x01  # linux/netfilter_ipv6/ip6_tables.h
_PROTOCOLS = {"ipv6-icmp": "icmpv6"}  # iptables prints the one, python-iptables reads the other


def commit(step: SwitchTable) -> None:
    """Give a table its new contents in one commit. Raises KernelError, and TableChanged if somebody who does not take
    the lock changed it meanwhile."""
    iptc = _iptc()
    try:
        layout = read_layout(step.family, step.table, CHAIN_PREFIX)
        with _opened(step.family, step.table) as table:
            if read_layout(step.family, step.table, CHAIN_PREFIX) != layout:
                raise TableChanged(str(step))
            _write(table, step, layout)
            table.commit()
    except iptc.IPTCError as error:
        if "Resource temporarily unavailable" in str(error):
            raise TableChanged(str(step)) from None
        raise KernelError(str(step), _reason(error)) from None
    except (iptc.XTablesError, ValueError, AttributeError) as error:
        raise KernelError(str(step), _reason(error)) from None


def _write(table: Any, step: SwitchTable, layout: Layout) -> None:
    iptc = _iptc()
    for name in step.chains:
        if not table.is_chain(name):
            table.create_chain(name)
    for name in (*step.chains, *(gone for gone in step.gone if table.is_chain(gone))):
        table.flush_entries(name)
    for name, rules in step.chains.items():
        chain = iptc.Chain(table, name)
        for rule in rules:
            chain.append_rule(_build(table, rule))
    for name, rules in step.hooks.items():
        for position in reversed(layout.jumps.get(name, ())):
            _delete(table, name, position)
        chain = iptc.Chain(table, name)
        for rule in reversed(rules):
            chain.insert_rule(_build(table, rule))
    for name in step.gone:
        if table.is_chain(name) and name not in layout.held:
            table.delete_chain(name)


def load() -> None:
    """Load the library, which takes a third of a second. Raises what it raises where it is missing."""
    _iptc()


def read_version() -> str:
    """The version of the library."""
    return metadata.version("python-iptables")


def _reason(error: Exception) -> str:
    return str(error).replace("b'", "'")


@cache
def _iptc() -> Any:
    """Import it late: it looks for libraries, and fails where they are missing; only a controller needs it."""
    confine_search()
    import iptc

    for kind in (iptc.Match, iptc.Target):
        kind.reset = _lend_notes_after(kind.reset)
    return iptc


def _lend_notes_after(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Give extensions memory for their notes (`udata`) that lasts. The library gives them a buffer that Python has let
    go when options are read: hashlimit then writes over whatever lies there by now, and a process in some thousands
    died of it."""

    def reset_and_lend(extension: Any) -> None:
        reset(extension)
        module = extension._module
        size = getattr(module, "udata_size", 0)
        if size:
            notes = _NOTES.setdefault(ctypes.addressof(module), (ctypes.c_ubyte * size)())
            ctypes.memset(notes, 0, size)
            module.udata = ctypes.addressof(notes)

    return reset_and_lend


def try_rule(family: int, table: str, words: str) -> None:
    """Add one rule, told in words, in a chain of our own and take both away again. Raises what the library raises."""
    name = f"{CHAIN_PREFIX}PROBE"
    with _opened(family, table) as handle:
        handle.create_chain(name).append_rule(_parse_words(handle, words.split()))
        handle.commit()
    with _opened(family, table) as handle:
        handle.flush_entries(name)
        handle.delete_chain(name)
        handle.commit()


@contextmanager
def _opened(family: int, name: str) -> Iterator[Any]:
    """A table as it is now. Closed tables must leave the library's cache: it would ask their dead handles."""
    kind = _iptc().Table if family == 4 else _iptc().Table6
    table = kind(name, autocommit=False)
    try:
        yield table
    finally:
        table.close()
        kind._cache.pop(name, None)


def _delete(table: Any, chain: str, position: int) -> None:
    """Remove by position: reading foreign rules to compare them could fail on an extension unknown here."""
    if table._iptc.iptc_delete_num_entry(chain.encode(), position, table._handle) != 1:
        raise _iptc().IPTCError(f"can't delete rule {position + 1} of {chain}: {table.strerror()}")


def _build(table: Any, rule: ChainRule) -> Any:
    assert rule.effect is not None
    built = _blank(table)
    for match in rule.matches:
        _add_match(built, match)
    _add_target(built, rule.effect)
    return built


def _blank(table: Any) -> Any:
    """A rule without any matches.

    To learn whether a target is a chain, the library opens every table there is, nat too, which brings connection
    tracking to the host; and keeps them open, so that what others change in them is undone when they are written.
    This rule looks into its own table alone.
    """
    iptc = _iptc()
    kind = iptc.Rule6 if isinstance(table, iptc.Table6) else iptc.Rule
    return type(kind.__name__, (kind,), {"tables": (table,)})()


def _add_match(built: Any, match: Match) -> None:
    if isinstance(match, Has):
        setattr(built, match.side, match.args()[1])
    elif isinstance(match, Enters):
        built.in_interface = match.interface
        _entry(built).iniface, _entry(built).iniface_mask = match.interface.encode(), _whole_name(match.interface)
    elif isinstance(match, Leaves):
        built.out_interface = match.interface
        _entry(built).outiface, _entry(built).outiface_mask = match.interface.encode(), _whole_name(match.interface)
    elif isinstance(match, Is):
        protocol = match.args()[-1]
        protocol = _PROTOCOLS.get(protocol, protocol)
        built.protocol = f"!{protocol}" if match.inverted else protocol
        if hasattr(built.entry, "ipv6"):
            # The library takes this flag away from `! -p`, which then matches any protocol.
            built.entry.ipv6.flags |= _IP6T_F_PROTO
    else:
        words = match.args(shown=False) if isinstance(match, Above) else match.args()
        extension = built.create_match(words[1])
        _set_options(extension, words[2:])
        if isinstance(match, Above) and match.burst is None:
            _clear_burst(extension)


def _entry(built: Any) -> Any:
    return built.entry.ip if hasattr(built.entry, "ip") else built.entry.ipv6


def _whole_name(interface: str) -> bytes:
    """The mask under which names of interfaces are compared, with the zero at the end, but for one that is to begin so
    (`eth+`).

    python-iptables sets one bit a letter for IPv6: it takes `lan` for `lo`, and nothing that is read back tells. Of a
    name that ends with + it leaves the + away, by which newer versions of iptables know such a name when they print it.
    """
    return bytes([255] * (len(interface) - 1 if interface.endswith("+") else len(interface) + 1))


def _clear_burst(extension: Any) -> None:
    """Take away the burst of 5 that the library gives a byte rate: there it means 5 seconds more, once.

    iptables itself clears it when no burst is given; python-iptables has no word for that, so it is done in struct
    xt_hashlimit_mtinfo3 (linux/netfilter/xt_hashlimit.h). What is read back afterwards proves it.
    """
    if extension._revision != _HASHLIMIT_REVISION:
        raise ValueError(f"hashlimit has revision {extension._revision} here; {_HASHLIMIT_REVISION} is known")
    ctypes.memset(ctypes.addressof(extension._match_buf) + _BURST_OFFSET, 0, ctypes.sizeof(ctypes.c_uint64))


def _add_target(built: Any, effect: Effect) -> None:
    if isinstance(effect, Jump):
        built.target = _iptc().Target(built, effect.chain, goto=effect.goto)
    elif isinstance(effect, Verdict):
        built.target = _iptc().Target(built, effect.name)
    else:
        words = effect.args()
        _set_options(built.create_target(words[1]), words[2:])


def _set_options(extension: Any, words: tuple[str, ...]) -> None:
    """Tell an extension its options: `! --name value value …` each."""
    options: list[tuple[str, list[str]]] = []
    inverted = False
    for word in words:
        if word == "!":
            inverted = True
        elif word.startswith("--"):
            options.append((word[2:], ["!"] if inverted else []))
            inverted = False
        else:
            options[-1][1].append(word)
    for name, values in options:
        if len(values) == 2 and values[0] == "!":
            extension.set_parameter(name, f"!{values[1]}")
        else:
            extension.set_parameter(name, values if len(values) > 1 else "".join(values))


def _parse_words(table: Any, words: list[str]) -> Any:
    built = _blank(table)
    if words[0] == "-p":
        built.protocol, words = words[1], words[2:]
    at = words.index("-j")
    if at:
        _set_options(built.create_match(words[1]), tuple(words[2:at]))
    _set_options(built.create_target(words[at + 1]), tuple(words[at + 2 :]))
    return built
