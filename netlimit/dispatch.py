"""Leading packets to the selectors that speak of them, in few steps however many selectors there are.

Few selectors are asked one after the other. Of many that tell packets apart by a port or by an interface, a tree of
chains is made: of ports it halves the range that is left (16 steps at most), of interfaces it goes by the letters of
the name. A selector hangs where all that is below belongs to it, so that a wide range does not stand in every leaf.

What is asked keeps its order between ranks; of one rank, the order is free. A tree only leads: in its leaves selectors
are asked in full, and a packet that comes there by mistake (a fragment without ports) passes. Chains are named by what
they hold: alike ones are one, and a change rewrites those on the way to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

from netlimit.conditions import may_meet
from netlimit.limits import digest
from netlimit.packet import Side
from netlimit.rules import Selector
from netlimit.state import CHAIN_PREFIX, ChainRule, Enters, Is, Jump, Leaves, Ports, SentPorts, chain_rule

MOST_IN_A_ROW = 8
"""So many selectors are asked one after the other; of more, a tree is made."""
_LAST_PORT = 65535
_NARROW = 16
"""Ranges of fewer ports may stand in every leaf that they reach, so that several ranks can share a tree."""

Rank = tuple[object, ...]


@dataclass(frozen=True)
class Ask:
    """What packets of a selector are asked, as complete rules. The interface is where they enter, or (not `enters`)
    leave. `marks`: it may leave a mark on a packet, which others must not meet. `sent`: the destination ports are those
    that were sent, before NAT led the packet to others."""

    selector: Selector
    enters: bool
    rank: Rank
    rules: tuple[ChainRule, ...]
    marks: bool = False
    sent: bool = False


class _Way(NamedTuple):
    """By what a tree tells packets apart: ports of a protocol at one side, or the interface."""

    kind: Literal["ports", "interface"]
    protocol: str = ""
    side: Side = "dst"
    enters: bool = True
    sent: bool = False


Ways = frozenset[_Way]
_Span = tuple[int, int, int]
"""The first and the last port, and the place in the order of what asks for them."""


@dataclass
class Dispatch:
    """Lines up what is asked, and collects the `chains` of the trees that this takes. `clear` takes a mark away."""

    clear: ChainRule
    chains: dict[str, tuple[ChainRule, ...]] = field(default_factory=dict)
    _roots: dict[tuple[_Way, Ways, tuple[ChainRule, ...]], str] = field(default_factory=dict)

    def line_up(self, asks: Sequence[Ask], ways: Ways = frozenset()) -> list[ChainRule]:
        """The rules that ask all this of a packet, in the order of ranks, by which `asks` are sorted. By `ways` packets
        have been told apart already."""
        rules: list[ChainRule] = []
        marked: list[Ask | None] = []
        for run in _runs(asks, ways):
            row, trees = _part(run, ways)
            for ask in row:
                if ask.marks and any(other is None or _may_meet(ask, other) for other in marked):
                    rules.append(self.clear)
                    marked = []
                rules += ask.rules
                marked += [ask] if ask.marks else []
            for way, part in trees.items():
                marks = any(ask.marks for ask in part)
                if marks and marked:
                    rules.append(self.clear)
                    marked = []
                rules.append(self._lead(way, part, ways | {way}))
                marked += [None] if marks else []
        return rules

    def gather(self, rules: Sequence[ChainRule]) -> str:
        """The chain that holds these rules."""
        name = f"{CHAIN_PREFIX}T{digest(chr(10).join(rule.text for rule in rules))}"
        self.chains[name] = tuple(rules)
        return name

    def _lead(self, way: _Way, asks: list[Ask], ways: Ways) -> ChainRule:
        """The rule that leads to a tree."""
        about = way, ways, tuple(ask.rules[0] for ask in asks)  # several hooks ask the same
        root = self._roots.get(about)
        if root is None and way.kind == "ports":
            spans = [(low, high, place) for place, ask in enumerate(asks) for low, high in _ranges(ask, way)]
            root = self._halve(way, asks, spans, 0, _LAST_PORT, ways)
        elif root is None:
            root = self._spell(way, asks, ways)
        self._roots[about] = root
        return chain_rule(Jump(root), *([Is(way.protocol)] if way.protocol else []))

    def _halve(self, way: _Way, asks: list[Ask], spans: list[_Span], low: int, high: int, ways: Ways) -> str:
        """The chain for packets with ports from `low` to `high`, which those in `spans` ask for."""
        one_rank = asks[0].rank == asks[-1].rank
        here, below = _take_whole(spans, low, high, one_rank)
        halves = low, (low + high) // 2, high
        while not here and len(_places(below)) > MOST_IN_A_ROW:
            lower, upper = _split(below, halves[1])
            if lower and upper:
                break
            halves = _narrow(halves, bool(lower))
            here, below = _take_whole(below, halves[0], halves[2], one_rank)
        rules = self._line_up_some(asks, _places(here), ways)
        if len(_places(below)) <= MOST_IN_A_ROW:
            return self.gather(rules + self._line_up_some(asks, _places(below), ways))
        low, middle, high = halves
        lower, upper = _split(below, middle)
        if lower:
            chain = self._halve(way, asks, lower, low, middle, ways)
            ports = SentPorts(low, middle) if way.sent else Ports(((low, middle),), way.side)
            rules.append(chain_rule(Jump(chain, goto=True), Is(way.protocol), ports))
        if upper:
            rules.append(chain_rule(Jump(self._halve(way, asks, upper, middle + 1, high, ways), goto=True)))
        return self.gather(rules)

    def _spell(self, way: _Way, asks: list[Ask], ways: Ways) -> str:
        """The chain for packets of interfaces whose names begin alike."""
        names = sorted({_interface(ask) for ask in asks})
        if len(asks) <= MOST_IN_A_ROW or len(names) == 1:
            return self.gather(self.line_up(asks, ways))
        known = _shared(names[0], names[-1])
        rules: list[ChainRule] = []
        by_letter = groupby(sorted(asks, key=_interface), key=lambda ask: _interface(ask)[: known + 1])
        for start, some in ((start, list(some)) for start, some in by_letter):
            alone = _interface(some[0]) == _interface(some[-1])
            name = _interface(some[0]) if alone else f"{start}+"
            chain = self._spell(way, some, ways)
            rules.append(chain_rule(Jump(chain, goto=True), Enters(name) if way.enters else Leaves(name)))
        return self.gather(rules)

    def _line_up_some(self, asks: list[Ask], places: list[int], ways: Ways) -> list[ChainRule]:
        """As `line_up`, and nothing of it is left behind for what follows."""
        some = [asks[place] for place in places]
        marks = [self.clear] if any(ask.marks for ask in some) else []
        return [*self.line_up(some, ways), *marks]


def _may_meet(one: Ask, other: Ask) -> bool:
    return may_meet(one.selector, other.selector, one.sent == other.sent)


def _runs(asks: Iterable[Ask], ways: Ways) -> Iterator[list[Ask]]:
    """Asks of one rank, or of several where one tree a protocol can keep their order."""
    run: list[Ask] = []
    known: dict[str, _Way] | None = None
    for _, group in groupby(asks, key=lambda ask: ask.rank):
        rank = list(group)
        found = _find_trees(rank, ways)
        if (
            run
            and known is not None
            and found is not None
            and all(known.get(p, way) == way for p, way in found.items())
        ):
            run += rank
            known |= found
        else:
            yield run
            run, known = rank, found
    yield run


def _find_trees(asks: list[Ask], ways: Ways) -> dict[str, _Way] | None:
    """The one way of each protocol by which all of them can be told apart, by few ports each; None if there is none."""
    found: dict[str, _Way] = {}
    for ask in asks:
        way = _first_way(ask, ways)
        if way is None or way.kind != "ports" or found.setdefault(way.protocol, way) != way:
            return None
        if any(high - low >= _NARROW for low, high in _ranges(ask, way)):
            return None
    return found


def _first_way(ask: Ask, ways: Ways) -> _Way | None:
    return next((way for way in _ways(ask) if way not in ways), None)


def _part(asks: list[Ask], ways: Ways) -> tuple[list[Ask], dict[_Way, list[Ask]]]:
    """Of a run, what is asked one after the other, and of what trees are made."""
    if len(asks) <= MOST_IN_A_ROW:
        return asks, {}
    parts: dict[_Way, list[Ask]] = {}
    for ask in asks:
        way = _first_way(ask, ways)
        if way is not None:
            parts.setdefault(way, []).append(ask)
    trees = {way: part for way, part in parts.items() if len(part) > MOST_IN_A_ROW}
    led = {id(ask) for part in trees.values() for ask in part}
    return [ask for ask in asks if id(ask) not in led], trees


def _ways(ask: Ask) -> Iterator[_Way]:
    selector = ask.selector
    if selector.ports:
        yield _Way("ports", selector.protocol.value, "dst", sent=ask.sent)
    if selector.source_ports:
        yield _Way("ports", selector.protocol.value, "src")
    if selector.interface:
        yield _Way("interface", enters=ask.enters)


def _ranges(ask: Ask, way: _Way) -> tuple[tuple[int, int], ...]:
    return ask.selector.ports if way.side == "dst" else ask.selector.source_ports


def _interface(ask: Ask) -> str:
    return ask.selector.interface or ""


def _take_whole(spans: list[_Span], low: int, high: int, one_rank: bool) -> tuple[list[_Span], list[_Span]]:
    """Those that hold all ports from `low` to `high`, and the others. Of more than one rank all or none hang here, lest
    what is below should come before."""
    here = [span for span in spans if span[0] <= low and high <= span[1]]
    if not here or len(here) == len(spans):
        return here, spans[len(here) :]
    return (here, [span for span in spans if not (span[0] <= low and high <= span[1])]) if one_rank else ([], spans)


def _split(spans: list[_Span], middle: int) -> tuple[list[_Span], list[_Span]]:
    """Those that reach ports up to the middle, and those that reach ports above it."""
    return [span for span in spans if span[0] <= middle], [span for span in spans if span[1] > middle]


def _narrow(halves: tuple[int, int, int], lower: bool) -> tuple[int, int, int]:
    low, middle, high = halves
    low, high = (low, middle) if lower else (middle + 1, high)
    return low, (low + high) // 2, high


def _places(spans: Iterable[_Span]) -> list[int]:
    """In the order in which they are asked, each once."""
    return sorted({place for _, _, place in spans})


def _shared(one: str, other: str) -> int:
    """How many letters two names begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
