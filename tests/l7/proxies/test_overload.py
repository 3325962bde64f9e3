"""A client does not open the gate by knocking hard; and a limiter that hangs holds nobody up.

The limiter is a process of its own here, to be stopped, and to be as slow as it is.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from netlimit.l7.service.rpc import HELD_BYTES
from tests.cli.running import until
from tests.cli.test_limiter import Running
from tests.l7.proxies.kinds import Kind
from tests.l7.proxies.programs import APART, CONFIGURATIONS, MAKERS, Change, Places, ask_always, running_at
from tests.l7.proxies.recording import Recorder, recording
from tests.l7.proxies.wire import connect, reset_in_frames, send_plainly
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 20}
  - key: remote_address
    value: 127.0.0.9
    rate_limit: {unlimited: true}
"""
CLIENT, OTHER = "127.0.0.1", "127.0.0.9"
OPEN = {"nginx", "haproxy", "envoy"}
"""Those that let everything pass without the limiter."""
BURSTS = {"nginx": 3000, "haproxy": 5000, "envoy": 3000, "caddy": 3000}
LONG = {"nginx": 7_000, "haproxy": 14_000, "envoy": 58_000, "caddy": 58_000}
"""As long a path as each takes, nearly."""
AT_ONCE = 250
"""Questions that nginx has room for."""
WAIT = 8.0
"""Seconds in which each is answered while the limiter hangs: it takes about one, and 35 or 45 before."""


@dataclass
class Site:
    """A proxy, the limiter that it asks, and what gets to the application."""

    place: str
    limiter: Running
    recorder: Recorder
    h2: str
    """Where the proxy speaks HTTP/2."""

    async def ask(self, mark: str, source: str = CLIENT, path: bytes = b"/") -> str:
        return await self.send(Kind("plain", path), mark, source)

    async def send(self, kind: Kind, mark: str, source: str = CLIENT) -> str:
        return await send_plainly(self.place, source, kind.write_plainly(mark), 100.0)

    async def ask_all(self, number: int, mark: str, source: str = CLIENT, path: bytes = b"/") -> Counter[str]:
        return Counter(await asyncio.gather(*(self.ask(f"{mark}-{each}", source, path) for each in range(number))))

    async def hang_up(self, number: int) -> None:
        """Ask, and go without waiting for an answer."""

        async def go(each: int) -> None:
            with suppress(OSError):
                _, writer = await connect(self.place, CLIENT)
                writer.write(Kind("plain", b"/").write_plainly(f"gone-{each}"))
                await asyncio.sleep(each % 20 / 100)
                writer.transport.abort()

        await asyncio.gather(*(go(each) for each in range(number)))

    def count(self, mark: str) -> int:
        return sum(reached.startswith(f"{mark}-") for reached in self.recorder.reached)


@contextmanager
def running_site(
    name: str,
    directory: Path,
    change: Change = str,
    rules: str = RULES,
    sockets: Path | None = None,
    changes: Change = str,
    before: Sequence[str] = (),
) -> Iterator[Site]:
    """With a limiter that listens at Unix sockets in a directory, if there is one."""
    with ExitStack() as stack:
        recorder = stack.enter_context(recording())
        limiter = Running(directory, rules, sockets)
        stack.callback(limiter.server.end)
        stack.callback(limiter.http.close)
        nowhere = f"127.0.0.1:{free_port()}"
        place = f"127.0.0.1:{free_port()}"
        there = recorder.place, limiter.place, limiter.grpc_place, nowhere
        h2 = f"127.0.0.1:{free_port()}" if name in APART else ""
        places = Places(place, *there, h2=h2, any_host=True, changes=changes)
        proxy = directory / "proxy"
        proxy.mkdir()
        proxy.chmod(0o777)
        yield Site(stack.enter_context(running_at(name, proxy, places, change, before)), limiter, recorder, h2 or place)


@pytest.fixture
def directory() -> Iterator[Path]:
    """One that the limiter's user may pass, unlike pytest's own."""
    with TemporaryDirectory(prefix="netlimit-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def site(request: pytest.FixtureRequest, directory: Path) -> Iterator[Site]:
    with running_site(request.param, directory, ask_always) as opened:
        yield opened


@pytest.mark.parametrize(
    ("length", "letter"),
    [(1, b"a"), (LONG, b"a"), (LONG, b"%61"), (LONG, b"/x;"), (LONG, b"/..;//")],
    ids=["short", "long", "escaped", "parameters", "ambiguous"],
)
@pytest.mark.parametrize(("site", "burst"), BURSTS.items(), indirect=["site"], ids=[*BURSTS])
def test_nobody_passes_by_knocking_hard(
    site: Site, burst: int, length: int | dict[str, int], letter: bytes, request: pytest.FixtureRequest
) -> None:
    """Of so many requests at once none arrives that is over the limit, and those of others do before and after."""
    most = length if isinstance(length, int) else length[request.node.callspec.params["site"]]
    path = b"/" + b"%2e%2e/"[: most - 1] + letter * ((most - 8) // len(letter))

    async def knock() -> Counter[str]:
        assert (await site.ask_all(30, "first"))["200"] <= 20
        statuses, _ = await asyncio.gather(site.ask_all(burst, "burst", path=path), site.hang_up(burst // 3))
        return statuses

    statuses = asyncio.run(knock())
    assert site.count("first") <= 20
    assert site.count("burst") == site.count("gone") == 0, statuses
    assert not statuses["200"], statuses
    assert asyncio.run(site.ask_all(3, "other", OTHER)) == {"200": 3}


LINE = """
domain: web
descriptors:
  - key: remote_address
    value: '*'
    share_threshold: true
    on_limit: queue
    max_wait: 30s
    rate_limit: {unit: second, requests_per_unit: 4, algorithm: gcra, burst: 1}
"""


def test_who_hangs_up_leaves_the_line_of_haproxy(directory: Path) -> None:
    """Sixty that have gone would keep it for fifteen seconds."""
    with running_site("haproxy", directory, rules=LINE) as site:
        asyncio.run(site.hang_up(60))
        time.sleep(1)
        begun = time.monotonic()
        assert asyncio.run(site.ask("other", OTHER)) == "200"
        assert time.monotonic() - begun < 5


def test_haproxy_asks_about_one_client_so_often_and_no_more(directory: Path) -> None:
    def change(text: str) -> str:
        return text.replace("sc_http_req_rate(0) gt 500", "sc_http_req_rate(0) gt 5")

    with running_site("haproxy", directory, change) as site:
        time.sleep(2.1)
        statuses = asyncio.run(site.ask_all(20, "many"))
        assert statuses["429"] >= 10, statuses
        assert asyncio.run(site.ask("other", OTHER)) == "200"


RECOVERY = 25.0
"""Seconds: it takes up to ten on a quiet machine. Before places were few it was up to a minute."""
FIELDS = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"host.example"))


@pytest.mark.parametrize(("clients", "pause"), [(32, 0.21), (200, 1.5)], ids=["few", "many"])
def test_who_comes_after_a_flood_of_resets_does_not_wait_at_haproxy(
    clients: int, pause: float, directory: Path
) -> None:
    """Each client stays below what one may send."""

    async def flood(place: str) -> None:
        sources = [f"127.0.1.{number}" for number in range(1, clients + 1)]
        batches = int(6 / pause)
        await asyncio.gather(*(reset_in_frames(place, source, FIELDS, batches, pause) for source in sources))

    with running_site("haproxy", directory) as site:
        asyncio.run(site.ask_all(21, "used"))
        asyncio.run(flood(site.place))
        began = time.monotonic()
        until(lambda: asyncio.run(site.ask_all(3, "other", OTHER)) == {"200": 3})
        assert time.monotonic() - began < RECOVERY
        assert asyncio.run(site.ask("burst")) == "429"
        assert site.count("burst") == 0


def test_a_body_that_fills_its_buffer_is_no_client_that_has_gone(directory: Path) -> None:
    with running_site("haproxy", directory) as site:
        for length in (100, 7_000, 9_000, 14_000, 15_500, 60_000):
            request = f"POST / HTTP/1.1\r\nHost: x\r\nX-Mark: body-1\r\nContent-Length: {length}\r\n\r\n".encode()
            request += b"a" * length
            assert asyncio.run(send_plainly(site.place, OTHER, request, 2.0)) != "503", length


def test_nginx_that_comes_late_to_an_answer_lets_nobody_pass(directory: Path) -> None:
    """One that is busy looks at its clock before it looks at what has become of a connection. (Here it gets no
    processor time, and sees a few events at a time.)"""

    def change(text: str) -> str:
        return ask_always(text.replace("events {", "events { epoll_events 4;"))

    with running_site("nginx", directory, change) as site:
        asyncio.run(site.ask_all(21, "used"))
        assert site.count("used") <= 20
        nginx = int((directory / "proxy/pid").read_text())

        async def knock() -> Counter[str]:
            asking = asyncio.create_task(site.ask_all(AT_ONCE, "late"))
            for _ in range(3):
                await asyncio.sleep(0.1)
                os.kill(nginx, signal.SIGSTOP)
                await asyncio.sleep(0.4)
                os.kill(nginx, signal.SIGCONT)
            return await asking

        statuses = asyncio.run(knock())
        assert (statuses, site.count("late")) == ({"429": AT_ONCE}, 0)


def test_who_waits_in_a_line_passes_nginx_by_no_delay_of_the_limiter(directory: Path) -> None:
    """What has lain there before it waits is answered before nginx gives up, too."""
    rules = RULES.replace(
        "    rate_limit: {unit: day, requests_per_unit: 20}",
        "    on_limit: queue\n    max_wait: 5s\n    concurrency: {limit: 1, lease: 600}",
    )
    with running_site("nginx", directory, rules=rules) as site:
        asyncio.run(site.ask_all(1, "used"))
        process = site.limiter.server.process

        async def knock() -> Counter[str]:
            process.send_signal(signal.SIGSTOP)
            try:
                asking = asyncio.create_task(site.ask_all(50, "late"))
                await asyncio.sleep(0.6)
            finally:
                process.send_signal(signal.SIGCONT)
            return await asking

        statuses = asyncio.run(knock())
        assert (statuses, site.count("late")) == ({"429": 50}, 0)


def test_nginx_refuses_what_it_has_no_room_to_ask_about(directory: Path) -> None:
    """More questions at once than `max_conns`: that is no reason to pass, not for those within their limit either."""
    with running_site("nginx", directory, lambda text: text.replace(f"max_conns={AT_ONCE}", "max_conns=1")) as site:
        process = site.limiter.server.process
        asyncio.run(site.ask_all(3, "first", OTHER))
        process.send_signal(signal.SIGSTOP)
        try:
            statuses = asyncio.run(site.ask_all(50, "many"))
        finally:
            process.send_signal(signal.SIGCONT)
        assert statuses["403"] >= 45
        assert statuses["200"] == site.count("many") <= 5  # the limiter does not answer those that are asked about


@pytest.mark.parametrize("site", [*MAKERS, "nginx-defer"], indirect=True)
def test_a_limiter_that_hangs_holds_nobody_up(site: Site, request: pytest.FixtureRequest) -> None:
    """Each is answered after about a second, as the page says; and when it goes on, limits hold again."""
    name = request.node.callspec.params["site"]
    asyncio.run(site.ask_all(21, "used"))
    assert site.count("used") <= 20
    process = site.limiter.server.process
    process.send_signal(signal.SIGSTOP)
    try:
        for mark in ("hung", "again"):
            began = time.monotonic()
            statuses = asyncio.run(site.ask_all(5, mark))
            assert time.monotonic() - began < WAIT
            if name in OPEN:
                assert statuses == {"200": 5}
            else:
                assert site.count(mark) == 0, statuses
    finally:
        process.send_signal(signal.SIGCONT)
    refused = "502" if name == "nginx-defer" else "429"  # nobody is there who would keep it
    until(lambda: asyncio.run(site.ask("back")) == refused)


@pytest.mark.parametrize("patience", ["3s", "0.4s"])
def test_envoy_waits_for_a_limiter_that_answers_late(directory: Path, patience: str) -> None:
    """Whether it hangs is for health checks to say. (Here they are patient: a busy Envoy hears those in another
    thread, and the answers to its pings seconds late, or so late that it closes the connection.)"""

    def change(text: str) -> str:
        assert "timeout: 3s, interval_jitter" in text
        changed = text.replace("timeout: 3s, interval_jitter", f"timeout: {patience}, interval_jitter")
        return changed.replace("_threshold: 2", "_threshold: 100")

    with running_site("envoy", directory, change) as site:
        asyncio.run(site.ask_all(21, "used"))
        process = site.limiter.server.process
        process.send_signal(signal.SIGSTOP)
        late = threading.Timer(1.5, process.send_signal, [signal.SIGCONT])
        late.start()
        try:
            statuses = asyncio.run(site.ask_all(5, "late"))
        finally:
            late.join()
        assert (statuses, site.count("late")) == ({"429": 5}, 0)


def test_what_the_workers_of_envoy_ask_at_once_finds_room() -> None:
    """Of 64 workers, one a core, and with heads as long as Envoy takes them; more would be asked again and again."""
    head = 60 * 1024
    (streams,) = re.findall(r"max_concurrent_streams: (\d+)", (CONFIGURATIONS / "envoy.yaml").read_text())
    assert int(streams) * 64 * head <= HELD_BYTES


assert BURSTS.keys() == MAKERS.keys()


def test_no_other_process_takes_the_places_of_what_haproxy_asks(directory: Path) -> None:
    """The frontend by which the script asks is open to all of this host: dear and half sent questions that come by it
    keep none of the script's from an answer."""
    questions = (
        b"POST /v1/decide HTTP/1.1\r\nHost: netlimit\r\nContent-Length: 60000\r\n\r\nhalf",
        b"GET /v1/auth?domain=web&key=remote_address HTTP/1.1\r\nHost: netlimit\r\nContent-Length: 100\r\n\r\nhalf",
        b"GET /metrics HTTP/1.1\r\nHost: netlimit\r\n\r\n",
        b"GET /v1/a",
    )
    with running_site("haproxy", directory) as site, ExitStack() as stack:
        address = f"\0netlimit{site.place}".encode().ljust(108, b"\0")
        for question in [questions[0]] * 2400 + [*questions[1:]] * 100:
            taking = stack.enter_context(socket.socket(socket.AF_UNIX))
            taking.settimeout(10)
            taking.connect(address)
            with suppress(OSError):
                taking.sendall(question)
        began = time.monotonic()
        statuses = asyncio.run(site.ask_all(5, "innocent", OTHER))
        took = time.monotonic() - began
        assert (statuses, site.count("innocent")) == ({"200": 5}, 5)
        assert took < 4, took
