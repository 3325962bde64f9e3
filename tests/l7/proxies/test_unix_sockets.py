"""Real proxies that ask over Unix sockets, with what the page changes in their configurations: as a user who may come
to these, and as one who may not."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from scripts.testbed.streams import ROOT
from tests.cli.running import until
from tests.cli.test_unix_sockets import PROXY, STRANGER, make_sockets_directory
from tests.l7.proxies.programs import MAKERS, Change, ask_always
from tests.l7.proxies.test_overload import BURSTS, OPEN, OTHER, WAIT, Site, directory, running_site  # noqa: F401

ALL = [*MAKERS, "nginx-defer"]
_FILES = {
    "nginx": "`nginx.conf`",
    "nginx-defer": "`nginx-defer.conf`",
    "haproxy": "`haproxy.cfg`|`netlimit.lua`",
    "envoy": "`envoy.yaml`",
    "caddy": "`Caddyfile`",
}


def read_changes(name: str) -> list[tuple[str, str]]:
    """What the page changes for a proxy."""
    page = (ROOT / "docs/proxies.md").read_text("utf-8")
    found = re.findall(rf"^\| (?:{_FILES[name]}) \| `(.*)` \| `(.*)` \|$", page, re.MULTILINE)
    assert found
    return found


def running_over_sockets(name: str, directory: Path, user: int, more: Change = str) -> AbstractContextManager[Site]:  # noqa: F811
    """A proxy that runs as this user."""
    sockets = make_sockets_directory(directory)
    changes = read_changes(name)

    def change(text: str) -> str:
        for before, after in changes:
            text = text.replace(before, after)
        text = text.replace("/run/netlimit-limiter", str(sockets)).replace("user haproxy", f"uid {user}")
        return text.replace("/run/haproxy", f"{directory}/proxy")

    before = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return running_site(name, directory, more, sockets=sockets, changes=change, before=before)


@pytest.fixture
def site(request: pytest.FixtureRequest, root: None, directory: Path) -> Iterator[Site]:  # noqa: F811
    with running_over_sockets(request.param, directory, PROXY) as opened:
        yield opened


@pytest.mark.parametrize("site", ALL, indirect=True)
def test_who_may_come_to_the_sockets_limits(site: Site, request: pytest.FixtureRequest) -> None:
    refused = "502" if "nginx-defer" in request.node.name else "429"  # nobody is there who would keep it
    statuses = asyncio.run(site.ask_all(30, "many"))
    assert statuses == {"200": 19, refused: 11}  # one was to see whether it is there
    assert site.count("many") == 19
    assert asyncio.run(site.ask_all(3, "other", OTHER)) == {"200": 3}
    assert not re.findall("WARNING|ERROR", site.limiter.server.said())


@pytest.mark.parametrize("name", ALL)
def test_who_may_not_is_without_the_limiter(root: None, directory: Path, name: str) -> None:  # noqa: F811
    with running_over_sockets(name, directory, STRANGER) as site:
        statuses = asyncio.run(site.ask_all(30, "many"))
        closed = "500" if name == "nginx-defer" else "502"
        assert statuses == ({"200": 30} if name in OPEN else {closed: 30})
        assert not re.findall('way="(auth|grpc)"', site.limiter.http.get("/metrics").text)


@pytest.mark.parametrize(("name", "burst"), BURSTS.items(), ids=[*BURSTS])
def test_nobody_passes_by_knocking_hard(root: None, directory: Path, name: str, burst: int) -> None:  # noqa: F811
    """Where more come at once than may wait at a Unix socket, the proxy is told at once, as if nobody listened. (How
    fast the limiter answers is no matter of its sockets: proxies wait for it longer here.)"""

    def wait(text: str) -> str:
        return ask_always(re.sub(r"(proxy_\w+_timeout|response_header_timeout) 1s", r"\1 60s", text))

    with running_over_sockets(name, directory, PROXY, wait) as site:

        async def knock() -> Counter[str]:
            assert (await site.ask_all(30, "first"))["200"] <= 20
            statuses, _ = await asyncio.gather(site.ask_all(burst, "burst"), site.hang_up(burst // 3))
            return statuses

        statuses = asyncio.run(knock())
        assert site.count("burst") == site.count("gone") == 0, statuses
        assert not statuses["200"], statuses
        assert asyncio.run(site.ask_all(3, "other", OTHER)) == {"200": 3}


@pytest.mark.parametrize("site", MAKERS, indirect=True)
def test_a_limiter_that_hangs_or_ends_holds_nobody_up(site: Site, request: pytest.FixtureRequest) -> None:
    is_open = request.node.callspec.params["site"] in OPEN
    asyncio.run(site.ask_all(21, "used"))
    process = site.limiter.server.process
    process.send_signal(signal.SIGSTOP)
    try:
        for mark in ("hung", "again"):
            began = time.monotonic()
            statuses = asyncio.run(site.ask_all(5, mark))
            assert time.monotonic() - began < WAIT
            assert statuses == {"200": 5} if is_open else site.count(mark) == 0, statuses
    finally:
        process.send_signal(signal.SIGCONT)
    until(lambda: asyncio.run(site.ask("back")) == "429")
    site.limiter.server.end()
    time.sleep(4)
    assert asyncio.run(site.ask("away")) == ("200" if is_open else "502")
    again = site.limiter.start()
    try:
        until(site.limiter.answers, again.said)
        until(lambda: "429" in asyncio.run(site.ask_all(25, "anew")))
    finally:
        again.end()
