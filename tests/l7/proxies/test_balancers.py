"""Real proxies behind a load balancer, with what the page adds to their configurations."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.testbed.streams import ROOT
from tests.l7.proxies.programs import MAKERS, Change
from tests.l7.proxies.test_overload import Site, directory, running_site  # noqa: F401
from tests.l7.proxies.wire import send_plainly
from tests.ports import free_port

ALL = [*MAKERS, "nginx-defer"]
BALANCER, STRANGER = "127.0.0.5", "127.0.0.7"
MOST = 20
"""Requests of one client that pass."""
_FILES = {
    "nginx": "nginx.conf",
    "nginx-defer": "nginx-defer.conf",
    "haproxy": "haproxy.cfg",
    "envoy": "envoy.yaml",
    "caddy": "Caddyfile",
}


def read_page() -> str:
    page = (ROOT / "docs/proxies.md").read_text("utf-8").replace("192.0.2.1", BALANCER)
    return page.partition("## Behind another proxy\n")[2].partition("\n## ")[0]


def add(name: str, text: str) -> str:
    """A configuration with what the page says; one that has none of it is as it was."""
    rows = re.findall(rf"^\| .*`{re.escape(_FILES[name])}`.* \| `(.*)` \| `(.*)` \|$", read_page(), re.MULTILINE)
    assert len(rows) == 1
    for behind, more in rows:
        written = more.replace("\\", r"\\")  # none of it means anything to `re`
        line = rf"^( *|\t*){re.escape(behind)}$"
        text = re.sub(line, rf"\g<0>\n\g<1>{written}", text, flags=re.MULTILINE)
    return text


def add_options(text: str) -> str:
    """Whom Caddy believes."""
    told = re.search(r"`\{ servers \{ (trusted_proxies static [^`]*)` and\n`(trusted_proxies_strict)`", read_page())
    assert told
    return text.replace("servers {\n", f"servers {{\n\t\t{told[1]}\n\t\t{told[2]}\n", 1)


def running(name: str, directory: Path, change: Change = str) -> AbstractContextManager[Site]:  # noqa: F811
    def write(text: str) -> str:
        return change(add_options(text) if name == "caddy" else text)

    return running_site(name, directory, write, changes=lambda text: add(name, text))


@pytest.fixture
def site(request: pytest.FixtureRequest, directory: Path) -> Iterator[Site]:  # noqa: F811
    with running(request.param, directory) as opened:
        yield opened


def ask_all(
    site: Site, number: int, mark: str, forwarded: str, source: str = BALANCER, before: str = ""
) -> Counter[str]:
    """With a client for each request, or one for all of them; led in by what the PROXY protocol says."""
    head = "GET / HTTP/1.1\r\nHost: host.example\r\nMark: {}\r\nX-Forwarded-For: {}\r\nConnection: close\r\n\r\n"

    async def ask(each: int) -> str:
        request = before.format(each) + head.format(f"{mark}-{each}", forwarded.format(each))
        return await send_plainly(site.place, source, request.encode())

    async def go() -> Counter[str]:
        return Counter([await ask(each) for each in range(number)])

    return asyncio.run(go())


@pytest.mark.parametrize("site", ALL, indirect=True)
def test_each_client_of_a_balancer_has_its_own_limit(site: Site, request: pytest.FixtureRequest) -> None:
    refused = "502" if "nginx-defer" in request.node.name else "429"  # nobody is there who would keep it
    for client in ("198.51.100.7", "198.51.100.8"):
        assert ask_all(site, MOST + 5, client, client) == {"200": MOST, refused: 5}
    # What the client has written itself stands before what the balancer has added.
    assert ask_all(site, 5, "forged", "198.51.100.1{}, 198.51.100.7") == {refused: 5}
    if "envoy" not in request.node.name:
        assert ask_all(site, MOST + 5, "stranger", "203.0.113.{}", STRANGER) == {"200": MOST, refused: 5}


FOURTH, SIXTH = ("198.51.100.7:4711", "198.51.100.8:4711"), ("[2001:db8:0:1::1]:4711", "[2001:db8:0:2::1]:4711")


@pytest.mark.parametrize(
    ("site", "clients"),
    [*((name, FOURTH) for name in ALL if name != "envoy"), *((name, SIXTH) for name in ("nginx", "haproxy"))],
    indirect=["site"],
)
def test_a_balancer_may_write_a_port_behind_an_address(site: Site, clients: tuple[str, str]) -> None:
    """As those of Azure do; for the others the page says so."""
    for client in clients:
        assert ask_all(site, MOST + 5, client, client)["200"] == MOST


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_a_balancer_may_speak_the_proxy_protocol(name: str, directory: Path) -> None:  # noqa: F811
    spoken = f"127.0.0.1:{free_port()}"  # nginx serves nobody else there

    def change(text: str) -> str:
        if name == "nginx":
            text = re.sub("listen [^;]*;", rf"\g<0> listen {spoken} proxy_protocol;", text, count=1)
            return text.replace("real_ip_header X-Forwarded-For", "real_ip_header proxy_protocol")
        rule = f"tcp-request connection expect-proxy layer4 if {{ src {BALANCER} }}"
        assert rule in read_page()
        return re.sub("http-request set-src [^\n]*", rule, text)

    with running(name, directory, change) as site:
        told = site if name == "haproxy" else replace(site, place=spoken)
        for client in ("198.51.100.7", "198.51.100.8"):
            line = f"PROXY TCP4 {client} 127.0.0.1 4711 80\r\n"
            assert ask_all(told, MOST + 5, client, "203.0.113.{}", before=line) == {"200": MOST, "429": 5}
        line = "PROXY TCP4 198.51.100.{} 127.0.0.1 4711 80\r\n" if name == "nginx" else ""
        assert ask_all(told, MOST + 5, "stranger", "203.0.113.{}", STRANGER, line) == {"200": MOST, "429": 5}
