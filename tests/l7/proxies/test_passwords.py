"""Sites for which nginx itself says who gets in: by a password, or by an address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.l7.proxies.conftest import RULES, Application, answering
from tests.l7.proxies.deferring import deferring
from tests.l7.proxies.programs import Places, running_at
from tests.l7.service.serving import Served, serving
from tests.ports import free_port

KINDS = ("nginx", "nginx-defer")
STRANGER, HOME = "127.0.0.7", "127.0.0.8"
"""Whom nobody has named, and who gets in without a password where the site says so."""
KEPT = RULES.replace("    rate_limit: {unit: minute", "    on_limit: defer\n    rate_limit: {unit: minute")


@pytest.fixture
def application() -> Iterator[Application]:
    server = Application()
    with answering(server):
        yield server


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(KEPT, running=True) as limiter:
        yield limiter


@dataclass(frozen=True)
class Site:
    """A site that asks for a password."""

    name: str
    place: str
    application: Application

    def ask(self, source: str, password: str | None = None) -> httpx.Response:
        transport = httpx.HTTPTransport(local_address=source)
        with httpx.Client(transport=transport, trust_env=False, timeout=20) as client:
            return client.get(f"http://{self.place}/", auth=None if password is None else ("ann", password))

    def ask_often(self) -> list[int]:
        return [self.ask(HOME, "secret").status_code for _ in range(5)]


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path, application: Application, served: Served) -> Iterator[Site]:
    """By the name of a configuration, what it says of access besides, and behind which line."""
    name, access, behind = request.param
    passwords = tmp_path / "passwords"
    passwords.write_text("ann:{PLAIN}secret\n")
    tmp_path.chmod(0o755)
    own = f'{access} auth_basic "site"; auth_basic_user_file {passwords};'

    def write(text: str) -> str:
        return re.sub(rf"(?m)^( *{behind}.*)$", rf"\1\n{own}", text, count=1)

    with deferring(served, tmp_path, application.place) as deferral:
        there = Places(f"127.0.0.1:{free_port()}", application.place, served.place, "", deferral)
        with running_at(name, tmp_path, there, write) as place:
            application.asked.clear()
            yield Site(name, place, application)


EITHER = f"satisfy any; allow {HOME}; deny all;"
SERVER, LOCATION = "listen 127", "location / {"
LIMITED = {"nginx": [200, 200, 200, 429, 429], "nginx-defer": [200, 200, 200, 202, 202]}


@pytest.mark.parametrize("site", [(name, EITHER, SERVER) for name in KINDS], indirect=True, ids=KINDS)
def test_who_is_within_his_limit_needs_his_password_all_the_same(site: Site) -> None:
    """nginx counts the question among what `satisfy any` is content with."""
    assert site.ask(STRANGER).status_code in (401, 403)
    assert site.ask(STRANGER, "wrong").status_code in (401, 403)
    assert site.application.asked == []


@pytest.mark.parametrize("site", [(name, EITHER, SERVER) for name in KINDS], indirect=True, ids=KINDS)
def test_whom_a_site_lets_in_by_his_address_has_his_limit(site: Site) -> None:
    assert site.ask_often() == LIMITED[site.name]


@pytest.mark.parametrize(
    "site",
    [(name, "", behind) for name in KINDS for behind in (SERVER, LOCATION)],
    indirect=True,
    ids=[f"{name}-{where}" for name in KINDS for where in ("server", "location")],
)
def test_who_has_no_password_is_asked_for_it_and_neither_limited_nor_kept(site: Site) -> None:
    """What is kept goes to the application past nginx."""
    for password in (None, "wrong") * 3:
        answer = site.ask(HOME, password)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="site"')
    assert site.application.asked == []
    assert site.ask_often() == LIMITED[site.name]
