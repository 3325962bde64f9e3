"""A teardown holds until `netlimit apply`, whatever state of its database comes: the gateway's copy knows it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.controller import Controller, Setup
from netlimit.kernel.fake import FakeKernel
from netlimit.records import HostStatus, Pause, Window
from netlimit.store import Replica, Store, make_pause, open_replica
from netlimit.teardown import tear_down
from tests.controller.conftest import Site
from tests.controller.test_outage import Away, put_back, save
from tests.databases import Postgres

BLOCKED = "10.0.0.1"
TOLD = "the database knows nothing of that"


@pytest.fixture
def away(sqlite_url: str, tmp_path: Path) -> Iterator[Away]:
    """A gateway that holds a block, and whose database file was copied just then (`saved.db`)."""
    store = Store(sqlite_url)
    away = Away(Site(store), tmp_path)
    away.site.add(target=BLOCKED, action="block")
    away.run()
    assert is_blocked(away.site)
    save(away)
    yield away
    away.others.close()
    away.replica.close()
    store.close()


def is_blocked(site: Site) -> bool:
    return site.send(BLOCKED) == ["drop"]


def tear_it_down(site: Site, copy: Replica) -> Pause:
    """What `netlimit teardown` does."""
    site.store.pause("gw", True, now=site.clock())
    pause = site.store.last_pause("gw")
    assert pause is not None
    copy.follow_pause(True, pause)
    tear_down(site.kernel, {})
    return pause


def apply(site: Site, copy: Replica | None) -> None:
    """What ends it, so far as it is told; a copy that cannot be written is not."""
    unheard = copy.find_unheard(site.store) if copy is not None else None
    if unheard is not None:
        site.store.keep_pause("gw", unheard, "root")
    known = copy.known_pause() if copy is not None else None
    ended = site.store.last_pause("gw")
    site.store.pause("gw", False, "root", for_good=True)
    for each in (known, ended):
        if copy is not None and each is not None:
            copy.note_resumed(each)


def find_report(site: Site) -> HostStatus:
    return next(each for each in site.store.hosts() if each.host == "gw")


def set_back(away: Away) -> None:
    """An older file is there: that from before the teardown."""
    put_back(away, away.file.with_name("saved.db"))


@pytest.mark.parametrize("begins", [False, True])
def test_a_database_that_has_not_heard_of_a_teardown_does_not_end_it(
    away: Away, caplog: pytest.LogCaptureFixture, begins: bool
) -> None:
    """It is told, so that others know, and so does who looks at it."""
    pause = tear_it_down(away.site, away.read_copy())
    away.run()
    set_back(away)
    assert not away.site.store.paused("gw")
    if begins:
        away.restart()
    away.run()
    assert not is_blocked(away.site)
    assert away.site.store.paused("gw")
    assert away.read_copy().paused("gw")
    (line, *_) = away.site.store.audit()
    assert (line.action, line.actor, line.after) == ("pause", "controller of gw", {"host": "gw", "pause": pause.word})
    away.controller._due["heartbeat"] = 0.0
    away.run()
    assert sum(TOLD in note for note in find_report(away.site).notes) == 1
    assert caplog.text.count(TOLD) == 1
    assert find_report(away.site).paused
    away.restart()
    away.run()
    assert not is_blocked(away.site)
    apply(away.site, away.read_copy())
    away.run()
    assert is_blocked(away.site)
    assert not away.read_copy().paused("gw")
    away.controller._due["heartbeat"] = 0.0
    away.run()
    assert not any(TOLD in note for note in find_report(away.site).notes)
    assert caplog.text.count(TOLD) == 1
    away.restart()
    away.run()
    assert is_blocked(away.site)


def test_who_begins_takes_out_what_a_boot_has_brought_back_meanwhile(away: Away) -> None:
    pause = make_pause(away.site.clock())
    away.controller.tick()
    away.read_copy().follow_pause(True, pause)
    assert is_blocked(away.site)
    away.restart()
    away.run()
    assert not is_blocked(away.site)
    assert away.site.store.last_pause("gw") == pause


def test_a_teardown_that_only_an_older_file_was_told_holds_with_the_newer(away: Away) -> None:
    """And one that none was told, for the database was away."""
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    set_back(away)
    away.run("alone")
    tear_it_down(away.site, away.read_copy())
    away.run()
    away.site.store.close()
    away.file.unlink()
    away.bring_back()
    away.run()
    assert not is_blocked(away.site)
    assert away.site.store.paused("gw")
    apply(away.site, away.read_copy())
    away.run()
    assert is_blocked(away.site)
    away.take_away()
    away.run("alone")
    away.read_copy().follow_pause(True, make_pause(away.site.clock()))
    tear_down(away.site.kernel, {})
    away.bring_back()
    away.run("back")
    away.run()
    assert not is_blocked(away.site)
    assert away.site.store.paused("gw")


def test_a_standby_that_lagged_does_not_end_a_teardown(
    postgres: Postgres, postgres_url: str, migrated: str, tmp_path: Path
) -> None:
    asked = Store(postgres.url(migrated))
    site = Site(asked)
    with closing(open_replica(tmp_path / "controller", "gw")) as copy:
        site.controller = Controller(asked, site.kernel, Setup("gw", "fake"), site.clock, copy)
        site.add(target=BLOCKED, action="block")
        site.controller.tick()
        asked.close()
        name = f"lagging{next(postgres.numbers)}"
        postgres.run("postgres", f"CREATE DATABASE {name} TEMPLATE {migrated}")
        lagging = Store(postgres.url(name))
        pause = tear_it_down(site, copy)
        site.controller.tick()
        asked._database, lagging._database = lagging._database, asked._database
        site.controller.tick()
        assert not is_blocked(site)
        assert asked.paused("gw")
        assert asked.last_pause("gw") == pause
        assert copy.paused("gw")
        apply(site, copy)
        site.controller.tick()
        assert is_blocked(site)
        asked._database, lagging._database = lagging._database, asked._database
        site.controller.tick()
        assert is_blocked(site), "what had ended is ended again"
        asked.close()
        lagging.close()
        postgres.drop_database(name)


@pytest.fixture
def torn(site: Site, tmp_path: Path) -> Iterator[tuple[Site, Replica]]:
    """A gateway that was torn down, as its database and its copy know."""
    with closing(open_replica(tmp_path / "controller", "gw")) as copy:
        site.controller = Controller(site.store, site.kernel, Setup("gw", "fake"), site.clock, copy)
        site.add(target=BLOCKED, action="block")
        site.controller.tick()
        tear_it_down(site, copy)
        site.controller.tick()
        assert not is_blocked(site)
        yield site, copy


def begin(site: Site, copy: Replica, host: str = "gw") -> Controller:
    site.controller = Controller(site.store, site.kernel, Setup(host, "fake"), site.clock, copy)
    return site.controller


@pytest.mark.parametrize("begins", [False, True])
def test_a_teardown_that_was_ended_while_the_copy_could_not_be_told_is_over(
    torn: tuple[Site, Replica], begins: bool
) -> None:
    site, copy = torn
    apply(site, None)
    assert copy.paused("gw")
    if begins:
        begin(site, copy)
    site.controller.tick()
    assert is_blocked(site)
    assert not copy.paused("gw")


def test_nor_does_an_older_database_bring_that_back_for_who_has_seen_its_end(away: Away) -> None:
    pause = tear_it_down(away.site, away.read_copy())
    away.run()
    apply(away.site, None)
    away.run()
    assert is_blocked(away.site)
    set_back(away)
    away.read_copy().follow_pause(True, pause)  # as if it could not be written all the time
    away.controller._paused = True
    away.controller.tick()
    assert is_blocked(away.site)
    assert not away.site.store.paused("gw")


def test_a_teardown_that_the_audit_has_given_up_is_over_where_nobody_is_paused(
    torn: tuple[Site, Replica], tmp_path: Path
) -> None:
    """Whether the database had heard of it nobody knows then: its word on who is paused counts."""
    site, copy = torn
    site.clock.pass_by(days=100)
    apply(site, None)
    site.store._audit_length = 5
    for number in range(10):
        site.add(target=f"10.1.0.{number}", action="block")
    assert not any(each.action == "pause" for each in site.store.audit())
    begin(site, copy).tick()
    assert is_blocked(site)
    assert not site.store.paused("gw")


def test_apply_ends_a_teardown_that_the_audit_has_given_up(torn: tuple[Site, Replica]) -> None:
    site, copy = torn
    site.clock.pass_by(days=100)
    site.store._audit_length = 5
    for number in range(10):
        site.add(target=f"10.1.0.{number}", action="block")
    apply(site, copy)
    site.controller.tick()
    assert is_blocked(site)


def test_another_database_and_one_that_was_restored_pause_whom_they_say(away: Away, tmp_path: Path) -> None:
    site = away.site
    site.store.back_up(tmp_path / "rules.backup", site.clock())
    tear_it_down(site, away.read_copy())
    away.run()
    set_back(away)
    site.store.restore(tmp_path / "rules.backup", "root", site.clock(), force=True)
    away.run()
    assert is_blocked(site)
    tear_it_down(site, away.read_copy())
    away.run()
    site.store.close()
    away.file.unlink()
    site.store.upgrade()
    site.add(target=BLOCKED, action="block")
    away.run()
    assert is_blocked(site)
    assert not site.store.paused("gw")


def test_a_pause_whose_word_the_copy_does_not_know_goes_by_the_database(away: Away) -> None:
    """Such as a former version has left it; who controls learns it where the database tells."""
    tear_it_down(away.site, away.read_copy())
    away.run()
    with closing(sqlite3.connect(away.directory / "applied.db")) as copy:
        copy.execute("UPDATE clock SET audit_pruned = 1000000")
        copy.execute("DELETE FROM audit")
        copy.commit()
    assert away.read_copy().known_pause() is None
    away.restart()
    away.run()
    assert away.read_copy().known_pause() == away.site.store.last_pause("gw")
    away.read_copy().follow_pause(False)
    away.read_copy().follow_pause(True)
    assert away.read_copy().known_pause() is None
    set_back(away)
    away.run()
    assert is_blocked(away.site)


def test_a_gateway_of_another_name_goes_by_the_database(torn: tuple[Site, Replica]) -> None:
    site, copy = torn
    with closing(open_replica(Path(copy._path).parent, "other")) as renamed:  # type: ignore[arg-type]
        begin(site, renamed, "other").tick()
        assert is_blocked(site)
        assert site.store.paused("gw")
        assert not site.store.paused("other")


def test_who_takes_a_pause_out_of_the_database_brings_back_none_that_was_ended(away: Away) -> None:
    """Whoever may write the database may pause gateways; but `apply` ends each for good."""
    pause = tear_it_down(away.site, away.read_copy())
    away.run()
    for _ in range(2):
        set_back(away)
        away.run()
        assert not is_blocked(away.site)
        away.hidden.unlink()
    apply(away.site, away.read_copy())
    away.run()
    for _ in range(2):
        set_back(away)
        away.restart()
        away.run()
        assert is_blocked(away.site)
        away.hidden.unlink()
    assert away.site.store.keep_pause("gw", pause, "somebody")
    away.run()
    assert is_blocked(away.site)
    assert not away.site.store.paused("gw")


def test_another_gateway_of_the_same_database_goes_on(away: Away, tmp_path: Path) -> None:
    tear_it_down(away.site, away.read_copy())
    away.run()
    set_back(away)
    kernel = FakeKernel()
    with closing(open_replica(tmp_path / "another", "gw2")) as copy:
        another = Controller(away.site.store, kernel, Setup("gw2", "fake"), away.site.clock, copy)
        another.tick()
        away.run()
        another.tick()
        assert not is_blocked(away.site)
        assert kernel.structure().sets
        assert [(each.host, each.paused) for each in away.site.store.hosts()] == [("gw", True), ("gw2", False)]


def open_window(site: Site, copy: Replica) -> Window:
    """What `netlimit apply --confirm` does."""
    paused = ("gw",) if site.store.paused("gw") else ()
    window = site.store.open_window(3600, "root", site.store.now(), paused=paused)
    copy.follow_pause(True)
    site.store.resume_within(window, "gw", "root", site.store.now())
    return window


def confirm(site: Site) -> None:
    """What `netlimit confirm` does, or another gateway's API."""
    site.store.confirm("operator", site.store.now())


def tick(away: Away) -> None:
    """One pass, in which the copy is looked after, too."""
    away.controller._due["heartbeat"] = 0.0
    away.controller.tick()


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("begins", [False, True])
def test_what_was_confirmed_no_older_database_takes_out(
    away: Away, caplog: pytest.LogCaptureFixture, runs: bool, begins: bool
) -> None:
    """As what was applied without a window: also where the controller hears of it only when it starts."""
    tear_it_down(away.site, away.read_copy())
    tick(away)
    save(away)
    open_window(away.site, away.read_copy())
    if runs:
        tick(away)
        assert is_blocked(away.site)
    confirm(away.site)
    if not runs:
        away.restart()
    tick(away)
    assert is_blocked(away.site)
    assert not away.read_copy().paused("gw")
    set_back(away)
    assert away.site.store.paused("gw")
    if begins:
        away.restart()
    away.run()
    assert is_blocked(away.site)
    assert not away.site.store.paused("gw")
    assert "older state" in caplog.text


@pytest.mark.parametrize("end", ["expired", "abandoned", "open", "torn down in it"])
def test_what_nobody_has_confirmed_ends_no_teardown(away: Away, end: str) -> None:
    """Until it is applied: then none of them comes back, the earliest neither."""
    first = tear_it_down(away.site, away.read_copy())
    tick(away)
    save(away)
    window = open_window(away.site, away.read_copy())
    tick(away)
    assert is_blocked(away.site)
    if end == "expired":
        away.site.store.expire(window, "guard", away.site.store.now())
    elif end == "abandoned":
        away.site.store.abandon("root", away.site.store.now())
    elif end == "torn down in it":
        tear_it_down(away.site, away.read_copy())
        confirm(away.site)
    if end != "open":
        tear_down(away.site.kernel, {})
    away.restart()
    tick(away)
    assert is_blocked(away.site) == (end == "open")
    assert away.read_copy().paused("gw")
    assert not away.read_copy().has_resumed(first)
    newer = away.file.with_name("newer.db")
    away.site.store.close()
    shutil.copy(away.file, newer)
    set_back(away)
    tear_down(away.site.kernel, {})
    away.restart()
    tick(away)
    assert not is_blocked(away.site)
    away.hidden.unlink()
    put_back(away, newer)
    apply(away.site, away.read_copy())
    tick(away)
    away.hidden.unlink()
    set_back(away)
    away.restart()
    away.run()
    assert is_blocked(away.site)
    assert not away.site.store.paused("gw")


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_of_two_teardowns_none_comes_back(away: Away, is_confirmed: bool) -> None:
    tear_it_down(away.site, away.read_copy())
    tick(away)
    save(away)
    tear_it_down(away.site, away.read_copy())
    if is_confirmed:
        open_window(away.site, away.read_copy())
        confirm(away.site)
    else:
        apply(away.site, away.read_copy())
    tick(away)
    assert is_blocked(away.site)
    set_back(away)
    away.restart()
    away.run()
    assert is_blocked(away.site)
    assert not away.site.store.paused("gw")


def test_a_teardown_that_came_after_the_one_that_was_confirmed_holds(away: Away) -> None:
    """Though the database that comes back knows the former alone, as one that is over."""
    tear_it_down(away.site, away.read_copy())
    tick(away)
    open_window(away.site, away.read_copy())
    confirm(away.site)
    save(away)
    tick(away)
    assert is_blocked(away.site)
    later = tear_it_down(away.site, away.read_copy())
    tick(away)
    set_back(away)
    assert not away.site.store.paused("gw")
    away.restart()
    tick(away)
    assert not is_blocked(away.site)
    assert away.site.store.last_pause("gw") == later
    assert not away.read_copy().has_resumed(later)


def test_of_teardowns_that_no_database_has_heard_of_none_comes_back(away: Away) -> None:
    """The copy alone knows the former: a state of the database that tells of it was away meanwhile."""
    tear_it_down(away.site, away.read_copy())
    tick(away)
    away.site.store.close()
    first = Path(shutil.copy(away.file, away.file.with_name("first.db")))
    tear_it_down(away.site, away.read_copy())
    tick(away)
    set_back(away)
    away.run()
    assert not is_blocked(away.site)
    open_window(away.site, away.read_copy())
    confirm(away.site)
    tick(away)
    assert is_blocked(away.site)
    away.hidden.unlink()
    put_back(away, first)
    away.restart()
    away.run()
    assert is_blocked(away.site)
    assert not away.site.store.paused("gw")


def test_a_copy_that_cannot_be_written_when_it_is_confirmed_hears_of_it_later(away: Away) -> None:
    path = away.directory / "applied.db"
    away.replica.close()
    with closing(Replica(path, "gw", patience=0.1)) as away.replica:
        away.restart()
        pause = tear_it_down(away.site, away.read_copy())
        tick(away)
        save(away)
        open_window(away.site, away.read_copy())
        tick(away)
        with closing(sqlite3.connect(path, isolation_level=None)) as busy:
            busy.execute("BEGIN IMMEDIATE")
            confirm(away.site)
            tick(away)
            assert is_blocked(away.site)
            assert not away.replica.has_resumed(pause)
            busy.execute("ROLLBACK")
        tick(away)
        assert away.replica.has_resumed(pause)
        set_back(away)
        away.run()
        assert is_blocked(away.site)
