"""A database server that has stopped, not gone: its kernel goes on answering for it, so nothing but time tells."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import connect, get, serve, until
from tests.databases import Postgres

MOST_SECONDS = 60.0
"""In which whoever asks must have heard something: without a bound, nobody would before the server goes on."""


@contextmanager
def stopped(server: Postgres) -> Iterator[None]:
    assert server.process is not None
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    pids = [server.process.pid, *map(int, children)]
    try:
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # one that served a connection which has ended since
        os.kill(pid, number)


@pytest.mark.parametrize("database", ["postgres"])
def test_everybody_hears_that_it_does_not_answer(settings: Settings, postgres: Postgres) -> None:
    store = Store(settings.database_url, silence=3.0)
    with serve(settings, store) as url, connect(url, "admin") as client, ThreadPoolExecutor(20) as pool:
        assert client.get("/rules").status_code == 200
        with stopped(postgres):
            asked = [pool.submit(client.get, "/rules", timeout=MOST_SECONDS) for _ in range(20)]
            answers = [each.result() for each in asked]
            told = {each.status_code for each in answers}
            assert 503 in told
            assert told <= {429, 503}  # or that those of the same token before have taken too long
            assert all("Retry-After" in each.headers for each in answers)
            assert get(f"{url}/healthz").status_code == 200
        until(lambda: _is_served(client))
    store.close()


def _is_served(client: httpx.Client) -> bool:
    return client.get("/rules").status_code == 200
