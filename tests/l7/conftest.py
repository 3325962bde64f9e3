"""The stores that the suite of algorithms runs over."""

from __future__ import annotations

import pytest

from tests.l7.counting import Counting, MemoryCounting, Subject, Subjects


@pytest.fixture
def counting() -> Counting:
    return MemoryCounting()


@pytest.fixture
def subject(counting: Counting) -> Subjects:
    return lambda limit: Subject(counting, limit)
