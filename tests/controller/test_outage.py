"""The database is gone: what was applied stays, is repaired and ends in time; what asks for it is out of force."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

import pytest

from api.standing import judge
from netlimit import controller, outage
from netlimit.cli import doctor
from netlimit.controller import Controller, Setup
from netlimit.copying import PREFIX, refuse_window
from netlimit.errors import Slow, StoreError
from netlimit.escalating import Blocks
from netlimit.faults import find_faults
from netlimit.limits import Limit
from netlimit.records import HostStatus, Outcome, Window
from netlimit.roles import Role
from netlimit.rules import Rule
from netlimit.settings import Settings
from netlimit.store import Replica, Store, open_replica, take_snapshot
from tests.controller.conftest import Site
from tests.damage import flip
from tests.forcing import make_rule

PATIENCE = 60.0
LOOKS = 3


class Away:
    """The database of a site, which can be taken away and brought back; its controller keeps a copy."""

    def __init__(self, site: Site, directory: Path) -> None:
        self.site = site
        self.file = directory / "netlimit.db"
        self.hidden = directory / "hidden.db"
        self.directory = directory / "controller"
        self.replica = open_replica(self.directory, "gw")
        self.failure_seconds = 60.0
        self.others = ExitStack()
        self.controller = self.restart()

    def restart(self) -> Controller:
        """Another controller; it knows what kernel, database and copy hold."""
        setup = Setup("gw", "fake", failure_seconds=self.failure_seconds)
        self.controller = Controller(self.site.store, self.site.kernel, setup, self.site.clock, self.replica)
        return self.controller

    def keep_in(self, directory: Path) -> None:
        """Have the copy in another directory, or opened anew where it is."""
        self.replica.close()
        self.directory = directory
        self.replica = open_replica(directory, "gw")

    def read_copy(self) -> Replica:
        """The copy as others see it, until the end of a test."""
        return self.others.enter_context(closing(open_replica(self.directory, "gw")))

    def take_away(self) -> None:
        self.site.store.close()  # else the latest changes would stay behind, in the log beside the file
        self.file.rename(self.hidden)

    def bring_back(self) -> None:
        self.hidden.rename(self.file)

    def slow_down(self) -> None:
        """Have the database be found too slow."""
        self.controller._lose_database(Slow("The database answers too slowly."), 0.0)

    def follow(self) -> None:
        """Have all that was changed be taken in, beside or not."""
        end, wanted = time.monotonic() + PATIENCE, self.site.store.revision()
        while self.controller._status.applied_revision != wanted:
            assert time.monotonic() < end, f"revision {wanted} is not applied after {PATIENCE} seconds"
            self.controller.tick()

    def run(self, until: str | None = None) -> None:
        """Let the controller run as the process does, until its log or its status says so, or for half a second and as
        many passes as are made in that."""
        end = time.monotonic() + (PATIENCE if until else 0.5)
        looks = count()

        def stopped() -> bool:
            outage, lifted = self.controller._outage is not None, bool(self.controller._roster.lifted)
            enough = next(looks) >= LOOKS
            over = time.monotonic() > end and (enough or until is not None)
            return {"alone": outage, "lifted": lifted, "back": not outage, None: False}[until] or over

        self.controller.run(stopped)
        assert until is None or time.monotonic() < end, f"it is not {until} after {PATIENCE} seconds"


@pytest.fixture
def away(sqlite_url: str, tmp_path: Path) -> Iterator[Away]:
    store = Store(sqlite_url)
    away = Away(Site(store), tmp_path)
    yield away
    away.others.close()
    away.replica.close()
    store.close()


def test_what_was_applied_stays_and_is_repaired(away: Away) -> None:
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.run()
    away.take_away()
    away.run("alone")
    kept = dict(away.site.kernel.chains)
    away.site.kernel.chains.clear()
    away.controller._due = dict.fromkeys(away.controller._due, 0.0)
    away.run()
    assert away.site.kernel.chains == kept
    assert away.site.send("10.0.0.1", times=8).count("accept") == 5


def test_a_controller_that_starts_without_its_database_begins_with_what_was_applied_last(away: Away) -> None:
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.run()
    away.take_away()
    away.site.kernel.chains.clear()
    away.site.kernel.hooks.clear()
    away.site.kernel.sets.clear()
    away.site.kernel.elements.clear()
    away.restart()
    away.run("alone")
    away.run()
    assert away.site.send("10.0.0.1", times=8).count("accept") == 5


def test_who_was_safe_is_so_for_a_controller_that_starts_without_its_database(away: Away) -> None:
    """A client of the API, whom only the database knows: a block around him would keep him out for good."""
    away.site.add(target="198.51.100.0/24", action="block")
    away.run()
    away.site.store.saw_client("gw", "198.51.100.7", token="boss", role=Role.ADMIN)
    away.controller._due = dict.fromkeys(away.controller._due, 0.0)
    away.run()
    assert away.site.send("198.51.100.7") == ["accept"]
    away.take_away()
    away.restart()
    away.run("alone")
    away.run()
    assert away.site.send("198.51.100.7") == ["accept"]
    assert away.site.send("198.51.100.8") == ["drop"]
    assert "198.51.100.7" in away.read_copy().hosts()[0].safe_reasons


def test_what_was_lifted_stays_so_for_a_controller_that_starts_meanwhile(away: Away) -> None:
    away.failure_seconds = 0.3
    away.site.add(target="10.0.0.1", action="block", on_failure="open")
    away.restart()
    away.run()
    away.take_away()
    away.run("lifted")
    away.run()
    assert away.site.send("10.0.0.1") == ["accept"]
    away.failure_seconds = 3600.0
    away.restart()
    away.run("lifted")
    away.run()
    assert away.site.send("10.0.0.1") == ["accept"]
    away.bring_back()
    away.run("back")
    away.run()
    assert away.site.send("10.0.0.1") == ["drop"]


def test_other_gateways_are_known_without_the_database(away: Away) -> None:
    away.site.store.report(
        HostStatus("gw2", "fake", own=("203.0.113.2", "127.0.0.1", "fe80::1", "10.0.0.0/8", "nowhere"))
    )
    away.site.add(target="203.0.113.0/24", action="block")
    away.run()
    away.controller._due = dict.fromkeys(away.controller._due, 0.0)
    away.run()
    away.take_away()
    away.controller._due = dict.fromkeys(away.controller._due, 0.0)
    away.run("alone")
    away.run()
    assert away.controller._compiled.facts.peers == {"203.0.113.2"}
    away.restart()
    away.run("alone")
    away.run()
    assert away.controller._compiled.facts.peers == {"203.0.113.2"}


def test_the_copy_knows_for_how_long_somebody_has_been_safe(away: Away) -> None:
    away.site.add(target="198.51.100.0/24", action="block")
    away.site.store.saw_client("gw", "198.51.100.7", token="boss", role=Role.ADMIN)
    away.run()
    began = away.replica.hosts()[0].safe_reasons["198.51.100.7"].seen
    away.site.clock.pass_by(minutes=20)
    away.site.store.saw_client("gw", "198.51.100.7", token="boss", role=Role.ADMIN)
    away.controller._due = dict.fromkeys(away.controller._due, 0.0)
    away.run()
    assert away.replica.hosts()[0].safe_reasons["198.51.100.7"].seen == pytest.approx(began + 1200, abs=30)


def test_a_controller_that_knows_nothing_touches_nothing(away: Away) -> None:
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.controller.sync()
    away.replica.close()
    for file in away.directory.iterdir():
        file.unlink()
    away.replica = open_replica(away.directory, "gw")
    away.take_away()
    away.restart()
    away.run()
    assert away.site.send("10.0.0.1", times=8).count("accept") == 5


def make_new_database(away: Away) -> None:
    """An empty one in the place of that which has the rules."""
    away.take_away()
    away.site.store.upgrade()


def find_report(away: Away) -> HostStatus:
    (status,) = away.site.store.hosts()
    return status


@pytest.mark.parametrize("begins_anew", [True, False])
def test_an_empty_database_in_the_place_of_the_one_with_the_rules_is_not_gone_by(away: Away, begins_anew: bool) -> None:
    away.site.add(target="10.0.0.1", action="block", on_failure="open")
    away.run()
    make_new_database(away)
    if begins_anew:
        away.restart()
    away.run("alone")
    end = time.monotonic() + PATIENCE
    while not away.site.store.hosts():
        assert time.monotonic() < end
        away.controller.tick()
    away.controller.tick()
    assert away.controller._outage is not None
    assert away.controller._outage.unread == 0, "what fails open stays: it can be read"
    assert away.site.send("10.0.0.1") == ["drop"]
    assert away.read_copy().revision() == 1
    said = find_report(away).last_error or ""
    assert "this gateway holds 1 rule of revision 1, as its copy tells: it is a new one in the place of" in said
    limiter = Blocks(away.site.store, "gw", now=away.site.clock)
    assert not limiter.block("10.0.0.99", 600, "It was refused too often."), "nobody has decided for this database"
    assert "it would bring back nothing" in str(refuse_window(away.site.store.hosts()))
    assert find_report(away).refused == said
    neighbour = HostStatus("gw2", "fake", silence=timedelta(0))
    assert refuse_window([*away.site.store.hosts(), neighbour]) is None, "others may go by it"
    assert find_report(away).applied_revision == 0
    away.site.add(target="10.0.0.2", action="block")
    look(away)
    assert [away.site.send(f"10.0.0.{host}") for host in (1, 2)] == [["drop"], ["accept"]], "nor is its first rule"
    assert "This is another database than the one of which this gateway holds 1 rule" in str(find_report(away).refused)
    away.read_copy().take(away.site.store.origin())
    away.run("back")
    away.follow()
    assert [away.site.send(f"10.0.0.{host}") for host in (1, 2)] == [["accept"], ["drop"]]
    assert (find_report(away).last_error, find_report(away).refused) == (None, None)


def look(away: Away) -> None:
    """Until the controller has looked at the database some more times, which it does every half second."""
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        away.controller.tick()


def save(away: Away) -> Path:
    """The file as it is now, as it is left below a disk that is mounted over it."""
    away.site.store.close()
    return Path(shutil.copy(away.file, away.file.with_name("saved.db")))


def put_back(away: Away, saved: Path) -> None:
    """Put that in the place of the file, which stays hidden."""
    away.take_away()
    shutil.copy(saved, away.file)


def is_blocked(away: Away) -> list[bool]:
    """Whether the hosts are that rules of these tests block, or would."""
    return [away.site.send(f"10.0.0.{host}") == ["drop"] for host in (1, 2, 3)]


@pytest.mark.parametrize("begins_anew", [True, False])
def test_an_older_file_of_the_database_takes_nothing_out_of_force(away: Away, begins_anew: bool) -> None:
    """Nor do the first changes in it, until its revision is as high, and higher. Once the newer file is back, all goes
    on by itself."""
    away.site.add(target="10.0.0.1", action="block")
    saved = save(away)
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    assert is_blocked(away) == [True, True, False]
    put_back(away, saved)
    if begins_anew:
        away.restart()
    away.run("alone")
    for revision in (1, 2, 3):
        look(away)
        assert is_blocked(away) == [True, True, False]
        said = str(find_report(away).refused)
        assert "older state than the one of which this gateway holds 2 rules of revision 2, as its copy tells" in said
        assert f"it lacks that revision (it is at {revision})" in said
        assert find_report(away).last_error == said
        assert (find_report(away).applied_revision, away.read_copy().revision()) == (0, 2)
        state = judge(away.site.store.load("gw")[1].__next__(), away.site.store.hosts(), {}, away.site.clock())
        told = "The gateway does not go by this database; `netlimit status` says why."
        assert (state["state"], state["message"]) == ("pending", told)
        limiter = Blocks(away.site.store, "gw", now=away.site.clock)
        assert not limiter.block("10.0.0.99", 600, "It was refused too often."), "nobody has decided for this one"
        assert "it would bring back nothing" in str(refuse_window(away.site.store.hosts()))
        away.site.add(target=f"10.0.0.{2 + revision}", action="block")
    away.site.store.close()
    away.file.unlink()
    away.bring_back()
    away.run("back")
    away.follow()
    assert is_blocked(away) == [True, True, False]
    assert (find_report(away).last_error, find_report(away).refused) == (None, None)


@pytest.fixture
def below(root: None, tmp_path: Path) -> Iterator[Away]:
    """The database is in a directory over which a disk can be mounted."""
    directory = tmp_path / "var"
    store = Store(f"sqlite:///{directory}/netlimit.db")
    store.upgrade()
    away = Away(Site(store), directory)
    away.keep_in(tmp_path / "copy")
    away.restart()
    yield away
    away.others.close()
    away.replica.close()
    store.close()


def test_a_newer_file_is_gone_by_once_its_disk_is_mounted_with_the_log_of_a_crash(below: Away, tmp_path: Path) -> None:
    below.failure_seconds = 1.0
    below.restart()
    below.site.add(target="10.0.0.1", action="block")
    saved = save(below)
    below.site.add(target="10.0.0.2", action="block", on_failure="open")
    below.run()
    disk = shutil.copytree(below.file.parent, tmp_path / "disk", ignore=shutil.ignore_patterns("*-shm"))
    assert (disk / "netlimit.db-wal").stat().st_size
    put_back(below, saved)
    below.run("alone")
    look(below)
    assert "an older state" in str(find_report(below).refused)
    subprocess.run(["mount", "--bind", disk, below.file.parent], check=True)
    try:
        below.run("back")
        below.follow()
        assert is_blocked(below) == [True, True, False]
        assert (find_report(below).last_error, find_report(below).refused) == (None, None)
    finally:
        subprocess.run(["umount", "--lazy", below.file.parent], check=True)


def test_an_older_file_that_has_forgotten_what_it_was_is_not_gone_by_either(away: Away) -> None:
    """A database remembers as many changes as the settings say."""
    away.site.add(target="10.0.0.1", action="block")
    saved = save(away)
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    put_back(away, saved)
    away.run("alone")
    away.site.store._revisions = 2
    for host in range(3, 9):
        away.site.add(target=f"10.0.0.{host}", action="block")
    assert away.site.store.stamp_of(2) is None
    for _ in range(2):
        look(away)
        assert is_blocked(away) == [True, True, False]
        away.restart()
        away.run("alone")
    away.site.store.close()
    away.file.unlink()
    away.bring_back()
    away.run("back")
    away.site.add(target="10.0.0.3", action="block")
    away.follow()
    assert is_blocked(away) == [True, True, True]
    assert not away.read_copy().held().is_doubted


def test_an_older_file_is_gone_by_once_it_is_taken(away: Away) -> None:
    """Then the newer one is not: it lacks what was changed since."""
    away.site.add(target="10.0.0.1", action="block")
    saved = save(away)
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    put_back(away, saved)
    away.run("alone")
    away.read_copy().take(away.site.store.origin())
    away.run("back")
    away.follow()
    assert is_blocked(away) == [True, False, False]
    away.site.add(target="10.0.0.3", action="block")
    away.follow()
    away.site.store.close()
    away.file.unlink()
    away.bring_back()
    away.run("alone")
    look(away)
    assert is_blocked(away) == [True, False, True]
    assert "This database has gone on from an older state" in str(find_report(away).refused)


def test_a_backup_that_is_restored_into_an_older_file_is_gone_by(away: Away, tmp_path: Path) -> None:
    away.site.add(target="10.0.0.1", action="block")
    saved = save(away)
    away.site.store.back_up(tmp_path / "rules.backup", datetime.now(UTC))
    for host in range(2, 7):
        away.site.add(target=f"10.0.0.{host}", action="block")
    away.run()
    put_back(away, saved)
    away.run("alone")
    away.site.store.restore(tmp_path / "rules.backup", "test", datetime.now(UTC), force=True)
    away.run("back")
    away.follow()
    assert is_blocked(away) == [True, False, False]
    assert away.read_copy().revision() == 2


def test_a_pass_of_a_command_goes_by_no_older_file(away: Away) -> None:
    away.site.add(target="10.0.0.1", action="block")
    saved = save(away)
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    put_back(away, saved)
    setup = Setup("gw", "fake")
    command = Controller(away.site.store, away.site.kernel, setup, away.site.clock, held=away.replica.held)
    for go in (command.plan, command.account, command.sync, command.relax):
        with pytest.raises(StoreError, match="This database is in an older state"):
            go()
    assert is_blocked(away) == [True, True, False]


def test_an_older_file_where_nothing_is_held_is_gone_by(away: Away) -> None:
    saved = save(away)
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    away.site.store.close()
    away.replica.follow_pause(True)
    put_back(away, saved)
    away.restart().tick()
    assert away.controller._outage is None
    assert is_blocked(away) == [False, False, False]


def test_a_pause_of_another_database_takes_nothing_out_of_force(away: Away) -> None:
    """It may be an old one, in which this gateway was torn down once."""
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    make_new_database(away)
    away.site.add(target="10.0.0.2", action="block")
    away.site.store.pause("gw", True)
    away.restart()
    away.run("alone")
    look(away)
    assert [away.site.send(f"10.0.0.{host}") for host in (1, 2)] == [["drop"], ["accept"]]


@pytest.mark.parametrize("begins_anew", [True, False])
def test_who_goes_by_his_copy_is_not_told_to_be_paused_by_an_older_file(away: Away, begins_anew: bool) -> None:
    """In which this gateway was torn down; limits are in force since. A teardown that comes now is told."""
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    away.site.store.pause("gw", True)
    saved = save(away)
    away.site.store.pause("gw", False, for_good=True)
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    put_back(away, saved)
    if begins_anew:
        away.restart()
    away.run("alone")
    look(away)
    assert is_blocked(away) == [True, True, False]
    assert find_report(away).refused is not None
    assert (find_report(away).paused, find_report(away).enforced) == (False, 2)
    assert away.site.store.paused("gw"), "what the file holds stays as it is"
    away.controller._due["heartbeat"] = 0.0
    away.site.store.pause("gw", True)
    assert find_report(away).paused


def test_another_database_that_takes_the_place_while_it_runs_is_not_gone_by(away: Away) -> None:
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    away.take_away()
    away.run("alone")
    away.site.store.upgrade()
    away.site.add(target="10.0.0.2", action="block")
    look(away)
    assert [away.site.send(f"10.0.0.{host}") for host in (1, 2)] == [["drop"], ["accept"]]
    assert find_report(away).refused is not None


def test_a_pass_of_a_command_goes_by_no_other_database(away: Away) -> None:
    """Such as `netlimit plan`, or the guard's: it has no copy of its own."""
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    make_new_database(away)
    away.site.add(target="10.0.0.2", action="block")
    setup = Setup("gw", "fake")
    command = Controller(away.site.store, away.site.kernel, setup, away.site.clock, held=away.replica.held)
    for go in (command.plan, command.account, command.sync, command.relax):
        with pytest.raises(StoreError, match="This is another database"):
            go()
    assert [away.site.send(f"10.0.0.{host}") for host in (1, 2)] == [["drop"], ["accept"]]


def test_a_database_that_comes_back_empty_says_so(away: Away) -> None:
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    away.take_away()
    away.run("alone")
    away.site.store.upgrade()
    end = time.monotonic() + PATIENCE
    while "Nothing was ever changed in this database" not in str(away.controller._status.last_error):
        assert time.monotonic() < end
        away.controller.tick()
    assert away.site.send("10.0.0.1") == ["drop"]


def test_one_that_is_restored_is_gone_by(away: Away, tmp_path: Path) -> None:
    """Even if it is older."""
    away.site.add(target="10.0.0.1", action="block")
    away.site.store.back_up(tmp_path / "rules.backup", datetime.now(UTC))
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    make_new_database(away)
    away.run("alone")
    away.site.store.restore(tmp_path / "rules.backup", "test", datetime.now(UTC))
    away.run("back")
    away.follow()
    assert [away.site.send(f"10.0.0.{host}") for host in (1, 2)] == [["drop"], ["accept"]]


@pytest.mark.parametrize("why", ["torn down", "nothing held"])
def test_an_empty_database_is_gone_by_where_it_takes_nothing_out_of_force(away: Away, why: str) -> None:
    rule = away.site.add(target="10.0.0.1", action="block")
    away.run()
    if why == "torn down":
        away.replica.follow_pause(True)
    else:
        away.site.store.remove(rule.id, "test", away.site.clock())
        away.run()
    make_new_database(away)
    away.restart().tick()
    assert away.controller._outage is None
    assert away.site.send("10.0.0.1") == ["accept"]


def test_what_changed_meanwhile_is_taken_in_when_the_database_is_back(away: Away) -> None:
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.run()
    away.take_away()
    away.run("alone")
    other = Store(f"sqlite:///{away.hidden}")
    rule = replace(other.load("gw")[1].__next__(), enabled=False)
    other.replace(rule.id, rule, "another gateway", datetime.now(UTC))
    other.close()
    away.bring_back()
    away.run("back")
    away.run()
    assert away.site.send("10.0.0.1", times=8).count("accept") == 8
    (host,) = away.site.store.hosts()
    assert (host.applied_revision, host.last_error) == (away.site.store.revision(), None)


def test_a_controller_that_started_without_its_database_tells_it_everything_when_it_is_back(away: Away) -> None:
    """What is in error, and what was counted: the copy knew the one, and not the other."""
    site = away.site
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.add(target="10.0.0.2", rate="1 Mbit/s", action="shape", interface="wan")
    away.run()
    site.send("10.0.0.1", times=4)
    away.controller._count([1])
    site.store.mark("gw", [], [2])
    away.take_away()
    away.restart()
    away.run(until="alone")
    away.bring_back()
    away.run(until="back")
    away.run()
    assert "There is no device wan" in site.store.exceptional([2])[2]["gw"].message
    site.send("10.0.0.1", times=3)
    away.controller._count([1])
    assert site.store.counters(1)["gw"].total.matched_packets == 7


def test_a_rule_ends_in_time_without_the_database(away: Away) -> None:
    away.site.add(target="10.0.0.1", action="block", ttl="10s")
    away.run()
    away.take_away()
    away.run("alone")
    away.site.clock.pass_by(seconds=11)
    away.run()
    assert away.site.send("10.0.0.1") == ["accept"]


def test_a_rule_that_fails_open_is_out_of_force_until_the_database_is_back(away: Away) -> None:
    away.failure_seconds = 0.0
    away.restart()
    away.site.add(target="10.0.0.1", action="block", on_failure="open")
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    assert (away.site.send("10.0.0.1"), away.site.send("10.0.0.2")) == (["drop"], ["drop"])
    away.take_away()
    away.run("lifted")
    away.run()
    assert (away.site.send("10.0.0.1"), away.site.send("10.0.0.2")) == (["accept"], ["drop"])
    (said,) = away.replica.hosts()
    assert (said.desired, said.enforced, said.lifted) == (2, 1, 1)
    away.bring_back()
    away.run("back")
    away.run()
    assert (away.site.send("10.0.0.1"), away.site.send("10.0.0.2")) == (["drop"], ["drop"])
    (host,) = away.site.store.hosts()
    assert (host.desired, host.enforced, host.lifted) == (2, 2, 0)


def test_rules_that_fail_open_stay_for_a_while(away: Away) -> None:
    away.site.add(target="10.0.0.1", action="block", on_failure="open")
    away.run()
    away.take_away()
    away.run("alone")
    away.run()
    assert away.site.send("10.0.0.1") == ["drop"]


def test_a_rule_that_fails_open_stays_where_the_database_only_takes_nothing(root: None, tmp_path: Path) -> None:
    """Its disk is full: it still tells the rules."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "netlimit-test", disk], check=True)
    store = Store(f"sqlite:///{disk}/netlimit.db")
    try:
        store.upgrade()
        away = Away(Site(store), tmp_path)
        away.site.add(target="10.0.0.1", action="block", on_failure="open")
        away.failure_seconds = 1.5
        away.restart()
        away.run()
        with suppress(OSError), (disk / "rest").open("wb", buffering=0) as rest:
            while rest.write(bytes(4096)):
                pass
        away.controller._due = dict.fromkeys(away.controller._due, 0.0)
        away.run("alone")
        began = time.monotonic()
        while time.monotonic() < began + 3:
            away.run()
            assert away.site.send("10.0.0.1") == ["drop"]
        assert away.controller._outage is not None
        (disk / "rest").unlink()
        away.run("back")
        away.replica.close()
    finally:
        store.close()
        subprocess.run(["umount", disk], check=True)


def test_the_copy_follows_every_change(away: Away) -> None:
    first = away.site.add(target="10.0.0.1", rate="5 packets/s", name="first", hosts=["gw"])
    away.site.add(target="10.0.0.9", rate="5 packets/s", hosts=["another"])
    away.controller.sync()
    second = away.site.add(target="10.0.0.2", rate="50 connections", labels={"why": "test"})
    away.controller.sync()
    assert _rules(away.replica) == _rules(away.site.store) == {first.id: first, second.id: second}
    assert away.replica.numbering("gw") == away.site.store.numbering("gw")
    away.site.store.remove(first.id, "test", away.site.clock())
    away.site.store.pause("gw", True)
    away.replica.follow(away.site.store)
    assert _rules(away.replica) == {second.id: second}
    assert away.replica.paused("gw")
    assert away.replica.numbering("gw") == away.site.store.numbering("gw")


@pytest.mark.parametrize(
    "harm",
    [lambda path: path.write_bytes(b"\0" * 5000), lambda path: flip(path, b"CREATE TABLE rules", 10)],
    ids=["zeros", "a letter of its schema"],
)
def test_a_damaged_copy_is_begun_anew(away: Away, harm: Callable[[Path], object]) -> None:
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.controller.sync()
    away.replica.close()
    path = away.directory / "applied.db"
    harm(path)
    away.replica = open_replica(away.directory, "gw")
    assert away.replica.revision() == 0
    away.restart().sync()
    assert _rules(away.replica) == _rules(away.site.store) != {}
    assert (path.stat().st_mode & 0o077, away.directory.stat().st_mode & 0o777) == (0o060, 0o700)


def test_a_copy_that_cannot_be_written_keeps_nobody_from_limiting(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_source: Store) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(away.replica, "follow", refuse)
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.controller.sync()
    assert away.site.send("10.0.0.1", times=8).count("accept") == 5


def test_what_is_torn_down_stays_so_without_the_database(away: Away) -> None:
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.run()
    away.site.store.pause("gw", True)
    away.run()
    assert away.replica.paused("gw"), "or the limits would be back when the machine starts again"
    away.take_away()
    for held in (away.site.kernel.chains, away.site.kernel.hooks, away.site.kernel.sets, away.site.kernel.elements):
        held.clear()
    away.restart()
    away.run()
    assert away.site.send("10.0.0.1", times=8).count("accept") == 8
    away.bring_back()
    away.site.store.pause("gw", False)
    away.run("back")
    away.run()
    assert not away.replica.paused("gw")


def test_the_copy_follows_a_pause_while_a_window_is_open_unless_the_window_undoes_it(away: Away) -> None:
    store, now = away.site.store, away.site.clock()
    away.run()

    def follow(paused: bool, for_good: bool = False) -> bool:
        store.pause("gw", paused, for_good=for_good)
        assert not away.replica.follow(store)
        return away.replica.paused("gw")

    store.open_window(3600, "test", now)
    assert [follow(paused) for paused in (True, False, True)] == [True, False, True]
    store.confirm("test", now)
    store.pause("gw", False)
    assert away.replica.follow(store)
    store.open_window(3600, "test", now, paused=["gw"])
    assert follow(False), "it is to be paused, though nobody has torn it down before"
    assert not follow(False, for_good=True)


def test_a_gateway_that_a_window_pauses_goes_on_from_its_copy_once_it_is_confirmed(away: Away) -> None:
    """A controller that has begun meanwhile brings the copy up."""
    store, now = away.site.store, away.site.clock()
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    store.open_window(3600, "test", now, paused=["gw"])
    away.restart()
    away.run()
    assert away.replica.paused("gw")
    assert away.site.send("10.0.0.1") == ["drop"]
    store.confirm("test", now)
    away.controller._due = dict.fromkeys(away.controller._due, 0.0)
    away.run()
    assert not away.replica.paused("gw")


@pytest.mark.parametrize("outcome", ["confirmed", "undone"])
def test_a_window_that_ends_while_the_copy_follows_leaves_it_as_it_was(
    away: Away, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """What was read in the window may be what nobody has confirmed."""
    store, now = away.site.store, away.site.clock()
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    store.open_window(3600, "test", now, paused=["gw"])
    away.site.add(target="10.0.0.2", action="block")
    assert not away.replica.follow(store)

    def end(host: str) -> bool:
        found = Store.paused(store, host)
        if outcome == "confirmed":
            store.confirm("test", now)
        else:
            store.abandon("test", now)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(store, "paused", end)
        assert not away.replica.follow(store)
    assert (away.replica.revision(), away.replica.paused("gw")) == (1, True)
    assert away.replica.follow(store)
    assert _rules(away.replica) == _rules(store)
    assert away.replica.paused("gw") == (outcome == "undone")


@pytest.mark.parametrize("paused", [False, True])
def test_the_copy_has_what_an_open_window_brings_back(away: Away, paused: bool) -> None:
    """Also if it was opened before what came back by then had been copied: so at once after another was confirmed."""
    store, now = away.site.store, away.site.clock()
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    store.open_window(3600, "test", now)
    away.site.add(target="10.0.0.2", action="block")
    away.run()
    store.confirm("test", now)
    store.open_window(3600, "test", now, paused=["gw"] if paused else [])
    away.site.add(target="10.0.0.3", action="block")
    assert away.replica.revision() == 1
    assert not away.replica.follow(store)
    assert (away.replica.revision(), away.replica.paused("gw")) == (2, paused)
    assert sorted(map(str, (kept.rule.target for kept in away.replica.select()[0]))) == ["10.0.0.1/32", "10.0.0.2/32"]
    assert not away.replica.follow(store)
    store.confirm("test", now)
    assert away.replica.follow(store)
    assert _rules(away.replica) == _rules(store)


def test_what_an_open_window_brings_back_costs_the_copy_what_differs(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller waits for it: of 60,000 rules all are not read again, neither then nor when it has ended."""
    store, now = away.site.store, away.site.clock()
    gone = away.site.add(target="10.0.0.1", action="block")
    changed = away.site.add(target="10.0.0.2", action="block")
    away.run()
    assert away.replica.follow(store)
    store.remove(gone.id, "test", now)
    store.change(changed.id, lambda rule: replace(rule, name="office"), "test", now)
    away.site.add(target="10.0.0.3", action="block", hosts=["another"])
    away.site.add(target="10.0.0.4", action="block")
    base = _rules(store)
    store.open_window(3600, "test", now)
    away.site.add(target="10.0.0.5", action="block")

    def refuse(*arguments: object) -> NoReturn:
        raise AssertionError("All rules are read.")

    def follow() -> bool:
        with monkeypatch.context() as patched:
            patched.setattr(store, "rules_at", refuse)
            patched.setattr(store, "load_stamped", refuse)
            return away.replica.follow(store)

    assert not follow()
    assert _rules(away.replica) == base
    store.confirm("test", now)
    assert follow()
    assert _rules(away.replica) == _rules(store) != base


def test_what_is_newer_than_the_copy_stays_when_the_database_goes_again(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may be older: it cannot be written, or a window of confirmation is open."""
    away.run()
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.run()
    away.site.store.open_window(3600, "test", away.site.clock())
    away.site.add(target="10.0.0.2", rate="5 packets/s")
    away.run()
    away.take_away()
    away.run("alone")

    asked = []

    def load(host: str) -> object:
        asked.append(host)
        away.take_away()
        return Store.load_stamped(away.site.store, host)

    with monkeypatch.context() as patched:
        patched.setattr(away.site.store, "load_stamped", load)
        away.bring_back()
        while not asked:
            away.run()
        away.run()
    assert {str(rule.target) for rule in away.replica.load("gw")[1]} == {"10.0.0.1/32"}
    assert away.site.send("10.0.0.2", times=8).count("accept") == 5


def set_rate(away: Away, rule: Rule, rate: int) -> None:
    fields = {"target": "10.0.0.1", "rate": f"{rate} packets/s"}
    away.site.store.replace(rule.id, make_rule(fields, away.site.clock()), "test", away.site.clock())
    away.follow()


def desired_rate(away: Away, rule: Rule) -> int:
    purpose = away.controller._compiled.fragments[rule.id].purpose
    assert isinstance(purpose, Limit)
    return purpose.profile.rate.amount


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Whatever answers counts as slow, until it is undone."""
    monkeypatch.setattr(outage, "QUICK_SECONDS", -1.0)
    return monkeypatch


def test_a_rule_that_was_changed_since_the_database_was_slow_is_as_it_was_changed_last(
    away: Away, slow: pytest.MonkeyPatch
) -> None:
    """A device comes, say, while the database is slow again: rules are looked at anew then."""
    rule = away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.follow()
    away.slow_down()
    set_rate(away, rule, 6)
    slow.undo()
    away.run("back")
    set_rate(away, rule, 7)
    away.slow_down()
    away.controller._look_again([rule.id])
    away.controller.sync()
    assert desired_rate(away, rule) == 7


def test_a_rule_that_was_changed_in_a_window_stays_when_the_database_is_slow_again(
    away: Away, slow: pytest.MonkeyPatch
) -> None:
    """The window keeps the copy behind."""
    rule = away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.follow()
    away.slow_down()
    set_rate(away, rule, 6)
    slow.undo()
    away.run("back")
    away.site.store.open_window(3600, "test", away.site.clock())
    set_rate(away, rule, 7)
    away.slow_down()
    away.controller._look_again([rule.id])
    away.controller.sync()
    assert desired_rate(away, rule) == 7


def test_what_takes_long_to_load_is_copied_in_the_end(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rules over a slow line, in a controller that has just begun."""
    monkeypatch.setattr(controller, "LOAD_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(controller, "SLOW_SECONDS", 0.4)
    monkeypatch.setattr(controller, "WAIT_SECONDS", 0.1)
    granted: list[float | None] = []

    def load(host: str) -> object:
        if granted and granted[-1] is not None and granted[-1] < 1.5:
            raise Slow("The database answers too slowly.")
        return Store.load_stamped(away.site.store, host)

    away.site.add(target="10.0.0.1", rate="5 packets/s")
    wanted = _rules(away.site.store)
    monkeypatch.setattr(away.site.store, "allow", granted.append)
    monkeypatch.setattr(away.site.store, "load_stamped", load)
    end = time.monotonic() + PATIENCE
    while _rules(away.replica) != wanted:
        assert time.monotonic() < end, f"it is not copied after {PATIENCE} seconds"
        away.run()


def test_a_copy_that_is_behind_is_written_before_the_controller_ends(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many rules that reading them keeps from the kernel for too long: a boot would not bring them back."""
    away.run()
    granted: list[float | None] = [None]

    def follow(source: Store) -> bool:
        if granted[-1] is not None and granted[-1] < 2 * controller.LOAD_WAIT_SECONDS:
            raise Slow("The database answers too slowly.")
        return Replica.follow(away.replica, source)

    monkeypatch.setattr(away.site.store, "allow", granted.append)
    monkeypatch.setattr(away.replica, "follow", follow)
    away.site.add(target="10.0.0.1", action="block")
    away.run("alone")
    assert away.site.send("10.0.0.1") == ["drop"]
    assert _rules(away.replica) == _rules(away.site.store)


def test_a_database_that_is_away_keeps_no_controller_from_ending(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    away.site.add(target="10.0.0.1", action="block")
    away.run()
    away.take_away()
    away.run("alone")
    monkeypatch.setattr(away.replica, "follow", pytest.fail)
    away.controller._copying.note_change()
    away.run()


def test_what_was_lifted_comes_back_after_a_teardown_in_a_slow_outage(away: Away, slow: pytest.MonkeyPatch) -> None:
    away.failure_seconds = 0.0
    away.restart()
    away.site.add(target="10.0.0.1", rate="5 packets/s", on_failure="open")
    away.follow()
    away.take_away()
    away.run("lifted")
    assert away.site.send("10.0.0.1", times=9).count("accept") == 9
    away.bring_back()
    away.site.store.pause("gw", True, "test")
    away.replica.follow_pause(True)
    away.run("back")
    away.site.store.pause("gw", False, "test")
    slow.undo()
    away.run()
    away.run()
    assert away.site.send("10.0.0.1", times=9).count("accept") == 5


def test_how_a_rule_stands_that_goes_and_comes_back_is_told_a_slow_database(
    away: Away, slow: pytest.MonkeyPatch
) -> None:
    """Whoever removes a rule forgets how it stands."""
    site = away.site
    rule = site.add(target="10.0.0.1", interface="nowhere0", direction="to", rate="9 Mbit/s", action="shape")
    away.follow()
    assert site.store.marked("gw")
    away.slow_down()
    before = site.store.revision()
    set_rate(away, site.add(target="10.0.0.1", rate="5 packets/s"), 6)
    away.run()
    site.store.remove(rule.id, "test", site.clock())
    site.store.rollback(before, "test", site.clock())
    assert not site.store.marked("gw")
    away.follow()
    end = time.monotonic() + PATIENCE
    while not site.store.marked("gw"):
        assert time.monotonic() < end
        away.controller.tick()
    assert away.controller._outage is not None


def test_a_copy_that_a_guard_has_put_back_is_followed_from_there(away: Away) -> None:
    away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.run()
    base, now = away.site.store.revision(), datetime.now(UTC)
    away.site.add(target="10.0.0.2", rate="5 packets/s")
    away.run()
    guards = open_replica(away.directory, "gw")
    window = Window(base, now, 1, "test", (), Outcome.EXPIRED, now, base)
    guards.hold(take_snapshot(away.site.store, "gw", base, False), window)
    guards.close()
    away.site.add(target="10.0.0.3", rate="5 packets/s")
    away.run()
    assert _rules(away.replica) == _rules(away.site.store)


def test_what_was_undone_without_the_database_does_not_come_back_with_it(away: Away) -> None:
    """The guard has put back the copy, and has not yet told the database that the window is over."""
    site, client, seconds = away.site, "10.0.0.2", 6
    site.add(target="10.0.0.1", rate="5 packets/s")
    away.follow()
    base, opened = site.store.revision(), site.store.now()
    site.store.open_window(seconds, "test", opened)
    over = time.monotonic() + seconds
    snapshot = take_snapshot(site.store, "gw", base, False)
    site.add(target=client, action="block")
    away.follow()
    assert site.send(client) == ["drop"]
    away.take_away()
    away.run("alone")
    with closing(open_replica(away.directory, "gw")) as copy:
        copy.hold(snapshot, Window(base, opened, seconds, "test", (), Outcome.EXPIRED, opened, base))
    away.run()
    assert site.send(client) == ["accept"]
    time.sleep(max(0.0, over - time.monotonic()))
    away.bring_back()
    end = time.monotonic() + PATIENCE
    while (window := site.store.window()) is None or window.outcome is None or away.controller._outage is not None:
        assert time.monotonic() < end
        away.controller.tick()
        assert site.send(client) == ["accept"]
    away.run()
    assert site.send(client) == ["accept"]
    assert _rules(site.store).keys() == _rules(away.replica).keys() == {1}


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A disk of its own that is soon full."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "netlimit-test", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """There is no room on a disk meanwhile."""
    filling = disk / "filling"
    with suppress(OSError), filling.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        filling.unlink()


def notes_on_copy(away: Away) -> list[str]:
    """What the gateway says of its copy, in a report that it makes now."""
    away.controller._due = dict.fromkeys(away.controller._due, 0.0)
    away.controller.tick()
    (status,) = away.site.store.hosts()
    return [note for note in status.notes if note.startswith(PREFIX)]


def find_on_copy(away: Away) -> list[str]:
    """What `netlimit doctor` says of it."""
    settings = Settings(database_url=f"sqlite:///{away.file}", host="gw", state_directory=away.directory)
    found = find_faults(doctor._survey_service(settings, away.site.kernel))
    return [f"{each.severity}: {each}" for each in found if each.name == "copy of the rules"]


def test_a_copy_that_is_behind_is_told_until_it_is_written_again(root: None, away: Away) -> None:
    """Else a boot brings back rules that were removed, and nobody has known."""
    with small_disk(away.directory.with_name("disk")) as disk:
        away.keep_in(disk / "controller")
        away.restart()
        removed = away.site.add(target="10.0.0.1", action="block")
        away.controller.sync()
        assert (notes_on_copy(away), find_on_copy(away)) == ([], [])
        with filled(disk):
            away.site.store.remove(removed.id, "test", away.site.clock())
            for number in range(20):
                away.site.add(target=f"10.3.0.{number}", action="block", comment="x" * 500)
            away.controller.sync()
            assert away.site.send("10.3.0.9") == ["drop"]
            assert removed.id in _rules(away.replica)
            (status,) = away.site.store.hosts()
            assert any("disk is full" in note for note in status.notes), "at once, with what is applied"
            (note,) = notes_on_copy(away)
            assert "disk is full" in note
            (found,) = find_on_copy(away)
            assert found.startswith("warning: ")
            assert "disk is full" in found
        assert (notes_on_copy(away), find_on_copy(away)) == ([], [])
        assert _rules(away.replica) == _rules(away.site.store)
        away.controller._copying.close()


def test_a_copy_that_does_not_hear_of_a_pause_is_told(root: None, away: Away) -> None:
    """Else a boot puts back what somebody has torn down."""
    with small_disk(away.directory.with_name("disk")) as disk:
        away.keep_in(disk / "controller")
        away.restart()
        away.site.add(target="10.0.0.1", action="block")
        away.controller.sync()
        with filled(disk):
            away.site.store.pause("gw", True)
            assert "disk is full" in notes_on_copy(away)[0]
            assert not away.replica.paused("gw")
        assert notes_on_copy(away) == []
        assert away.replica.paused("gw")
        away.controller._copying.close()


def refuse(_source: Store) -> bool:
    raise StoreError("The disk is full.")


def test_a_copy_that_cannot_be_told_who_is_safe_says_so(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a controller that begins on it cuts off who manages this gateway."""
    away.site.add(target="198.51.100.0/24", action="block")
    away.run()
    with monkeypatch.context() as patch:
        patch.setattr(away.replica, "keep_report", refuse)
        away.site.store.saw_client("gw", "198.51.100.7", token="boss", role=Role.ADMIN)
        notes_on_copy(away)
        assert "who is safe" in notes_on_copy(away)[0]
    notes_on_copy(away)
    assert notes_on_copy(away) == []
    assert "198.51.100.7" in away.replica.hosts()[0].safe_reasons


def test_a_copy_that_could_not_be_opened_is_told_and_opened_later(away: Away) -> None:
    away.replica.close()
    away.directory = away.directory.with_name("another")
    away.directory.write_text("no directory")
    setup = Setup("gw", "fake")
    reopen = partial(open_replica, away.directory, "gw")
    away.controller = Controller(away.site.store, away.site.kernel, setup, away.site.clock, None, reopen)
    away.site.add(target="10.0.0.1", action="block")
    away.controller.sync()
    assert away.site.send("10.0.0.1") == ["drop"]
    (note,) = notes_on_copy(away)
    assert "another" in note
    assert len(find_on_copy(away)) == 1
    away.directory.unlink()
    assert notes_on_copy(away) == []
    assert _rules(away.read_copy()) == _rules(away.site.store)
    away.controller._copying.close()


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_copy_whose_file_is_gone_or_damaged_is_begun_anew(away: Away, harm: str) -> None:
    setup, reopen = Setup("gw", "fake"), partial(open_replica, away.directory, "gw")
    away.controller = Controller(away.site.store, away.site.kernel, setup, away.site.clock, away.replica, reopen)
    away.site.add(target="10.0.0.1", action="block")
    away.controller.sync()
    notes_on_copy(away)
    path = away.directory / "applied.db"
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(5000))
    away.site.add(target="10.0.0.2", action="block")
    away.controller.sync()
    notes_on_copy(away)
    assert notes_on_copy(away) == []
    assert _rules(away.read_copy()) == _rules(away.site.store)
    away.controller._copying.close()


def test_a_damaged_copy_that_cannot_be_begun_anew_is_let_go(root: None, tmp_path: Path) -> None:
    """It is tried again every few seconds: what stays open each time would run out."""
    with small_disk(tmp_path / "disk") as disk:
        (disk / "applied.db").write_bytes(bytes(5000))
        with filled(disk), pytest.raises(StoreError, match="full"):
            open_replica(disk, "gw")
        held = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        assert not [each for each in held if each.startswith(str(disk))]


def test_a_copy_that_commands_alone_have_left_behind_is_told(away: Away) -> None:
    """No controller runs that would say so."""
    away.site.add(target="10.0.0.1", action="block")
    away.controller.sync()
    settings = Settings(database_url=f"sqlite:///{away.file}", host="gw", state_directory=away.directory)
    (status,) = away.site.store.hosts()
    assert doctor._look_at_copy(settings, status) is None
    away.site.add(target="10.0.0.2", action="block")
    Controller(away.site.store, away.site.kernel, Setup("gw", "fake"), away.site.clock).sync()
    (status,) = away.site.store.hosts()
    assert "revision" in (doctor._look_at_copy(settings, status) or "")


def test_a_copy_on_a_full_disk_is_there(root: None, away: Away) -> None:
    """It may be all that there is when the machine starts."""
    disk = away.directory.with_name("disk")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "netlimit-test", disk], check=True)
    try:
        away.keep_in(disk / "controller")
        away.site.add(target="10.0.0.1", rate="5 packets/s")
        away.restart().sync()
        away.replica.close()
        with suppress(OSError), (disk / "filling").open("wb", buffering=0) as filling:
            while filling.write(bytes(4096)):
                pass
        away.keep_in(disk / "controller")
        assert _rules(away.replica) == _rules(away.site.store) != {}
        away.replica.close()
    finally:
        subprocess.run(["umount", disk], check=True)


def _rules(store: Store | Replica) -> dict[int, object]:
    return {rule.id: rule for rule in store.load("gw")[1]}


@pytest.mark.parametrize("is_told", [False, True])
def test_numbers_that_another_process_has_given_out_beside_a_slow_database_stay_its_own(
    away: Away, slow: pytest.MonkeyPatch, is_told: bool
) -> None:
    """`netlimit apply` has, say: entries that bear them must not be misread."""
    rule = away.site.add(target="10.0.0.1", rate="5 packets/s")
    away.follow()
    ((limits, former), number), *_ = sorted(away.site.store.numbering("gw").items(), key=itemgetter(1))
    ours, other = (limits, former.replace("5", "6")), (limits, former.replace("5", "7"))
    away.slow_down()
    away.site.store.number("gw", {other: number + 1}, ())
    set_rate(away, rule, 6)
    assert away.controller._compiled.numbers.kept[ours] == number + 1
    end = time.monotonic() + PATIENCE
    while is_told and away.controller._ledger.numbers is not None:
        assert time.monotonic() < end
        away.controller.tick()
    assert away.site.store.numbering("gw")[other] == number + 1
    slow.undo()
    away.run("back")
    away.run()
    assert away.site.store.numbering("gw")[ours] == away.controller._compiled.numbers.kept[ours] == number + 2
