"""docs/evasion.md: what became of each kind of packets under each kind of rules, written from what was seen."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.evasion.headers import PORT

PAGE = Path(__file__).resolve().parents[3] / "docs" / "evasion.md"

OWN_WAYS = ("to the gateway", "from the gateway")


@dataclass(frozen=True)
class Column:
    """A kind of rules. `tracks`: it is about connections. `sent` datagrams of each kind are sent, of which `burst`
    may pass, or so many as have `burst_bytes`."""

    name: str
    fields: dict[str, object] = field(default_factory=dict)
    tracks: bool = False
    sent: int = 12
    burst: int = 0
    burst_bytes: int = 0

    def most(self, size: int) -> int:
        """How many datagrams of a size (bytes, without what is charged for their headers) may pass, refills meanwhile
        included."""
        return self.burst + 2 * self.burst_bytes // size


COLUMNS = (
    Column("no rule"),
    Column("block", {"action": "block"}),
    Column("packets", {"rate": "1 packets/min", "burst": 2, "per": "host"}, burst=3),
    Column("bits", {"rate": "12 kbit/s", "per": "host"}, sent=120, burst=1, burst_bytes=1500),
    Column("block, ports", {"action": "block", "ports": [PORT]}),
    Column("packets, ports", {"rate": "1 packets/min", "burst": 2, "per": "host", "ports": [PORT]}, burst=3),
    Column("connections", {"rate": "1 connections/min", "burst": 2, "per": "host"}, tracks=True, burst=3),
)


@dataclass(frozen=True)
class Cell:
    """What passed on each way on which such packets arrive without rules."""

    column: str
    passed: dict[str, int]
    control: dict[str, int]
    excuse: str
    spared: str
    most: int
    sent: int

    @property
    def fault(self) -> bool:
        """Whether something passed that should not have, or was held that should not have been."""
        spared = bool(self.spared) and self._over.keys() <= {*OWN_WAYS}
        return bool(self._over) and not (self.excuse or spared)

    @property
    def _over(self) -> dict[str, int]:
        """The ways on which more passed than may."""
        return {way: number for way, number in self.passed.items() if number > self.most}

    def __str__(self) -> str:
        if not self.passed:
            return "-"
        if not self._over:
            return "held"
        if not self.fault:
            return self.excuse or f"held; {self.spared} is spared"
        ways = ", ".join(f"{way} {number} of {self.sent}" for way, number in self._over.items())
        return f"**passes** ({self.column}: {ways})"


@dataclass(frozen=True)
class Row:
    """One kind of packets."""

    name: str
    cells: tuple[Cell, ...]

    def __str__(self) -> str:
        arrives = [way for way, number in self.cells[0].control.items() if number] if self.cells else []
        where = "nowhere" if not arrives else ", ".join(arrives)
        return f"| {self.name} | {where} | {' | '.join(map(str, self.cells))} |"


def check_page(family: int, rows: list[Row]) -> None:
    """Compare with the page, or (NETLIMIT_GOLDEN=write) write it there."""
    head = f"| IPv{family} | arrives | {' | '.join(column.name for column in COLUMNS[1:])} |"
    table = "\n".join([head, "|---" * (len(COLUMNS) + 1) + "|", *map(str, rows)])
    text = PAGE.read_text("utf-8")
    begin = text.index(head)
    end = text.find("\n\n", begin)
    end = len(text) if end < 0 else end
    if os.environ.get("NETLIMIT_GOLDEN") == "write":
        PAGE.write_text(text[:begin] + table + (text[end:] or "\n"), "utf-8")
        return
    assert text[begin:end].strip() == table
