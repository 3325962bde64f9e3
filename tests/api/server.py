"""A real API over a real store in a file: a server in a thread, and a controller that only says that it is done."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import uvicorn

from api.app import create_app
from api.server import configure, open_door
from netlimit.records import HostStatus
from netlimit.settings import Settings
from netlimit.store import Store
from netlimit.tokens import find_handle, hash_token

TOKENS = {role: f"nl_{role:0>12}_{role:-<43}" for role in ("admin", "operator", "viewer")}
HASHES = {role: hash_token(token, cost=2) for role, token in TOKENS.items()}
HANDLES = {role: find_handle(token) for role, token in TOKENS.items()}
_TRUST = ssl.create_default_context()
"""For all clients: it takes long to make one."""
LOCALHOST = "127.0.0.1"
PATIENCE = 120.0
"""For what must come: the machine may be so busy that all that is tested here stands still for seconds."""
Answer = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def serve(settings: Settings, store: Store) -> Iterator[str]:
    """Run the API until the block ends."""
    app = create_app(settings, store)
    with open_door(settings, app, socket.create_server((LOCALHOST, 0), backlog=2048)) as door:
        server = uvicorn.Server(configure(settings, app, door))
        thread = threading.Thread(target=server.run, args=[[door]], daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            yield f"{'https' if settings.tls_cert else 'http'}://{LOCALHOST}:{door.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the API does not end"


def connect(url: str, role: str) -> httpx.Client:
    """A client with the token of a role."""
    return httpx.Client(
        base_url=f"{url}/api/v1",
        headers={"Authorization": f"Bearer {TOKENS[role]}"},
        verify=_TRUST,
        trust_env=False,
        timeout=PATIENCE,
    )


def ask(method: str, url: str, **options: Any) -> httpx.Response:
    """Ask for something on a connection of its own, without a token."""
    return httpx.request(method, url, trust_env=False, timeout=PATIENCE, **options)


def get(url: str, **options: Any) -> httpx.Response:
    """Look at something in the same way."""
    return ask("GET", url, **options)


def until(come: Callable[[], bool]) -> None:
    """Wait until it has come."""
    end = time.monotonic() + PATIENCE
    while not come():
        assert time.monotonic() < end
        time.sleep(0.01)


class Controller:
    """Plays a gateway's controller, and its guard: applies every revision in a while, answers questions, and tells now
    and then that it is there."""

    def __init__(self, store: Store, host: str = "gw1", delay: float = 0.01) -> None:
        self.store = store
        self.status = HostStatus(host=host, backend="iptables")
        self.delay = delay
        self.answers: dict[str, Answer] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> Controller:
        """Begin; the gateway is known when this returns."""
        self.store.report(self.status)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End, and be silent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        watch = self.store.watch()
        told = time.monotonic()
        self.store.guarded(self.status.host)
        while not self._stopping.is_set():
            if time.monotonic() > told + 5:
                self.store.report(self.status)
                self.store.guarded(self.status.host)
                told = time.monotonic()
            self._apply()
            for question in self.store.questions(self.status.host):
                if question.kind in self.answers:
                    self.store.answer(question.id, self.answers[question.kind](dict(question.argument)))
            watch.wait(0.1)
        watch.close()

    def _apply(self) -> None:
        revision = self.store.revision()
        if self.store.paused(self.status.host):
            self.status = replace(self.status, applied_revision=0)
        elif revision != self.status.applied_revision:
            time.sleep(self.delay)
            self.status = replace(self.status, applied_revision=revision)
            self.store.report(self.status)
