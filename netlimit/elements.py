"""Rules of nftables that list several cases in braces, written out: one rule for each case, that means the same.

`ip daddr vmap { 10.1.0.2 : goto web, 10.1.0.3 : accept }` is `ip daddr 10.1.0.2 goto web` and
`ip daddr 10.1.0.3 accept`; `dnat to ip daddr . tcp dport map { 10.1.0.2 . 80 : 10.2.0.2 . 8080 }` is
`ip daddr 10.1.0.2 tcp dport 80 dnat to 10.2.0.2:8080`. Sets of one field stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MOST = 1_000_000
"""A rule that would be more characters stays as it is: who reads it does not understand it then."""
_BRACES = re.compile(r"(?<!!= )(?:(v?map) )?\{([^}]*)\}|(?<!\S)(map) (@\S+)")
_TO = re.compile(r"(?<!\S)((?:[ds]nat|redirect) (?:ip6? )?(?:addr \. port |prefix |interval )?to )(\S*:)?(?=[a-z@])")
"""What stands before the fields of a map that tells what NAT gives; where it tells the port alone, with the address
(`dnat to 10.2.0.2:tcp dport map`)."""


def write_out(rule: str) -> list[str]:
    """The rules of one element each that mean what a rule does. What is quoted must not have braces in it."""
    if "{" not in rule and "map @" not in rule:
        return [rule]
    written, size = [], 0
    for each in _write_out(rule):
        written.append(each)
        size += len(each)
        if size > _MOST:
            return [rule]
    return written


def _write_out(rule: str) -> Iterator[str]:
    for match in _BRACES.finditer(rule):
        if match[1] or match[3] or " . " in match[2]:
            for element in (match[2] or f"{match[4]} : ?").split(","):
                key, _, value = (part.strip() for part in element.partition(" : "))
                before = _put(rule[: match.start()].rstrip(), key.split(" . "))
                if match[1] == "vmap" or not (match[1] or match[3]):
                    written = f"{before} {value}".rstrip()
                else:
                    written = _lead(before, value)
                yield from _write_out(f"{written}{rule[match.end() :]}")
            return
    yield rule


def _put(before: str, values: list[str]) -> str:
    """Each value behind its field."""
    fields = before.rsplit(" . ", len(values) - 1)
    return " ".join(f"{field} {value}" for field, value in zip(fields, values, strict=False))


def _lead(before: str, value: str) -> str:
    """The case before the verdict that a map completes."""
    if (to := _TO.search(before)) is None:
        return f"{before} {value}"
    address, _, port = value.partition(" . ")
    place = address if not port else f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{before[: to.start()]}{before[to.end() :]} {to[1]}{to[2] or ''}{place}"
