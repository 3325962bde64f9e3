"""A second copy of our chains, in the tables of iptables-nft: somebody has loaded there what `iptables-save` had saved.

It is nobody's. What nftables holds netlimit neither writes nor removes, and others' rules may have come from the same
file. But the copy goes by our sets and by the same buckets of hashlimit, so that packets are charged twice (where 50 a
second may pass less than one did, measured), and it goes on when rules are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from netlimit.state import CHAIN_PREFIX

_TABLE = re.compile(r"^table (ip6?) (raw|mangle|filter|security) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
HOOKS = "PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"
"""Of these, chains of ours by which packets come have their names."""
_ENTRY = re.compile(rf"^\tchain {CHAIN_PREFIX}(?:{'|'.join(HOOKS)}) \{{$", re.MULTILINE)
_CHAIN = re.compile(rf"^\tchain {CHAIN_PREFIX}\S+ \{{$", re.MULTILINE)
_LED = re.compile(rf"^\t\t.*\b(?:jump|goto) {CHAIN_PREFIX}", re.MULTILINE)
_TOOLS = {"ip": "iptables-nft", "ip6": "ip6tables-nft"}


class Duplicate(NamedTuple):
    """A table of iptables-nft (`ip`, or `ip6`, and its name) with so many chains of ours."""

    family: str
    table: str
    chains: int

    def __str__(self) -> str:
        return f"{self.family} {self.table} ({self.chains} chain{'s' if self.chains > 1 else ''})"

    @property
    def removal(self) -> str:
        """The command that removes these chains, and all lines of the table in which `NL-` stands."""
        return make_removal(_TOOLS[self.family], self.table)


def make_removal(tool: str, table: str) -> str:
    """The command that removes all lines from a table in which `NL-` stands."""
    return f"{tool}-save -t {table} | grep -v {CHAIN_PREFIX} | {tool}-restore"


def find_duplicates(nftables: str) -> Iterator[Duplicate]:
    """The copies in what `nft list ruleset` prints. Chains whose names begin as ours do are some only where one has a
    name of those by which packets come to ours, and something leads there."""
    for family, table, body in _TABLE.findall(nftables):
        if _ENTRY.search(body) and _LED.search(body):
            yield Duplicate(family, table, len(_CHAIN.findall(body)))


def say_duplicates(duplicates: tuple[Duplicate, ...]) -> str:
    """What is wrong."""
    return (
        f"A copy of netlimit's chains is in tables of iptables-nft: {', '.join(map(str, duplicates))}. Somebody has "
        "loaded saved rules there (netfilter-persistent, say). Nobody manages it: beside ours in the legacy tables it "
        "charges packets twice, keeps the rates of before when rules are changed, and may limit on when they are "
        "removed, and after a teardown."
    )


def advise(duplicates: tuple[Duplicate, ...]) -> str:
    """What to do about it."""
    removals = "; ".join(each.removal for each in duplicates)
    return (
        f"To remove it: {removals}. Save without ours then, or it comes back at the next boot: "
        f"iptables-legacy-save | grep -v {CHAIN_PREFIX} (ip6tables-legacy-save for IPv6)."
    )
