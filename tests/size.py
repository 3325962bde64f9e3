"""How much is tried of what tests draw at random or go through: some of it, or all with `scripts/test --long`."""

from __future__ import annotations

import os

LONG = os.environ.get("TESTS_SIZE") == "long"


def choose(usual: int, long: int) -> int:
    """How many of something are tried."""
    return long if LONG else usual
