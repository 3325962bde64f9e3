"""How rules stand is told as it is, whatever others have written of them meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from netlimit import controller
from netlimit.controller import Controller, Setup
from netlimit.records import Exceptional, State
from netlimit.rules import Rule
from netlimit.tree import Device, Topology
from tests.controller.conftest import Site

UNHELD = {"target": "10.1.2.3", "interface": "nowhere0", "direction": "to", "rate": "9 Mbit/s", "action": "shape"}


@pytest.fixture
def unheld(site: Site, monkeypatch: pytest.MonkeyPatch) -> Rule:
    """A rule that the gateway cannot hold, and says so; its heart beats with each look."""
    for pace in ("HEARTBEAT_SECONDS", "LOOK_SHARE"):
        monkeypatch.setattr(controller, pace, 0.0)
    rule = site.add(**UNHELD)
    site.controller.tick()
    assert standing(site, rule) is State.ERROR
    return rule


def standing(site: Site, rule: Rule) -> State | None:
    told = site.store.marked("gw").get(rule.id)
    return told and told.state


def come_back(site: Site, rule: Rule) -> None:
    """Remove a rule, and undo that."""
    before = site.store.revision()
    site.store.remove(rule.id, "test", datetime.now(UTC))
    site.store.rollback(before, "test", datetime.now(UTC))


def test_a_rule_that_goes_and_comes_back_unseen_is_in_error_as_before(site: Site, unheld: Rule) -> None:
    come_back(site, unheld)
    assert standing(site, unheld) is None
    site.controller.sync()  # before any heartbeat: whoever waits for the revision reads the state then
    assert standing(site, unheld) is State.ERROR


def test_one_that_goes_and_comes_back_while_others_are_taken_in_is_in_error_too(site: Site, unheld: Rule) -> None:
    for last in range(50):
        site.add(target=f"10.9.0.{last}", action="block")
    come_back(site, unheld)
    site.controller.sync()
    assert standing(site, unheld) is State.ERROR


def test_one_that_can_be_held_when_it_comes_back_is_in_error_no_more(site: Site, unheld: Rule) -> None:
    site.kernel.routes = Topology({"lan": Device(1, True), "nowhere0": Device(2, True)})
    come_back(site, unheld)
    site.controller.tick()
    assert standing(site, unheld) is None


def test_what_only_the_controller_knows_is_told_anew_after_a_command_that_does_not(site: Site, unheld: Rule) -> None:
    other = site.add(target="10.0.0.1", rate="9 packets/s")
    site.controller.tick()
    site.controller._disputes.note_refusal("chains", "somebody undoes it", {other.id})
    site.controller._settle()
    assert standing(site, other) is State.ERROR
    Controller(site.store, site.kernel, Setup("gw", "fake", set_size=1000), site.clock).sync()  # netlimit apply
    assert standing(site, other) is None
    site.controller.tick()
    assert standing(site, other) is State.ERROR


def test_what_others_wrote_of_rules_that_stand_well_goes(site: Site, unheld: Rule) -> None:
    other = site.add(target="10.0.0.1", rate="9 packets/s")
    site.controller.tick()
    site.store.mark("gw", [Exceptional(other.id, State.DEGRADED, "not so")], [unheld.id])
    site.controller.tick()
    assert (standing(site, other), standing(site, unheld)) == (None, State.ERROR)


def test_nothing_is_written_of_rules_while_all_is_told(
    site: Site, unheld: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    monkeypatch.setattr(site.store, "mark", lambda *told: written.append(told))
    for _ in range(3):
        site.controller.tick()
    assert not written
