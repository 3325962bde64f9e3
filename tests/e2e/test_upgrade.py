"""A gateway that holds what an older netlimit put there is brought to this one under traffic, and nobody notices."""

from __future__ import annotations

from pathlib import Path

from scripts.soaking.upgrade import upgrade_recorded


def test_nobody_notices_an_upgrade(root: None) -> None:
    """`scripts/soak upgrade --before CHECKOUT --record tests/e2e/former` wrote down what the older one held."""
    passage = upgrade_recorded(Path(__file__).with_name("former"))
    assert passage.clean, str(passage)
