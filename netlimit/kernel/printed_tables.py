"""What iptables prints of tables, each rule put where it stands.

The tools print names of others as they are (of hashlimit, recent and sets, of interfaces), and those can hold ends of
lines, and lines that look like rules, chains and tables. But the kernel says how many rules each chain has, and where
our jumps stand: what is printed is believed only if it has just as many lines. Else each rule of ours is asked for by
its place, and none of others is heard.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from netlimit.errors import KernelError
from netlimit.kernel import restore
from netlimit.kernel.legacy import find_tool
from netlimit.kernel.tables import Outline, list_tables, read_outline
from netlimit.kernel.tools import ToolMissing, ask
from netlimit.plain import show_line
from netlimit.state import CHAIN_PREFIX, Table

_ATTEMPTS = 5
_MOST_QUESTIONS = 60
"""How often the tool is asked for rules of others, of whom any number can hold ends of lines."""

_Texts = dict[str, list[str | None]]


class Place(NamedTuple):
    """Where a rule stands: its chain, and how many are before it."""

    chain: str
    before: int


class PrintedTable(NamedTuple):
    """A table. `texts` are its rules by chain, each without `-A` and the chain; None where rules of others hide what
    the others are."""

    table: str
    outline: Outline
    texts: _Texts

    def list_own(self) -> Iterator[Place]:
        """Our rules: what stands in chains of ours, and what leads there from the kernel's own."""
        for chain in self.outline.ours:
            yield from (Place(chain, index) for index in range(len(self.outline.rules[chain])))
        for hook, jumps in self.outline.layout.jumps.items():
            yield from (Place(hook, index) for index in jumps)

    def list_foreign(self) -> Iterator[Place]:
        """The rules of others."""
        for chain, rules in self.outline.rules.items():
            jumps = self.outline.layout.jumps.get(chain, ())
            if chain not in self.outline.ours:
                yield from (Place(chain, index) for index in range(len(rules)) if index not in jumps)


def read_printed(family: int, only: Table | None = None) -> list[PrintedTable]:
    """Read all tables that are in use, or one. Raises KernelError, OSError."""
    for attempt in range(_ATTEMPTS):
        outlines = _read_outlines(family, only)
        found = _save(family, only, outlines)
        if found is not None:
            return found
        found = [_ask_own(family, table, outline) for table, outline in outlines.items()]
        if _describe_own(_read_outlines(family, only)) == _describe_own(outlines):
            return found
        time.sleep(0.02 * (attempt + 1))
    raise KernelError(f"read the tables of IPv{family}", "another program changes them all the time")


def read_foreign(family: int, table: PrintedTable, places: Sequence[Place]) -> list[str]:
    """What iptables prints of rules of others, as lines. Raises KernelError where too many of them hold ends of lines,
    or nobody can ask for them."""
    known = {place: text for place in places if (text := table.texts[place.chain][place.before]) is not None}
    missing = [place for place in places if place not in known]
    if missing:
        strange = [place for place in missing if not restore.is_plain(place.chain)]
        if strange:
            raise KernelError(f"read the table {table.table}", "nobody can ask for a chain of such a name")
        questions = [_Question(place.chain, range(place.before, place.before + 1)) for place in missing]
        known |= _ask(family, table.table, questions, iter(range(_MOST_QUESTIONS)))
    return [f"-A {place.chain} {known[place]}" for place in places]


def _read_outlines(family: int, only: Table | None) -> dict[str, Outline]:
    tables = (table for table in list_tables(family) if only in (None, table))
    return {table: read_outline(family, table, CHAIN_PREFIX) for table in tables}


def _describe_own(outlines: Mapping[str, Outline]) -> object:
    """How many rules our chains have, and where our jumps stand: what must be the same when it is asked for."""
    return {
        table: (outline.layout.jumps, {chain: len(outline.rules[chain]) for chain in outline.ours})
        for table, outline in outlines.items()
    }


def _save(family: int, only: Table | None, outlines: Mapping[str, Outline]) -> list[PrintedTable] | None:
    """All rules, None where the tool does not get through: it gives up at a rule with an extension that it lacks."""
    try:
        return _cut(ask(find_tool(family, "save"), *(("-t", only) if only else ())), outlines)
    except ToolMissing:
        raise
    except KernelError:
        if not outlines:
            raise
        return None


def _cut(printed: str, outlines: Mapping[str, Outline]) -> list[PrintedTable] | None:
    """The rules in what is printed, None where it has not just the lines that it must have.

    Each table is one line, each chain, each rule at least one, and the end of the table one. So if a rule has more,
    there stands something else where the end of its table is to be."""
    lines = printed.split("\n")
    found: dict[str, PrintedTable] = {}
    start = 0
    while start < len(lines):
        line = lines[start]
        start += 1
        if not line or line.startswith("#"):
            continue
        outline = outlines.get(line[1:]) if line.startswith("*") and line[1:] not in found else None
        rules = _cut_table(lines, start, outline.rules) if outline else None
        if outline is None or rules is None:
            return None
        found[line[1:]] = PrintedTable(line[1:], outline, rules)
        start += len(rules) + sum(map(len, rules.values())) + 1
    return list(found.values()) if found.keys() == outlines.keys() else None


def _cut_table(lines: list[str], start: int, counts: Mapping[str, tuple[int, ...]]) -> _Texts | None:
    names = [line[1:].rsplit(" ", 2)[0] for line in lines[start : start + len(counts)]]
    if len(set(names)) != len(counts) or counts.keys() != set(names):
        return None
    start += len(names)
    rules: _Texts = {}
    for name in names:
        end = start + len(counts[name])
        head = f"-A {name}"
        part = [line for line in lines[start:end] if line.startswith(head)]
        if len(part) != len(counts[name]):
            return None
        rules[name] = [line[len(head) + 1 :] for line in part]
        start = end
    return rules if lines[start : start + 1] == ["COMMIT"] else None


class _Question(NamedTuple):
    """What the tool is asked for: one rule, or all of a chain, before which it prints one line."""

    chain: str
    rules: range
    whole: bool = False

    @property
    def words(self) -> str:
        return f"-S {self.chain}" if self.whole else f"-S {self.chain} {self.rules[0] + 1}"

    @property
    def lines(self) -> int:
        """How many lines are to be printed, if no rule has more than one."""
        return len(self.rules) + self.whole

    def split(self) -> list[_Question]:
        """A question for each rule."""
        return [_Question(self.chain, range(rule, rule + 1)) for rule in self.rules]


def _ask_own(family: int, table: str, outline: Outline) -> PrintedTable:
    questions = [_Question(chain, range(len(outline.rules[chain])), whole=True) for chain in outline.ours]
    for hook, jumps in outline.layout.jumps.items():
        questions += (_Question(hook, range(rule, rule + 1)) for rule in jumps)
    found = PrintedTable(table, outline, {chain: [None] * len(rules) for chain, rules in outline.rules.items()})
    for place, text in _ask(family, table, questions, iter(range(_MOST_QUESTIONS)), "").items():
        found.texts[place.chain][place.before] = text
    return found


def _ask(
    family: int, table: str, questions: Sequence[_Question], turns: Iterator[int], otherwise: str | None = None
) -> dict[Place, str]:
    """What is printed of some rules. Where there are more lines than there should be, each half is asked for by itself;
    of one rule all that is printed is the rule. If that takes too many turns, they are said to be something else.
    Raises KernelError, also if there is nothing else to be said."""
    if not questions:
        return {}
    if next(turns, None) is None:
        if otherwise is None:
            raise KernelError(f"read the table {table}", "too many rules of others hold ends of lines")
        return {Place(each.chain, rule): otherwise for each in questions for rule in each.rules}
    printed = restore.ask_rules(family, table, (each.words for each in questions))
    lines = printed.split("\n")[:-1]
    if len(lines) == sum(each.lines for each in questions):
        return dict(_assign(questions, lines))
    if len(questions) == 1 and not questions[0].whole:
        return dict(_assign(questions, [show_line(printed.removesuffix("\n"))]))
    parts = questions[0].split() if len(questions) == 1 else questions
    middle = (len(parts) + 1) // 2
    first = _ask(family, table, parts[:middle], turns, otherwise)
    return first | _ask(family, table, parts[middle:], turns, otherwise)


def _assign(questions: Iterable[_Question], lines: Iterable[str]) -> Iterator[tuple[Place, str]]:
    answers = iter(lines)
    for each in questions:
        if each.whole:
            next(answers)
        for rule in each.rules:
            yield Place(each.chain, rule), next(answers)[len(f"-A {each.chain} ") :]
