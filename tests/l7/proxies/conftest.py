"""A limiter, an application, and the proxies between clients and them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.l7.proxies.programs import MAKERS, running
from tests.l7.service.serving import Served, serving
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: minute, requests_per_unit: 3, name: each_client}
  - key: remote_address
    value: 127.0.0.9
    rate_limit: {unlimited: true}
    descriptors:
      - key: path
        value: /queue
        on_limit: queue
        max_wait: 5s
        rate_limit: {algorithm: gcra, unit: second, requests_per_unit: 5, burst: 1}
"""


class Application(ThreadingHTTPServer):
    """Says that it was asked, and remembers by whom."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.asked: list[str] = []

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    server: Application

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(403 if self.path == "/forbidden" else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_OPTIONS = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def answering(server: Application) -> Iterator[None]:
    """Let an application answer in a thread of its own."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture(scope="package")
def application() -> Iterator[Application]:
    server = Application()
    with answering(server):
        yield server


@pytest.fixture(scope="package")
def served() -> Iterator[Served]:
    with serving(RULES, running=True) as limiter:
        yield limiter


@pytest.fixture(scope="package", params=MAKERS)
def proxy(
    request: pytest.FixtureRequest, application: Application, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Where a proxy is."""
    directory = tmp_path_factory.mktemp(request.param)
    with running(request.param, directory, application.place, served.place, served.grpc_place) as place:
        yield place


@pytest.fixture(scope="package")
def nginx(application: Application, served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running("nginx", tmp_path_factory.mktemp("nginx"), application.place, served.place, "") as place:
        yield place


@pytest.fixture(params=MAKERS)
def unlimited(request: pytest.FixtureRequest, application: Application, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A proxy whose limiter is down: its name, and where it is."""
    nowhere = f"127.0.0.1:{free_port()}"
    with running(request.param, tmp_path, application.place, nowhere, nowhere) as place:
        yield request.param, place
