"""A standby that takes the primary's place, for a moment or for good: nobody stays where no change is taken, and of two
that take changes all use the newer one."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy.engine import make_url

from netlimit.cli import doctor
from netlimit.conflicts import Severity
from netlimit.controller import Controller, Setup
from netlimit.errors import StoreError
from netlimit.faults import find_faults
from netlimit.kernel.fake import FakeKernel
from netlimit.kernel.none import NoKernel
from netlimit.l7.sources import Sources
from netlimit.origins import TOKENS
from netlimit.rules import parse_rule
from netlimit.settings import Settings
from netlimit.store import Store, clock, open_replica, primaries
from netlimit.store.faults import Undone
from netlimit.store.servers import find_primary, split_servers
from tests.api.server import HANDLES, HASHES, connect, serve
from tests.databases import Postgres, run_postgres

NOW = datetime.now(UTC)
LOST = "changes lost by the database"


class Pair(NamedTuple):
    """A server, and another that streams what it is told."""

    primary: Postgres
    standby: Postgres


@pytest.fixture
def pair() -> Iterator[Pair]:
    with run_postgres() as primary:
        home = Path(tempfile.mkdtemp(prefix="netlimit-standby-"))
        shutil.copystat(primary.home, home)
        os.chown(home, primary.home.stat().st_uid, primary.home.stat().st_gid)
        standby = Postgres(home, count())
        try:
            standby.copy(primary)
            standby.start()
            yield Pair(primary, standby)
            standby.stop()
        finally:
            shutil.rmtree(home)


def add(store: Store, host: int) -> None:
    store.add([parse_rule({"target": f"10.0.0.{host}", "action": "block"}, NOW)], "test", NOW)


def migrate(server: Postgres) -> None:
    store = Store(server.url("postgres"))
    store.upgrade()
    store.close()


def test_where_the_url_names_both_all_go_back_to_the_primary(pair: Pair) -> None:
    migrate(pair.primary)
    store = Store(f"postgresql+psycopg://postgres@/postgres?host={pair.primary.home},{pair.standby.home}")
    add(store, 1)
    pair.primary.stop()
    with pytest.raises(StoreError):
        store.revision()  # not what the standby has, which may lag
    pair.primary.start()
    add(store, 2)
    assert store.revision() == 2
    store.close()


def test_who_was_led_to_the_standby_by_a_name_goes_where_it_leads_now(pair: Pair, tmp_path: Path) -> None:
    migrate(pair.primary)
    wait_for(pair.standby)
    name = tmp_path / "server"
    name.symlink_to(pair.standby.home)
    store = Store(f"postgresql+psycopg://postgres@/postgres?host={name}")
    assert store.revision() == 0
    with pytest.raises(StoreError, match="let NETLIMIT_DATABASE_URL name the primary server"):
        add(store, 1)
    name.unlink()
    name.symlink_to(pair.primary.home)
    add(store, 1)
    assert store.revision() == 1
    store.close()


def wait_for(standby: Postgres, revision: int = 0) -> None:
    """Until it has what the primary has been told."""
    end = time.monotonic() + 30
    while True:
        store = Store(standby.url("postgres"))
        try:
            if store.revision() == revision:
                return
        except StoreError:
            pass
        finally:
            store.close()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("?host=a,b", "read-write"),
        ("?host=a&host=b", "read-write"),
        ("?hostaddr=192.0.2.1,192.0.2.2", "read-write"),
        ("?host=a", None),
        ("?host=a,b&target_session_attrs=any", None),
        ("?host=a,b&target_session_attrs=standby", None),
    ],
)
def test_what_a_server_is_asked_to_be(query: str, asked: str | None) -> None:
    found = find_primary(make_url(f"postgresql+psycopg:///netlimit{query}"))
    assert found.get("target_session_attrs") == asked


@pytest.mark.parametrize(
    ("query", "servers"),
    [
        ("?host=a:1&host=b:2", [("a", None, "1"), ("b", None, "2")]),
        ("?host=a,b&port=5433,5434", [("a", None, "5433"), ("b", None, "5434")]),
        ("?host=a,b&hostaddr=192.0.2.1,192.0.2.2", [("a", "192.0.2.1", None), ("b", "192.0.2.2", None)]),
        ("?hostaddr=192.0.2.1,192.0.2.2", [(None, "192.0.2.1", "5432"), (None, "192.0.2.2", "5432")]),
        ("?host=a,b&target_session_attrs=primary", [("a", None, None), ("b", None, None)]),
        ("?host=a,b&target_session_attrs=any", []),
        ("?host=a,b,c&hostaddr=192.0.2.1,192.0.2.2", []),
        ("?host=a", []),
    ],
)
def test_what_servers_there_are_to_choose_from(query: str, servers: list[tuple[str | None, ...]]) -> None:
    found = split_servers(make_url(f"postgresql+psycopg:///netlimit{query}"))
    assert [(each.host, each.hostaddr, each.port or None) for each in found] == servers


def test_what_the_environment_asks_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "standby")
    assert find_primary(make_url("postgresql+psycopg:///netlimit?host=a,b")) == {}


def name_both(pair: Pair, user: str = "postgres") -> str:
    return f"postgresql+psycopg://{user}@/postgres?host={pair.primary.home},{pair.standby.home}"


@pytest.fixture
def divided(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The standby takes changes, too: it has the first that the primary had, and is of a newer timeline."""
    monkeypatch.setattr(primaries, "LOOK_SECONDS", 0.0)
    migrate(pair.primary)
    with opened(pair.primary.url("postgres")) as store:
        add(store, 1)
    wait_for(pair.standby, 1)
    return pair


def opened(url: str, patience: float | None = None, silence: float | None = None) -> closing[Store]:
    return closing(Store(url, patience=patience, silence=silence))


def promote(server: Postgres) -> None:
    server.run("postgres", "SELECT pg_promote()")


def count_rules(pair: Pair) -> tuple[int, int]:
    """How many the former primary has, and how many the former standby."""
    found = []
    for server in pair:
        with opened(server.url("postgres")) as store:
            found.append(store.revision())
    return found[0], found[1]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_further_connections_do_not_go_to_an_old_primary_that_comes_back(divided: Pair) -> None:
    with opened(name_both(divided)) as store:
        store.revision()
        promote(divided.standby)
        divided.primary.stop()
        add(store, 2)
        divided.primary.start()
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(partial(add, store), range(3, 15)))
        assert count_rules(divided) == (1, 14)
        wait_until(lambda: bool(store.revision() and store.divided))


def test_who_begins_uses_the_newer_of_two_that_take_changes(divided: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """And needs no rights for that but those of an ordinary user."""
    divided.primary.run("postgres", "CREATE ROLE low LOGIN", "GRANT SELECT ON ALL TABLES IN SCHEMA public TO low")
    promote(divided.standby)
    wait_until(lambda: has_role(divided.standby))
    with opened(name_both(divided, "low")) as store:
        with opened(divided.standby.url("postgres")) as newer:
            add(newer, 2)
        for _ in range(3):
            assert store.revision() == 2
        said = store.divided or ""
    assert f"{divided.standby.home} (timeline 2), which is used here, and {divided.primary.home} (timeline 1)" in said
    assert [each.getMessage() for each in caplog.records].count(said) == 1


def has_role(server: Postgres) -> bool:
    with opened(server.url("postgres").replace("postgres@", "low@")) as store:
        try:
            return store.revision() == 1
        except StoreError:
            return False


@pytest.mark.parametrize("patience", [{}, {"silence": 25.0}, {"patience": 1.0}], ids=["command", "API", "controller"])
def test_who_is_at_work_leaves_the_older_one(divided: Pair, patience: dict[str, float]) -> None:
    with opened(name_both(divided), **patience) as store:
        watch = store.watch()
        assert store.revision() == 1
        assert store.divided is None
        promote(divided.standby)
        with opened(divided.standby.url("postgres")) as newer:
            add(newer, 2)
        wait_until(lambda: store.revision() == 2)
        assert watch.wait(0), "what was listened to is left, too"
        with opened(divided.standby.url("postgres")) as newer:
            add(newer, 3)
        assert watch.wait(10)
        add(store, 4)
        watch.close()
        assert count_rules(divided) == (1, 4)
        divided.primary.stop()
        wait_until(lambda: bool(store.revision()) and store.divided is None)


def test_what_was_begun_at_the_older_one_is_not_acknowledged(divided: Pair) -> None:
    with opened(name_both(divided)) as store:
        store.revision()
        writing = store._database.writing()
        clock.take_revision(writing.__enter__())
        promote(divided.standby)
        wait_until(lambda: bool(store.revision()) and store.divided is not None)
        with pytest.raises(Undone):
            writing.__exit__(None, None, None)
        assert count_rules(divided) == (1, 1)


def test_the_api_and_doctor_tell_that_there_are_two(divided: Pair, tmp_path: Path) -> None:
    """The former without names of hosts."""
    promote(divided.standby)
    settings = Settings(database_url=name_both(divided), host="gw1")
    with opened(settings.database_url, silence=25.0) as store:
        store.add_token("viewer", HASHES["viewer"], "viewer", NOW, handle=HANDLES["viewer"])
        with serve(settings, store) as url, connect(url, "viewer") as client:
            notes = client.get("/status").json()["notes"]
    assert [each for each in notes if each.startswith("Several servers of the database take changes")]
    assert str(divided.primary.home) not in str(notes)
    found = {each.name: str(each) for each in find_faults(doctor._survey_service(settings, NoKernel(tmp_path)))}
    assert f"{divided.primary.home} (timeline 1)" in found["two databases"]


def test_while_the_newer_one_begins_anew_no_change_goes_to_the_older(
    divided: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(divided.standby)
    with opened(name_both(divided)) as store:
        add(store, 2)
        divided.standby.stop()
        with pytest.raises(StoreError, match=rf"{divided.primary.home} takes changes, but is older"):
            add(store, 3)
        divided.standby.start()
        add(store, 3)
        assert count_rules(divided) == (1, 3)
        divided.standby.stop()
        with pytest.raises(StoreError):
            add(store, 4)
        monkeypatch.setattr(primaries, "AWAY_SECONDS", 0.0)
        add(store, 4)  # it has been away for long
        assert store.revision() == 2
        divided.standby.start()
        wait_until(lambda: store.revision() == 3)


def test_one_server_of_two_names_is_one(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primaries, "LOOK_SECONDS", 0.0)
    migrate(pair.primary)
    name = tmp_path / "server"
    name.symlink_to(pair.primary.home)
    with opened(f"postgresql+psycopg://postgres@/postgres?host={name},{pair.primary.home}") as store:
        for _ in range(5):
            store.revision()
            time.sleep(0.1)
        pair.primary.stop()
        pair.primary.start()
        for number in range(5):
            add(store, number)
            time.sleep(0.1)
        assert store.divided is None


@pytest.mark.parametrize("is_first", [True, False])
def test_a_server_that_says_nothing_is_not_waited_for(pair: Pair, tmp_path: Path, is_first: bool) -> None:
    migrate(pair.primary)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / ".s.PGSQL.5432"))
        silent.listen(16)
        hosts = [str(tmp_path), str(pair.primary.home)]
        began = time.monotonic()
        with opened(
            f"postgresql+psycopg://postgres@/postgres?host={','.join(hosts if is_first else hosts[::-1])}"
        ) as s:
            s.revision()
            assert time.monotonic() - began < 3


def test_what_a_standby_that_lagged_has_lost_is_told(pair: Pair, tmp_path: Path) -> None:
    """A gateway goes by it, for changes must not wait until somebody comes; and says what is out of force."""
    migrate(pair.primary)
    url = name_both(pair)
    with opened(url) as store, closing(open_replica(tmp_path / "controller", "gw")) as replica:
        add(store, 1)
        wait_for(pair.standby, 1)
        pair.standby.stop()
        add(store, 2)
        add(store, 3)
        controller = Controller(store, FakeKernel(), Setup("gw", "fake"), replica=replica)
        controller.sync()
        pair.primary.stop()
        pair.standby.start()
        promote(pair.standby)
        with opened(pair.standby.url("postgres")) as newer:
            add(newer, 4)
        looks = count()

        def stopped() -> bool:
            status = controller._status
            return next(looks) > 1000 or (controller._outage is None and status.applied_revision == 2)

        controller.run(stopped)
        assert {str(rule.target) for rule in replica.load("gw")[1]} == {"10.0.0.1/32", "10.0.0.4/32"}
        settings = Settings(host="gw", database_url=url, state_directory=tmp_path / "controller")
        told = doctor._survey_service(settings, NoKernel(tmp_path))
        (finding,) = [each for each in find_faults(told) if each.name == LOST]
        assert finding.severity is Severity.SERIOUS
        assert "revision 3 is lost there (it is at 2)" in str(finding)
        assert "Out of force are: rule 2: block from 10.0.0.2 any, rule 3: block from 10.0.0.3 any." in str(finding)
        assert "In force are instead, or again: rule 2: block from 10.0.0.4 any." in str(finding)


def test_what_else_such_a_standby_has_lost_is_told_where_no_rule_is_lost(pair: Pair, tmp_path: Path) -> None:
    """Limits of requests by the limiter; that there may be more, such as a revoked token, by the controller."""
    migrate(pair.primary)
    url = name_both(pair)
    web = "domain: web\ndescriptors:\n- key: remote_address\n  rate_limit: {unit: minute, requests_per_unit: %d}\n"
    with opened(url) as store, closing(open_replica(tmp_path / "controller", "gw")) as replica:
        store.put_limits("web", web % 50, "application/yaml", "test", NOW)
        token = store.add_token("leaked", "hash", "admin", NOW, None, None, "test")
        add(store, 1)
        wait_for(pair.standby, 1)
        pair.standby.stop()
        store.put_limits("web", web % 5, "application/yaml", "test", NOW)
        store.revoke_token(token.id, NOW, "test")
        controller = Controller(store, FakeKernel(), Setup("gw", "fake"), replica=replica)
        controller.tick()
        sources = Sources(database=store)
        sources.start()
        pair.primary.stop()
        pair.standby.start()
        promote(pair.standby)
        looks = count()
        controller.run(lambda: next(looks) > 1000 or bool(controller._losses))
        controller._due["heartbeat"] = 0.0
        controller.tick()
        assert [each.name for each in store.active_tokens(NOW)] == ["leaked"]
        settings = Settings(host="gw", database_url=url, state_directory=tmp_path / "controller")
        told = doctor._survey_service(settings, NoKernel(tmp_path))
        (finding,) = [each for each in find_faults(told) if each.name == LOST]
        assert finding.severity is Severity.SERIOUS
        assert TOKENS in str(finding)
        sources.refresh()
        assert "Others than before are those of: 'web'." in " ".join(sources.troubles)
        store.put_limits("web", web % 5, "application/yaml", "test", NOW)
        sources.refresh()
        assert sources.troubles == ()
