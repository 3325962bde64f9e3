"""Two gateways share a PostgreSQL database: each enforces its own rules, and hears of them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest

from netlimit.controller import Controller, Setup
from netlimit.kernel.fake import FakeKernel
from netlimit.liveness import is_recent
from netlimit.packet import Packet
from netlimit.rules import parse_rule
from netlimit.store import Store, homes
from tests.databases import Postgres

SECONDS = 120.0


class Gateway:
    """A controller that runs, with a kernel in memory."""

    def __init__(self, host: str, url: str, ahead: timedelta = timedelta(0)) -> None:
        self.store = Store(url)
        self.kernel = FakeKernel(now=time.time)
        self.stopping = threading.Event()
        self.controller = Controller(self.store, self.kernel, Setup(host, "fake"), lambda: datetime.now(UTC) + ahead)
        self.thread = threading.Thread(target=self.controller.run, args=(self.stopping.is_set,))
        self.thread.start()

    def blocks(self, source: str) -> bool:
        packet = Packet(ip_address(source), ip_address("203.0.113.1"), in_interface="lan", out_interface="wan")
        return self.kernel.trace(packet) != "accept"

    def await_reports(self, store: Store, times: int) -> None:
        seen = set[datetime | None]()

        def look() -> bool:
            reporter = self.controller._status.reporter
            seen.update(host.seen_at for host in store.hosts() if reporter and host.reporter == reporter)
            return len(seen) >= times

        until(look)

    def close(self) -> None:
        self.stopping.set()
        self.thread.join()
        self.store.close()


@pytest.fixture
def gateways(postgres_url: str) -> Iterator[dict[str, Gateway]]:
    gateways = {host: Gateway(host, postgres_url) for host in ("gw1", "gw2")}
    yield gateways
    for gateway in gateways.values():
        gateway.close()


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    store = Store(postgres_url)
    yield store
    store.close()


def until(come: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not come():
        assert time.monotonic() < end
        time.sleep(0.01)


def block(store: Store, target: str, *hosts: str) -> None:
    """Add a rule; both have taken it in, if it is theirs, on return."""
    now = datetime.now(UTC)
    rule = parse_rule({"target": target, "action": "block", "hosts": list(hosts)}, now)
    (kept,) = store.add([rule], "test", now)
    until(lambda: [host.applied_revision for host in store.hosts()] == [kept.revision] * 2)


def test_each_has_its_own_rules_also_after_a_lost_connection(
    postgres: Postgres, migrated: str, store: Store, gateways: dict[str, Gateway]
) -> None:
    one, two = gateways["gw1"], gateways["gw2"]
    block(store, "10.0.0.1", "gw1")
    block(store, "10.0.0.2", "gw2")
    block(store, "10.0.0.3")
    assert [one.blocks(f"10.0.0.{n}") for n in (1, 2, 3, 4)] == [True, False, True, False]
    assert [two.blocks(f"10.0.0.{n}") for n in (1, 2, 3, 4)] == [False, True, True, False]
    postgres.run(
        migrated,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    block(store, "10.0.0.4", "gw1")
    assert (one.blocks("10.0.0.4"), two.blocks("10.0.0.4")) == (True, False)
    store.remove(1, "test", datetime.now(UTC))
    until(lambda: not one.blocks("10.0.0.1"))


@pytest.fixture
def clones(postgres_url: str) -> Iterator[list[Gateway]]:
    clones = [Gateway("gw1", postgres_url)]
    yield clones
    for gateway in clones:
        gateway.close()


def notes_of(store: Store) -> str:
    return " ".join(note for host in store.hosts() for note in host.notes)


def test_two_of_one_name_are_told_and_one_that_is_started_again_is_not(
    postgres_url: str, store: Store, clones: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.controller.HEARTBEAT_SECONDS", 0.05)
    for _ in range(4):
        clones[0].close()
        clones[0] = Gateway("gw1", postgres_url)
        clones[0].await_reports(store, times=5)
    assert "name gw1" not in notes_of(store)
    clones.append(Gateway("gw1", postgres_url))
    until(lambda: "Another controller reports by the name gw1 to this database" in notes_of(store))
    clones.pop().close()
    monkeypatch.setattr("netlimit.namesakes.WITHIN", 0.2)
    until(lambda: "name gw1" not in notes_of(store))


def test_passes_of_other_commands_beside_the_controller_are_no_controller_of_its_name(
    store: Store, clones: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.controller.HEARTBEAT_SECONDS", 0.05)
    running = clones[0]
    for _ in range(5):
        running.await_reports(store, times=2)
        Controller(store, running.kernel, Setup("gw1", "fake")).sync()
    running.await_reports(store, times=2)
    assert "name gw1" not in notes_of(store)


@pytest.mark.parametrize(("ahead", "said"), [(1, "ahead of"), (-1, "behind")])
def test_one_whose_clock_is_not_the_databases_is_alive_and_says_so(
    postgres_url: str, store: Store, ahead: int, said: str
) -> None:
    gateway = Gateway("gw1", postgres_url, timedelta(hours=ahead))
    try:
        until(lambda: f"The clock of this gateway is 1 h {said} the database's" in notes_of(store))
        assert is_recent(store.hosts()[0].silence, timedelta(seconds=SECONDS))
        asked = store.ask("gw1", "plan", {})
        until(lambda: store.answered(asked) is not None)
    finally:
        gateway.close()


def test_a_gateway_that_was_forgotten_and_lives_tells_anew_how_rules_stand(postgres_url: str) -> None:
    """One that was cut off from the database for long."""
    gateway = Gateway("gw1", postgres_url)
    store = Store(postgres_url)
    try:
        now = datetime.now(UTC)
        unheld = {
            "target": "10.1.2.3",
            "interface": "nowhere0",
            "direction": "to",
            "rate": "9 Mbit/s",
            "action": "shape",
        }
        (rule,) = store.add([parse_rule(unheld, now)], "test", now)
        until(lambda: rule.id in store.marked("gw1") and bool(store.hosts()))
        before = store.marked("gw1")
        with store._database.writing() as connection, homes.by_name(connection):  # as if it had been silent
            for name in ("hosts", "rule_states"):
                connection.exec_driver_sql(f"DELETE FROM {name}")  # noqa: S608  # two words of this line
        until(lambda: bool(store.hosts()) and store.marked("gw1") == before)
    finally:
        gateway.close()
        store.close()
