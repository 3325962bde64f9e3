"""The marks that iptables writes and asks for, from the lines of `iptables-save`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from netlimit.marks import EVERY, UNKNOWN, Bits, Read, Use, Write

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_ONE = r"(0x[0-9a-fA-F]{1,16}|[0-9]{1,20})"
_NUMBER = rf"{_ONE}(?:/{_ONE})?"
_TARGET = re.compile(r".* -[jg] (\S+)(.*)$", re.DOTALL)
"""The last there is: what stands before may be a name that somebody has given."""
_SET = re.compile(rf"--(set-xmark|set-mark|tproxy-mark|or-mark|and-mark|xor-mark) {_NUMBER}")
_MATCH = re.compile(rf" -m (mark|connmark)(?: !)? --mark {_NUMBER}")
_MASKS = re.compile(rf"--(nfmask|ctmask) {_ONE}")
_SHOWN = 120


class Marking(NamedTuple):
    """The rules of others that speak of marks, each behind its table (`mangle -A CHAIN …`); and the chains (`nat -A
    CHAIN`) which a packet to be rejected passes before filter answers, each with the hooks in which it does."""

    lines: tuple[str, ...]
    between: Mapping[str, frozenset[str]]


NO_MARKING = Marking((), {})


def read_marks(lines: Iterable[str], between: Mapping[str, frozenset[str]], tool: str) -> Iterator[Use]:
    """Who uses marks, by the fields of a `Marking`."""
    for line in lines:
        if "ark" in line or "MARK" in line or "TPROXY" in line:
            here = between.get(" ".join(line.split(" ", 3)[:3]), frozenset())
            for use in _read(line, tool):
                yield replace(use, between=here) if isinstance(use, Write) else use


def _read(line: str, tool: str) -> Iterator[Use]:
    rule = line.partition(" ")[2]
    owner = f"The {tool} rule '{rule[:_SHOWN]}'"
    bare = _QUOTED.sub('""', rule)
    for kind, value, mask in _MATCH.findall(bare):
        under = _parse(mask) if mask else EVERY
        claims = under if under != EVERY else 0
        yield Read(owner, _parse(value) & under, kind == "connmark", claims=claims)
    found = _TARGET.match(bare)
    if found is None:
        return
    target, words = found.groups()
    late = bare.startswith("-A POSTROUTING")
    if target in ("MARK", "TPROXY"):
        yield _say_write(owner, words, False, late)
    elif target == "CONNMARK":
        yield _say_connection(owner, words, late)
    elif target == "HMARK" or (target == "SET" and "--map-mark" in words):
        yield Write(owner, UNKNOWN, late=late)
    if "--restore-skmark" in bare:
        yield Write(owner, UNKNOWN, late=late)


def _say_write(owner: str, words: str, connection: bool, late: bool) -> Write:
    found = _SET.search(words)
    if found is None:
        return Write(owner, UNKNOWN, connection, late)
    kind, value, mask = found[1], _parse(found[2]), _parse(found[3]) if found[3] else None
    if kind == "and-mark":
        return _write(owner, 0, EVERY & ~value, connection, late)
    if kind in ("or-mark", "xor-mark"):
        return _write(owner, value, value, connection, late)
    if mask is None:
        mask = EVERY
    return _write(owner, value, mask | value, connection, late)


def _write(owner: str, value: int, mask: int, connection: bool, late: bool) -> Write:
    kept = EVERY & ~mask
    own = Bits(value, connection=kept) if connection else Bits(value, packet=kept)
    return Write(owner, own, connection, late, claims=mask if mask != EVERY else 0)


def _say_connection(owner: str, words: str, late: bool) -> Write:
    masks = {name: _parse(value) for name, value in _MASKS.findall(words)}
    here, there = masks.get("nfmask", EVERY), masks.get("ctmask", EVERY)
    if "shift" in words:
        saves = "--save-mark" in words or "--set" in words
        return Write(owner, UNKNOWN if saves else replace(UNKNOWN, packet=EVERY & ~here), saves, late)
    if "--save-mark" in words:
        return Write(owner, Bits(packet=here, connection=EVERY & ~there), True, late)
    if "--restore-mark" in words:
        return Write(owner, Bits(packet=EVERY & ~here, connection=there), False, late)
    return _say_write(owner, words, True, late)


def _parse(text: str) -> int:
    return int(text, 16 if text.startswith("0x") else 10) & EVERY
