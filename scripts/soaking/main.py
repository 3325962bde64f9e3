"""`scripts/soak [PART]`: the parts, each a command of its own."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from scripts.soaking import exactness, kernel, sequences, upgrade, writers

PARTS = {"kernel": kernel, "sequences": sequences, "writers": writers, "exactness": exactness, "upgrade": upgrade}
"""Each has a first line of its docstring to be listed with, `add_options` and `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the part that is named; `kernel` if none is. Gives the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or (given[0] not in PARTS and given[0] not in ("-h", "--help")):
        given = ["kernel", *given]
    options = _make_parser().parse_args(given)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32)
        print(f"seed {options.seed}", flush=True)
    status: int = options.run(options)
    return status


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parts = parser.add_subparsers(metavar="PART", required=True)
    for name, part in PARTS.items():
        about = (part.__doc__ or "").partition("\n")[0]
        added = parts.add_parser(name, help=about, description=part.__doc__)
        added.add_argument("--seed", type=int, default=None, help="default: another each time, which is printed")
        part.add_options(added)
        added.set_defaults(run=part.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
