"""Real Redis: one server a session, one cluster of three a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.l7.redis.servers import Nodes, Server


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


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    running = Nodes(tmp_path_factory.mktemp("cluster"))
    yield running
    running.close()
