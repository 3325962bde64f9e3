"""The marks that nftables writes and asks for, from what `nft -j list ruleset` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from netlimit.marks import EVERY, UNKNOWN, Bits, Read, Use, Write

_BEHIND_US = ("postrouting", "egress")
_BETWEEN = ("input", "forward", "output")
_FAMILIES = {"ip": ("",), "ip6": ("6",), "inet": ("", "6")}
"""Those of nftables in which packets pass the hooks of ours."""
_MANGLE, _FILTER = -150, 0
_EXTENSIONS = ("MARK", "CONNMARK", "TPROXY", "SET", "HMARK")
_KEEPS = Bits(packet=EVERY)
_KEEPS_CONNECTION = Bits(connection=EVERY)
Json = Any
_Where = tuple[str, str]


def read_marks(ruleset: Mapping[str, Json]) -> tuple[list[Use], dict[str, dict[str, frozenset[str]]]]:
    """Who uses marks; and, of each address family that has rules of iptables-nft about them, which only it can tell,
    their chains (`mangle -A INPUT`) with the hooks in which a packet to be rejected passes them."""
    objects = [item for item in ruleset.get("nftables", []) if isinstance(item, dict)]
    tables: dict[_Where, _Table] = {}
    for item in objects:
        for kind, held in item.items():
            if isinstance(held, dict) and "table" in held:
                where = str(held.get("family")), str(held["table"])
                tables.setdefault(where, _Table(*where)).add(kind, held)
    uses = [use for table in tables.values() for use in table.find_uses()]
    extended: dict[str, dict[str, frozenset[str]]] = {}
    for table in tables.values():
        if table.extended:
            between = {f"{table.name} -A {chain}": table.find_between(chain) for chain in table.extended}
            extended.setdefault(table.family, {}).update(between)
    return uses, extended


def count_rules(ruleset: Mapping[str, Json], family: str) -> dict[str, int]:
    """How many rules each table of an address family has."""
    counts: Counter[str] = Counter()
    for item in ruleset.get("nftables", []):
        for kind, held in item.items() if isinstance(item, dict) else ():
            if kind in ("table", "rule") and isinstance(held, dict) and held.get("family") == family:
                counts[str(held.get("name" if kind == "table" else "table"))] += kind == "rule"
    return dict(counts)


@dataclass
class _Table:
    """One table: its base chains with their hook and priority, its rules by chain, and its sets and maps."""

    family: str
    name: str
    hooks: dict[str, tuple[str, int]] = field(default_factory=dict)
    rules: list[tuple[str, list[Json]]] = field(default_factory=list)
    held: dict[str, Json] = field(default_factory=dict)
    extended: set[str] = field(default_factory=set)
    _given: dict[str, Bits] = field(default_factory=dict)
    _asked: dict[tuple[str, int | None, bool], tuple[int, bool]] = field(default_factory=dict)

    def add(self, kind: str, item: Mapping[str, Json]) -> None:
        if kind == "chain" and "hook" in item:
            priority = item.get("prio")
            self.hooks[str(item.get("name"))] = str(item["hook"]), priority if isinstance(priority, int) else _MANGLE
        elif kind == "rule" and isinstance(item.get("expr"), list):
            self.rules.append((str(item.get("chain")), item["expr"]))
        elif kind in ("map", "set"):
            self.held[str(item.get("name"))] = item

    def find_uses(self) -> Iterator[Use]:
        for chain, statements in self.rules:
            owner = f"A rule of nftables (table {self.family} {self.name}, chain {chain})"
            for statement in statements:
                yield from self._read(owner, chain, statement)

    def _read(self, owner: str, chain: str, statement: Json) -> Iterator[Use]:
        if not isinstance(statement, dict):
            return
        extension = statement.get("xt", {"name": None})
        if not isinstance(extension, dict) or extension.get("name") in _EXTENSIONS or "name" not in extension:
            self.extended.add(chain)
        change = statement.get("mangle")
        if isinstance(change, dict) and _is_mark(change.get("key")):
            yield self._write(owner, chain, change)
        match = statement.get("match")
        if isinstance(match, dict):
            yield from self._ask(owner, match.get("left"), match.get("right"))
        for inner in ("vmap", "map"):
            look = statement.get(inner)
            if isinstance(look, dict) and "key" in look:
                yield from self._ask(owner, look["key"], look.get("data"), keyed=True)
        if isinstance(change, dict):
            yield from self._ask_inside(owner, change.get("value"))

    def _ask_inside(self, owner: str, expression: Json) -> Iterator[Use]:
        """A map that is asked with a mark as its key."""
        for look in _find_all(expression, "map"):
            if isinstance(look, dict) and "key" in look:
                yield from self._ask(owner, look["key"], look.get("data"), keyed=True)

    # -- writing

    def _write(self, owner: str, chain: str, change: Mapping[str, Json]) -> Write:
        value = self._evaluate(change.get("value"))
        hooks = list(self._hooks_of(chain))
        late = bool(hooks) and all(hook in _BEHIND_US for hook, _ in hooks)
        connection = _mark_of(change["key"]) == "connection"
        claims = EVERY & ~value.packet if value.packet and value.sure else 0
        return Write(owner, value, connection, late, self.find_between(chain), 0 if claims == EVERY else claims)

    def find_between(self, chain: str) -> frozenset[str]:
        """The hooks in which a packet to be rejected may pass a chain. Of equal priorities, those who registered later
        come first: the order is another after each start, and never relied upon."""
        found = (hook for hook, priority in self._hooks_of(chain) if _MANGLE <= priority <= _FILTER)
        families = _FAMILIES.get(self.family, ())
        return frozenset(f"{hook.upper()}{family}" for hook in found if hook in _BETWEEN for family in families)

    def _hooks_of(self, chain: str) -> Iterator[tuple[str, int]]:
        """The hooks from which packets come to a chain."""
        reached, new = set[str](), {chain}
        while new:
            reached |= new
            new = set[str]().union(*(self._callers.get(name, ()) for name in new)) - reached
        yield from (self.hooks[name] for name in reached if name in self.hooks)

    @cached_property
    def _callers(self) -> Mapping[str, set[str]]:
        """The chains that lead to a chain, by its name; each set or map is looked through once."""
        callers: dict[str, set[str]] = {}
        led = {name: set(_find_targets(item)) for name, item in self.held.items()}
        for chain, statements in self.rules:
            targets = set(_find_targets(statements))
            for name in _find_strings(statements):
                targets |= led.get(name[1:], set()) if name.startswith("@") else set()
            for target in targets:
                callers.setdefault(target, set()).add(chain)
        return callers

    def _evaluate(self, expression: Json, depth: int = 20) -> Bits:
        """The bits that an expression can have."""
        number = _number(expression)
        if number is not None:
            return Bits(number & EVERY)
        if not isinstance(expression, dict) or len(expression) != 1 or not depth:
            return UNKNOWN
        ((kind, inside),) = expression.items()
        if kind == "meta" and _mark_of(expression) == "packet":
            return _KEEPS
        if kind == "ct" and _mark_of(expression) == "connection":
            return _KEEPS_CONNECTION
        if kind in ("|", "^", "&", "<<", ">>") and isinstance(inside, list) and len(inside) >= 2:
            parts = [self._evaluate(each, depth - 1) for each in inside]
            for part, raw in zip(parts[1:], inside[1:], strict=True):
                parts[0] = _combine(kind, parts[0], part, _number(raw))
            return parts[0]
        if kind == "map" and isinstance(inside, dict):
            return self._look_up(inside.get("data"), depth - 1)
        if kind in ("numgen", "jhash", "symhash") and isinstance(inside, dict):
            most, offset = _number(inside.get("mod")), _number(inside.get("offset", 0))
            return UNKNOWN if most is None or offset is None else Bits(_up_to(offset + (most & EVERY) - 1) & EVERY)
        return UNKNOWN

    def _look_up(self, data: Json, depth: int) -> Bits:
        """What a map can give. One that packets fill gives what cannot be foreseen."""
        if isinstance(data, str):
            name = data.removeprefix("@")
            if name not in self._given:
                named = self.held.get(name, {})
                found = _union(self._evaluate(value, depth) for _, value in _pairs(named.get("elem", [])))
                self._given[name] = found | UNKNOWN if "dynamic" in _words(named.get("flags")) or not named else found
            return self._given[name]
        return _union(self._evaluate(value, depth) for _, value in _pairs(_items(data)))

    # -- asking

    def _ask(self, owner: str, left: Json, right: Json, keyed: bool = False) -> Iterator[Read]:
        """Who compares a mark, alone or beside something else, with what."""
        place = None
        if isinstance(left, dict) and isinstance(left.get("concat"), list):
            places = [at for at, part in enumerate(left["concat"]) if _find_mark(part)]
            if not places:
                return
            place, left = places[0], left["concat"][places[0]]
        which = _find_mark(left)
        if which is None:
            return
        mask = _mask_of(left)
        bits, sure = self._asked_for(right, place, keyed)
        claims = mask if mask != EVERY else 0
        yield Read(owner, bits & mask, which == "connection", sure and mask is not None, claims)

    def _asked_for(self, right: Json, place: int | None, keyed: bool) -> tuple[int, bool]:
        if not isinstance(right, str) or not right.startswith("@"):
            return self._add_up(right, place, keyed)
        about = right, place, keyed
        if about not in self._asked:
            named = self.held.get(right[1:], {})
            bits, sure = self._add_up({"set": named.get("elem", [])}, place, keyed)
            # What packets fill holds tomorrow what nobody foresees.
            self._asked[about] = (bits, sure) if "dynamic" not in _words(named.get("flags")) else (EVERY, False)
        return self._asked[about]

    def _add_up(self, right: Json, place: int | None, keyed: bool) -> tuple[int, bool]:
        bits, sure = 0, True
        for item in _items(right):
            value = item[0] if keyed and isinstance(item, list) and len(item) == 2 else item
            value = (
                value["elem"].get("val") if isinstance(value, dict) and isinstance(value.get("elem"), dict) else value
            )
            if place is not None and isinstance(value, dict) and isinstance(value.get("concat"), list):
                value = value["concat"][place] if place < len(value["concat"]) else None
            found = _asked_bits(value)
            bits, sure = (bits | found, sure) if found is not None else (EVERY, False)
        return bits, sure


def _combine(kind: str, left: Bits, right: Bits, constant: int | None) -> Bits:
    if kind in ("|", "^"):
        return left | right
    if kind == "&":
        if constant is not None:
            return left.under(constant)
        known = right.constant if right.sure and not (right.packet or right.connection) else EVERY
        return left.under(known) if known != EVERY else Bits(left.constant | left.packet | left.connection, sure=False)
    if constant is not None and not (left.packet or left.connection) and left.sure:
        return Bits((left.constant << constant if kind == "<<" else left.constant >> constant) & EVERY)
    return UNKNOWN


def _union(values: Iterable[Bits]) -> Bits:
    found = Bits()
    for value in values:
        found |= value
    return found


def _asked_bits(value: Json) -> int | None:
    number = _number(value)
    if number is not None:
        return number & EVERY
    if isinstance(value, dict) and isinstance(value.get("range"), list) and len(value["range"]) == 2:
        top = _number(value["range"][1])
        return None if top is None else _up_to(top & EVERY)
    if isinstance(value, dict) and isinstance(value.get("prefix"), dict):
        return _number(value["prefix"].get("addr"))
    if isinstance(value, list) or value == "*":
        return 0 if value == "*" else None
    return None


def _mask_of(left: Json) -> int:
    """The mask under which a mark is compared."""
    if isinstance(left, dict) and isinstance(left.get("&"), list):
        numbers = [number for number in map(_number, left["&"]) if number is not None]
        return numbers[0] & EVERY if numbers else EVERY
    return EVERY


def _find_mark(expression: Json) -> str | None:
    """Whose mark is in an expression, if it is in one."""
    if _is_mark(expression):
        return _mark_of(expression)
    if isinstance(expression, dict):
        for kind in ("&", "|", "^", "<<", ">>"):
            for part in expression.get(kind, []) if isinstance(expression.get(kind), list) else []:
                found = _find_mark(part)
                if found:
                    return found
    return None


def _is_mark(expression: Json) -> bool:
    return _mark_of(expression) is not None


def _mark_of(expression: Json) -> str | None:
    for kind, whose in (("meta", "packet"), ("ct", "connection")):
        inside = expression.get(kind) if isinstance(expression, dict) else None
        if isinstance(inside, dict) and inside.get("key") == "mark":
            return whose
    return None


def _items(data: Json) -> list[Json]:
    inside = data.get("set", data) if isinstance(data, dict) else data
    return inside if isinstance(inside, list) else [inside]


def _pairs(items: Json) -> Iterator[tuple[Json, Json]]:
    for item in items if isinstance(items, list) else [items]:
        if isinstance(item, list) and len(item) == 2:
            yield item[0], item[1]


def _find_targets(tree: Json) -> Iterator[str]:
    """The chains to which something jumps."""
    verdicts = (verdict for word in ("jump", "goto") for verdict in _find_all(tree, word))
    yield from (str(verdict.get("target")) for verdict in verdicts if isinstance(verdict, dict))


def _words(flags: Json) -> list[Json]:
    return flags if isinstance(flags, list) else [flags]


def _find_all(tree: Json, name: str) -> Iterator[Json]:
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield from (value for key, value in item.items() if key == name)
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _find_strings(tree: Json) -> Iterator[str]:
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _number(value: Json) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return int(value, 0) if isinstance(value, str) else None
    except ValueError:
        return None


def _up_to(top: int) -> int:
    """All bits that a number up to this one can have."""
    return (1 << max(top, 0).bit_length()) - 1
