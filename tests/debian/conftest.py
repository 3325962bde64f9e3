"""The labs of tests/e2e, one a test: links are made and unmade in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.testbed.namespaces import Lab

pytest.register_assert_rewrite("tests.e2e.gateway")

from tests.e2e.gateway import Gateway  # noqa: E402  it says what was marked when it should not be

PATIENCE = 240.0
"""Seconds: an emulated machine takes ten times as long as others."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.e2e.gateway.PATIENCE", PATIENCE)


@pytest.fixture
def lab(root: None) -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture
def gateway(lab: Lab, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway whose controller a test starts when its links are there."""
    gateway = Gateway(lab, tmp_path)
    try:
        yield gateway
    finally:
        gateway.close()
