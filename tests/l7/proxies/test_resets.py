"""Who opens requests and goes, as fast as he can, opens no gate: what nobody waits for keeps nobody from asking."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from tests.cli.test_unix_sockets import PROXY
from tests.l7.proxies.apart import run_apart
from tests.l7.proxies.kinds import Kind
from tests.l7.proxies.programs import MAKERS, ask_always
from tests.l7.proxies.test_overload import OTHER, Site, directory, running_site  # noqa: F401
from tests.l7.proxies.test_unix_sockets import running_over_sockets
from tests.l7.proxies.wire import write_resets

SECONDS = 3.0
PLAIN = "127.0.0.8"
"""Who asks plainly meanwhile, and is over his limit: what one sends who goes is refused for being so many."""
BACKLOG = 600
"""So many connections wait to be let in here, more than a proxy asks at once, and fewer than nobody waits for."""
RESET = struct.pack("ii", 1, 0)
MANY = 999
"""Streams, after which nginx ends a connection."""


def reset_streams(site: Site, end: float) -> None:
    """Open streams and reset them (HTTP/2)."""
    streams = write_resets(Kind("plain", b"/").write_fields("gone-2"), MANY)
    while time.monotonic() < end:
        with suppress(OSError), connect(site.h2) as connection:
            connection.sendall(streams)
            while connection.recv(2**16):
                pass


def hang_up(site: Site, end: float) -> None:
    """Ask, and reset the connection a little later."""
    request = Kind("plain", b"/").write_plainly("gone-1")
    left: list[socket.socket] = []
    while time.monotonic() < end:
        with suppress(OSError):
            left.append(connect(site.place))
            left[-1].sendall(request)
        if len(left) > 16:
            left.pop(0).close()
    for connection in left:
        connection.close()


def connect(place: str) -> socket.socket:
    host, _, port = place.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=0.3)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return connection


def run_over(over: str, name: str, directory: Path) -> AbstractContextManager[Site]:  # noqa: F811
    """A proxy that waits for answers longer here (how fast the limiter is, is no matter of who goes), and for a
    connection no longer."""

    def change(text: str) -> str:
        return ask_always(re.sub(r"(proxy_read_timeout|response_header_timeout) 1s", r"\1 60s", text))

    if over == "unix":
        return running_over_sockets(name, directory, PROXY, change)
    return running_site(name, directory, change)


@pytest.mark.parametrize("go", [reset_streams, hang_up])
@pytest.mark.parametrize(
    ("name", "over"),
    [("nginx", "tcp"), ("nginx-defer", "tcp"), *((name, "unix") for name in [*MAKERS, "nginx-defer"])],
)
def test_who_goes_without_an_answer_opens_no_gate(
    root: None,
    directory: Path,  # noqa: F811
    name: str,
    over: str,
    go: Callable[[Site, float], None],
) -> None:
    def body() -> None:
        Path("/proc/sys/net/core/somaxconn").write_text(str(BACKLOG))
        with run_over(over, name, directory) as site:
            for source in ("127.0.0.1", PLAIN):
                asyncio.run(site.ask_all(21, "used", source))
            statuses = asyncio.run(ask_meanwhile(site, go))
            assert site.count("used") <= 40
            assert site.count("plain") == 0, statuses
            assert asyncio.run(site.ask_all(3, "other", OTHER)) == {"200": 3}
            if name.startswith("nginx"):
                log = (directory / "proxy/log").read_text(errors="replace")
                assert not re.search("temporarily unavailable|timed out.*while connecting", log), statuses

    run_apart(body)


async def ask_meanwhile(site: Site, go: Callable[[Site, float], None]) -> Counter[str]:
    """Ask plainly while two go without an answer, again and again."""
    end = time.monotonic() + SECONDS
    going = [threading.Thread(target=go, args=(site, end)) for _ in range(2)]
    for each in going:
        each.start()
    asked = []
    while time.monotonic() < end:
        asked.append(asyncio.create_task(site.ask(f"plain-{len(asked)}", PLAIN)))
        await asyncio.sleep(0.05)
    statuses = Counter(await asyncio.gather(*asked))
    for each in going:
        each.join()
    return statuses


SAME = [
    ("192.0.2.7", "192.0.2.7", True),
    ("192.0.2.8", "192.0.2.9", False),
    ("2001:db8:0:a::7", "2001:db8:0:a:ffff:ffff:ffff:ffff", True),
    ("2001:db8:0:a0a::7", "2001:db8:0:a0a::a:0", True),
    ("2001:db8:0:b::7", "2001:db8:0:c::7", False),
    ("::ffff:198.51.100.7", "::ffff:198.51.100.8", False),
]
"""Two addresses, and whether they are one client's."""


@pytest.mark.parametrize("name", ["nginx", "nginx-defer"])
def test_nginx_asks_about_one_client_so_often_and_no_more(directory: Path, name: str) -> None:  # noqa: F811
    def change(text: str) -> str:
        slow = text.replace("rate=500r/s", "rate=1r/m").replace("burst=200 ", "burst=2 ")
        return slow.replace("    location / {", "    set_real_ip_from 127.0.0.1;\n    location / {", 1)

    with running_site(name, directory, change) as site:

        async def ask(source: str, number: int) -> Counter[str]:
            told = Kind("plain", b"/", more=[(b"X-Real-IP", source.encode())])
            return Counter([await site.send(told, f"asked-{each}") for each in range(number)])

        for one, another, same in SAME:
            assert asyncio.run(ask(one, 10)) == {"200": 3, "429": 7}
            assert asyncio.run(ask(another, 1)) == ({"429": 1} if same else {"200": 1}), (one, another)
