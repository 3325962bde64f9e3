"""Sixty-four clients write at once, over each database, through the real processes: nothing that was said is lost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.soaking.writers import soak
from tests.databases import DATABASES

OVER = DATABASES
SECONDS, WRITERS = 5, 64


@pytest.fixture
def place(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, str]:
    """The settings that name the database, and where the controller keeps its copy: not where the host has one."""
    if database == "sqlite":
        return {}
    copy = {"NETLIMIT_STATE_DIRECTORY": str(tmp_path / "controller")}
    return copy | {"NETLIMIT_DATABASE_URL": request.getfixturevalue("postgres_url")}


def test_nothing_is_lost_among_many_writers(place: Mapping[str, str]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    outcome = soak(place, SECONDS, WRITERS, seed)
    print(f"seed {seed}: {outcome}")
    assert not outcome.wrong, f"seed {seed}\n{outcome}"
    assert {status // 100 for writer in outcome.writers for status in writer.answers} <= {2, 4}
