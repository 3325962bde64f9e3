"""What others change is repaired, counted and told; a fight is not fought at full speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import pytest

from netlimit.controller import LOOK_SHARE, STRUCTURE_SECONDS
from netlimit.drift import CALM_SECONDS, FIRST_REST, LAST_REST, MOST_REPAIRS, Histogram, Repairs, find_lost
from netlimit.errors import KernelError
from netlimit.ingress import Ingress
from netlimit.kernel.base import Reading
from netlimit.plan import Plan, WriteIngress, WriteTree
from netlimit.records import State
from netlimit.state import ChainRule
from netlimit.store.repairs import MOST
from tests.controller.conftest import Site

Read = Callable[[Iterable[str]], dict[str, dict[str, Reading]]]


def look(site: Site) -> None:
    """One turn of the controller in which everything is due."""
    site.controller._due = dict.fromkeys(site.controller._due, 0.0)
    site.controller.tick()


def test_what_was_found_is_told(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    look(site)
    chain = next(name for name in site.kernel.chains if name.table == "mangle" and name.family == 4)
    del site.kernel.chains[chain]
    look(site)
    (host,) = site.store.hosts()
    assert (host.drift, host.repairs, host.drifted, host.last_error) == (1, {"chains": 1}, 0, None)
    (repair,) = site.store.repairs("gw", 10)
    assert repair.kind == "chains"
    assert f"iptables -t mangle -N {chain.name}" in repair.found
    assert repair.took > 0


def test_a_repair_that_the_kernel_first_refuses_counts_once_it_is_made(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    look(site)
    site.kernel.chains.clear()
    site.kernel.fail_at(0)
    with pytest.raises(KernelError):
        look(site)
    site.controller._in_step = False  # as `run` has it after an error
    look(site)
    assert site.kernel.chains
    (host,) = site.store.hosts()
    assert (host.drift, host.repairs) == (1, {"chains": 1})
    look(site)
    assert site.store.hosts()[0].drift == 1


def test_sets_and_entries_are_other_kinds(site: Site) -> None:
    site.add(target="10.0.0.1", action="block")
    look(site)
    name = next(name for name, held in site.kernel.elements.items() if "10.0.0.1" in held)
    del site.kernel.elements[name]["10.0.0.1"]
    for _ in range(20):
        look(site)
    assert site.store.hosts()[0].repairs == {"entries": 1}
    assert site.send("10.0.0.1") == ["drop"]


@pytest.mark.parametrize("hosts", [1, 300])
def test_a_set_that_holds_less_than_it_should_is_looked_at_before_its_turn(site: Site, hosts: int) -> None:
    """However long the looks at entries rest, for they are dear where there are many."""
    for host in range(hosts):
        site.add(target=f"10.0.{host >> 8}.{host & 255}", action="block")
    look(site)
    site.controller._due["sweep"] = math.inf
    for held in site.kernel.elements.values():
        held.clear()
    _look_at_structure(site)
    assert site.send("10.0.0.0") == ["drop"]
    assert site.store.hosts()[0].repairs == {"entries": 1}


def test_a_set_that_holds_less_because_something_has_ended_is_looked_at_once(site: Site) -> None:
    """And again when still less is in it."""
    for host in range(1, 6):
        site.add(target=f"10.0.0.{host}", action="block", ttl="10s" if host < 4 else None)
    look(site)
    site.controller._due = dict.fromkeys(site.controller._due, math.inf)
    site.clock.pass_by(seconds=10)
    (name,) = (name for name, held in site.kernel.elements.items() if "10.0.0.5" in held and name.startswith("nl-b4"))
    asked: list[frozenset[str]] = []

    def read(names: Iterable[str], readings: Read = site.kernel.readings) -> dict[str, dict[str, Reading]]:
        asked.append(frozenset(names))
        return readings(asked[-1])

    site.kernel.readings = read  # type: ignore[method-assign]
    site.kernel.elements[name].pop("10.0.0.1", None)
    for _ in range(5):
        _look_at_structure(site, alone=True)
    assert [name in names for names in asked] == [True]
    assert site.store.hosts()[0].repairs == {}
    del site.kernel.elements[name]["10.0.0.5"]
    _look_at_structure(site, alone=True)
    assert site.store.hosts()[0].repairs == {"entries": 1}
    assert site.send("10.0.0.5") == ["drop"]


def _look_at_structure(site: Site, alone: bool = False) -> None:
    """One turn of the controller in which a look at the structure is due; with `alone`, nothing else is done."""
    site.controller._due["structure"] = 0.0
    site.controller._check_drift() if alone else site.controller.tick()


def test_a_fight_is_told_and_fought_more_slowly(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    look(site)
    for _ in range(MOST_REPAIRS + 1):
        site.kernel.chains.clear()
        look(site)
        assert site.kernel.chains
    site.kernel.chains.clear()
    look(site)
    assert not site.kernel.chains, "it rests"
    (host,) = site.store.hosts()
    assert (host.drifted, host.repairs) == (1, {"chains": MOST_REPAIRS + 1})
    assert host.last_error is not None
    assert "Another program undoes the chains of netlimit over and over: 6 repairs so far" in host.last_error
    site.controller._repairs._times["chains"][-1] -= FIRST_REST
    look(site)
    assert site.kernel.chains
    (host,) = site.store.hosts()
    assert (host.drifted, host.repairs["chains"]) == (0, MOST_REPAIRS + 2)
    assert host.last_error is not None
    site.controller._repairs._times["chains"][-1] -= CALM_SECONDS + LAST_REST
    look(site)
    assert site.store.hosts()[0].last_error is None


def test_who_puts_rules_before_ours_holds_up_no_repair_of_what_somebody_undoes(site: Site) -> None:
    """As who bans addresses does, one by one."""
    (rule,) = [site.add(target="10.0.0.1", rate="5 packets/s")]
    look(site)
    wanted = dict(site.kernel.hooks)
    for _ in range(3 * MOST_REPAIRS):
        site.kernel.hooks = {hook: (ChainRule("(not ours)"), *rules) for hook, rules in wanted.items()}
        look(site)
    (host,) = site.store.hosts()
    assert host.repairs.keys() == {"places"}
    assert host.last_error is not None
    assert "puts rules of its own before the jumps of netlimit" in host.last_error
    assert site.store.exceptional([rule.id])[rule.id]["gw"].state is State.DEGRADED
    site.kernel.chains.clear()
    look(site)
    assert site.kernel.chains
    assert site.kernel.hooks == wanted, "moved back with it"
    assert site.controller._repairs.rest("places", 0.0) <= site.controller._repairs._times["places"][-1] + FIRST_REST


def test_a_jump_that_is_gone_is_no_matter_of_places(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    look(site)
    hook = next(iter(site.kernel.hooks))
    site.kernel.hooks[hook] = (ChainRule("(not ours)"), *site.kernel.hooks[hook][1:])
    look(site)
    assert site.store.hosts()[0].repairs == {"chains": 1}


def test_repairs_that_are_far_apart_are_no_fight() -> None:
    repairs = Repairs()
    for turn in range(50):
        now = turn * (CALM_SECONDS / MOST_REPAIRS + 0.1)
        assert repairs.note("sets", now) is None
        assert repairs.rest("sets", now) == 0


def test_a_rest_doubles_up_to_its_longest_and_ends_with_calm() -> None:
    repairs, now, rests = Repairs(), 0.0, []
    for _ in range(MOST_REPAIRS + 8):
        fight = repairs.note("sets", now)
        rests.append(round(repairs.rest("sets", now), 6))
        now += rests[-1] + 0.1
        assert (fight is not None) == (rests[-1] > 0)
    assert rests == [0.0] * MOST_REPAIRS + [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert repairs.calm(now + CALM_SECONDS / 2) == []
    assert repairs.calm(now + CALM_SECONDS + 1) == ["sets"]
    assert repairs.note("sets", now + CALM_SECONDS + 1) is None


def test_a_device_that_has_got_its_program_has_not_lost_the_queues_that_it_never_had() -> None:
    """A session that is dialled anew: a pass may write the program for all devices before it comes to its queues."""
    repairs, dialled = Repairs(), {"ppp0": 8, "ppp1": 9}
    queues = Plan((WriteTree("ppp0", 1), WriteTree("ppp1", 2)))
    program = Plan((WriteIngress(Ingress(("ppp0", "ppp1"), (), ())),))
    repairs.know(program, dialled)
    assert find_lost(queues, repairs.find_kept(dialled)) == {"queues"}
    assert find_lost(program, repairs.find_kept(dialled)) == set(), "somebody has undone that one"
    repairs.know(queues, dialled)
    assert find_lost(queues, repairs.find_kept(dialled)) == set()


def test_a_device_that_has_got_its_queues_has_not_lost_the_program_that_it_never_had() -> None:
    repairs, dialled = Repairs(), {"ppp0": 8}
    repairs.know(Plan((WriteTree("ppp0", 1),)), dialled)
    program = Plan((WriteIngress(Ingress(("ppp0",), (), ())),))
    assert find_lost(program, repairs.find_kept(dialled)) == {"ingress"}


def test_only_the_newest_repairs_are_kept(site: Site) -> None:
    for number in range(MOST + 5):
        site.store.repaired("gw", "sets", f"number {number}", 0.1, site.clock())
    kept = site.store.repairs("gw", 1000)
    assert (len(kept), kept[0].found, kept[-1].found) == (MOST, f"number {MOST + 4}", "number 5")


def test_passes_are_counted_by_how_long_they_took(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.add(target="10.0.0.2", rate="5 packets/s")
    site.controller.sync()
    (host,) = site.store.hosts()
    assert host.applying["+Inf"] == 2
    assert 0 < host.applying["sum"] < 10
    counts = [count for bound, count in host.applying.items() if bound != "sum"]
    assert counts == sorted(counts)


@pytest.mark.parametrize(("seconds", "bounds"), [(0.005, 13), (0.2, 8), (31, 1)])
def test_a_histogram_counts_what_took_no_longer(seconds: float, bounds: int) -> None:
    passes = Histogram()
    passes.observe(seconds)
    read = dict(passes.read())
    assert read.pop("sum") == seconds
    assert sum(read.values()) == bounds


def test_what_the_kernel_has_ended_by_itself_is_no_drift(site: Site) -> None:
    """Where the controller looks before it has ended it itself: a pass may have taken long."""
    for host in range(1, 4):
        site.add(target=f"10.0.0.{host}", rate="5 packets/s", ttl="10s")
    site.controller.tick()
    (name,) = (name for name, held in site.kernel.elements.items() if "10.0.0.1" in held and name.startswith("nl-l"))
    site.clock.pass_by(seconds=10)
    site.controller._due["structure"] = 0.0
    site.kernel.elements[name].clear()
    assert _sweep(site) == set()
    site.clock.pass_by(seconds=-1)
    assert _sweep(site) == {"entries"}


def _sweep(site: Site) -> set[str]:
    """The kinds of drift in all sets."""
    names = set(site.controller._compiled.state.entries)
    return {kind for _ in names for kind in site.controller._sweep_one()}


def test_looks_rest_as_they_are_dear_but_for_those_around_a_repair(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    look(site)
    rests = []
    for broken in (False, True, False, False):
        if broken:
            site.kernel.chains.clear()
        monkeypatch.setattr("netlimit.controller._spent", iter([0.0, 0.5]).__next__)
        site.controller._due = dict.fromkeys(site.controller._due, time.monotonic() + 60)
        site.controller._due["structure"] = 0.0
        site.controller._check_drift()
        rests.append(site.controller._due["structure"] - time.monotonic() - STRUCTURE_SECONDS)
    dear, repaired = pytest.approx(LOOK_SHARE * 0.5, abs=1), pytest.approx(0.0, abs=1)
    assert rests == [dear, repaired, repaired, dear]
