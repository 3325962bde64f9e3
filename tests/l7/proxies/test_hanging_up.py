"""An application that hangs up instead of answering, as one whose worker dies."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from scripts.testbed.streams import ROOT
from tests.l7.proxies.conftest import Answering, Application, answering
from tests.l7.proxies.programs import MAKERS, Places, running_at
from tests.l7.service.serving import serving
from tests.ports import free_port

RULES = "domain: web\ndescriptors:\n  - key: remote_address\n    rate_limit: {unit: day, requests_per_unit: 1000}\n"


class Failing(Answering):
    """Takes a while to answer, so that connections are many, and `/fatal` for the last request that it gets."""

    protocol_version = "HTTP/1.1"
    server: FailingApplication

    def do_GET(self) -> None:
        if self.path != "/fatal":
            self.server.together.wait(30)
            return super().do_GET()
        self.server.asked.append(self.path)
        self.close_connection = True
        return None


class FailingApplication(Application):
    MANY = 10
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = Failing
        self.together = threading.Barrier(self.MANY)


@pytest.fixture
def failing() -> Iterator[FailingApplication]:
    server = FailingApplication()
    with answering(server):
        yield server


@pytest.mark.parametrize("name", MAKERS)
def test_a_request_that_has_been_counted_arrives_once(name: str, failing: FailingApplication, tmp_path: Path) -> None:
    """However many connections to the application have been used before; with Caddy as docs/proxies.md says."""
    page = (ROOT / "docs/proxies.md").read_text()
    (once,) = re.findall(r"```text\n(reverse_proxy .*?)```", page, re.DOTALL)
    simply = f"reverse_proxy {failing.place}\n"

    def change(text: str) -> str:
        return text.replace(simply, once.replace("127.0.0.1:8080", failing.place))

    with (
        serving(RULES, running=True) as limiter,
        running_at(
            name,
            tmp_path,
            Places(f"127.0.0.1:{free_port()}", failing.place, limiter.place, limiter.grpc_place),
            change,
        ) as place,
        httpx.Client(base_url=f"http://{place}", trust_env=False, timeout=30) as client,
    ):
        with ThreadPoolExecutor(failing.MANY) as threads:
            answers = list(threads.map(lambda _: client.get("/together").status_code, range(failing.MANY)))
        assert answers == [200] * failing.MANY
        with suppress(httpx.RemoteProtocolError):  # a proxy may hang up, too
            assert client.get("/fatal").status_code in (502, 503)
        assert failing.asked.count("/fatal") == 1
