"""A guard that hangs leaves a window of confirmation open past its end: the controller undoes it, once."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from netlimit import controller as controllers
from netlimit import guard as guarding
from netlimit import overdue
from netlimit.controller import Controller, Setup
from netlimit.errors import StoreError
from netlimit.guard import Guard
from netlimit.plan import Step
from netlimit.records import Actor, Outcome, Window
from netlimit.store import Replica, Store, open_replica
from tests.controller.conftest import Site

CLIENT = "10.0.0.1"
PATIENCE = 60.0
LATE = 1 + overdue.OVERDUE_SECONDS
"""So many seconds after a window of one second has been seen, the controller ends it."""


@dataclass
class Elapsed:
    """The seconds by which controllers know what is overdue: they pass when a test says so."""

    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture(autouse=True)
def elapsed(monkeypatch: pytest.MonkeyPatch) -> Elapsed:
    elapsed = Elapsed()
    monkeypatch.setattr(controllers, "Overdue", partial(overdue.Overdue, clock=elapsed))
    monkeypatch.setattr(guarding, "RECORD_SECONDS", PATIENCE)
    return elapsed


def cut(site: Site, paused: tuple[str, ...] = ()) -> None:
    """Open a window of one second that the controller sees, and cut the client off."""
    site.store.open_window(1, "test", site.clock(), paused=paused)
    tick(site)
    site.add(target=CLIENT, action="block")
    tick(site)
    assert site.send(CLIENT) == ["drop"]


def tick(site: Site) -> None:
    site.controller._due["window"] = 0.0
    site.controller.tick()


def wait(site: Site, come: Callable[[], bool]) -> None:
    """Let the controller work until it has come, while no seconds pass."""
    end = time.monotonic() + PATIENCE
    while not come():
        assert time.monotonic() < end
        tick(site)
        time.sleep(0.02)


def wait_until_late(site: Site, elapsed: Elapsed, late: float = LATE) -> None:
    """Until the window is overdue, and what it changed is undone: not before."""
    elapsed.pass_by(late - 0.1)
    for _ in range(3):
        tick(site)
    assert not is_open(site)
    elapsed.pass_by(0.2)
    wait(site, lambda: is_open(site))


def is_open(site: Site) -> bool:
    return site.send(CLIENT) == ["accept"]


def test_what_the_guard_does_not_undo_the_controller_does(site: Site, elapsed: Elapsed) -> None:
    cut(site)
    wait_until_late(site, elapsed)
    window = site.store.window()
    assert window is not None
    assert (window.outcome, window.revision) == (Outcome.EXPIRED, 2)
    assert site.store.select()[1] == 0
    assert site.store.audit()[0].actor == "controller of gw"
    for _ in range(3):
        tick(site)
    assert site.store.revision() == 2


def test_one_that_is_over_by_the_controller_s_clock_alone_is_not_undone_when_the_database_returns(
    site: Site, elapsed: Elapsed
) -> None:
    """Its end was reckoned from an answer that took long."""
    site.store.open_window(3600, "test", site.store.now())
    tick(site)
    elapsed.pass_by(3600 + 0.9 * overdue.OVERDUE_SECONDS)
    site.controller._overdue.look(site.store, site.kernel, patience=0.0)
    window = site.store.window()
    assert window is not None
    assert window.outcome is None


@pytest.mark.parametrize("forces", [False, True])
def test_what_was_forced_comes_back_for_who_may_force(site: Site, elapsed: Elapsed, forces: bool) -> None:
    forced = site.add(target="10.0.0.2", action="block", forced_by="alice")
    site.store.open_window(1, "test", site.clock(), forces=forces)
    site.add(target=CLIENT, action="block")
    tick(site)
    site.store.remove(forced.id, "alice", site.clock())
    tick(site)
    wait_until_late(site, elapsed)
    assert site.send("10.0.0.2") == ["drop" if forces else "accept"]


def test_the_guard_that_wakes_up_undoes_nothing_again(site: Site, elapsed: Elapsed) -> None:
    """Nor what has been changed since."""
    cut(site)
    window = site.store.window()
    assert window is not None
    guard = Guard(site.store, "gw", lambda: site.kernel, lambda source, kernel: site.restart(), lambda: None)  # type: ignore[arg-type, return-value]
    snapshot = guard._remember(window)
    wait_until_late(site, elapsed)
    site.add(target="10.0.0.2", action="block")
    tick(site)
    guard._undo(window, snapshot, overdue.read_clock() - 60)
    assert site.store.revision() == 3
    assert site.send("10.0.0.2") == ["drop"]


def test_the_guard_that_wakes_up_without_a_database_puts_nothing_back(
    site: Site, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(site)
    window = site.store.window()
    assert window is not None
    monkeypatch.setattr(guarding, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(site.kernel, "controlled", lambda: True)
    guard = Guard(site.store, "gw", lambda: site.kernel, lambda source, kernel: site.restart(), lambda: None)  # type: ignore[arg-type, return-value]
    snapshot = guard._remember(window)
    wait_until_late(site, elapsed)
    site.add(target="10.0.0.2", action="block")
    tick(site)
    asked: list[int] = []

    def fail(*arguments: object) -> None:
        asked.append(1)
        if len(asked) < 4:
            raise StoreError("It is away.")

    monkeypatch.setattr(site.store, "expire", fail)
    monkeypatch.setattr(guard, "_restore", lambda *arguments: pytest.fail("The kernel was put back again."))
    thread = threading.Thread(target=guard._undo, args=[window, snapshot, overdue.read_clock() - 60])
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert site.send("10.0.0.2") == ["drop"]


def test_what_was_confirmed_stays(site: Site, elapsed: Elapsed) -> None:
    cut(site)
    site.store.confirm(Actor("test"), site.clock())
    elapsed.pass_by(LATE + 0.1)
    for _ in range(3):
        tick(site)
    assert not is_open(site)
    assert site.store.revision() == 1


@pytest.mark.parametrize("by", ["controller", "another gateway"])
def test_what_was_not_ours_to_begin_with_is_taken_out(site: Site, elapsed: Elapsed, by: str) -> None:
    cut(site, paused=("gw",))
    if by == "another gateway":
        site.store.abandon(Actor("test"), site.clock())
        tick(site)
    wait_until_late(site, elapsed, LATE if by == "controller" else overdue.OVERDUE_SECONDS)
    wait(site, lambda: not site.kernel.structure().sets)
    assert is_open(site)
    assert site.store.paused("gw")


@pytest.mark.parametrize("ends", ["confirmed", "for good", "forgotten", "not"])
def test_what_a_slow_database_has_told_while_the_kernel_was_waited_for_is_not_taken_out(
    site: Site, elapsed: Elapsed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """It may have been confirmed in the last moment."""
    told: list[Window | None] = [None]

    @contextmanager
    def wait_for_turn(patience: float = PATIENCE) -> Iterator[None]:
        if ends == "confirmed":
            site.store.confirm("test", site.clock())
        elif ends == "for good":
            site.store.pause("gw", False, for_good=True)
        told[0] = last = site.store.window()
        if ends == "forgotten":  # how the one before has ended says nothing of this one
            assert last is not None
            told[0] = replace(last, opened_at=last.opened_at - timedelta(hours=1), outcome=Outcome.CONFIRMED)
        yield

    with closing(open_replica(tmp_path / "controller", "gw")) as copy:
        cut(site, paused=("gw",))
        elapsed.pass_by(LATE + 1)
        monkeypatch.setattr(site.kernel, "exclusive", wait_for_turn)
        site.controller._overdue.look_alone(copy, site.kernel, lambda: told[0])
    assert bool(site.kernel.structure().sets) == (ends in ("confirmed", "for good"))


def test_what_goes_on_for_good_meanwhile_is_not_taken_out(site: Site, elapsed: Elapsed) -> None:
    site.add(target="10.0.0.2", action="block")
    cut(site, paused=("gw",))
    site.store.pause("gw", False, for_good=True)
    wait_until_late(site, elapsed)
    assert site.kernel.structure().sets
    assert not site.store.paused("gw")


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_moves_no_end(site: Site, elapsed: Elapsed, hours: int) -> None:
    cut(site)
    site.clock.pass_by(hours=hours)
    wait_until_late(site, elapsed)


def test_without_the_database_the_copy_comes_back(site: Site, elapsed: Elapsed, tmp_path: Path) -> None:
    replica = open_replica(tmp_path / "controller", "gw")
    setup = Setup("gw", "fake")
    site.controller = Controller(site.store, site.kernel, setup, site.clock, replica)
    site.add(target="10.0.0.2", action="block")
    tick(site)
    cut(site)
    assert site.controller._go_on_without(StoreError("It is gone."))
    site.controller._outage.over = lambda: False  # type: ignore[union-attr, method-assign]
    wait_until_late(site, elapsed)
    assert site.send("10.0.0.2") == ["drop"]
    window = site.store.window()
    assert window is not None
    assert window.outcome is None
    site.controller._outage.over = lambda: True  # type: ignore[union-attr, method-assign]
    site.controller.tick()
    assert is_open(site), "and not for a moment is it as it was in the window"
    window = site.store.window()
    assert window is not None
    assert window.outcome is Outcome.EXPIRED
    replica.close()


@contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Nobody else can write this file meanwhile."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


@pytest.fixture
def site_behind(site: Site, tmp_path: Path) -> Iterator[Site]:
    """A gateway whose copy lacks the base of the window in which the client was cut off; and the database is away."""
    path = tmp_path / "applied.db"
    with closing(Replica(path, "gw", patience=0.05)) as replica:
        replica.upgrade()
        site.controller = Controller(site.store, site.kernel, Setup("gw", "fake"), site.clock, replica)
        site.add(target="10.0.0.2", action="block")
        tick(site)
        with unwritable(path):
            site.add(target="10.0.0.3", action="block")
            tick(site)
            cut(site)
        assert replica.revision() == 1
        assert site.controller._go_on_without(StoreError("It is gone."))
        site.controller._outage.over = lambda: False  # type: ignore[union-attr, method-assign]
        yield site


def restore_from_memory(site: Site) -> None:
    """What the guard does where neither the database nor the copy can do its part."""
    window = site.store.window()
    assert window is not None
    guard = Guard(
        site.store,
        "gw",
        lambda: site.kernel,
        lambda source, kernel: Controller(source, kernel, Setup("gw", "fake"), site.clock),
        lambda: nullcontext(None),
    )
    assert guard._restore(window, guard._remember(window), lambda: True)
    assert is_open(site)


@pytest.mark.parametrize("late", [0.0, overdue.OVERDUE_SECONDS])
def test_what_the_guard_brings_back_from_memory_is_not_undone_by_who_holds_what_is_over(
    site_behind: Site, elapsed: Elapsed, late: float
) -> None:
    site, controller = site_behind, site_behind.controller
    elapsed.pass_by(1.1 + late)
    tick(site)
    restore_from_memory(site)
    for _ in range(5):
        controller._due["structure"] = controller._due["sweep"] = controller._due["heartbeat"] = 0.0
        tick(site)
        elapsed.pass_by(1.0)
    assert is_open(site)
    assert site.send("10.0.0.3") == ["drop"]
    assert any("leaves the kernel as it is" in note for note in controller._status.notes)
    assert controller._rest() > 0
    controller._outage.over = lambda: True  # type: ignore[union-attr, method-assign]
    controller.tick()
    window = site.store.window()
    assert window is not None
    assert window.outcome is Outcome.EXPIRED
    assert is_open(site)
    assert not any("leaves the kernel as it is" in note for note in controller._status.notes)


def test_before_its_end_what_was_changed_in_the_window_is_kept_in_force(site_behind: Site, elapsed: Elapsed) -> None:
    restore_from_memory(site_behind)
    elapsed.pass_by(0.5)
    site_behind.controller._due["structure"] = 0.0
    tick(site_behind)
    assert not is_open(site_behind)


def test_what_nobody_has_confirmed_is_not_gone_by_at_a_start_either(site: Site, tmp_path: Path) -> None:
    """The guard has put the kernel right, but could not tell the database, which takes no writes; then both were
    killed."""
    setup, verdicts, write = Setup("gw", "fake"), set(), site.kernel.apply

    def write_and_send(step: Step) -> None:
        write(step)
        verdicts.update(site.send(CLIENT))

    with closing(open_replica(tmp_path / "controller", "gw")) as copy:
        site.controller = Controller(site.store, site.kernel, setup, site.clock, copy)
        site.add(target="10.0.0.2", action="block")
        tick(site)
        site.store.open_window(1, "test", site.store.now())
        site.add(target=CLIENT, action="block")
        site.controller.sync()
        assert site.send(CLIENT) == ["drop"]
        restore_from_memory(site)
        time.sleep(1.0)
        site.kernel.apply = write_and_send  # type: ignore[method-assign]
        assert site.store.path is not None
        with unwritable(site.store.path), closing(Store(f"sqlite:///{site.store.path}", patience=0.05)) as store:
            site.controller = Controller(store, site.kernel, setup, site.clock, copy)
            for _ in range(3):
                try:
                    tick(site)
                except StoreError as error:
                    site.controller._recover(error, time.monotonic(), 0.5)
    assert site.send("10.0.0.2") == ["drop"]
    assert is_open(site)
    assert "drop" not in verdicts


@contextmanager
def without_room_for_an_end(path: Path) -> Iterator[None]:
    """The database can be read, and takes what is small, but not that a window has ended: its disk is full."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(
            "CREATE TRIGGER no_room BEFORE INSERT ON audit WHEN NEW.action = 'expire-window' "
            "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        )
        yield
        connection.execute("DROP TRIGGER no_room")


def pass_on(site: Site) -> None:
    """What `run` does in one turn, with a look at everything."""
    controller = site.controller
    controller._due |= dict.fromkeys(("structure", "sweep", "heartbeat"), 0.0)
    try:
        tick(site)
    except StoreError as error:
        controller._recover(error, time.monotonic(), 0.5)


def is_expired(site: Site) -> bool:
    """Whether the database knows that the window has ended, and is gone by again."""
    window = site.store.window()
    return window is not None and window.outcome is Outcome.EXPIRED and site.controller._outage is None


@pytest.mark.parametrize("copies", [True, False])
def test_while_the_end_cannot_be_recorded_nothing_puts_back_what_the_guard_has_undone(
    site: Site, elapsed: Elapsed, tmp_path: Path, caplog: pytest.LogCaptureFixture, copies: bool
) -> None:
    write, verdicts = site.kernel.apply, set[str]()

    def write_and_send(step: Step) -> None:
        write(step)
        verdicts.update(site.send(CLIENT))

    with closing(open_replica(tmp_path / "controller", "gw")) as copy:
        setup = Setup("gw", "fake")
        site.controller = Controller(site.store, site.kernel, setup, site.clock, copy if copies else None)
        site.add(target="10.0.0.2", action="block")
        tick(site)
        cut(site)
        assert site.store.path is not None
        with without_room_for_an_end(site.store.path):
            elapsed.pass_by(1.1)
            restore_from_memory(site)
            site.kernel.apply = write_and_send  # type: ignore[method-assign]
            for _ in range(30):
                pass_on(site)
                elapsed.pass_by(0.5)
                time.sleep(0.1)
            assert is_open(site)
            assert site.send("10.0.0.2") == ["drop"]
            assert "answers again" not in caplog.text
        end = time.monotonic() + PATIENCE
        while not is_expired(site):
            assert time.monotonic() < end
            pass_on(site)
            time.sleep(0.05)
        site.add(target="10.0.0.4", action="block")
        pass_on(site)
        assert site.send("10.0.0.4") == ["drop"]
        assert is_open(site)
        assert "drop" not in verdicts


def test_without_a_guard_the_copy_comes_back_where_the_end_cannot_be_recorded(
    site: Site, tmp_path: Path, elapsed: Elapsed
) -> None:
    with closing(open_replica(tmp_path / "controller", "gw")) as copy:
        site.controller = Controller(site.store, site.kernel, Setup("gw", "fake"), site.clock, copy)
        site.add(target="10.0.0.2", action="block")
        tick(site)
        cut(site)
        assert site.store.path is not None
        with without_room_for_an_end(site.store.path):
            elapsed.pass_by(LATE + 0.1)
            for _ in range(3):
                pass_on(site)
            assert is_open(site)
            assert site.send("10.0.0.2") == ["drop"]


def test_a_window_that_ends_in_time_is_heard_of_at_once(site: Site, elapsed: Elapsed) -> None:
    """From its end on nothing of it is written; whoever undoes it in the database is heard with the next pass."""
    cut(site)
    elapsed.pass_by(1.1)
    site.controller._due["window"] = time.monotonic() + PATIENCE
    site.controller.tick()
    site.store.confirm("test", site.clock())
    site.add(target="10.0.0.4", action="block")
    site.controller.tick()
    assert site.send("10.0.0.4") == ["drop"]


def rest(site: Site) -> None:
    """Tick where nothing was written: the look at the window that is due finds nothing to ask."""
    site.controller._quiet, site.controller._due["window"] = True, 0.0
    site.controller.tick()
    site.controller._quiet = False


@pytest.mark.parametrize("fresh", [False, True], ids=["a change", "everything"])
def test_what_was_changed_in_a_window_is_known_to_be_of_it_from_the_first(
    site: Site, tmp_path: Path, elapsed: Elapsed, fresh: bool
) -> None:
    """The look at the window is not due, and the database is away before it is: the guard has undone it all the same,
    and must not be undone."""
    with closing(open_replica(tmp_path / "controller", "gw")) as copy:
        site.controller = controller = Controller(site.store, site.kernel, Setup("gw", "fake"), site.clock, copy)
        site.add(target="10.0.0.2", action="block")
        tick(site)
        site.store.open_window(1, "test", site.store.now())
        site.add(target=CLIENT, action="block")
        controller._due["window"] = time.monotonic() + PATIENCE
        if fresh:
            controller._load_all()
        controller.tick()
        assert site.send(CLIENT) == ["drop"]
        restore_from_memory(site)
        assert controller._go_on_without(StoreError("It is gone."))
        elapsed.pass_by(1.1)
        for _ in range(3):
            pass_on(site)
        assert is_open(site)


def test_a_window_in_which_nothing_more_is_written_is_seen(site: Site, elapsed: Elapsed) -> None:
    """It was opened when no look was due; when one is, nobody writes."""
    site.add(target="10.0.0.2", action="block")
    tick(site)
    site.store.open_window(1, "test", site.store.now())
    site.controller._due["window"] = time.monotonic() + PATIENCE
    site.controller.tick()
    assert not site.controller._overdue.watches
    rest(site)
    assert site.controller._overdue.watches


def test_a_rule_of_which_it_cannot_be_told_whether_a_window_is_open_is_not_written(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add(target="10.0.0.2", action="block")
    tick(site)
    site.add(target=CLIENT, action="block")
    site.controller._due["window"] = time.monotonic() + PATIENCE

    def refuse() -> Window:
        raise StoreError("It is gone.")

    with monkeypatch.context() as patched:
        patched.setattr(site.store, "window", refuse)
        with pytest.raises(StoreError):
            site.controller.sync()
    assert is_open(site)
    site.controller.sync()
    assert site.send(CLIENT) == ["drop"]


@pytest.mark.parametrize("begins", [False, True])
def test_what_was_confirmed_is_not_undone_with_an_older_file_of_the_database(
    sqlite_url: str, tmp_path: Path, elapsed: Elapsed, begins: bool
) -> None:
    """It lacks the confirmation alone, so the gateway goes by it; and its window is over."""
    with closing(Store(sqlite_url)) as store, closing(open_replica(tmp_path / "controller", "gw")) as replica:
        site = Site(store)
        restart(site, replica)
        cut(site)
        set_aside(site.store, tmp_path / "older.db")
        site.store.confirm("test", site.clock())
        wait(site, lambda: replica.revision() == 1)
        site.clock.pass_by(hours=1)
        put_older(site.store, tmp_path / "older.db")
        if begins:
            restart(site, replica)
        tick(site)
        elapsed.pass_by(3600)
        wait(site, lambda: find_outcome(site) is not None)
        assert find_outcome(site) is Outcome.CONFIRMED
        (line, *_) = site.store.audit()
        assert (line.action, line.actor) == ("confirm-window", "controller of gw")
        elapsed.pass_by(3600)
        for _ in range(3):
            tick(site)
        assert not is_open(site)
        assert (site.store.revision(), replica.revision()) == (1, 1)


def test_what_only_the_copy_knows_to_be_confirmed_is_not_undone_either(
    sqlite_url: str, tmp_path: Path, elapsed: Elapsed
) -> None:
    """The guard has heard of it, and told the copy; the controller has not looked meanwhile."""
    with closing(Store(sqlite_url)) as store, closing(open_replica(tmp_path / "controller", "gw")) as replica:
        site = Site(store)
        restart(site, replica)
        cut(site)
        set_aside(site.store, tmp_path / "older.db")
        with closing(open_replica(tmp_path / "controller", "gw")) as copy:
            copy.note_window(site.store, site.store.confirm("test", site.clock()))
        put_older(site.store, tmp_path / "older.db")
        elapsed.pass_by(3600)
        wait(site, lambda: find_outcome(site) is not None)
        assert find_outcome(site) is Outcome.CONFIRMED
        assert not is_open(site)


def test_a_copy_does_not_go_back_for_a_window_that_is_confirmed_anew(sqlite_url: str, tmp_path: Path) -> None:
    with closing(Store(sqlite_url)) as store, closing(open_replica(tmp_path / "controller", "gw")) as replica:
        site = Site(store)
        site.add(target="10.0.0.2", action="block")
        site.store.open_window(3600, "test", site.clock())
        site.add(target=CLIENT, action="block")
        set_aside(site.store, tmp_path / "older.db")
        assert not replica.follow(site.store)
        assert replica.revision() == 1
        site.store.confirm("test", site.clock())
        assert replica.follow(site.store)
        put_older(site.store, tmp_path / "older.db")
        assert not replica.follow(site.store)
        assert replica.revision() == 2


def test_what_was_abandoned_is_undone_with_an_older_file_of_the_database(
    sqlite_url: str, tmp_path: Path, elapsed: Elapsed
) -> None:
    with closing(Store(sqlite_url)) as store:
        site = Site(store)
        cut(site)
        set_aside(site.store, tmp_path / "older.db")
        site.store.abandon("test", site.clock())
        wait(site, lambda: is_open(site))
        site.clock.pass_by(hours=1)
        put_older(site.store, tmp_path / "older.db")
        tick(site)
        elapsed.pass_by(3600)
        wait(site, lambda: find_outcome(site) is Outcome.EXPIRED)
        wait(site, lambda: is_open(site))


def restart(site: Site, replica: Replica) -> None:
    site.controller = Controller(site.store, site.kernel, Setup("gw", "fake"), site.clock, replica)


def set_aside(store: Store, path: Path) -> None:
    """Keep the file as it is now."""
    assert store.path is not None
    with closing(sqlite3.connect(store.path)) as now, closing(sqlite3.connect(path)) as aside:
        now.backup(aside)


def put_older(store: Store, path: Path) -> None:
    """Put an older file in the place of the database's."""
    assert store.path is not None
    store.close()
    store.path.unlink()
    path.rename(store.path)


def find_outcome(site: Site) -> Outcome | None:
    window = site.store.window()
    return window.outcome if window else None
