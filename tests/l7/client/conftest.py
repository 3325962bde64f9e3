"""One server a module, and callers of both kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.l7.client.callers import Caller, TaskCaller, ThreadCaller
from tests.l7.client.script import Script, Time, serve
from tests.l7.redis.servers import Server

Open = Callable[..., Caller]


@pytest.fixture(scope="module")
def server() -> Iterator[Script]:
    with serve() as script:
        yield script


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("redis"))
    yield running
    running.close()


@pytest.fixture
def script(server: Script) -> Script:
    server.time = Time()
    server.answers.clear()
    server.heard.clear()
    return server


@pytest.fixture(params=[ThreadCaller, TaskCaller], ids=["threads", "tasks"])
def open_caller(request: pytest.FixtureRequest, script: Script) -> Iterator[Open]:
    callers: list[Caller] = []

    def open_one(**options: Any) -> Caller:
        caller: Caller = request.param(script.time, **options)
        callers.append(caller)
        return caller

    yield open_one
    for caller in callers:
        caller.close()
