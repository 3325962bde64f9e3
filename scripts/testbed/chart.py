"""Draws rates over time for a terminal, with the limit in force at the time as a line in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
TOLERANCE = 1.05  # a bar within 5 % above the limit counts as limited: one sample has a burst's worth of noise


@dataclass(frozen=True)
class Sample:
    """The rate in one stretch of time, and the limit that was set then, in the same unit."""

    rate: float
    limit: float | None = None


def draw(
    samples: Sequence[Sample],
    *,
    every: float,
    unit: str = "packets/s",
    width: int = 80,
    height: int = 14,
    top: float | None = None,
) -> Text:
    """A bar chart `width` characters wide: one column a sample, the newest at the right, older ones drop out.

    every: seconds that a sample stands for. height: rows of bars. top: the value at the upper edge; without it
    a round one above all samples. Bars are green within the limit, red above it and blue where none is set.
    """
    top = top or _round_up(max((max(s.rate, s.limit or 0) for s in samples), default=0) or 1)
    margin = max(len(_number(value)) for value in (top, *(s.limit or 0 for s in samples))) + 2
    columns = width - margin
    shown = samples[-columns:]
    text = Text(no_wrap=True)
    for row in range(height - 1, -1, -1):
        text.append(_label(shown, row, height, top).rjust(margin - 2) + " │", "dim")
        for sample in shown:
            text.append(*_cell(sample, row, height / top))
        text.append("\n")
    text.append("0".rjust(margin - 2) + " └" + "─" * columns + "\n", "dim")
    first = len(samples) - len(shown)
    text.append(" " * margin + _ticks(first, len(shown), every, columns) + "\n", "dim")
    text.append(" " * margin + f"{unit} against seconds", "dim")
    return text


def _cell(sample: Sample, row: int, scale: float) -> tuple[str, str]:
    """The character and the style of one sample in one row (0 is the lowest)."""
    filled = min(max(sample.rate * scale - row, 0), 1)
    colour = _colour(sample)
    if sample.limit is not None and row == _row(sample.limit, scale):
        return "━", "bold yellow" if filled < 1 else f"bold yellow on {colour}"
    return BLOCKS[round(filled * 8)], colour


def _colour(sample: Sample) -> str:
    if sample.limit is None:
        return "blue"
    return "green" if sample.rate <= sample.limit * TOLERANCE else "red"


def _row(value: float, scale: float) -> int:
    """The row that a line at `value` goes through: a bar of just that height ends in it or below."""
    return max(math.ceil(value * scale) - 1, 0)


def _label(samples: Sequence[Sample], row: int, height: int, top: float) -> str:
    limits = {s.limit for s in samples if s.limit is not None and _row(s.limit, height / top) == row}
    if limits:
        return _number(max(limits))
    return _number(top) if row == height - 1 else ""


def _ticks(first: int, count: int, every: float, columns: int) -> str:
    """Whole seconds under their columns, at least ten columns apart."""
    step = max(1, math.ceil(10 * every))
    line = ""
    for column in range(count):
        seconds = (first + column) * every
        label = f"{round(seconds)}"
        begins = round(seconds / step) * step
        if math.isclose(seconds, begins, abs_tol=every / 2 - 1e-9) and len(line) <= column:
            line = line.ljust(column) + label
    return line[:columns]


def _round_up(value: float) -> float:
    """The next of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10 times a power of ten, with a little room above."""
    power: float = 10 ** math.floor(math.log10(value))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12)
    return next(step * power for step in steps if step * power >= value * 1.05)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
