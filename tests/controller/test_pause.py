"""A controller that runs takes out nothing by itself: what a teardown has left that was ended early stays until one
begins, or somebody says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from netlimit.controller import Controller, Setup
from netlimit.errors import KernelError
from netlimit.kernel.base import Addresses
from netlimit.store import Store, hosts, open_replica
from netlimit.teardown import tear_down
from netlimit.tree import SavedRoot
from tests.controller.conftest import Site
from tests.controller.test_outage import Away
from tests.unit.shapes import HOME

BLOCKED = "10.0.0.1"
PFIFO, OTHER = SavedRoot(1, "pfifo", "07000000"), SavedRoot(2, "pfifo", "07000000")


def test_a_teardown_that_can_tell_the_database_at_last_is_heard(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends to put off when that is told: between two looks of the controller, say."""
    site.add(target=BLOCKED, action="block")
    telling = [True]
    paused = site.store.paused

    def look(host: str) -> bool:
        found = paused(host)
        site.store.pause(host, True)
        telling.clear()
        return found

    site.controller._load_all()
    monkeypatch.setattr(site.kernel, "is_put_off", lambda: bool(telling))
    monkeypatch.setattr(site.store, "paused", look)
    site.controller.sync()
    assert site.send(BLOCKED) == ["accept"]


def test_what_a_teardown_has_left_is_not_touched(site: Site) -> None:
    site.add(target=BLOCKED, action="block")
    site.controller.tick()
    held = site.kernel.structure()
    site.store.pause("gw", True)
    site.controller.tick()
    site.controller.tick()
    assert site.send(BLOCKED) == ["drop"]
    assert site.kernel.structure() == held


def test_who_begins_and_finds_a_pause_takes_out_what_is_there(site: Site) -> None:
    """A boot has brought it back from a copy that was not told of the pause, and nobody else would take it out."""
    site.add(target=BLOCKED, action="block")
    site.kernel.routes = HOME
    site.kernel.roots["lan"] = PFIFO
    site.store.save_root("gw", "lan", PFIFO)
    site.add(target="10.1.0.2", action="shape", direction="to", rate="1 Mbit/s")
    site.controller.tick()
    assert site.kernel.trees
    site.store.pause("gw", True)
    begun = site.restart()
    begun.tick()
    assert site.send(BLOCKED) == ["accept"]
    structure = site.kernel.structure()
    assert not structure.sets
    assert not structure.chains
    assert (site.kernel.roots, site.kernel.trees, site.store.saved_roots("gw")) == ({"lan": PFIFO}, {}, {})
    assert [(each.paused, each.enforced) for each in site.store.hosts()] == [(True, 0)]
    site.store.pause("gw", False)
    begun.tick()
    assert site.send(BLOCKED) == ["drop"]


def test_what_an_apply_brings_back_meanwhile_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for nobody who has only begun, and ends the pause before it writes."""
    site.add(target=BLOCKED, action="block")
    site.controller.tick()
    site.store.pause("gw", True)
    begun = site.restart()
    alone = site.kernel.exclusive

    def wait_for_apply(patience: float = 0.0) -> AbstractContextManager[None]:
        site.store.pause("gw", False)
        return alone(patience)

    monkeypatch.setattr(site.kernel, "exclusive", wait_for_apply)
    begun._paused = begun._is_paused_there = True
    begun._pause()
    assert site.send(BLOCKED) == ["drop"]


def test_what_an_apply_is_about_to_take_over_stays_known(site: Site) -> None:
    """Between the place that it has saved and the end of the pause, a controller begins, which puts nothing back."""
    site.kernel.routes = HOME
    site.kernel.roots["lan"] = PFIFO
    site.add(target="10.1.0.2", action="shape", direction="to", rate="1 Mbit/s")
    site.store.pause("gw", True)
    begun = site.restart()
    site.store.save_root("gw", "lan", PFIFO)
    begun.tick()
    assert site.store.saved_roots("gw") == {"lan": PFIFO}
    site.store.pause("gw", False)
    begun.tick()
    assert site.kernel.trees
    assert site.store.marked("gw") == {}


def test_what_was_put_back_is_forgotten_before_another_writes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would forget what another saves meanwhile of the same device."""
    site.kernel.routes = HOME
    site.kernel.roots["lan"] = PFIFO
    site.add(target="10.1.0.2", action="shape", direction="to", rate="1 Mbit/s")
    site.store.save_root("gw", "lan", PFIFO)
    site.controller.tick()
    assert site.kernel.trees
    site.store.pause("gw", True)
    known: list[object] = []

    @contextmanager
    def wait_for_others(_patience: float = 0.0) -> Iterator[None]:
        site.store.save_root("gw", "lan", OTHER)
        yield
        known.append(site.store.saved_roots("gw"))

    monkeypatch.setattr(site.kernel, "exclusive", wait_for_others)
    site.restart().tick()
    assert (site.kernel.roots, known[0]) == ({"lan": OTHER}, {})


def test_who_begins_and_is_refused_by_the_kernel_tries_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add(target=BLOCKED, action="block")
    site.controller.tick()
    site.store.pause("gw", True)
    begun = site.restart()
    with monkeypatch.context() as refused:
        refused.setattr(site.kernel, "apply", _refuse)
        with pytest.raises(KernelError):
            begun.tick()
    assert [each.paused for each in site.store.hosts()] == [True]
    begun.tick()
    assert site.send(BLOCKED) == ["accept"]


def _refuse(_step: object) -> None:
    raise KernelError("remove a chain", "it is busy")


def test_who_is_paused_counts_no_rule_as_enforced(site: Site) -> None:
    site.add(target=BLOCKED, action="block")
    site.controller.tick()
    assert [(each.enforced, each.desired) for each in site.store.hosts()] == [(1, 1)]
    site.store.pause("gw", True)
    assert [(each.enforced, each.desired) for each in site.store.hosts()] == [(0, 1)], "also where no controller runs"
    site.controller.tick()
    assert [(each.enforced, each.desired) for each in site.store.hosts()] == [(0, 1)]
    site.store.pause("gw", False)
    site.controller.tick()
    assert [(each.enforced, each.desired) for each in site.store.hosts()] == [(1, 1)]


def test_what_cannot_be_brought_back_after_a_teardown_is_not_said_to_be_applied(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add(target=BLOCKED, action="block")
    site.controller.tick()
    site.store.pause("gw", True)
    tear_down(site.kernel, {})
    site.controller.tick()
    site.controller._report()
    site.store.pause("gw", False)
    with monkeypatch.context() as refused:
        refused.setattr(site.kernel, "apply", refuse)
        for controller in (site.controller, site.restart()):
            with pytest.raises(KernelError):
                controller.tick()
            controller._report(last_error="It is refused.")
            assert told(site) == (0, 0, 1)
    site.controller.tick()
    assert told(site) == (1, 1, 1)


def test_a_teardown_that_waits_for_the_database_is_told_by_the_controller(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add(target=BLOCKED, action="block")
    site.controller.tick()
    monkeypatch.setattr(site.kernel, "is_put_off", lambda: True)
    tear_down(site.kernel, {})
    site.controller.tick()
    assert told(site) == (0, 0, 1)
    site.store.pause("gw", True)  # at last
    monkeypatch.undo()
    site.controller.tick()
    assert told(site) == (0, 0, 1)
    site.store.pause("gw", False)
    site.controller.tick()
    assert told(site) == (1, 1, 1)


def told(site: Site) -> tuple[int, int, int]:
    """What the database knows: the revision that is applied, the rules in force, and those that should be."""
    (status,) = site.store.hosts()
    return status.applied_revision, status.enforced, status.desired


def refuse(step: object) -> None:
    raise KernelError("write", "somebody holds its lock")


def test_what_is_known_of_a_host_stays_known_of_one_that_begins_while_it_is_paused(site: Site) -> None:
    """Else nothing of it would be in the way of a rule that closes it, and others would not know it as a neighbour."""
    site.kernel.where = Addresses(("10.1.0.1",), ())
    site.kernel.routes = HOME
    site.controller.tick()
    (before,) = site.store.hosts()
    assert before.own
    assert before.networks
    site.store.pause("gw", True)
    site.restart().tick()
    (after,) = site.store.hosts()
    for field in ("own", "networks", "management", "local", "capabilities", "hz"):
        assert getattr(after, field) == getattr(before, field), field


def test_a_gateway_that_has_another_name_now_says_so(sqlite_url: str, tmp_path: Path) -> None:
    store = Store(sqlite_url)
    away = Away(Site(store), tmp_path)
    away.site.add(target=BLOCKED, action="block")
    away.run()
    store.pause("gw", True)
    setup = Setup("renamed", "fake")
    for told in (True, False):
        Controller(store, away.site.kernel, setup, away.site.clock, away.replica).tick()
        notes = {status.host: status.notes for status in store.hosts()}["renamed"]
        assert any("NETLIMIT_HOST=gw" in note for note in notes) is told
    away.replica.close()
    store.close()


def test_a_copy_that_is_paused_still_takes_out_nothing_of_what_a_window_has_brought(
    sqlite_url: str, tmp_path: Path
) -> None:
    store = Store(sqlite_url)
    away = Away(Site(store), tmp_path)
    away.site.add(target=BLOCKED, action="block")
    store.pause("gw", True)
    away.run()
    store.open_window(600, "test", away.site.clock(), paused=["gw"])
    store.pause("gw", False)
    away.run()
    assert away.site.send(BLOCKED) == ["drop"]
    assert away.replica.paused("gw")
    away.take_away()
    away.run("alone")
    away.run()
    assert away.site.send(BLOCKED) == ["drop"]
    away.replica.close()
    store.close()


def test_a_pause_in_the_copy_is_heard_of_while_the_database_is_not_asked(sqlite_url: str, tmp_path: Path) -> None:
    """It may answer again for half a minute before the controller asks: a teardown holds meanwhile."""
    store = Store(sqlite_url)
    away = Away(Site(store), tmp_path)
    away.site.add(target=BLOCKED, action="block")
    away.run()
    away.take_away()
    away.run("alone")
    with closing(open_replica(away.directory, "gw")) as told:
        told.follow_pause(True)
    tear_down(away.site.kernel, {})
    away.run()
    assert away.site.send(BLOCKED) == ["accept"]
    away.bring_back()
    away.replica.close()
    store.close()


def bring_back_pause(store: Store) -> None:
    """What a server does that takes the place of another, and lags: the pause is there again that had ended since."""
    with store._database.writing() as connection:
        hosts.pause(connection, "gw", True)


@pytest.fixture
def resumed(site: Site, tmp_path: Path) -> Iterator[Site]:
    """A gateway that was torn down, and then `netlimit apply` has ended that, as its copy knows."""
    with closing(open_replica(tmp_path / "controller", "gw")) as copy:
        site.controller = Controller(site.store, site.kernel, Setup("gw", "fake"), site.clock, copy)
        site.add(target=BLOCKED, action="block")
        site.store.pause("gw", True)
        copy.follow_pause(True)
        site.controller.tick()
        word = site.store.last_pause("gw")
        assert word is not None
        site.store.pause("gw", False, for_good=True)
        copy.note_resumed(word)
        site.controller.tick()
        assert site.send(BLOCKED) == ["drop"]
        assert not copy.paused("gw")
        yield site


@pytest.mark.parametrize("begins", [False, True])
def test_a_pause_that_had_ended_and_comes_back_with_an_older_database_is_ended_again(
    resumed: Site, caplog: pytest.LogCaptureFixture, begins: bool
) -> None:
    controller = resumed.controller
    bring_back_pause(resumed.store)
    if begins:
        controller = Controller(resumed.store, resumed.kernel, controller._setup, resumed.clock, controller._replica)
    controller.tick()
    assert resumed.send(BLOCKED) == ["drop"]
    assert not resumed.store.paused("gw")
    assert caplog.text.count("older state") == 1
    controller._due["heartbeat"] = 0.0
    controller.tick()
    told = resumed.store.hosts()[0]
    assert any("older state" in note for note in told.notes)
    assert (told.applied_revision, told.enforced) == (1, 1)
    assert resumed.store.audit()[0].action == "resume"
    assert resumed.store.audit()[0].actor == "controller of gw"
    resumed.store.pause("gw", True)
    controller.tick()
    assert resumed.store.paused("gw")
    assert not any("older state" in note for note in resumed.store.hosts()[0].notes)


def test_who_tears_down_anew_is_heard_though_that_pause_is_there_already(resumed: Site) -> None:
    bring_back_pause(resumed.store)
    resumed.store.pause("gw", True)
    resumed.controller.tick()
    assert resumed.store.paused("gw")
    assert resumed.controller._paused


@pytest.mark.parametrize("end", ["expired", "abandoned", "expired by an older version"])
def test_a_pause_that_the_end_of_a_window_brings_back_is_heeded(
    resumed: Site, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """It is none of the teardown that had ended before: nobody has confirmed what would be in force."""
    controller, store = resumed.controller, resumed.store
    window = store.open_window(60, "test", resumed.clock(), paused=["gw"])
    if end == "abandoned":
        store.abandon("test", resumed.clock())
    elif end == "expired":
        store.expire(window, "guard", resumed.clock())
    else:
        store.confirm("test", resumed.clock())
        bring_back_pause(store)
        store.note("expire-window", "guard", resumed.clock(), after={"base": 1, "paused": ["gw"]})
    tear_down(resumed.kernel, {})
    assert controller._replica is not None
    controller._replica.follow_pause(False)
    controller = Controller(store, resumed.kernel, controller._setup, resumed.clock, controller._replica)
    controller.tick()
    assert resumed.send(BLOCKED) == ["accept"]
    assert store.paused("gw")
    assert controller._replica is not None
    assert controller._replica.paused("gw")
    assert "older state" not in caplog.text


def test_a_pause_that_had_ended_does_not_hide_a_later_one_that_was_lost(resumed: Site) -> None:
    """The copy knows of a teardown that the database has forgotten."""
    controller = resumed.controller
    assert controller._replica is not None
    controller._replica.follow_pause(True)
    bring_back_pause(resumed.store)
    controller = Controller(resumed.store, resumed.kernel, controller._setup, resumed.clock, controller._replica)
    controller.tick()
    assert resumed.store.paused("gw")
    assert resumed.send(BLOCKED) == ["accept"]


def test_a_pause_is_ended_again_by_its_word_alone(resumed: Site) -> None:
    word = resumed.store.last_pause("gw")
    assert word is not None
    assert not resumed.store.end_pause("gw", word, "test"), "there is none"
    resumed.store.pause("gw", True)
    assert not resumed.store.end_pause("gw", word, "test")
    assert resumed.store.paused("gw")
    fresh = resumed.store.last_pause("gw")
    assert fresh is not None
    assert resumed.store.end_pause("gw", fresh, "test")
    assert not resumed.store.paused("gw")
