"""The table of faults in docs/reliability.md: written from what was seen, and compared with what is seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.faults import Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
HEAD = "| Fault | Limits meanwhile | What is allowed | All is right again after |\n|---|---|---|---|"
HELD = "held"


def check_matrix(rows: list[Row]) -> None:
    """Compare what was seen with the page, or (NETLIMIT_GOLDEN=write) write it there. Times differ from run to run;
    what was hit by a fault, and what was not, must not."""
    text = PAGE.read_text("utf-8")
    begin = text.index(HEAD) if HEAD in text else len(text)
    end = text.find("\n\n", begin) if HEAD in text else len(text)
    if os.environ.get("NETLIMIT_GOLDEN") == "write":
        table = "\n".join([HEAD, *map(write_row, rows)])
        PAGE.write_text(text[:begin] + table + (text[end:] if end > 0 else "\n"), "utf-8")
        return
    told = [line.split(" | ") for line in text[begin:end].splitlines()[2:]]
    assert [line[0].removeprefix("| ") for line in told] == [row.fault.name for row in rows]
    for line, row in zip(told, rows, strict=True):
        assert line[1] != HELD or row.lapse < 0.1 > row.blocked, f"{line[0]}: the page says that limits held, but {row}"


def write_row(row: Row) -> str:
    """One line of the table."""
    return f"| {row.fault.name} | {write_limits(row)} | nothing dropped | {row.repaired:.1f} s |"


def write_limits(row: Row) -> str:
    """What the limits did."""
    said = [f"a limit was missing for {row.lapse:.1f} s"] if row.lapse >= 0.05 else []
    said += [f"a block let {row.blocked} packets pass"] if row.blocked else []
    said += [f"a shaped host was not shaped for {row.unshaped:.1f} s"] if row.unshaped else []
    return "; ".join(said) or HELD
