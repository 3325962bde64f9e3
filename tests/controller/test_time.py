from dataclasses import replace
from datetime import timedelta

import pytest

from netlimit.controller import Controller, Setup
from netlimit.kernel.base import Addresses
from netlimit.roles import Role
from netlimit.roster import Roster
from netlimit.rules import parse_rule
from netlimit.state import ChainId
from tests.controller.conftest import Site
from tests.databases import DATABASES

OVER = DATABASES


def test_a_ban_ends_by_itself_and_is_gone_after_the_next_pass(site: Site) -> None:
    site.add(target="10.0.0.1", action="block", ttl="10m")
    site.controller.sync()
    assert site.send("10.0.0.1") == ["drop"]
    site.clock.pass_by(minutes=11)
    assert site.send("10.0.0.1") == ["accept"], "the kernel ends it without the controller"
    site.controller.sync()
    assert site.kernel.structure().chains == {}


def test_an_end_too_far_for_the_kernel_is_told_to_it_when_it_is_near(site: Site) -> None:
    site.add(target="10.0.0.1", action="block", ttl="60d")
    site.controller.sync()
    name = next(name for name in site.kernel.sets if name.startswith("nl-b4"))
    assert site.kernel.elements[name]["10.0.0.1"].entry.expires == 0
    site.clock.pass_by(days=40)
    site.controller.sync()
    assert site.kernel.elements[name]["10.0.0.1"].entry.expires > 0
    site.clock.pass_by(days=21)
    site.controller.sync()
    assert site.send("10.0.0.1") == ["accept"]


def test_drift_is_repaired_and_counted(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    chain = next(chain for chain in site.kernel.chains if chain.name == "NL-FORWARD")
    site.kernel.damage(chain=ChainId(*chain))
    assert "accept" in site.send("10.0.0.1", times=6)[-1]
    site.controller.tick()
    assert site.send("10.0.0.1", times=6)[-1] == "drop"
    assert site.store.hosts()[0].drift == 1


def test_a_lost_entry_is_found_by_the_sweep(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    name = next(name for name in site.kernel.sets if name.startswith("nl-l4"))
    site.kernel.damage(set_name=name)
    for _ in range(8):
        site.controller._repair(site.controller._sweep_one())
    assert site.send("10.0.0.1", times=6)[-1] == "drop"
    assert site.store.hosts()[0].drift == 1


def test_teardown_keeps_hands_off_until_apply(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.tick()
    site.store.pause("gw", True)
    site.kernel.chains.clear()
    site.kernel.hooks.clear()
    site.controller.tick()
    assert site.store.hosts()[0].paused
    assert site.kernel.chains == {}
    site.store.pause("gw", False)
    site.controller.tick()
    assert not site.store.hosts()[0].paused
    assert site.send("10.0.0.1", times=6)[-1] == "drop"


def test_whoever_manages_the_host_becomes_safe_and_stays_so_unless_a_rule_was_forced(site: Site) -> None:
    site.add(target="198.51.100.0/24", action="block")
    site.controller.tick()
    assert site.send("198.51.100.7") == ["drop"]
    site.kernel.where = Addresses((), ("198.51.100.7",))
    site.controller._protect()
    site.controller.sync()
    assert site.send("198.51.100.7") == ["accept"]
    named = site.add(target="198.51.100.7", action="block")
    site.controller.sync()
    assert site.send("198.51.100.7") == ["accept"], "a rule that names the exact address spares them, too"
    site.store.change(named.id, lambda rule: replace(rule, forced_by="root"), "root", site.clock())
    site.controller.sync()
    assert site.send("198.51.100.7") == ["drop"], "one that was forced does not"


def test_an_address_that_another_gateway_takes_over_is_safe_for_what_else_is_there(site: Site) -> None:
    """A database answers on an address that moves between two gateways, one of which looks."""
    setup = Setup("gw", "fake", servers={"10.2.0.50": "database"})
    site.kernel.where = Addresses(("10.2.0.1", "10.2.0.50"), ())
    site.controller = Controller(site.store, site.kernel, setup, site.clock)
    site.add(target="10.2.0.0/24", rate="1 packets/min", per="host")
    site.add(target="10.2.0.7", action="block")
    for own in (("10.2.0.50",), (), ("10.2.0.50",)):
        site.kernel.where = Addresses(("10.2.0.1", *own), ())
        for _ in range(2):
            site.controller._due = dict.fromkeys(site.controller._due, 0.0)
            site.controller.tick()
        assert set(site.kernel.elements["nl-safe4"]) == (set() if own else {"10.2.0.50"})
        assert {str(each) for each in site.controller._compiled.facts.own} == {"10.2.0.1", *own}
        assert not Controller(site.store, site.kernel, setup, site.clock).plan()


@pytest.mark.parametrize("hours", [1, 24 * 365 * 30, -1, -24 * 365 * 30])
def test_nobody_falls_out_of_the_safe_set_by_a_clock_that_is_set(site: Site, hours: int) -> None:
    """Nor does anybody stay longer: half an hour after he was seen it is over. Whenever it is set: in a pass, too."""
    clock = site.clock
    elapsed = [0.0]
    site.controller._premises.elapsed = lambda: elapsed[0]
    site.add(target="198.51.100.0/24", action="block")
    site.store.saw_client("gw", "198.51.100.7", token="boss", role=Role.ADMIN)
    site.kernel.where = Addresses((), ("198.51.100.8",))
    site.controller.tick()
    site.kernel.where = Addresses((), ())
    clock.pass_by(hours=hours)
    site.controller._protect()
    for _ in range(3):
        site.controller._due = dict.fromkeys(site.controller._due, 0.0)
        site.controller.tick()
    assert [site.send(f"198.51.100.{host}") for host in (7, 8, 9)] == [["accept"], ["accept"], ["drop"]]
    site.store.saw_client("gw", "198.51.100.7", site.store.now() - timedelta(hours=1), "boss", Role.ADMIN)
    site.controller._protect()
    clock.pass_by(minutes=31)
    elapsed[0] += 31 * 60
    site.controller._protect()
    site.controller.sync()
    assert [site.send(f"198.51.100.{host}") for host in (7, 8)] == [["drop"], ["drop"]]


def test_a_client_of_the_api_is_safe_for_half_an_hour_and_no_longer(site: Site) -> None:
    """From when he was last seen, though the database names him until then."""
    elapsed = [0.0]
    site.controller._premises.elapsed = lambda: elapsed[0]
    site.add(target="198.51.100.0/24", action="block")
    site.store.saw_client("gw", "198.51.100.7", site.store.now() - timedelta(minutes=29), "boss", Role.ADMIN)
    site.controller.tick()
    site.controller._protect()
    assert site.send("198.51.100.7") == ["accept"]
    site.store.saw_client("gw", "198.51.100.7", site.store.now() - timedelta(minutes=31), "boss", Role.ADMIN)
    site.clock.pass_by(minutes=2)
    elapsed[0] += 120
    site.controller._protect()
    site.controller.sync()
    assert site.send("198.51.100.7") == ["drop"]


@pytest.mark.parametrize("ahead", [timedelta(0), timedelta(hours=9), timedelta(days=-20 * 365)])
def test_who_was_safe_before_a_boot_is_so_for_half_an_hour_from_it_whatever_the_clock(
    site: Site, ahead: timedelta
) -> None:
    """It may be wrong until somebody has told the machine the time, and nobody may be forgotten for that."""
    site.add(target="198.51.100.0/24", action="block")
    site.kernel.where = Addresses((), ("198.51.100.8",))
    site.controller.tick()
    site.kernel.where = Addresses((), ())
    uptime = [0.0]

    def run_on(seconds: float) -> str:
        uptime[0] += seconds
        site.clock.pass_by(seconds=seconds)
        for _ in range(2):
            site.controller._due = dict.fromkeys(site.controller._due, 0.0)
            site.controller.tick()
        return site.send("198.51.100.8")[0]

    def start_controller() -> None:
        site.restart()._premises.uptime = site.controller._premises.elapsed = lambda: uptime[0]
        site.controller.tick()

    site.clock.pass_by(hours=2)  # it is off for longer than anybody is remembered
    site.clock.moment += ahead
    start_controller()  # as `netlimit apply --last` does
    start_controller()
    assert run_on(300) == "accept"
    site.clock.moment -= ahead
    assert run_on(5) == "accept"
    start_controller()
    assert run_on(1400) == "accept"
    start_controller()
    assert run_on(100) == "drop"
    start_controller()
    assert run_on(5) == "drop"


def test_who_was_safe_when_the_clock_was_set_while_no_controller_ran_is_so_for_half_an_hour_from_the_boot(
    site: Site,
) -> None:
    site.add(target="198.51.100.0/24", action="block")
    site.kernel.where = Addresses((), ("198.51.100.8",))
    site.controller.tick()
    site.kernel.where = Addresses((), ())
    site.clock.pass_by(days=20 * 365)
    for uptime, verdict in ((300.0, "accept"), (2000.0, "drop")):
        site.restart()._premises.uptime = lambda uptime=uptime: uptime
        site.clock.pass_by(seconds=uptime)
        site.controller.tick()
        assert site.send("198.51.100.8") == [verdict]


def test_counters_go_on_over_a_restart_and_over_an_entry_written_anew(site: Site) -> None:
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.send("10.0.0.1", times=8, length=100)
    site.controller._count([rule.id])
    total = site.store.counters(rule.id)["gw"].total
    assert (total.matched_packets, total.matched_bytes, total.dropped_packets) == (8, 800, 3)
    site.restart().sync()
    site.kernel.damage(set_name=next(name for name in site.kernel.sets if name.startswith("nl-l4")))
    site.controller.plan()
    site.controller._in_step = False
    site.controller._repair({"chains": "a test"})
    site.send("10.0.0.1", times=4, length=100)
    site.controller._count([rule.id])
    total = site.store.counters(rule.id)["gw"].total
    assert total.matched_packets == 12


def test_questions_are_answered_through_the_store(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s")
    asked = site.store.ask("gw", "plan", {})
    site.controller.tick()
    answer = site.store.answered(asked)
    assert answer is not None
    assert answer["text"] == "Nothing to do.", "the pass comes first"
    site.send("10.0.0.1", times=9)
    offenders = site.store.ask("gw", "offenders", {})
    site.controller.tick()
    answer = site.store.answered(offenders)
    assert answer is not None
    assert answer["items"] == [{"address": "10.0.0.1", "packets": 3, "bytes": 180}]


def test_a_clock_that_is_set_while_it_is_paused_changes_nothing(site: Site) -> None:
    site.add(target="10.0.0.1", action="block", ttl="10m")
    site.controller.tick()
    site.store.pause("gw", True)
    site.controller.tick()
    site.clock.pass_by(hours=1)
    site.controller.tick()
    site.store.pause("gw", False)
    site.controller.tick()
    assert site.kernel.structure().chains == {}


def test_an_end_that_is_put_off_again_and_again_is_remembered_once(site: Site) -> None:
    roster = Roster("gw")
    for second in range(1000):
        now = site.clock() + timedelta(seconds=second)
        roster.admit(replace(parse_rule({"target": "10.0.0.1", "action": "block", "ttl": "1h"}, now), id=1), now)
    assert len(roster._looks) < 200
    assert [rule.id for rule in roster.due(now + timedelta(hours=2))] == [1]
