"""Real Redis: one cluster of three a session; single servers are the fixtures of all tests of the limiter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.l7.redis.servers import Nodes


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    running = Nodes(tmp_path_factory.mktemp("cluster"))
    yield running
    running.close()
