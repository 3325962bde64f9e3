"""A PostgreSQL server that answers, but slowly: the kernel does not wait for it, and it hears of everything in the
end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.records import Outcome, State
from netlimit.rules import parse_rule
from netlimit.store import Store
from scripts.testbed.namespaces import CLIENT, Lab
from scripts.testbed.service import Service
from tests.databases import Postgres
from tests.slow_server import SlowServer, run_slow_server

DELAY = 0.5
"""Seconds that each answer takes."""
REPAIR_DELAY = 0.8
"""A repair that waits for all that is asked and told takes twenty seconds and more."""
REPAIR_SECONDS = 8.0
UNDO_SECONDS = 15.0
SECONDS = 120.0
WAIT = "Prefer: wait=60"
RULE = {"target": CLIENT, "rate": "100 packets/s"}
BLOCK = {"target": "10.1.7.0/24", "action": "block"}


@pytest.fixture
def slow(postgres: Postgres) -> Iterator[SlowServer]:
    with run_slow_server(postgres.home) as server:
        yield server


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    """The database as it is seen by who is not kept waiting."""
    store = Store(postgres_url)
    yield store
    store.close()


@pytest.fixture
def service(lab: Lab, slow: SlowServer, migrated: str, store: Store, tmp_path: Path) -> Iterator[Service]:
    settings = {
        "NETLIMIT_DATABASE_URL": slow.url(migrated),
        "NETLIMIT_BOOTSTRAP_TOKEN": "a-token-of-the-tests",
        "NETLIMIT_STATE_DIRECTORY": str(tmp_path / "controller"),
    }
    with Service(lab.gateway, settings=settings) as running:
        for rule in (RULE, BLOCK):
            assert running.request("POST", "/api/v1/rules", rule, WAIT).body["status"]["state"] == "applied"
        yield running
        slow.delay = 0.0


def flush(lab: Lab) -> float:
    """Undo what leads packets to our chains; in how many seconds it is done again."""
    lab.gateway.run("iptables-legacy", "-t", "mangle", "-F")
    lab.gateway.run("iptables-legacy", "-t", "raw", "-F")
    began = time.monotonic()
    until(lambda: is_led(lab, "mangle", "FORWARD") and is_led(lab, "raw", "PREROUTING"))
    return time.monotonic() - began


def is_led(lab: Lab, table: str, chain: str) -> bool:
    return "NL-" in lab.gateway.run("iptables-legacy", "-t", table, "-S", chain).stdout


def holds(lab: Lab, entry: str) -> bool:
    """Whether one of our sets holds an entry."""
    return entry in lab.gateway.run("ipset", "list").stdout


def until(done: Callable[[], object], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds:g} seconds"
        time.sleep(0.1)


def count_as_slow(service: Service) -> None:
    until(lambda: "answers too slowly" in service.log.read_text())


def test_repairs_do_not_wait_for_a_slow_server(service: Service, slow: SlowServer, lab: Lab, store: Store) -> None:
    slow.delay = REPAIR_DELAY
    assert flush(lab) < REPAIR_SECONDS  # while it is found out
    count_as_slow(service)
    assert flush(lab) < REPAIR_SECONDS  # and when it is known
    until(lambda: len(store.repairs("gw1", 10)) >= 2)
    until(lambda: store.hosts()[0].drift >= 2)
    assert "answers too slowly" in (store.hosts()[0].last_error or "")

    slow.delay = 0.0
    until(lambda: store.hosts()[0].last_error is None)
    assert flush(lab) < REPAIR_SECONDS
    until(lambda: store.hosts()[0].drift >= 3)
    assert store.exceptional([1, 2]) == {}


def test_changes_come_in_from_a_slow_server(service: Service, slow: SlowServer, lab: Lab, store: Store) -> None:
    slow.delay = DELAY
    count_as_slow(service)
    now = datetime.now(UTC)
    added = [
        parse_rule({"target": "10.1.8.0/24", "action": "block"}, now),
        parse_rule({"target": "10.1.9.9", "action": "shape", "rate": "1 Mbit/s", "interface": "absent"}, now),
    ]
    store.add(added, "tests", now)
    store.remove(2, "tests", now)
    until(lambda: holds(lab, "10.1.8.0/24") and not holds(lab, "10.1.7.0/24"))
    revision = store.revision()
    until(lambda: store.hosts()[0].applied_revision == revision)  # what is told comes after what it is about
    assert store.exceptional([3, 4])[4]["gw1"].state is State.ERROR
    assert 3 not in store.exceptional([3, 4])
    assert flush(lab) < REPAIR_SECONDS

    slow.delay = 0.0
    until(lambda: store.hosts()[0].last_error is None)
    store.remove(3, "tests", now)
    until(lambda: not holds(lab, "10.1.8.0/24"))


def test_what_nobody_has_confirmed_is_undone_though_the_server_is_slow(
    service: Service, slow: SlowServer, lab: Lab, store: Store
) -> None:
    """Also what the database tells of it from before it was undone there, long after, brings nothing back."""
    seconds = 15
    store.open_window(seconds, "tests", datetime.now(UTC))
    store.add([parse_rule({"target": "10.1.8.0/24", "action": "block"}, datetime.now(UTC))], "tests", datetime.now(UTC))
    end = time.monotonic() + seconds
    until(lambda: holds(lab, "10.1.8.0/24"))
    slow.delay = DELAY
    until(lambda: not holds(lab, "10.1.8.0/24"), end - time.monotonic() + UNDO_SECONDS)
    assert time.monotonic() > end - 1
    came_back = []

    def undone() -> bool:
        came_back.append(holds(lab, "10.1.8.0/24"))
        window = store.window()
        return window is not None and window.outcome is Outcome.EXPIRED

    until(undone)
    slow.delay = 0.0
    until(lambda: undone() and store.hosts()[0].applied_revision == store.revision())
    assert not any(came_back)
    assert holds(lab, "10.1.7.0/24")
