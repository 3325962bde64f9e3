"""Real Redis: one server a session, one cluster of three a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.l7.redis.servers import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("redis"))
    yield running
    running.close()
