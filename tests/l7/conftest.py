"""The stores that the suite of algorithms runs over, and real Redis: one server a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.l7.counting import Counting, MemoryCounting, Subject, Subjects
from tests.l7.redis.servers import Server


@pytest.fixture
def counting() -> Counting:
    return MemoryCounting()


@pytest.fixture
def subject(counting: Counting) -> Subjects:
    return lambda limit: Subject(counting, limit)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("redis"))
    yield running
    running.close()


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the test's own, to be killed."""
    running = Server(tmp_path_factory.mktemp("redis"))
    yield running
    running.close()
