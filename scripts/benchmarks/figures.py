"""A measured figure, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One line of a result: what, the figure as text, the goal as text, and whether it was met (None: no goal)."""

    what: str
    value: str
    goal: str = ""
    met: bool | None = None


def show(name: str, figures: list[Figure]) -> None:
    """Print a table."""
    table = Table(title=name, title_justify="left")
    for heading in ("what", "measured", "goal", ""):
        table.add_column(heading)
    for figure in figures:
        table.add_row(figure.what, figure.value, figure.goal, {True: "met", False: "MISSED", None: ""}[figure.met])
    Console().print(table)
