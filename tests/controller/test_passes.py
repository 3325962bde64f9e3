import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from netlimit.errors import StoreError
from netlimit.numbers import MARK_BITS
from netlimit.plan import Step, SwitchTable, WriteSets
from netlimit.records import State
from netlimit.rules import parse_rule
from tests.controller.conftest import Site
from tests.databases import DATABASES
from tests.forcing import make_rule

OVER = DATABASES


def test_a_rule_limits_from_the_next_pass_on_and_no_longer_when_removed(site: Site) -> None:
    assert site.send("10.0.0.1", times=10) == ["accept"] * 10
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    assert site.send("10.0.0.1", times=10) == ["accept"] * 5 + ["drop"] * 5
    assert site.send("10.0.0.2", times=10) == ["accept"] * 10
    site.store.remove(rule.id, "test", site.clock())
    site.controller.sync()
    assert site.send("10.0.0.1", times=10) == ["accept"] * 10
    assert str(site.kernel.structure().chains) == "{}"


def test_one_more_rule_of_a_known_limit_is_one_entry_in_each_of_its_sets(site: Site) -> None:
    for host in range(1, 60):
        site.add(target=f"10.0.0.{host}", rate="5 packets/s")
    site.controller.sync()
    site.kernel.applied.clear()
    site.add(target="10.0.1.1", rate="5 packets/s")
    site.controller.sync()
    (step,) = site.kernel.applied
    assert isinstance(step, WriteSets)
    assert sorted(len(entries) for entries in step.add.values()) == [1, 1]
    assert (step.create, step.remove, step.destroy) == ((), {}, ())


def test_a_pass_without_changes_touches_nothing(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.kernel.applied.clear()
    site.controller.sync()
    site.restart().sync()
    assert site.kernel.applied == []


def test_changing_the_only_rate_of_a_limit_keeps_a_limit_at_every_step(site: Site) -> None:
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.kernel.applied.clear()
    kept = site.store.find(rule.id)
    assert kept is not None
    changed = site.add(target="10.0.0.2", rate="7 packets/s")
    site.store.remove(rule.id, "test", site.clock())
    del changed
    site.controller.sync()
    kinds = [type(step) for step in site.kernel.applied]
    assert kinds == [SwitchTable, WriteSets, SwitchTable], "leaves come, entries move, leaves go"


@pytest.fixture
def narrow_site(site: Site) -> Site:
    """Room for three rates of a kind, which are taken."""
    site.restart(mark_mask=0xC0000000)
    for number in (1, 2, 3):
        site.add(target=f"10.0.0.{number}", rate=f"{number} packets/day")
    site.controller.sync()
    return site


def change(site: Site, rule_id: int, **fields: object) -> None:
    site.store.replace(rule_id, make_rule(fields, site.clock()), "test", site.clock())


@pytest.mark.parametrize("anew", [False, True])
def test_changing_a_rate_where_all_numbers_are_taken_keeps_a_limit_at_every_step(
    narrow_site: Site, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    change(narrow_site, 3, target="10.0.0.3", rate="7 packets/day")
    planned = narrow_site.restart(mark_mask=0xC0000000)
    plan, words = planned.account()
    assert not planned._compiled.problems
    assert not any("taken" in each for each in words)
    write, held = narrow_site.kernel.apply, []

    def write_and_send(step: Step) -> None:
        write(step)
        held.append(narrow_site.send("10.0.0.3", times=20).count("drop"))

    monkeypatch.setattr(narrow_site.kernel, "apply", write_and_send)
    controller = planned if anew else narrow_site.controller
    controller.sync()
    assert len(held) == len(plan.steps)
    assert all(held)
    assert narrow_site.store.marked("gw") == {}
    assert [narrow_site.send(f"10.0.0.{number}", times=9).count("accept") for number in (1, 2)] == [1, 2]
    assert narrow_site.store.numbering("gw") == dict(controller._compiled.numbers.kept)
    assert not narrow_site.restart(mark_mask=0xC0000000).plan()


def test_rates_that_change_at_once_where_all_numbers_are_taken(narrow_site: Site) -> None:
    for number, rate in ((1, 4), (2, 1), (3, 5)):
        change(narrow_site, number, target=f"10.0.0.{number}", rate=f"{rate} packets/day")
    narrow_site.controller.sync()
    assert [narrow_site.send(f"10.0.0.{number}", times=9).count("accept") for number in (1, 2, 3)] == [4, 1, 5]
    assert narrow_site.store.marked("gw") == {}
    assert not narrow_site.controller.plan()
    assert not narrow_site.restart(mark_mask=0xC0000000).plan()


def test_a_rule_takes_the_number_of_one_that_is_gone_in_the_same_pass(narrow_site: Site) -> None:
    shared = narrow_site.add(target="10.0.0.4", rate="3 packets/day")
    narrow_site.controller.sync()
    narrow_site.store.remove(1, "test", narrow_site.clock())
    change(narrow_site, shared.id, target="10.0.0.4", rate="5 packets/day")
    narrow_site.controller.sync()
    assert [narrow_site.send(f"10.0.0.{number}", times=9).count("accept") for number in (1, 2, 3, 4)] == [9, 2, 3, 5]


def test_a_rate_for_which_there_is_no_number_takes_none_from_others(narrow_site: Site) -> None:
    late = narrow_site.add(target="10.0.0.4", rate="3 packets/day")
    narrow_site.controller.sync()
    change(narrow_site, late.id, target="10.0.0.4", rate="5 packets/day")
    narrow_site.controller.sync()
    (said,) = narrow_site.store.marked("gw").values()
    assert (said.rule_id, "All 3 numbers" in said.message) == (late.id, True)
    assert [narrow_site.send(f"10.0.0.{number}", times=9).count("accept") for number in (1, 2, 3)] == [1, 2, 3]


def test_the_room_that_ends_leave_is_given_out_though_the_database_fails_meanwhile(
    small_site: Callable[[int], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = small_site(2)
    site.add(target="10.0.0.1", rate="5 packets/day")
    site.add(target="10.0.0.2", rate="5 packets/day", expires_at=(site.clock() + timedelta(seconds=60)).isoformat())
    waiting = site.add(target="10.0.0.3", rate="5 packets/day")
    site.controller.sync()
    assert site.store.marked("gw").keys() == {waiting.id}
    site.clock.pass_by(seconds=61)

    def fail(_key: object) -> None:
        raise StoreError("The server has closed the connection.")

    with monkeypatch.context() as broken:
        broken.setattr(site.store, "find_some", fail)
        with pytest.raises(StoreError):
            site.controller.sync()
    site.controller.sync()
    assert site.store.marked("gw") == {}
    assert site.send("10.0.0.3", times=6).count("drop") == 1


def test_the_applied_revision_is_reported_only_after_it_is_applied(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    (host,) = site.store.hosts()
    assert host.applied_revision == site.store.revision()


def test_a_failed_step_is_put_right_by_the_next_pass(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    before = site.store.hosts()[0].applied_revision
    for step in range(3):
        site.add(target=f"10.0.{step}.2", rate=f"{7 + step} packets/s", per="host")
        site.kernel.fail_at(step)
        end = time.monotonic() + 60

        def stopped(end: float = end) -> bool:
            return site.store.hosts()[0].applied_revision == site.store.revision() or time.monotonic() > end

        site.controller.run(stopped)
        host = site.store.hosts()[0]
        assert host.applied_revision == site.store.revision() > before
        assert host.last_error is None
    assert not site.controller.plan()


def test_a_rule_that_finds_its_set_full_is_in_error_and_says_what_would_work(
    small_site: Callable[[int], Site],
) -> None:
    site = small_site(2)
    for host in range(3):
        site.add(target=f"10.0.0.{host}", rate="5 packets/s")
    site.controller.sync()
    ((rule_id, states),) = site.store.exceptional([1, 2, 3]).items()
    assert rule_id == 3
    assert states["gw"].state is State.ERROR
    assert "it holds 2 addresses" in states["gw"].message
    assert "NETLIMIT_SET_SIZE" in states["gw"].message
    assert site.send("10.0.0.0", times=6)[-1] == "drop"
    assert site.send("10.0.0.2", times=6)[-1] == "accept"
    site.store.remove(1, "test", site.clock())
    site.controller.sync()
    assert site.store.exceptional([3]) == {}, "there is room now"
    assert site.send("10.0.0.2", times=6)[-1] == "drop"


def test_a_missing_capability_is_the_reason_that_the_rule_shows(site: Site) -> None:
    site.kernel.facts = site.kernel.facts._replace(capabilities={"connlimit": "this host has no connlimit."})
    few = site.add(target="10.0.0.1", rate="5 connections")
    some = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    states = site.store.exceptional([few.id, some.id])
    assert states[few.id]["gw"].message.startswith("this host has no connlimit. A limiter could enforce it")
    assert some.id not in states
    assert site.send("10.0.0.1", times=6)[-1] == "drop"


def test_numbers_that_another_process_gave_out_are_not_given_again(site: Site) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    site.controller.sync()
    mine = site.controller
    site.add(target="10.0.0.2", rate="4 packets/s")
    site.restart().sync()
    site.add(target="10.0.0.3", rate="5 packets/s")
    mine.sync()
    numbers = [n for key, n in site.store.numbering("gw").items() if n and key != MARK_BITS]
    assert len(numbers) == len(set(numbers)) == 3
    assert not mine.plan()
    for host, allowed in ((1, 3), (2, 4), (3, 5)):
        assert site.send(f"10.0.0.{host}", times=10).count("accept") == allowed


def test_an_exception_is_there_before_what_it_is_an_exception_from(site: Site) -> None:
    """Somebody has reset the tables and destroyed the set of what is allowed; that of what is blocked is still full."""
    site.add(target="10.0.0.0/24", action="block")
    site.add(target="10.0.0.1", action="allow")
    site.controller.sync()
    allowed = next(name for name, held in site.kernel.elements.items() if name.startswith("nl-a4") and held)
    site.kernel.chains.clear()
    site.kernel.hooks.clear()
    for name in (allowed, "nl-exempt4-from"):
        del site.kernel.sets[name], site.kernel.elements[name]
    for step in site.controller.plan().steps:
        site.kernel.apply(step)
        assert site.send("10.0.0.1") == ["accept"], step
    assert site.send("10.0.0.2") == ["drop"]


def test_exceptions_change_places_in_a_set_that_is_full(small_site: Callable[[int], Site]) -> None:
    site = small_site(5)  # who is safe takes one
    allowed = [site.add(target=f"10.0.0.{n}", action="allow") for n in range(1, 5)]
    site.add(target="10.0.0.0/28", action="block")
    site.controller.sync()
    for rule in allowed:
        other = parse_rule({"target": f"10.0.0.{rule.id + 4}", "action": "allow"}, site.clock())
        site.store.replace(rule.id, other, "test", site.clock())
    site.controller.sync()
    assert site.send("10.0.0.1") == ["drop"]
    assert all(site.send(f"10.0.0.{n}") == ["accept"] for n in range(5, 9))


def test_what_only_others_hold_is_no_news_here(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    for n in range(3):
        site.add(target=f"10.0.1.{n}", rate="5 packets/s", hosts=["another"])
        site.controller.sync()
    assert site.controller._news == set()
