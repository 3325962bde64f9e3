"""A teardown holds until `netlimit apply`, also where the database that is there has not heard of it: an older file has
come in its place, or it was away."""

from __future__ import annotations

import pwd
import shutil
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.cli.database import share
from netlimit.store import Store
from tests.cli.running import Netlimit, until
from tests.cli.test_host import PAUSED, is_ended, snapshot

TOLD = "the database knows nothing of that"


@pytest.fixture
def forgetful(gateway: Netlimit) -> Iterator[tuple[Netlimit, str, str]]:
    """A gateway that was torn down, and in the place of whose database is a file from before; and what its kernel holds
    with nothing, and with its limit."""
    empty = snapshot(gateway)
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    server.end()
    held, file = snapshot(gateway), find_file(gateway)
    shutil.copy(file, file.with_name("older.db"))
    gateway.do("teardown")
    set_back(gateway)
    assert not is_paused(gateway)
    yield gateway, empty, held
    assert snapshot(gateway) == empty


def find_file(gateway: Netlimit) -> Path:
    return Path(gateway.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///"))


def set_back(gateway: Netlimit) -> None:
    file = find_file(gateway)
    for ending in ("-wal", "-shm"):
        Path(f"{file}{ending}").unlink(missing_ok=True)
    file.unlink()
    shutil.copy(file.with_name("older.db"), file)
    share(file, pwd.getpwnam("nobody"))


def is_paused(gateway: Netlimit) -> bool:
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        return store.paused("gw1")


def test_a_controller_that_starts_then_stays_paused_and_says_so(forgetful: tuple[Netlimit, str, str]) -> None:
    gateway, empty, held = forgetful
    server = gateway.serve()
    until(lambda: gateway.ask("status")["hosts"][0]["paused"], server.said)
    until(lambda: TOLD in " ".join(gateway.do("status").split()), server.said)
    assert server.said().count(TOLD) == 1
    assert snapshot(gateway) == empty
    assert "1 rule in force here" in gateway.do("apply")
    until(lambda: gateway.ask("status")["rules"]["applied"] == 1, server.said)
    assert snapshot(gateway) == held
    server.end()
    set_back(gateway)
    server = gateway.serve()
    until(lambda: gateway.ask("status")["rules"]["applied"] == 1, server.said)
    assert TOLD not in gateway.do("status")
    gateway.do("teardown")
    server.end()


def test_apply_without_a_controller_ends_it_for_good(forgetful: tuple[Netlimit, str, str]) -> None:
    gateway, empty, held = forgetful
    gateway.do("rollback", "0")
    assert snapshot(gateway) == empty, "it is paused"
    assert is_paused(gateway)
    set_back(gateway)
    gateway.do("apply")
    assert snapshot(gateway) == held
    server = gateway.serve()
    until(lambda: gateway.ask("status")["rules"]["applied"] == 1, server.said)
    assert TOLD not in server.said()
    gateway.do("teardown")
    server.end()


def test_what_nobody_confirms_ends_it_for_a_while(forgetful: tuple[Netlimit, str, str]) -> None:
    gateway, empty, held = forgetful
    gateway.do("apply", "--confirm", "1h")
    assert snapshot(gateway) == held
    assert "paused by teardown" in gateway.do("rollback")
    until(lambda: snapshot(gateway) == empty)
    assert is_paused(gateway)


def test_a_teardown_whose_database_is_away_holds_once_it_is_back(gateway: Netlimit) -> None:
    empty = snapshot(gateway)
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    server.end()
    file = find_file(gateway)
    file.rename(file.with_suffix(".away"))
    assert gateway.run("teardown").returncode == 0
    file.with_suffix(".away").rename(file)
    assert gateway.run("apply", "--last").stdout == PAUSED
    server = gateway.serve()
    until(lambda: TOLD in " ".join(gateway.do("status").split()), server.said)
    assert snapshot(gateway) == empty
    assert is_paused(gateway)
    assert "1 rule in force here" in gateway.do("apply")
    until(lambda: gateway.ask("status")["rules"]["applied"] == 1, server.said)
    gateway.do("teardown")
    server.end()


@pytest.mark.parametrize("how", ["here", "while a controller runs", "by another gateway's API"])
def test_what_is_confirmed_ends_a_teardown_for_good(gateway: Netlimit, how: str) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    held, file = snapshot(gateway), find_file(gateway)
    if "controller" not in how:
        server.end()
    gateway.do("teardown")
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.back_up(file.with_name("older.db"), datetime.now(UTC))
        gateway.do("apply", "--confirm", "1h")
        assert not is_ended(gateway)
        if "API" in how:
            store.confirm("operator", datetime.now(UTC))
        else:
            gateway.do("confirm")
    assert how != "here" or is_ended(gateway)
    until(lambda: is_ended(gateway))
    assert snapshot(gateway) == held
    if not server.ended:
        server.end()
    set_back(gateway)
    assert is_paused(gateway)
    server = gateway.serve()
    until(lambda: "older state" in " ".join(gateway.do("status").split()), server.said)
    assert not is_paused(gateway)
    assert snapshot(gateway) == held
    gateway.do("teardown")
    server.end()
