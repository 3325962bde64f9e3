"""Chains and rules: written by python-iptables, one commit a table, and read back by `iptables-legacy-save`.

python-iptables (libiptc) loses errors and keeps tables open; this module is the only one that knows it. Handles belong
to the network namespace in which they were opened, so a process serves one.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from netlimit.errors import KernelError
from netlimit.kernel.lock import locked
from netlimit.kernel.tables import digest_tables
from netlimit.plan import SwitchTable
from netlimit.state import (
    CHAIN_PREFIX,
    TABLES,
    Above,
    ChainId,
    ChainRule,
    Chains,
    Effect,
    Enters,
    Has,
    Is,
    Jump,
    Leaves,
    Match,
    Table,
    Verdict,
)

LOCK = "/run/xtables.lock"
_ATTEMPTS = 5
_HASHLIMIT_REVISION = 3
_BURST_OFFSET = 32 + 256 + 8  # struct xt_entry_match, then name[255] aligned to 8, then cfg.avg
_IP6T_F_PROTO = 0x01  # linux/netfilter_ipv6/ip6_tables.h
_PROTOCOLS = {"ipv6-icmp": "icmpv6"}  # iptables prints the one, python-iptables reads the other
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_ELSEWHERE = ChainRule("(not ours)")


def read_tables(family: int) -> tuple[Chains, Chains]:
    """Our chains, and what of ours stands in the kernel's own (hooks), for one address family.

    Rules that do not stand first are shown behind a foreign one, so that they never equal what is wanted.
    """
    chains: dict[ChainId, list[ChainRule]] = {}
    hooks: dict[ChainId, list[ChainRule]] = {}
    table: Table | None = None
    for line in save(family).splitlines():
        if line.startswith("*"):
            table = next((known for known in TABLES if known == line[1:]), None)
        elif table is None:
            continue
        elif line.startswith(f":{CHAIN_PREFIX}"):
            chains[ChainId(family, table, line[1:].split()[0])] = []
        elif line.startswith("-A "):
            _, name, text = (*line.split(" ", 2), "")[:3]
            where = ChainId(family, table, name)
            if where in chains:
                chains[where].append(ChainRule(text))
            else:
                hooks.setdefault(where, []).append(ChainRule(text) if _is_ours(text) else _ELSEWHERE)
    found = {hook: _own_part(rules) for hook, rules in hooks.items()}
    return (
        {chain: tuple(rules) for chain, rules in chains.items()},
        {hook: rules for hook, rules in found.items() if rules},
    )


class TableReader:
    """Reads chains and hooks as `read_tables` does, and asks the tool only if something in the tables has changed: it
    takes ten times as long as to see that nothing has."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, tuple[Chains, Chains]]] = {}

    def read(self, family: int) -> tuple[Chains, Chains]:
        """Read them now. Raises KernelError, OSError."""
        before, found = self._known.get(family, (None, ({}, {})))
        digest = digest_tables(family)
        if digest != before:
            found = read_tables(family)
            if digest_tables(family) == digest:  # else somebody writes at this moment
                self._known[family] = digest, found
        return found

    def forget(self) -> None:
        """Read everything anew the next time."""
        self._known.clear()


def switch_table(step: SwitchTable) -> None:
    """Give a table its new contents in one commit, then read back and compare. Raises KernelError."""
    # libiptc does not take the lock that iptables itself takes.
    with locked(LOCK, f"write to the table {step.table}"):
        for attempt in range(_ATTEMPTS):
            try:
                _commit(step)
                break
            except _iptc().IPTCError as error:
                # Somebody who does not take the lock changed the table since it was read.
                if "Resource temporarily unavailable" not in str(error) or attempt == _ATTEMPTS - 1:
                    raise KernelError(str(step), _reason(error)) from None
                time.sleep(0.02 * (attempt + 1))
            except (_iptc().XTablesError, ValueError, AttributeError) as error:
                raise KernelError(str(step), _reason(error)) from None
        _compare(step)


def _commit(step: SwitchTable) -> None:
    iptc = _iptc()
    positions = _positions(step)
    with _opened(step.family, step.table) as table:
        if _positions(step) != positions:
            raise iptc.IPTCError("the table changed while it was read: Resource temporarily unavailable")
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
            for position in reversed(positions.get(name, [])):
                _delete(table, name, position)
            chain = iptc.Chain(table, name)
            for rule in reversed(rules):
                chain.insert_rule(_build(table, rule))
        for name in step.gone:
            if table.is_chain(name):
                table.delete_chain(name)
        table.commit()


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


def _positions(step: SwitchTable) -> dict[str, list[int]]:
    """Where our rules stand in the kernel's own chains, counted from 0."""
    positions: dict[str, list[int]] = {}
    seen: dict[str, int] = {}
    for line in save(step.family, step.table).splitlines():
        if line.startswith("-A "):
            _, name, text = (*line.split(" ", 2), "")[:3]
            if name in step.hooks and _is_ours(text):
                positions.setdefault(name, []).append(seen.get(name, 0))
            seen[name] = seen.get(name, 0) + 1
    return positions


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
        _entry(built).iniface_mask = _whole_name(match.interface)
    elif isinstance(match, Leaves):
        built.out_interface = match.interface
        _entry(built).outiface_mask = _whole_name(match.interface)
    elif isinstance(match, Is):
        protocol = _PROTOCOLS.get(match.protocol, match.protocol)
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
    """The mask under which names of interfaces are compared, with the zero at the end.

    python-iptables sets one bit a letter for IPv6: it takes `lan` for `lo`, and nothing that is read back tells.
    """
    return bytes([255] * (len(interface) + 1))


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


def _compare(step: SwitchTable) -> None:
    """python-iptables can lose an option without a word: believe only what is read back."""
    chains, hooks = read_tables(step.family)
    wanted = {ChainId(step.family, step.table, name): rules for name, rules in step.chains.items()}
    hooked = {ChainId(step.family, step.table, name): rules for name, rules in step.hooks.items()}
    for where, rules in (*wanted.items(), *hooked.items()):
        found = hooks.get(where, ()) if where in hooked else chains.get(where)
        if found != rules:
            lost = next((rule.text for rule in rules if rule not in (found or ())), "the order")
            raise KernelError(str(step), f"it does not hold in {where} what was written: {lost}")
    left = [name for name in step.gone if ChainId(step.family, step.table, name) in chains]
    if left:
        raise KernelError(str(step), f"the chain {left[0]} is still there")
    _compare_buckets(step)


def _compare_buckets(step: SwitchTable) -> None:
    directory = "/proc/net/ipt_hashlimit" if step.family == 4 else "/proc/net/ip6t_hashlimit"
    names = {m.name for rules in step.chains.values() for rule in rules for m in rule.matches if isinstance(m, Above)}
    missing = names - set(os.listdir(directory)) if names else set()
    if missing:
        raise KernelError(str(step), f"there is no hashlimit table {missing.pop()}")


def _own_part(rules: list[ChainRule]) -> tuple[ChainRule, ...]:
    """Up to our last rule; what is foreign before it stays visible as such."""
    last = max((index for index, rule in enumerate(rules) if rule != _ELSEWHERE), default=-1)
    return tuple(rules[: last + 1])


def _is_ours(text: str) -> bool:
    words = _QUOTED.sub("", text).split()  # a comment of others may speak of our chains
    return any(words[i] in ("-j", "-g") and words[i + 1].startswith(CHAIN_PREFIX) for i in range(len(words) - 1))


def save(family: int, table: Table | None = None) -> str:
    """What `iptables-legacy-save` prints, of all tables or of one. Raises KernelError."""
    command = ["iptables-legacy-save" if family == 4 else "ip6tables-legacy-save"]
    if table:
        command += ["-t", table]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise KernelError(command[0], "there is no such program on this host; install the package iptables") from None
    if done.returncode:
        raise KernelError(" ".join(command), done.stderr.strip())
    return done.stdout


def _reason(error: Exception) -> str:
    return str(error).replace("b'", "'")


def load() -> None:
    """Load the library, which takes a third of a second. Raises what it raises where it is missing."""
    _iptc()


def _iptc() -> Any:
    """Import it late: it looks for libraries, and fails where they are missing; only a controller needs it."""
    import iptc

    return iptc


def try_rule(family: int, table: str, words: str) -> None:
    """Add one rule in a chain of our own and take both away again. Raises what python-iptables raises."""
    name = f"{CHAIN_PREFIX}PROBE"
    with _opened(family, table) as handle:
        handle.create_chain(name).append_rule(_parse_words(handle, words.split()))
        handle.commit()
    with _opened(family, table) as handle:
        handle.flush_entries(name)
        handle.delete_chain(name)
        handle.commit()


def foreign_rules(family: int) -> list[str]:
    """The rules of others, as iptables prints them."""
    lines = [line for line in save(family).splitlines() if line.startswith("-A ")]
    return [line for line in lines if not line.startswith(f"-A {CHAIN_PREFIX}") and not _is_ours(line)]


def _parse_words(table: Any, words: list[str]) -> Any:
    built = _blank(table)
    if words[0] == "-p":
        built.protocol, words = words[1], words[2:]
    at = words.index("-j")
    if at:
        _set_options(built.create_match(words[1]), tuple(words[2:at]))
    _set_options(built.create_target(words[at + 1]), tuple(words[at + 2 :]))
    return built
