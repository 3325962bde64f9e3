"""The guard over a kernel in memory: a database that hangs, and a controller that goes on without it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, delete, text, update

from netlimit import guard as guarding
from netlimit import safety
from netlimit.controller import Controller, Setup
from netlimit.errors import KernelError, StoreError
from netlimit.guard import Guard
from netlimit.kernel.fake import FakeKernel
from netlimit.plan import Step
from netlimit.records import Actor, HostStatus, Outcome, Pause, SafeReason, State, Window
from netlimit.store import Replica, Snapshot, Store, homes, hosts, open_replica, tables, take_snapshot, windows
from netlimit.teardown import tear_down
from tests.controller.conftest import Clock, Site
from tests.databases import DATABASES

OVER = DATABASES
CLIENT = "10.0.0.1"
SETUP = Setup("gw", "fake")
PATIENCE = 60.0
LONG = 3600
"""The seconds of a window: it is over when a test says so."""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "RECORD_SECONDS", 0.5)
    monkeypatch.setattr(guarding, "CONTROLLER_SECONDS", 0.1)
    monkeypatch.setattr(guarding, "LOOK_SECONDS", 0.05)


@dataclass
class Elapsed:
    """The seconds by which guards know that a window is over: more pass when a test says so."""

    more: float = 0.0

    def __call__(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) + self.more


@pytest.fixture(autouse=True)
def elapsed(monkeypatch: pytest.MonkeyPatch) -> Elapsed:
    elapsed = Elapsed()
    monkeypatch.setattr(guarding, "read_clock", elapsed)
    return elapsed


class Watcher(Guard):
    """A guard of which one knows whether it watches over a window."""

    watches = False

    def _wait_for_end(self, window: Window, end: float) -> Window | None:
        self.watches = True
        return super()._wait_for_end(window, end)


class Guarded:
    """A site with a guard that runs in a thread."""

    def __init__(self, site: Site, directory: Path, elapsed: Elapsed) -> None:
        site.clock = site.controller._now = Now()
        self.site = site
        self.directory = directory
        self.elapsed = elapsed
        self.stopping = threading.Event()
        self.alive = True
        self.guard = self.make_guard()
        self.thread = threading.Thread(target=self.guard.run, args=[self.stopping.is_set], daemon=True)

    def make_guard(self, failure_seconds: float | None = None) -> Watcher:
        def make(source: Store, kernel: FakeKernel) -> Controller:
            return Controller(source, kernel, SETUP, self.site.clock)

        return Watcher(self.site.store, "gw", lambda: self.site.kernel, make, self.copy, failure_seconds)  # type: ignore[arg-type]

    @contextmanager
    def copy(self) -> Iterator[Replica]:
        with closing(open_replica(self.directory / "controller", "gw")) as replica:
            yield replica

    def cut(self, paused: Sequence[str] = ()) -> None:
        """Open a window, see it guarded, and cut the client off."""
        self.site.store.open_window(LONG, "test", datetime.now(UTC), paused=paused)
        wait(lambda: self.guard.watches)
        self.site.add(target=CLIENT, action="block")
        self.site.controller.sync()
        assert self.site.send(CLIENT) == ["drop"]

    def end_window(self) -> None:
        """Let the window be over, and wait until it is undone."""
        assert self.site.send(CLIENT) == ["drop"]
        self.elapsed.more += LONG
        self.wait_until_open()

    def wait_until_open(self) -> None:
        wait(lambda: self.site.send(CLIENT) == ["accept"])

    @property
    def outcome(self) -> Outcome | None:
        window = self.site.store.window()
        return window.outcome if window else None


class Now(Clock):
    def __call__(self) -> datetime:
        return datetime.now(UTC)


@pytest.fixture
def guarded(site: Site, tmp_path: Path, elapsed: Elapsed) -> Iterator[Guarded]:
    guarded = Guarded(site, tmp_path, elapsed)
    guarded.thread.start()
    wait(lambda: site.store.guards() == ["gw"])
    yield guarded
    guarded.stopping.set()
    guarded.thread.join(PATIENCE)
    assert not guarded.thread.is_alive()
    assert site.store.guards() == []


def wait(come: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not come():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def locked(store: Store) -> Iterator[Connection]:
    """Keep everybody else from writing to a database, and on PostgreSQL from reading."""
    database = store._database
    with database._writer.connect() as connection, connection.begin():
        if not database.is_sqlite:
            locked = homes.name_tables(connection, ("clock", "windows", "rules"))
            connection.execute(text(f"LOCK TABLE {locked} IN ACCESS EXCLUSIVE MODE"))
        yield connection


def test_what_nobody_confirms_is_undone_without_a_controller(guarded: Guarded) -> None:
    guarded.cut()
    guarded.end_window()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert guarded.site.store.select()[1] == 0
    assert guarded.site.store.audit()[0].actor == "guard of gw"


def test_a_database_that_hangs_keeps_nothing_from_coming_back(guarded: Guarded) -> None:
    guarded.cut()
    with locked(guarded.site.store):
        guarded.end_window()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert guarded.site.send(CLIENT) == ["accept"]
    assert guarded.site.store.revision() == 2


class Stranger:
    """Whether the database counts as another than the one whose rules are in force here."""

    is_there = False

    def refuse(self) -> None:
        if self.is_there:
            raise StoreError("This is another database.")


@pytest.fixture
def stranger(guarded: Guarded) -> Stranger:
    stranger = Stranger()
    guarded.guard._refuse = stranger.refuse
    return stranger


def test_a_window_of_another_database_brings_nothing_into_the_kernel(guarded: Guarded, stranger: Stranger) -> None:
    """Nobody has opened it for this gateway; once that goes by the database, it is undone."""
    stranger.is_there = True
    guarded.site.store.open_window(LONG, "test", datetime.now(UTC))
    guarded.site.add(target=CLIENT, action="block")
    guarded.site.controller.sync()
    wait(lambda: "another database" in guarded.guard._said.get("window", ""))
    time.sleep(1.0)
    assert not guarded.guard.watches
    assert (guarded.site.send(CLIENT), guarded.outcome) == (["drop"], None)
    stranger.is_there = False
    wait(lambda: guarded.guard.watches)
    guarded.end_window()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)


def test_a_window_comes_back_from_memory_where_another_database_is_in_the_place_of_its_own(
    guarded: Guarded, stranger: Stranger
) -> None:
    guarded.cut()
    stranger.is_there = True
    guarded.end_window()
    assert guarded.outcome is None, "the other one has nothing to do with it"
    with guarded.copy() as copy:
        assert copy.revision() == 0
    stranger.is_there = False
    wait(lambda: guarded.outcome is Outcome.EXPIRED)


def test_what_only_looks_for_who_hangs_keeps_nothing_from_coming_back(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that has no room for another thread."""
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "writers":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    guarded.cut()
    guarded.end_window()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert guarded.site.store.select()[1] == 0


def test_no_error_on_the_way_keeps_anything_from_coming_back(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long after the end the kernel is asked whether a controller has undone it; and there may be no room for the
    thread that speaks to the database."""
    guarded.cut()
    refusals = [KernelError("look", "busy"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd")]
    submit, rooms = guarded.guard._database.submit, [RuntimeError("can't start new thread")] * 2

    def find_controller() -> bool:
        if refusals:
            raise refusals.pop()
        return False

    def submit_late(*arguments: object) -> Future[object]:
        if rooms:
            raise rooms.pop()
        return submit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(guarded.site.kernel, "controlled", find_controller)
    monkeypatch.setattr(guarded.guard._database, "submit", submit_late)
    wait(lambda: not rooms)
    with locked(guarded.site.store):
        guarded.elapsed.more += guarding.OVERTAKEN_SECONDS + 1
        rooms.append(RuntimeError("can't start new thread"))
        guarded.end_window()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert not refusals


def test_what_was_confirmed_in_the_last_moment_is_in_force_again(guarded: Guarded) -> None:
    guarded.cut()
    with locked(guarded.site.store) as connection:
        windows.confirm(connection, Actor("test"), datetime.now(UTC))
        guarded.end_window()
    wait(lambda: guarded.site.send(CLIENT) == ["drop"])
    assert guarded.outcome is Outcome.CONFIRMED


@pytest.mark.parametrize("confirmed", [True, False])
def test_what_the_database_tells_while_the_kernel_is_waited_for_is_not_taken_out(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, confirmed: bool
) -> None:
    """Somebody else writes there when the guard gives up on the database, which says then that it was confirmed."""
    site, writing, waits = guarded.site, threading.Lock(), threading.Event()
    guarded.cut(paused=["gw"])

    @contextmanager
    def take_turn(patience: float = PATIENCE) -> Iterator[None]:
        waits.set()
        with writing:
            yield

    monkeypatch.setattr(site.kernel, "exclusive", take_turn)
    verdicts, write = set(site.send(CLIENT)), site.kernel.apply

    def write_and_send(step: Step) -> None:
        write(step)
        verdicts.update(site.send(CLIENT))

    monkeypatch.setattr(site.kernel, "apply", write_and_send)
    with writing:
        with locked(site.store) as connection:
            if confirmed:
                windows.confirm(connection, Actor("test"), datetime.now(UTC))
            guarded.elapsed.more += LONG
            assert waits.wait(PATIENCE)
        guarded.guard._database.submit(lambda: None).result(PATIENCE)
    wait(lambda: guarded.guard._done is not None)
    assert verdicts == ({"drop"} if confirmed else {"drop", "accept"})
    assert site.send(CLIENT) == ["drop" if confirmed else "accept"]


EARLIER = Window(0, datetime(2020, 1, 1, tzinfo=UTC), LONG, "test")
"""One that was open before."""
EARLIER_ENDS = [
    None,
    *(replace(EARLIER, outcome=outcome, ended_at=EARLIER.deadline, revision=0) for outcome in Outcome),
]


def forget_window(store: Store, last: Window | None, paused: bool = False) -> None:
    """Let the database be as it was before the window in which the client was cut off, its only rule: `last` was the
    last one then."""
    with store._database.writing() as connection:
        windows.write(connection, EARLIER)
        for table in (tables.rules, tables.undo, tables.revisions, *([] if last else [tables.windows])):
            connection.execute(delete(table))
        connection.execute(update(tables.clock).values(revision=0))
        connection.execute(update(tables.hosts).values(applied_revision=0))
        hosts.pause(connection, "gw", paused)
        if last is not None:
            windows.write(connection, last)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("last", EARLIER_ENDS, ids=lambda last: last.outcome.value if last else "none")
def test_a_database_that_was_restored_confirms_nothing_and_the_deadline_counts(
    guarded: Guarded, last: Window | None, hangs: bool
) -> None:
    guarded.cut()
    forget_window(guarded.site.store, last)
    time.sleep(0.5)
    with locked(guarded.site.store) if hangs else nullcontext():
        guarded.end_window()
    wait(lambda: guarded.guard._done is not None)
    assert guarded.site.send(CLIENT) == ["accept"]
    assert guarded.site.store.window() == last


def test_one_that_is_open_in_a_database_that_was_restored_is_watched_over_at_once(guarded: Guarded) -> None:
    guarded.cut()
    guarded.guard.watches = False
    forget_window(guarded.site.store, replace(EARLIER, opened_at=datetime.now(UTC) - timedelta(seconds=60)))
    guarded.wait_until_open()
    wait(lambda: guarded.guard.watches)
    guarded.elapsed.more += LONG
    wait(lambda: guarded.outcome is Outcome.EXPIRED)


@pytest.mark.parametrize("paused", [False, True])
def test_what_was_not_ours_before_a_window_that_is_forgotten_is_taken_out(guarded: Guarded, paused: bool) -> None:
    guarded.cut(paused=["gw"])
    forget_window(guarded.site.store, None, paused)
    guarded.end_window()
    wait(lambda: not guarded.site.kernel.structure().sets)
    assert guarded.site.store.paused("gw")


@pytest.mark.parametrize("ends", [windows.confirm, windows.abandon, None])
def test_another_window_since_confirms_nothing_of_the_one_before(
    guarded: Guarded, ends: Callable[[Connection, Actor, datetime], Window] | None
) -> None:
    """The guard looks a few times a second, and the database may not answer for longer."""
    guarded.cut()
    actor, now = Actor("test"), datetime.now(UTC)
    with guarded.site.store._database.writing() as connection:
        windows.abandon(connection, actor, now)
        windows.begin(connection, LONG, actor, now, None, (), False, None)
        if ends is not None:
            ends(connection, actor, now)
    guarded.wait_until_open()
    if ends is None:
        guarded.site.store.confirm("test", datetime.now(UTC))


def test_it_does_not_end_while_a_window_is_open(guarded: Guarded) -> None:
    guarded.cut()
    guarded.stopping.set()
    guarded.end_window()
    guarded.thread.join(PATIENCE)
    assert guarded.outcome is Outcome.EXPIRED


def test_what_was_not_ours_to_begin_with_is_taken_out(guarded: Guarded) -> None:
    guarded.cut(paused=["gw"])
    guarded.end_window()
    wait(lambda: not guarded.site.kernel.structure().sets)
    assert guarded.site.store.paused("gw")


def copied(guarded: Guarded, paused: bool = False) -> None:
    """Have the copy hold what is applied, and whether the gateway is paused."""
    with guarded.copy() as copy:
        copy.follow(guarded.site.store)
        copy.follow_pause(paused)


def is_paused_there(guarded: Guarded) -> bool:
    """Whether a machine that starts begins with nothing."""
    with guarded.copy() as copy:
        return copy.paused("gw")


@pytest.mark.parametrize("end", ["over", "over without the database", "abandoned", "of another gateway's"])
def test_the_copy_knows_that_the_end_of_a_window_has_paused_the_gateway(guarded: Guarded, end: str) -> None:
    """Or a boot would put back what nobody has confirmed."""
    store = guarded.site.store
    guarded.site.add(target="10.0.0.2", action="block")
    guarded.site.controller.sync()
    copied(guarded)
    guarded.cut(paused=["gw"])
    if end == "abandoned":
        store.abandon("test", datetime.now(UTC))
    elif end == "of another gateway's":
        window = store.window()
        assert window is not None
        store.expire(window, "guard of gw2", datetime.now(UTC))
    else:
        with locked(store) if "without" in end else nullcontext():
            guarded.end_window()
    wait(lambda: is_paused_there(guarded))
    assert not guarded.site.kernel.structure().sets


def test_the_copy_knows_of_a_pause_that_a_window_has_left_that_no_guard_has_watched_over(
    site: Site, tmp_path: Path, elapsed: Elapsed
) -> None:
    guarded = Guarded(site, tmp_path, elapsed)
    site.add(target=CLIENT, action="block")
    site.controller.sync()
    copied(guarded)
    site.store.open_window(60, "test", datetime.now(UTC), paused=["gw"])
    site.store.abandon("test", datetime.now(UTC))
    guarded.guard.run(lambda: guarded.guard._done is not None)
    assert not site.kernel.structure().sets
    assert is_paused_there(guarded)


def test_a_copy_that_cannot_be_told_of_the_pause_keeps_nothing_in_force(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as soon as that can be done."""
    refused = []

    def refuse(_replica: Replica, paused: bool, _pause: Pause | None = None) -> None:
        refused.append(paused)
        raise StoreError("The disk is full.")

    guarded.cut(paused=["gw"])
    with monkeypatch.context() as patched:
        patched.setattr(Replica, "follow_pause", refuse)
        guarded.end_window()
        wait(lambda: guarded.guard._done is not None)
        assert not guarded.site.kernel.structure().sets
        wait(lambda: bool(refused))
    wait(lambda: is_paused_there(guarded))


def test_who_applies_for_good_while_the_copy_is_told_of_the_pause_finds_none(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tell = guarded.site.store, Replica.follow_pause

    def apply(replica: Replica, paused: bool, pause: Pause | None = None) -> None:
        store.pause("gw", False, for_good=True)
        tell(replica, paused, pause)

    copied(guarded)
    guarded.cut(paused=["gw"])
    monkeypatch.setattr(Replica, "follow_pause", apply)
    guarded.end_window()
    wait(lambda: guarded.guard._done is not None)
    guarded.stopping.set()
    guarded.thread.join(PATIENCE)
    assert not is_paused_there(guarded)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("controlled", [False, True])
def test_without_a_controller_the_guard_brings_the_copy_to_what_was_confirmed(
    site: Site, tmp_path: Path, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch, watched: bool, controlled: bool
) -> None:
    """By REST, say, on another gateway: else a boot would begin with nothing."""
    guarded = Guarded(site, tmp_path, elapsed)
    site.add(target="10.0.0.2", action="block")
    site.controller.sync()
    copied(guarded, paused=True)
    monkeypatch.setattr(site.kernel, "controlled", lambda: controlled)
    site.store.open_window(LONG, "test", datetime.now(UTC), paused=["gw"])
    site.add(target=CLIENT, action="block")
    site.controller.sync()
    if not watched:
        site.store.confirm("test", datetime.now(UTC))
    guarded.thread.start()
    if watched:
        wait(lambda: guarded.guard.watches)
        site.store.confirm("test", datetime.now(UTC))
    wait(lambda: guarded.guard._done is not None)
    guarded.stopping.set()
    guarded.thread.join(PATIENCE)
    with guarded.copy() as copy:
        assert (copy.revision(), copy.paused("gw")) == ((1, True) if controlled else (2, False))


def test_without_a_controller_the_guard_tells_the_copy_that_what_was_confirmed_has_ended_a_teardown(
    site: Site, tmp_path: Path, elapsed: Elapsed
) -> None:
    """Else an older state of the database would tear the gateway down again."""
    guarded = Guarded(site, tmp_path, elapsed)
    site.add(target=CLIENT, action="block")
    site.controller.sync()
    copied(guarded)
    site.store.pause("gw", True)
    pause = site.store.last_pause("gw")
    assert pause is not None
    with guarded.copy() as copy:
        copy.follow_pause(True, pause)
    window = site.store.open_window(LONG, "test", datetime.now(UTC), paused=["gw"])
    site.store.resume_within(window, "gw", "test", datetime.now(UTC))
    site.add(target="10.0.0.2", action="block")
    site.controller.sync()
    guarded.thread.start()
    wait(lambda: guarded.guard.watches)
    with guarded.copy() as copy:
        assert not copy.has_resumed(pause)
    site.store.confirm("test", datetime.now(UTC))
    wait(lambda: guarded.guard._done is not None)
    guarded.stopping.set()
    guarded.thread.join(PATIENCE)
    with guarded.copy() as copy:
        assert copy.has_resumed(pause)
        assert not copy.paused("gw")


def test_what_is_torn_down_without_its_database_stays_so_for_a_boot_though_a_window_is_confirmed(
    site: Site, tmp_path: Path, elapsed: Elapsed
) -> None:
    guarded = Guarded(site, tmp_path, elapsed)
    site.add(target=CLIENT, action="block")
    site.controller.sync()
    copied(guarded)
    site.store.open_window(LONG, "test", datetime.now(UTC), paused=["gw"])
    tear_down(site.kernel, {})
    with guarded.copy() as copy:
        copy.follow_pause(True)
    site.store.confirm("test", datetime.now(UTC))
    guarded.guard.run(lambda: guarded.guard._done is not None)
    assert is_paused_there(guarded)


@pytest.mark.parametrize("hangs", [False, True])
def test_what_goes_on_for_good_meanwhile_is_not_taken_out(guarded: Guarded, hangs: bool) -> None:
    store = guarded.site.store
    guarded.site.add(target="10.0.0.2", action="block")
    guarded.cut(paused=["gw"])
    store.pause("gw", False, for_good=True)
    wait(lambda: not guarded.guard._pauses)
    assert guarded.outcome is None, "it is taken for another window, or for one that has ended"
    with locked(store) if hangs else nullcontext():
        guarded.end_window()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert guarded.site.send("10.0.0.2") == ["drop"]
    assert not store.paused("gw")


@pytest.mark.parametrize("hangs", [False, True])
def test_what_is_torn_down_meanwhile_stays_so(guarded: Guarded, hangs: bool) -> None:
    site = guarded.site
    site.add(target="10.0.0.2", action="block")
    guarded.cut()
    site.store.pause("gw", True)
    wait(lambda: guarded.guard._pauses)
    with locked(site.store) if hangs else nullcontext():
        guarded.end_window()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    wait(lambda: not site.kernel.structure().sets)
    assert site.store.paused("gw")


@pytest.mark.parametrize("is_copied", [True, False])
def test_what_is_torn_down_without_the_database_in_a_window_stays_so(
    guarded: Guarded, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by who is cut off from it by what was made in the window: only the copy hears of it. Where that takes no more,
    the one in memory is written."""
    site = guarded.site
    site.add(target="10.0.0.2", action="block")
    site.controller.sync()
    copied(guarded)
    guarded.cut()
    with locked(site.store):
        tear_down(site.kernel, {})
        with guarded.copy() as copy:
            copy.follow_pause(True, Pause("a-word", datetime.now(UTC)))
        if not is_copied:
            monkeypatch.setattr(Replica, "hold", refuse_file(Replica.hold))
        guarded.elapsed.more += LONG
        wait(lambda: "memory" in guarded.guard._said)
        time.sleep(0.5)
        assert site.send("10.0.0.2") == ["accept"]
        assert is_paused_there(guarded)
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    wait(lambda: site.store.paused("gw"))
    guarded.stopping.set()
    guarded.thread.join(PATIENCE)
    assert site.send("10.0.0.2") == ["accept"]
    assert is_paused_there(guarded)


def test_the_audit_is_not_searched_at_each_look(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no index for that, and may be as large as 256 MiB; the guard looks four times a second."""
    asked: list[str] = []
    find = Store.last_pause
    monkeypatch.setattr(Store, "last_pause", lambda store, host: asked.append(host) or find(store, host))
    guarded.cut()
    before = len(asked)
    time.sleep(1)
    assert len(asked) == before <= 2
    guarded.end_window()


def refuse_file(hold: Callable[..., None]) -> Callable[..., None]:
    """The disk of the copy is full."""

    def refuse(copy: Replica, snapshot: Snapshot, window: Window | None) -> None:
        if copy._path is not None:
            raise StoreError("The disk is full.")
        hold(copy, snapshot, window)

    return refuse


@pytest.mark.parametrize("hangs", [False, True])
def test_what_was_forced_and_was_removed_meanwhile_stays_away(guarded: Guarded, hangs: bool) -> None:
    """While the database does not answer, nobody knows what was removed."""
    site = guarded.site
    forced = site.add(target="10.0.0.2", action="block", forced_by="alice")
    site.add(target="10.0.0.3", action="block", forced_by="alice")
    guarded.cut()
    site.store.remove(forced.id, "alice", datetime.now(UTC))
    site.controller.sync()
    with locked(site.store) if hangs else nullcontext():
        guarded.end_window()
        assert site.send("10.0.0.2") == ["drop" if hangs else "accept"]
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    wait(lambda: site.send("10.0.0.2") == ["accept"])
    assert site.send("10.0.0.3") == ["drop"]


def test_a_controller_without_its_database_follows_the_guard(guarded: Guarded) -> None:
    """It would take what the guard has written for somebody's drift, and repair it."""
    site = guarded.site
    with guarded.copy() as copy:
        controller = site.controller = Controller(site.store, site.kernel, SETUP, replica=copy)
        controller.sync()
        guarded.cut()
        with locked(site.store):
            assert controller._go_on_without(StoreError("It is gone."))
            guarded.end_window()
            controller.tick()
            assert site.send(CLIENT) == ["accept"]
    wait(lambda: guarded.outcome is Outcome.EXPIRED)


def test_rules_that_fail_open_are_out_of_force_once_no_controller_has_run_for_long(
    site: Site, tmp_path: Path, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded(site, tmp_path, elapsed)
    monkeypatch.setattr(site.kernel, "controlled", lambda: guarded.alive)
    guard = guarded.make_guard(failure_seconds=0.3)
    thread = threading.Thread(target=guard.run, args=[guarded.stopping.is_set], daemon=True)
    lifted = site.add(target=CLIENT, action="block", on_failure="open")
    site.add(target="10.0.0.2", action="block")
    site.controller.sync()
    with guarded.copy() as copy:
        copy.follow(site.store)
    thread.start()
    try:
        time.sleep(0.6)
        assert site.send(CLIENT) == ["drop"], "the controller lives"
        guarded.alive = False
        guarded.wait_until_open()
        assert site.send("10.0.0.2") == ["drop"]
        wait(lambda: bool(site.store.marked("gw")))
        marked = site.store.marked("gw")
        assert (marked.keys(), marked[lifted.id].state) == ({lifted.id}, State.ERROR)
        assert "no controller has run" in marked[lifted.id].message
        assert [(each.enforced, each.lifted) for each in site.store.hosts()] == [(1, 1)]
        guarded.alive = True
        site.restart().sync()
        assert site.store.marked("gw") == {}
        assert site.send(CLIENT) == ["drop"]
        time.sleep(0.6)
        assert site.send(CLIENT) == ["drop"], "it lives again"
    finally:
        guarded.stopping.set()
        thread.join(PATIENCE)


def test_a_teardown_of_which_the_copy_has_not_heard_holds(site: Site, tmp_path: Path, elapsed: Elapsed) -> None:
    guarded = Guarded(site, tmp_path, elapsed)
    site.add(target="10.0.0.3", action="block", on_failure="open")
    site.add(target=CLIENT, action="block")
    site.controller.sync()
    with guarded.copy() as copy:
        copy.follow(site.store)
    site.store.pause("gw", True)
    tear_down(site.kernel, {})
    guarded.make_guard(failure_seconds=0.0)._relax(site.kernel)
    assert site.send(CLIENT) == ["accept"]


@pytest.mark.parametrize("fails_open", [False, True])
def test_what_was_confirmed_without_a_controller_stays(
    site: Site, tmp_path: Path, elapsed: Elapsed, fails_open: bool
) -> None:
    """The copy is not followed while a window is open, and nobody has followed it since."""
    guarded = Guarded(site, tmp_path, elapsed)
    site.add(target=CLIENT, action="block", on_failure="open" if fails_open else "closed")
    removed = site.add(target="10.0.0.3", action="block")
    site.controller.sync()
    with guarded.copy() as copy:
        copy.follow(site.store)
    site.store.open_window(60, "test", datetime.now(UTC))
    site.add(target="10.0.0.2", action="block")
    site.store.remove(removed.id, "test", datetime.now(UTC))
    site.controller.sync()
    site.store.confirm("test", datetime.now(UTC))
    guarded.make_guard(failure_seconds=0.0)._relax(site.kernel)
    passing = ["accept"] if fails_open else ["drop"]
    assert [site.send(f"10.0.0.{host}") for host in (1, 2, 3)] == [passing, ["drop"], ["accept"]]
    with guarded.copy() as copy:
        assert copy.revision() == site.store.hosts()[0].applied_revision


def count_lines(caplog: pytest.LogCaptureFixture) -> int:
    return max(Counter(each.getMessage() for each in caplog.records if each.name == guarding.__name__).values())


def test_what_is_wrong_is_told_once_where_only_the_copy_cannot_be_opened(
    site: Site, tmp_path: Path, elapsed: Elapsed, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = Guarded(site, tmp_path, elapsed)
    (tmp_path / "controller").write_text("This is no directory.")
    looks = iter(range(6))
    elapsed.more = 60
    guarded.make_guard(failure_seconds=0.0).run(lambda: next(looks) == 5)
    assert count_lines(caplog) == 1


def test_what_is_wrong_is_told_once_where_the_kernel_refuses_what_comes_back(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, asked = guarded.site.kernel.apply, []

    def refuse(step: Step) -> None:
        asked.append(step)
        raise KernelError("write", "it is refused")

    guarded.cut()
    monkeypatch.setattr(guarded.site.kernel, "apply", refuse)
    with locked(guarded.site.store):
        guarded.elapsed.more += LONG
        wait(lambda: len(asked) >= 4)
    wait(lambda: len(asked) >= 8)
    monkeypatch.setattr(guarded.site.kernel, "apply", write)
    guarded.wait_until_open()
    assert count_lines(caplog) <= 2, "once for each copy"


def test_a_copy_in_memory_knows_who_is_safe(site: Site) -> None:
    """For a window that ends while neither the database nor the copy can be written."""
    site.add(target="192.0.2.0/24", action="block")
    reasons = {"192.0.2.7/32": SafeReason(safety.CLIENT, site.clock().timestamp())}
    site.store.report(HostStatus("gw", "fake", safe_reasons=reasons, peers=("192.0.2.8",)))
    window = site.store.open_window(1, "test", datetime.now(UTC))
    snapshot = take_snapshot(site.store, "gw", window.base, False)
    copy = Replica(None, "gw")
    copy.upgrade()
    copy.hold(snapshot, window)
    Controller(copy, site.kernel, SETUP, site.clock).sync()
    assert [site.send(f"192.0.2.{host}") for host in (7, 9)] == [["accept"], ["drop"]]
    assert copy.hosts()[0].peers == ("192.0.2.8",)
    copy.close()


def test_one_that_was_started_for_a_window_waits_for_a_database_that_is_away(
    small_site: Callable[[int], Site], tmp_path: Path, elapsed: Elapsed
) -> None:
    site = small_site(1000)
    site.store.open_window(1, "test", datetime.now(UTC))
    site.add(target=CLIENT, action="block")
    site.controller.sync()
    guard = Guarded(site, tmp_path, elapsed).make_guard()
    site.store.close()
    file, hidden = tmp_path / "netlimit.db", tmp_path / "hidden.db"
    file.rename(hidden)
    thread = threading.Thread(target=guard.run, args=[lambda: False, True], daemon=True)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    hidden.rename(file)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    window = site.store.window()
    assert window is not None
    assert window.outcome is Outcome.EXPIRED
    assert site.send(CLIENT) == ["accept"]


def test_a_window_is_watched_over_while_what_was_due_before_hangs(
    site: Site, tmp_path: Path, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One had ended while no guard ran; to take its rules out waits for somebody who hangs, and who is ended."""
    guarded = Guarded(site, tmp_path, elapsed)
    site.add(target="10.0.0.2", action="block")
    site.controller.sync()
    before = site.store.open_window(LONG, "test", datetime.now(UTC))
    site.add(target=CLIENT, action="block")
    site.controller.sync()
    site.store.expire(before, "another guard", datetime.now(UTC))
    begun, going_on, sought, write = threading.Event(), threading.Event(), threading.Event(), site.kernel.apply

    def hang(step: Step) -> None:
        begun.set()
        going_on.wait(PATIENCE)
        write(step)

    monkeypatch.setattr(site.kernel, "apply", hang)
    monkeypatch.setattr(site.kernel, "end_hanging_writer", sought.set)
    monkeypatch.setattr(guarding, "OVERSEE_SECONDS", 0.05)
    guarded.thread.start()
    try:
        assert begun.wait(PATIENCE)
        window = site.store.open_window(LONG, "test", datetime.now(UTC))
        wait(lambda: guarded.guard.watches)
        assert sought.wait(PATIENCE)
        assert site.send(CLIENT) == ["drop"]
    finally:
        going_on.set()
        site.store.confirm("test", datetime.now(UTC))
        guarded.stopping.set()
        guarded.thread.join(PATIENCE)
    assert not guarded.thread.is_alive()
    assert site.send(CLIENT) == ["accept"]
    assert guarded.guard._done == window.opened_at


def test_one_that_has_made_up_while_another_window_was_open_ends_with_that(
    site: Site, tmp_path: Path, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock of guards until then."""
    guarded = Guarded(site, tmp_path, elapsed)
    before = site.store.open_window(LONG, "test", datetime.now(UTC))
    site.store.expire(before, "another guard", datetime.now(UTC))
    going_on = threading.Event()
    monkeypatch.setattr(guarded.guard, "_make_up", lambda window: going_on.wait(PATIENCE))
    thread = threading.Thread(target=guarded.guard.run, args=[guarded.stopping.is_set, True], daemon=True)
    thread.start()
    try:
        wait(lambda: guarded.guard._making_up is not None)
        site.store.open_window(LONG, "test", datetime.now(UTC))
        wait(lambda: guarded.guard.watches)
        going_on.set()
        site.store.confirm("test", datetime.now(UTC))
        thread.join(5.0)
        assert not thread.is_alive()
    finally:
        going_on.set()
        guarded.stopping.set()
        thread.join(PATIENCE)


@pytest.mark.parametrize("newer", [False, True])
def test_an_apply_that_was_killed_half_way_is_undone_by_a_guard_that_comes_later(
    site: Site, tmp_path: Path, elapsed: Elapsed, newer: bool
) -> None:
    """The gateway tells the revision of before, and another's guard has ended the window. What was changed since then
    is left to whoever runs `apply` or a controller: here nobody has."""
    guarded = Guarded(site, tmp_path, elapsed)
    site.add(target="10.0.0.2", action="block")
    site.controller.sync()
    window = site.store.open_window(LONG, "test", datetime.now(UTC))
    site.add(target=CLIENT, action="block")
    killed = Controller(site.store, site.kernel, SETUP, site.clock)
    for step in killed.plan().steps:
        site.kernel.apply(step)
    site.store.expire(window, "another guard", datetime.now(UTC))
    if newer:
        site.add(target="10.0.0.3", action="block")
    guarded.guard.run(lambda: True)
    assert site.send(CLIENT) == ["drop" if newer else "accept"]
    assert site.send("10.0.0.3") == ["accept"]
    assert site.send("10.0.0.2") == ["drop"]


def lose_end(store: Store, **lost: object) -> None:
    """Let the database be as it was before the last window ended; what else is `lost` stands in the window."""
    window = store.window()
    assert window is not None
    opened = replace(window, outcome=None, ended_at=None, revision=None)
    with store._database.writing() as connection:
        windows.write(connection, replace(opened, **lost))  # type: ignore[arg-type]


def confirm(guarded: Guarded) -> None:
    """Confirm the window, and see that the guard has heard of it, and so has the copy."""
    guarded.site.store.confirm("test", datetime.now(UTC))
    window = guarded.site.store.window()
    assert window is not None
    wait(lambda: knows_end(guarded, window))


def knows_end(guarded: Guarded, window: Window) -> bool:
    with guarded.copy() as copy:
        return guarded.guard._done == window.opened_at and copy.find_ending(window) is not None


def end_later(guarded: Guarded) -> None:
    """Let another guard run from now on, which has seen nothing."""
    guarded.stopping.set()
    guarded.thread.join(PATIENCE)
    guarded.stopping.clear()
    guarded.guard = guarded.make_guard()
    guarded.thread = threading.Thread(target=guarded.guard.run, args=[guarded.stopping.is_set], daemon=True)


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_what_was_confirmed_is_confirmed_anew_in_a_database_that_has_lost_that(
    guarded: Guarded, caplog: pytest.LogCaptureFixture, begins: bool, over: bool
) -> None:
    """One that is over already would be undone at once."""
    if over:
        guarded.site.store.open_window(1, "test", datetime.now(UTC))
        wait(lambda: guarded.guard.watches)
        guarded.site.add(target=CLIENT, action="block")
        guarded.site.controller.sync()
    else:
        guarded.cut()
    confirm(guarded)
    if begins:
        end_later(guarded)
    if over:
        time.sleep(1.0)
    guarded.guard.watches = False
    lose_end(guarded.site.store)
    if begins:
        guarded.thread.start()
    wait(lambda: guarded.outcome is not None)
    assert guarded.outcome is Outcome.CONFIRMED
    assert guarded.site.store.select()[1] == 1
    assert guarded.site.send(CLIENT) == ["drop"]
    (line, *_) = guarded.site.store.audit()
    assert (line.action, line.actor) == ("confirm-window", "guard of gw")
    assert not guarded.guard.watches
    wait(lambda: "It is confirmed anew" in caplog.text)


def test_what_is_changed_in_a_window_that_is_open_again_is_not_confirmed_with_it(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """No guard runs when the database comes back; who changes something then is told that it is undone."""
    guarded.cut()
    confirm(guarded)
    end_later(guarded)
    guarded.guard.watches = False
    lose_end(guarded.site.store, paused=("gw2",))
    guarded.site.add(target="10.0.0.3", action="block")
    guarded.thread.start()
    wait(lambda: guarded.guard.watches)
    assert guarded.outcome is None
    assert "What was confirmed stays" in caplog.text
    guarded.elapsed.more += LONG
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    guarded.site.controller.sync()
    assert guarded.site.send(CLIENT) == ["drop"]
    assert guarded.site.send("10.0.0.3") == ["accept"]
    assert not guarded.site.store.paused("gw2")
    assert [each.action for each in guarded.site.store.audit()].count("narrow-window") == 1


def test_a_guard_that_watches_hears_that_less_is_to_be_undone(guarded: Guarded) -> None:
    """As another one does that knows how the window had ended: from then on this one has that revision in memory."""
    guarded.cut()
    store = guarded.site.store
    window, confirmed = store.window(), store.revision()
    assert window is not None
    guarded.site.add(target="10.0.0.3", action="block")
    guarded.site.controller.sync()
    guarded.guard.watches = False
    assert store.confirm_anew(window, confirmed, "other", datetime.now(UTC)) is not None
    assert store.confirm_anew(window, confirmed, "other", datetime.now(UTC)) is None
    wait(lambda: guarded.guard.watches)
    guarded.elapsed.more += LONG
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    wait(lambda: guarded.site.send("10.0.0.3") == ["accept"])
    assert guarded.site.send(CLIENT) == ["drop"]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("end", [Store.confirm, Store.abandon])
def test_what_was_undone_or_changed_since_is_not_confirmed_anew(
    guarded: Guarded, begins: bool, end: Callable[[Store, str, datetime], Window]
) -> None:
    """Nor a window of which nobody has seen the end."""
    guarded.cut()
    end(guarded.site.store, "test", datetime.now(UTC))
    window = guarded.site.store.window()
    assert window is not None
    wait(lambda: knows_end(guarded, window))
    if begins:
        end_later(guarded)
    guarded.guard.watches = False
    other = {"opened_at": datetime.now(UTC)} if end is Store.confirm else {}
    lose_end(guarded.site.store, **other)
    if begins:
        guarded.thread.start()
    wait(lambda: guarded.guard.watches)
    assert guarded.outcome is None
    guarded.elapsed.more += LONG
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert guarded.site.store.select()[1] == 0


@pytest.mark.parametrize("is_another", [False, True], ids=["lacks a change", "another"])
@pytest.mark.parametrize("begins", [False, True])
def test_nothing_is_confirmed_anew_in_another_database_or_where_a_change_is_lost(
    guarded: Guarded, begins: bool, is_another: bool
) -> None:
    """What is left of the changes nobody has confirmed."""
    guarded.cut()
    confirm(guarded)
    if begins:
        end_later(guarded)
    guarded.guard.watches = False
    with guarded.site.store._database.writing() as connection:
        connection.execute(update(tables.clock).values(**({"identity": "other"} if is_another else {"stamp": 7})))
    lose_end(guarded.site.store)
    if begins:
        guarded.thread.start()
    wait(lambda: guarded.guard.watches)
    guarded.elapsed.more += LONG
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert guarded.site.store.select()[1] == 0


def test_a_copy_whose_disk_hangs_keeps_no_window_from_being_watched_over(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = threading.Event()

    @contextmanager
    def hang() -> Iterator[Replica]:
        hanging.wait(PATIENCE)
        with guarded.copy() as copy:
            yield copy

    monkeypatch.setattr(guarding, "RECALL_SECONDS", 0.2)
    monkeypatch.setattr(guarded.guard, "_open_copy", hang)
    try:
        guarded.cut()
        guarded.elapsed.more += LONG
        wait(lambda: guarded.outcome is Outcome.EXPIRED)
    finally:
        hanging.set()
