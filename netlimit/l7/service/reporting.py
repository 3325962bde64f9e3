"""What is said of all limits, however many there are: found and written in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from heapq import merge

from netlimit.l7.report import Finding, describe_report, make_report, rank
from netlimit.l7.rules import Rule
from netlimit.l7.service.pieces import in_pieces
from netlimit.l7.usage import Usage


async def find_all(rules: Iterable[Rule], usage: Usage, now: float) -> Iterator[Finding]:
    """What is to be said of each limit, what needs a look first. They are put in order as they are read."""
    return merge(*[make_report(piece, usage, now) async for piece in in_pieces(rules)], key=rank)


async def write_report(findings: Iterable[Finding]) -> bytes:
    """As JSON."""
    texts = [json.dumps(describe_report(piece))[1:-1] async for piece in in_pieces(findings)]
    return b'{"limits": [%s]}' % ", ".join(texts).encode()
