"""`scripts/bench [NAME …]`: runs benchmarks and prints a table each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks import accuracy, before, bulk, drift, forwarding, latency, limiter, shaping
from scripts.benchmarks.figures import Figure, show

BENCHMARKS: dict[str, Callable[[], list[Figure]]] = {
    "forwarding": forwarding.measure,
    "accuracy": accuracy.measure,
    "bulk": bulk.measure,
    "latency": latency.measure,
    "drift": drift.measure,
    "shaping": shaping.measure,
    **{f"limiter-{name}": part for name, part in limiter.PARTS.items()},
}
GROUPS = {"limiter": [f"limiter-{name}" for name in limiter.PARTS]}
"""Several by one name."""


def main() -> None:
    """Run what is named, or all."""
    parser = argparse.ArgumentParser(description="Measure netlimit; the kernel's part in namespaces of its own.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*BENCHMARKS, *GROUPS]))
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="what forwarding costs here by what it costs in another checkout",
    )
    if other := parser.parse_args().before:
        sys.exit(_compare_with(other.resolve()))
    given = parser.parse_args().names or list(BENCHMARKS)
    names = [name for each in given for name in GROUPS.get(each, [each])]
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join([*BENCHMARKS, *GROUPS])}")
    if os.geteuid() != 0 and not set(names) <= set(GROUPS["limiter"]):
        sys.exit("scripts/bench: run it as root: it makes network namespaces.")
    missed = 0
    for name in names:
        figures = BENCHMARKS[name]()
        show(name, figures)
        missed += sum(figure.met is False for figure in figures)
    sys.exit(1 if missed else 0)


def _compare_with(other: Path) -> int:
    figures = before.compare_with(other)
    show(f"here by {other}", figures)
    return 1 if any(figure.met is False for figure in figures) else 0


if __name__ == "__main__":
    main()
