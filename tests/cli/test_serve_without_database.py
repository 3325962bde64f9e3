"""`netlimit serve` while its database, or a file of the API's, does not answer: controller and guard run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.api.test_tls import make_certificate
from tests.cli.running import Netlimit, Server, until
from tests.cli.strangers import stranger
from tests.cli.test_secure import secure
from tests.databases import Postgres, run_postgres

TOKEN = "a-token-of-my-own-7f3a"


@pytest.fixture
def server() -> Iterator[Postgres]:
    with run_postgres() as running:
        yield running
        if running.process is not None and running.process.poll() is not None:
            running.start()


@pytest.fixture
def holding(root: None, gateway: Netlimit, server: Postgres, directory: Path) -> Netlimit:
    """A gateway with its rules on a server, which holds a block of 10.1.2.3, and where nothing runs now."""
    own = {
        "NETLIMIT_DATABASE_URL": server.url(server.make_database()),
        "NETLIMIT_STATE_DIRECTORY": str(directory / "controller"),
        "NETLIMIT_BOOTSTRAP_TOKEN": TOKEN,
        "NETLIMIT_TOKEN": TOKEN,
    }
    place = replace(gateway, environment={**gateway.environment, **own})
    serving = place.serve()
    place.do("rule", "add", "10.1.2.3", "--action", "block", "--wait", "60")
    assert serving.end() == 0
    return place


def test_a_start_without_the_server_puts_back_what_the_copy_holds(holding: Netlimit, server: Postgres) -> None:
    """And what the start has to do there is done when it answers."""
    server.stop()
    _boot(holding)
    serving = holding.start("serve", "--api-user", "nobody")
    until(lambda: serving.ended or _is_blocked(holding), serving.said)
    assert not serving.ended, serving.said()
    assert "cannot be reached" in serving.said()
    assert "goes by its copy of the rules meanwhile" in serving.said()
    server.start()
    _await_api(holding, serving)
    assert serving.end() == 0
    assert "Traceback" not in serving.said()


def test_a_server_that_says_nothing_is_not_waited_for(holding: Netlimit, server: Postgres) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        _boot(holding)
        serving = holding.start("serve", "--api-user", "nobody")
        until(lambda: serving.ended or _is_blocked(holding), serving.said)
        assert not serving.ended, serving.said()
    finally:
        server.process.send_signal(signal.SIGCONT)
    _await_api(holding, serving)
    assert serving.end() == 0


def test_an_api_that_comes_late_while_the_server_is_away_ends_nothing(holding: Netlimit, server: Postgres) -> None:
    with stranger(holding, "127.0.0.1"):
        serving = holding.start("serve", "--api-user", "nobody")
        until(lambda: serving.ended or "cannot listen" in serving.said(), serving.said)
        server.stop()
    until(lambda: serving.ended or "cannot be reached" in _after(serving, "cannot listen"), serving.said)
    until(lambda: serving.ended or serving.said().count("it is tried again and again") == 2, serving.said)
    _boot(holding)
    until(lambda: serving.ended or _is_blocked(holding), serving.said)
    assert not serving.ended, serving.said()
    server.start()
    _await_api(holding, serving)
    assert serving.said().count("it is tried again and again") == 2
    assert serving.end() == 0


def test_what_only_an_operator_can_mend_ends_a_start_that_holds_rules(holding: Netlimit, server: Postgres) -> None:
    for url, said in (
        ("mysql://localhost/netlimit", "begins with 'mysql'; netlimit knows sqlite and postgresql"),
        ("postgresql+psycopg://postgres@/netlimit?hst=db", "hst"),
    ):
        assert said in holding.refuse("serve", "--api-user", "nobody", NETLIMIT_DATABASE_URL=url)


def test_a_first_start_without_the_server_ends_with_a_sentence(root: None, gateway: Netlimit, server: Postgres) -> None:
    url = server.url(server.make_database())
    server.stop()
    assert "cannot be reached" in gateway.refuse("serve", "--api-user", "nobody", NETLIMIT_DATABASE_URL=url)


def test_a_certificate_that_does_not_answer_keeps_nobody_but_the_api_from_running(
    netlimit: Netlimit, directory: Path
) -> None:
    """As on a mount that hangs: who opens a FIFO waits for ever."""
    certificate, key = make_certificate(directory)
    sound = certificate.read_bytes()
    certificate.unlink()
    os.mkfifo(certificate)
    place = secure(netlimit, certificate, key, authority=certificate)
    serving = place.start("serve", "--api-user", "nobody")
    until(lambda: serving.ended or "Keeping the rules" in serving.said(), serving.said)
    until(lambda: serving.ended or "is no plain file" in serving.said(), serving.said)
    assert not serving.ended, serving.said()
    certificate.unlink()
    certificate.write_bytes(sound)
    until(lambda: serving.ended or not place.run("status").returncode, serving.said)
    assert serving.end() == 0


def _boot(gateway: Netlimit) -> None:
    """Empty the kernel, as a start of the machine does."""
    for table in ("raw", "mangle", "filter", "security"):
        for family in ("iptables-legacy", "ip6tables-legacy"):
            for what in ("-F", "-X"):
                subprocess.run(gateway.within(family, "-t", table, what), check=True)
    subprocess.run(gateway.within("ipset", "destroy"), check=False)


def _is_blocked(gateway: Netlimit) -> bool:
    held = subprocess.run(gateway.within("ipset", "save"), capture_output=True, text=True, check=True).stdout
    return "10.1.2.3" in held


def _await_api(gateway: Netlimit, serving: Server) -> None:
    until(lambda: serving.ended or "Answering at" in _after(serving, "it is tried again"), serving.said)
    until(lambda: serving.ended or not gateway.run("status").returncode, serving.said)
    assert not serving.ended, serving.said()
    assert len(serving.children) == 3


def _after(serving: Server, words: str) -> str:
    return serving.said().partition(words)[2]
