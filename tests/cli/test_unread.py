"""A log that nobody reads holds up nobody: neither rules, nor the API, nor what undoes a window of confirmation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.running import Netlimit, Server, until
from tests.cli.strangers import stranger
from tests.unread import OUTLETS, Outlet, opened


@pytest.fixture(params=OUTLETS)
def unread(request: pytest.FixtureRequest) -> Iterator[Outlet]:
    """Full, and read by nobody."""
    with opened(request.param) as outlet:
        outlet.fill()
        yield outlet


@pytest.fixture
def talkative(netlimit: Netlimit) -> Netlimit:
    netlimit.do("db", "upgrade")
    return Netlimit({**netlimit.environment, "NETLIMIT_LOG_LEVEL": "debug"})


@contextmanager
def running(netlimit: Netlimit, outlet: Outlet, *arguments: str) -> Iterator[Server]:
    server = netlimit.start(*arguments, stderr=outlet.write_end)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def read_to_end(server: Server, outlet: Outlet) -> str:
    """End what runs; all that it has said, and what it says meanwhile."""
    said = bytearray(outlet.read())
    server.process.terminate()
    until(lambda: said.extend(outlet.read()) or server.ended)
    said.extend(outlet.read())
    return said.decode()


def test_rules_are_enforced_and_a_window_is_undone(root: None, talkative: Netlimit, unread: Outlet) -> None:
    with running(talkative, unread, "serve", "--api-user", "nobody") as server:
        until(lambda: server.ended or not talkative.run("status").returncode)
        rule = talkative.ask("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--wait", "60")
        assert rule["status"]["state"] == "applied"
        talkative.do("apply", "--confirm", "8s")
        assert talkative.run("rule", "add", "10.1.2.4", "--action", "block", "--wait", "60").returncode == 0
        until(lambda: [each["id"] for each in talkative.ask("rule", "list")["items"]] == [rule["id"]])
        said = read_to_end(server, unread)
    assert server.process.returncode == 0
    assert "Revision 1 is applied" in said
    assert "guard: root on gw1 has opened a window of confirmation" in said
    assert "Stopped; the rules stay in the kernel." in said


def test_it_ends_when_it_is_told_to(root: None, talkative: Netlimit, unread: Outlet) -> None:
    with running(talkative, unread, "serve", "--api-user", "nobody") as server:
        until(lambda: server.ended or not talkative.run("status").returncode)
        assert server.end() == 0


def test_what_ends_over_an_error_does_end(root: None, talkative: Netlimit, unread: Outlet) -> None:
    """Who is to start it again waits for that."""
    with stranger(talkative, "127.0.0.1"), running(talkative, unread, "api", "--user", "nobody") as server:
        until(lambda: server.ended)
        assert server.process.returncode == 1
