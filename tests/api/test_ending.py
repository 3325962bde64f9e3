"""The API is told to end while somebody waits for an answer: he gets one that a program can read."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from api.server import GRACE_SECONDS
from netlimit.records import HostStatus
from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import PATIENCE, TOKENS, connect, serve, until
from tests.awake import Awake

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}
Ask = Callable[[httpx.Client], httpx.Response]


@contextmanager
def asking(settings: Settings, store: Store, ask: Ask, comes: Callable[[], object]) -> Iterator[Future[httpx.Response]]:
    """Ask, and have the API end once that has come to it; the answer, which is there when the block begins."""
    with ThreadPoolExecutor() as pool, Awake() as awake:
        with serve(settings, store) as url:
            client = connect(url, "admin")
            answer = pool.submit(ask, client)
            until(lambda: bool(comes()))
        yield answer
        client.close()
    assert awake.seconds < GRACE_SECONDS, "nobody is kept until the grace has passed"


def test_who_waits_for_the_kernel_hears_what_is_known(settings: Settings, store: Store) -> None:
    def add(client: httpx.Client) -> httpx.Response:
        return client.post("/rules", json=RULE, headers={"Prefer": "wait=60"})

    with asking(settings, store, add, store.revision) as asked:
        answer = asked.result()
    assert (answer.status_code, answer.json()["status"]["state"]) == (201, "pending")


@pytest.mark.parametrize("path", ["/plan", "/offenders"])
def test_who_waits_for_a_controller_hears_that_the_api_ends(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(f"api{path.replace('/', '.')}.ANSWER_SECONDS", PATIENCE)
    store.report(HostStatus("gw1", "fake"))
    with asking(settings, store, lambda client: client.get(path), lambda: store.questions("gw1")) as asked:
        check_ending(asked.result())
    assert store.questions("gw1") == [], "and nobody works for him any more"


def check_ending(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.headers["Content-Type"]) == (503, "application/problem+json")
    assert "Retry-After" in answer.headers
    assert "ends just now" in answer.json()["detail"]


def test_so_does_who_is_not_ready_with_asking_when_the_grace_has_passed(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.GRACE_SECONDS", 1)
    head = f"POST /api/v1/rules HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['admin']}\r\n"
    with serve(settings, store) as url:
        place = urlsplit(url)
        connection = socket.create_connection((place.hostname, place.port), timeout=PATIENCE)
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{".encode())
        time.sleep(0.5)
    with closing(connection):
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 "), answer
    assert b"application/problem+json" in answer
    assert b"ends just now" in answer
