"""The bits of the packet mark that are in use are kept, and change when somebody else needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import event

from netlimit import neighbours
from netlimit.controller import Controller, Setup
from netlimit.kernel.base import Addresses
from netlimit.kernel.fake import FakeKernel
from netlimit.marks import USUAL, Bits, MarkUse, Read, Write
from netlimit.numbers import MARK_BITS
from netlimit.rates import parse_rate
from netlimit.records import State
from tests.controller.conftest import Site
from tests.controller.test_guard import Guarded, elapsed, guarded, hasty
from tests.controller.test_outage import Away, away

__all__ = ["away", "elapsed", "guarded", "hasty"]

THEIRS = MarkUse((Write("The rule of X", Bits(0x1000000)),))


def masks(site: Site) -> set[int]:
    """Under which masks the kernel's entries have numbers."""
    return {each.entry.mask for held in site.kernel.elements.values() for each in held.values()} - {0}


def add(site: Site) -> None:
    for number in range(1, 4):
        site.add(target=f"10.0.0.{number}", rate=f"{number} packets/min", burst=number, action="reject")


def test_they_change_when_somebody_takes_them_and_stay_when_he_goes(site: Site) -> None:
    add(site)
    site.controller.tick()
    assert masks(site) == {USUAL}
    site.kernel.mark_use = THEIRS
    site.controller._due["marks"] = 0.0
    site.controller.tick()
    site.controller.tick()
    assert masks(site) == {0xFF0000}
    assert site.store.numbering("gw")[MARK_BITS] == 0xFF0000
    assert site.send("10.0.0.2", times=4) == ["accept", "accept", "reject", "reject"]
    assert not site.controller.plan().steps
    site.kernel.mark_use = MarkUse()
    site.restart().sync()
    assert masks(site) == {0xFF0000}, "what is kept is as good as any"
    assert not site.restart().plan().steps


def test_a_plan_is_made_with_those_in_use_and_a_pass_changes_them(site: Site) -> None:
    add(site)
    site.controller.sync()
    site.kernel.mark_use = THEIRS
    controller = site.restart()
    assert not controller.plan().steps
    controller.sync()
    assert masks(site) == {0xFF0000}


def test_there_may_be_less_room_under_others(site: Site) -> None:
    """Who was there first keeps his limit."""
    for number in range(1, 6):
        site.add(target=f"10.0.0.{number}", rate=f"{number} packets/min")
    site.controller.sync()
    site.kernel.mark_use = MarkUse((Read("The rule of X", 0xFFFFFFF3),))
    site.restart().sync()
    assert masks(site) == {0xC}
    marked = site.store.marked("gw")
    assert len(marked) == 2
    assert {each.state for each in marked.values()} == {State.ERROR}
    assert all("0xc" in each.message for each in marked.values())


def test_room_that_others_have_left_is_used_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 6):
        site.add(target=f"10.0.0.{number}", rate=f"{number} packets/min", burst=number)
    site.kernel.mark_use = MarkUse((Read("The rule of X", 0xFFFFFFF3),))
    site.controller.sync()
    assert len(site.store.marked("gw")) == 2
    site.kernel.mark_use = MarkUse()
    monkeypatch.setattr(neighbours, "REMEMBERED_SECONDS", 0.0)
    site.controller._due["marks"] = 0.0
    site.controller.tick()
    site.controller.tick()
    assert masks(site) == {USUAL}
    assert site.store.marked("gw") == {}
    assert site.send("10.0.0.5", times=6) == ["accept"] * 5 + ["drop"]


def test_only_what_needs_marks_is_in_error_when_none_are_left(site: Site) -> None:
    site.kernel.mark_use = MarkUse((Read("The rule of X", 0xFFFFFFFF),))
    site.add(target="10.0.0.1", rate="1 packets/min")
    site.add(target="10.0.0.2", action="block")
    site.add(target="10.0.0.3", rate="1 packets/min", action="observe")
    site.controller.sync()
    assert {number: each.state for number, each in site.store.marked("gw").items()} == {1: State.ERROR}
    site.kernel.mark_use = MarkUse()
    site.controller._due["marks"] = 0.0
    site.controller.tick()
    site.controller.tick()
    assert site.store.marked("gw") == {}


def test_who_wipes_out_what_tells_filter_to_reject_concerns_those_rules_alone(site: Site) -> None:
    site.add(target="10.0.0.1", rate="1 packets/min")
    site.add(target="10.0.0.2", rate="1 packets/min", action="reject")
    site.kernel.mark_use = MarkUse((Write("The rule of X", Bits(7), between=frozenset({"FORWARD"})),))
    site.controller.sync()
    (marked,) = site.store.marked("gw").values()
    assert marked.rule_id == 2
    assert "between mangle and filter" in marked.message
    (status,) = site.store.hosts()
    assert [name for name, reason in status.capabilities.items() if reason] == ["reject marks"]


def test_bits_that_somebody_overwrites_there_are_left_to_him(site: Site) -> None:
    add(site)
    site.controller.tick()
    wiping = Write("The rule of X", Bits(packet=0x00FFFFFF), between=frozenset({"FORWARD"}))
    for use in (MarkUse((wiping,)), MarkUse(), MarkUse((wiping,))):
        site.kernel.mark_use = use
        site.controller._due["marks"] = 0.0
        site.controller.tick()
        site.controller.tick()
        assert masks(site) == {0xFF0000}
        assert site.store.marked("gw") == {}


def test_who_has_overwritten_them_all_a_while_ago_stands_in_nobody_s_way(site: Site) -> None:
    """Bits are chosen by who is there now, where those of a while ago leave none."""
    add(site)
    site.controller.tick()
    for low in range(0, 32, 4):
        wiping = Write("The rule of X", Bits(packet=0xFFFFFFFF & ~(0xF << low)), between=frozenset({"FORWARD"}))
        site.kernel.mark_use = MarkUse((wiping,))
        site.controller._due["marks"] = 0.0
        site.controller.tick()
        site.controller.tick()
        assert not any(mask & wiping.wiped for mask in masks(site))
        assert site.store.marked("gw") == {}


def test_a_look_that_fails_stops_nothing(site: Site) -> None:
    def fail() -> MarkUse:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")

    site.kernel.marks = fail  # type: ignore[method-assign]
    site.add(target="10.0.0.1", rate="1 packets/min")
    site.controller.tick()
    assert masks(site) == {USUAL}
    (status,) = site.store.hosts()
    assert any("Whether others use packet marks is not known" in note for note in status.notes)


def test_what_is_set_is_used_even_where_something_else_was(site: Site) -> None:
    add(site)
    site.controller.sync()
    controller = site.restart(mark_mask=0xFF00)
    assert not controller.plan().steps
    controller.sync()
    assert masks(site) == {0xFF00}
    assert site.store.marked("gw") == {}


def test_what_else_changes_meanwhile_is_not_told_of_other_bits_than_those_in_force(site: Site) -> None:
    add(site)
    site.controller.tick()
    site.kernel.mark_use, site.kernel.where = THEIRS, Addresses(("10.9.9.9",), ())
    site.controller._due["marks"] = site.controller._due["heartbeat"] = 0.0
    site.controller.tick()
    assert not site.controller.plan().steps
    site.controller.tick()
    assert masks(site) == {0xFF0000}
    assert not site.restart().plan().steps
    assert site.send("10.0.0.2", times=4) == ["accept", "accept", "reject", "reject"]


def move(site: Site, controller: Controller) -> None:
    """Somebody takes the usual bits, and goes away again."""
    add(site)
    controller.sync()
    site.kernel.mark_use = THEIRS
    controller._due["marks"] = 0.0
    controller.tick()
    controller.tick()
    site.kernel.mark_use = MarkUse()
    assert masks(site) == {0xFF0000}


def test_a_machine_that_boots_without_its_database_uses_those_that_were_in_use(away: Away) -> None:
    """As `netlimit apply --last` does."""
    move(away.site, away.controller)
    away.take_away()
    away.site.kernel.elements.clear()
    booted = FakeKernel(now=away.site.kernel.now)
    Controller(away.replica, booted, Setup("gw", "fake"), away.site.clock).sync()
    away.site.kernel = booted
    assert masks(away.site) == {0xFF0000}


def test_a_guard_that_undoes_something_uses_those_that_are_in_use(guarded: Guarded) -> None:
    move(guarded.site, guarded.site.controller)
    guarded.cut()
    guarded.end_window()
    assert masks(guarded.site) == {0xFF0000}


def test_without_the_database_they_stay_and_change_when_it_is_back(away: Away) -> None:
    site = away.site
    add(site)
    away.controller.sync()
    away.take_away()
    away.run("alone")
    site.kernel.mark_use = THEIRS
    away.controller._due["marks"] = 0.0
    away.run()
    assert masks(site) == {USUAL}
    assert any("until it can move to 0xff0000" in note for note in away.controller._premises.notes)
    assert site.send("10.0.0.2", times=4) == ["accept", "accept", "reject", "reject"]
    away.bring_back()
    away.run("back")
    away.run()
    assert masks(site) == {0xFF0000}
    assert site.store.numbering("gw")[MARK_BITS] == 0xFF0000
    assert site.send("10.0.0.3", times=4) == ["accept", "accept", "accept", "reject"]
    assert not away.controller.plan().steps


def test_a_database_that_goes_while_they_change_leaves_nobody_without_a_limit(away: Away) -> None:
    site = away.site
    add(site)
    away.controller.sync()
    site.kernel.mark_use = THEIRS
    away.controller._due["marks"] = 0.0
    away.controller.tick()
    away.take_away()
    away.run("alone")
    assert len(masks(site)) == 1
    assert site.send("10.0.0.2", times=4) == ["accept", "accept", "reject", "reject"]
    away.bring_back()
    away.run("back")
    away.run()
    assert masks(site) == {0xFF0000}


def test_a_rate_is_edited_though_no_number_is_free(site: Site) -> None:
    """Its own is free once it has gone."""
    controller = site.restart(mark_mask=0xC0000000)
    rules = [site.add(target=f"10.0.0.{n}", rate=f"{n} packets/min") for n in (1, 2, 3)]
    controller.tick()
    later = parse_rate("4 packets/min")
    site.store.change(rules[2].id, lambda rule: replace(rule, rate=later), "root", site.clock())
    controller.tick()
    assert site.store.exceptional([rule.id for rule in rules]) == {}
    assert site.send("10.0.0.3", times=5) == ["accept"] * 4 + ["drop"]
    assert not controller.plan()


def test_of_many_that_have_no_room_each_is_tried_again(
    small_site: Callable[[int], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though those that are tried first never find any."""
    monkeypatch.setattr("netlimit.controller._MOST_RETRIED", 2)
    site = small_site(16)
    controller = site.restart(mark_mask=0xC0000000)
    limits = [site.add(target=f"10.0.0.{n}", rate=f"{n} packets/min") for n in range(1, 10)]
    controller.tick()
    allowed = [site.add(target=f"172.16.0.{n}", action="allow").id for n in range(32)]
    controller.tick()
    stuck = [rule.id for rule in limits[3:]]
    assert set(site.store.exceptional(stuck)) == {*stuck}
    refused = {*site.store.exceptional(allowed)}
    assert 0 < len(refused) < 32
    site.store.remove(min({*allowed} - refused), "root", site.clock())
    for n in range(len(limits)):
        site.add(target=f"10.1.0.{n}", action="block")  # a pass needs a cause
        controller.tick()
    assert len(site.store.exceptional(allowed)) == len(refused) - 1


def test_many_that_have_no_room_are_asked_for_by_one_question(small_site: Callable[[int], Site]) -> None:
    """A database may be far."""
    site = small_site(16)
    controller = site.restart(mark_mask=0xC0000000)
    limits = [site.add(target=f"10.0.0.{n}", rate=f"{n} packets/min") for n in range(1, 60)]
    controller.tick()
    assert len(site.store.exceptional([rule.id for rule in limits])) > 50
    asked: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("SELECT rules.id"):
            asked.append(statement)

    site.add(target="10.1.0.1", action="block")  # a pass needs a cause
    engine = site.store._database.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        controller.tick()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert 1 <= len(asked) <= 3, "what has changed, and those that are tried again"
