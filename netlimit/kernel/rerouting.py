"""Who has the kernel route once more what this host sends: marks that are written at OUTPUT, and routing rules that ask
for them. The route is another then, but what is asked of the packet at OUTPUT is still the device of the first one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from netlimit.detours import follow_rerouted, follow_tables
from netlimit.kernel import iptables_marks
from netlimit.marks import EVERY, UNKNOWN, Bits, Write

_WRITTEN = re.compile(r"(?<!ct )(?:meta )?mark set (.+)")
"""As nft prints it; what stands behind may be more statements."""
_CONSTANT = re.compile(r"(0x[0-9a-f]+)(?= |$)(?! [&|^])")
_MASKED = re.compile(r"(?:meta )?mark (?:and|&) (0x[0-9a-f]+) (?:x?or|[|^]) (0x[0-9a-f]+)")
_RESTORED = re.compile(r"ct mark(?= |$)")


def find_rerouting(ruleset: str, tables: Iterable[Sequence[str]], asked: Collection[tuple[int, int]]) -> Iterator[str]:
    """The rules that give what this host sends a mark for which a routing rule asks: in a ruleset of nftables, and in
    mangle tables of iptables (the rules of each, as it saves them). `asked` are those marks, each with its mask."""
    for rule, value in (*_list_nft(ruleset), *_list_tables(tables)):
        if any(value.may_become(mark, mask) for mark, mask in asked):
            yield rule


def _list_tables(tables: Iterable[Sequence[str]]) -> Iterator[tuple[str, Bits]]:
    for rule in follow_tables(tables, "OUTPUT"):
        for use in iptables_marks.read_marks([f"mangle {rule}"], {}, "iptables"):
            if isinstance(use, Write) and not use.connection:
                yield rule, use.value


def _list_nft(ruleset: str) -> Iterator[tuple[str, Bits]]:
    for rule in follow_rerouted(ruleset):
        if (written := _WRITTEN.search(rule)) is not None:
            yield rule, _read_value(written[1])


def _read_value(text: str) -> Bits:
    if (constant := _CONSTANT.match(text)) is not None:
        return Bits(int(constant[1], 16) & EVERY)
    if (masked := _MASKED.match(text)) is not None:
        return Bits(int(masked[2], 16) & EVERY, packet=int(masked[1], 16) & EVERY)
    return Bits(connection=EVERY) if _RESTORED.match(text) else UNKNOWN
