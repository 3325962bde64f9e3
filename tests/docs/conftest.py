"""One lab for all pages: netlimit runs on its gateway, and somebody floods through it."""

from __future__ import annotations

import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.cli.privileges import USER
from scripts.testbed.namespaces import SERVER, Lab
from scripts.testbed.reports import SendReport
from scripts.testbed.service import Service
from scripts.testbed.streams import Stream, sending
from tests.docs import short
from tests.docs.console import Console, mount_point

FLOOD = 500  # packets a second, from 10.1.0.2 to port 9000 of 10.2.0.2


@pytest.fixture(scope="session")
def service(root: None) -> Iterator[Service]:
    _make_user()
    with Lab() as lab, mount_point(), Service(lab.gateway, USER) as running, _flood(lab):
        yield running


def _make_user() -> None:
    """The user whom scripts/run makes, and whom the limiter becomes by itself."""
    try:
        pwd.getpwnam(USER)
    except KeyError:
        options = ("--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent")
        subprocess.run(["useradd", *options, "--shell", "/usr/sbin/nologin", USER], check=True)


def _flood(lab: Lab) -> Stream[SendReport]:
    return sending(lab.client, SERVER, rate=FLOOD, seconds=300)


@pytest.fixture
def console(service: Service, tmp_path: Path) -> Iterator[Console]:
    """A shell on the gateway, without any rules yet."""
    (tmp_path / "bin").mkdir()
    with short.offered(tmp_path / "bin/netlimit"):
        shell = Console(service, tmp_path)
        for rule in service.request("GET", "/api/v1/rules").body["items"]:
            service.request("DELETE", f"/api/v1/rules/{rule['id']}")
        yield shell
