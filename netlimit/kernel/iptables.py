"""Chains and rules: written by one of two writers, one commit a table, and read back as iptables prints them."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Protocol

from netlimit.errors import KernelError
from netlimit.kernel import libiptc, restore
from netlimit.kernel.iptables_marks import Marking
from netlimit.kernel.legacy import find_tool
from netlimit.kernel.lock import locked
from netlimit.kernel.printed_tables import Place, PrintedTable, read_foreign, read_printed
from netlimit.kernel.tables import TableChanged, digest_tables, find_reached, list_extensions, list_tables
from netlimit.kernel.tools import ask, is_shortage
from netlimit.plain import name_of
from netlimit.plan import SwitchTable
from netlimit.state import (
    CHAIN_PREFIX,
    PROTOCOL_NUMBERS,
    SET_PREFIX,
    TABLES,
    Above,
    ChainId,
    ChainRule,
    Chains,
    Table,
    Verdict,
    chain_rule,
)

LOCK = "/run/xtables.lock"
_ATTEMPTS = 5
_MANY = 100
"""So many rules in one step go in through the tool: python-iptables takes milliseconds for each, where the tool takes
microseconds, and some milliseconds to start."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_PROTOCOL = re.compile(r"\A((?:-[sdio] \S+ )*(?:! )?-p )(\S+)")
_HASHLIMIT = re.compile(r"--hashlimit-name (\S+)(?:.* --hashlimit-htable-max (\d+))?")
_MARKING = frozenset(("mark", "connmark", "socket", "MARK", "CONNMARK", "TPROXY", "HMARK", "SET"))
"""The matches and targets that ask for marks, or write them."""
_SHOWN = 200
_TRIED = f"{CHAIN_PREFIX}TRIED"
_MOST_REFUSED = 32
"""So many buckets that are refused are looked for at a time."""
_ELSEWHERE = ChainRule("(not ours)")

log = logging.getLogger(__name__)


def read_tables(family: int, only: Table | None = None) -> tuple[Chains, Chains]:
    """Our chains, and what of ours stands in the kernel's own (hooks), for one address family; of all tables, or one.

    Rules that do not stand first are shown behind a foreign one, so that they never equal what is wanted.
    """
    return _find_own(family, read_printed(family, only))


def _find_own(family: int, tables: Iterable[PrintedTable]) -> tuple[Chains, Chains]:
    chains: dict[ChainId, tuple[ChainRule, ...]] = {}
    hooks: dict[ChainId, tuple[ChainRule, ...]] = {}
    for table, printed in _in_our_tables(tables):
        layout = printed.outline.layout
        for name in printed.outline.ours:
            rules = tuple(_make_rule(text) for text in printed.texts[name])
            # One that cannot go, for others lead to it, is empty: as good as gone.
            if rules or name not in layout.held:
                chains[ChainId(family, table, name)] = rules
        for hook, jumps in layout.jumps.items():
            before = enumerate(printed.texts[hook][: jumps[-1] + 1])
            rules = tuple(_make_rule(text) if index in jumps else _ELSEWHERE for index, text in before)
            hooks[ChainId(family, table, hook)] = rules
    return chains, hooks


def _make_rule(text: str | None) -> ChainRule:
    return ChainRule(_canonical(text or ""))


def _find_held(family: int, tables: Iterable[PrintedTable]) -> frozenset[ChainId]:
    """The chains of ours to which chains of others lead."""
    ours = _in_our_tables(tables)
    return frozenset(ChainId(family, table, name) for table, each in ours for name in each.outline.layout.held)


def _in_our_tables(tables: Iterable[PrintedTable]) -> Iterator[tuple[Table, PrintedTable]]:
    for printed in tables:
        for table in TABLES:
            if printed.table == table:
                yield table, printed


def _canonical(text: str) -> str:
    """A rule as we say it, whatever version of iptables has printed it."""
    return _PROTOCOL.sub(lambda found: found[1] + PROTOCOL_NUMBERS.get(found[2], found[2]), text, count=1)


class TableReader:
    """Reads chains and hooks as `read_tables` does, and asks the tool only if something in the tables has changed: it
    takes ten times as long as to see that nothing has."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, tuple[Chains, Chains]]] = {}
        self._marks: dict[int, Marking | KernelError] = {}
        self.held: dict[int, frozenset[ChainId]] = {}
        """Chains of ours to which chains of others lead, by family, at the last `read`."""

    def read(self, family: int) -> tuple[Chains, Chains]:
        """Read them now. Raises KernelError, OSError."""
        before, found = self._known.get(family, (None, ({}, {})))
        digest = digest_tables(family)
        if digest != before:
            tables = read_printed(family)
            found = _find_own(family, tables)
            self._marks[family] = _find_marks(family, tables)
            self.held[family] = _find_held(family, tables)
            # Who writes at this moment may bring back what was known before: then it is read once more.
            self._known[family] = digest if digest_tables(family) == digest else b"", found
        return found

    def read_marks(self, family: int) -> Marking:
        """The rules of others that speak of marks, as they were at the last `read`. Raises KernelError, OSError."""
        if family not in self._known:
            self.read(family)
        found = self._marks[family]
        if isinstance(found, KernelError):
            raise found
        return found

    def forget(self) -> None:
        """Read everything anew the next time."""
        self._known.clear()


def _find_marks(family: int, tables: Iterable[PrintedTable]) -> Marking | KernelError:
    """The rules of others that speak of marks; or why they cannot be told, which keeps nobody from reading what is
    ours. A packet to be rejected meets none of mangle, which it has left, nor of filter before ours, which stand first;
    but what this host sends passes nat between the two."""
    try:
        lines = tuple(f"{each.table} {line}" for each in tables for line in _read_marking(family, each))
    except KernelError as error:
        return error
    here = frozenset({"OUTPUT" if family == 4 else "OUTPUT6"})
    nat = (each.outline for each in tables if each.table == "nat")
    return Marking(lines, {f"nat -A {chain}": here for each in nat for chain in find_reached(family, each, "OUTPUT")})


def _read_marking(family: int, printed: PrintedTable) -> list[str]:
    places = [place for place in printed.list_foreign() if _is_marking(family, printed, place)]
    return read_foreign(family, printed, places)


def _is_marking(family: int, printed: PrintedTable, place: Place) -> bool:
    """Whether a rule asks for marks or writes them, and not only names something so."""
    text = printed.texts[place.chain][place.before]
    if text is not None and "mark" not in text.lower():
        return False
    start = printed.outline.rules[place.chain][place.before]
    return not _MARKING.isdisjoint(list_extensions(family, printed.outline, start))


class Writer(Protocol):
    """A way in which rules get into a table."""

    def commit(self, step: SwitchTable) -> None:
        """Give a table its new contents in one commit. Raises KernelError, TableChanged."""
        ...

    def try_rule(self, family: int, table: str, words: str) -> None:
        """Add one rule in a chain of our own, and take both away again. Raises what tells why it is refused."""
        ...


def find_writer(reason: str | None) -> Writer:
    """The writer for a host: python-iptables, if there is no reason why it cannot say here what we say."""
    return restore if reason else libiptc


def choose_writer(step: SwitchTable, usual: Writer) -> Writer:
    """The writer for a step: the `usual` one of its host, but for one of many rules."""
    return restore if sum(map(len, step.chains.values())) >= _MANY else usual


def try_writer(writer: Writer, step: SwitchTable) -> str | None:
    """Why a writer cannot take a step, None if it can. Where nobody else is: it waits for no lock, which others of this
    machine may hold for long."""
    try:
        _switch(step, writer)
    except Exception as error:  # the library has errors of its own, and may be missing
        return str(getattr(error, "reason", error))
    return None


def find_refused(step: SwitchTable, writer: Writer) -> dict[str, str]:
    """The buckets of a step that the kernel, or the tool, does not take by themselves, by the names of their tables,
    with the reason: the first few. None where it takes not even a usual one, for then it is not they. Each is tried in
    a chain of ours to which nothing leads, and which is gone afterwards."""
    rules = chain.from_iterable(step.chains.values())
    buckets = [*dict.fromkeys(each for rule in rules for each in rule.matches if isinstance(each, Above))]
    attempt = partial(_try_buckets, replace(step, chains={}, gone=(), hooks={}, before={}), writer)
    with locked(LOCK, f"try buckets in the table {step.table}"):
        usual = [replace(bucket, above="10/sec", above_shown="10/sec", burst="5") for bucket in buckets[:1]]
        return _find_refused(buckets, attempt, _MOST_REFUSED) if usual and attempt(usual) is None else {}


def _find_refused(
    buckets: Sequence[Above], attempt: Callable[[Sequence[Above]], str | None], most: int
) -> dict[str, str]:
    """By halves."""
    reason = attempt(buckets) if buckets and most > 0 else None
    if reason is None:
        return {}
    if len(buckets) == 1:
        return {} if is_shortage(reason) else {buckets[0].name: reason}
    middle = len(buckets) // 2
    found = _find_refused(buckets[:middle], attempt, most)
    return found | _find_refused(buckets[middle:], attempt, most - len(found))


def _try_buckets(step: SwitchTable, writer: Writer, buckets: Sequence[Above]) -> str | None:
    """Why some are refused. Their tables have names of their own: one that is there would be taken as it is."""
    named = (replace(bucket, name=f"{SET_PREFIX}tried{number}") for number, bucket in enumerate(buckets))
    rules = tuple(chain_rule(Verdict("RETURN"), bucket) for bucket in named)
    reason = try_writer(writer, replace(step, chains={_TRIED: rules}))
    try_writer(writer, replace(step, gone=(_TRIED,)))
    return reason


def switch_table(step: SwitchTable, writer: Writer = libiptc) -> None:
    """Give a table its new contents in one commit, then read back and compare. Raises KernelError."""
    # libiptc does not take the lock that iptables itself takes.
    with locked(LOCK, f"write to the table {step.table}"):
        _switch(_leave_out_unspeakable(step), writer)


def _leave_out_unspeakable(step: SwitchTable) -> SwitchTable:
    """The step without rules that no tool can be told: what ends a line. Nothing of that gets here; if it did, it must
    neither be obeyed nor keep the table from holding all others."""
    if all(map(_is_speakable, chain.from_iterable([*step.chains.values(), *step.hooks.values()]))):
        return step
    return replace(step, chains=_choose_speakable(step.chains), hooks=_choose_speakable(step.hooks))


def _choose_speakable(places: Mapping[str, tuple[ChainRule, ...]]) -> dict[str, tuple[ChainRule, ...]]:
    for name, rules in places.items():
        for rule in rules:
            if not _is_speakable(rule):
                log.error(
                    "Not written, for no tool can be told it: the rule %s, to %s.", ascii(rule.text)[:_SHOWN], name
                )
    return {name: tuple(filter(_is_speakable, rules)) for name, rules in places.items()}


def _is_speakable(rule: ChainRule) -> bool:
    return rule.text.isprintable()


def _switch(step: SwitchTable, writer: Writer) -> None:
    _load_table(step.family, step.table)
    for attempt in range(_ATTEMPTS):
        try:
            writer.commit(step)
            break
        except TableChanged:
            if attempt == _ATTEMPTS - 1:
                raise KernelError(str(step), "another program changes the table all the time") from None
            time.sleep(0.02 * (attempt + 1))
    _compare(step)


def _load_table(family: int, table: Table) -> None:
    """Have a table that nobody has asked for yet. The tool loads its modules; to ask the kernel alone does not."""
    if table not in list_tables(family):
        ask(find_tool(family, "save"), "-t", table)


def _compare(step: SwitchTable) -> None:
    """python-iptables can lose an option without a word: believe only what is read back."""
    chains, hooks = read_tables(step.family, step.table)
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


def foreign_rules(family: int) -> dict[str, list[str]]:
    """The rules of others by table, as iptables prints them. Raises KernelError, OSError."""
    return {
        printed.table: read_foreign(family, printed, list(printed.list_foreign())) for printed in read_printed(family)
    }


def find_buckets(family: int) -> dict[str, str]:
    """The tables of hashlimit of which rules speak, with the sizes that these give them ("": the default). Rules may
    lie about others' tables. Raises KernelError, OSError."""
    directory = "/proc/net/ipt_hashlimit" if family == 4 else "/proc/net/ip6t_hashlimit"
    there = {name_of(name) for name in os.listdir(directory)} if os.path.isdir(directory) else set()
    lines: list[str] = []
    for printed in read_printed(family):
        lines += (printed.texts[place.chain][place.before] or "" for place in printed.list_own())
        with suppress(KernelError):  # those of others only advise
            lines += read_foreign(family, printed, list(printed.list_foreign()))
    found = (pair for line in lines for pair in _HASHLIMIT.findall(_QUOTED.sub("", line)))
    return {name: most for name, most in found if name in there}
