"""What is shaped follows rules, hosts, devices and whatever others do to them, pass by pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import pytest

from netlimit.controller import QUEUE_SECONDS, SWEEP_SHARE
from netlimit.drift import MOST_REPAIRS
from netlimit.errors import KernelError
from netlimit.kernel.base import Addresses
from netlimit.numbers import MARK_BITS
from netlimit.packet import Packet
from netlimit.plan import Plan, Step, WriteIngress, WriteTree
from netlimit.presence import Presence
from netlimit.records import Changes, State
from netlimit.rules import Rule, parse_rule
from netlimit.state import State as KernelState
from netlimit.store import Store
from netlimit.tree import INGRESS_DEVICE, Queues, SavedRoot, Topology, Usage
from tests.controller.conftest import Site
from tests.unit.shapes import HOME, UPLINKS, WITHOUT_WAN, is_host

PFIFO = SavedRoot(1, "pfifo", "07000000")


class Shaper(Site):
    """A gateway with clients behind `lan`, and the rest behind `wan`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kernel.routes = HOME
        self.kernel.where = Addresses(("10.1.0.1", "10.2.0.1"), ())

    def shape(self, target: str, rate: str = "1 Mbit/s", **fields: object) -> Rule:
        return self.add(**{"action": "shape", "direction": "to", "target": target, "rate": rate, **fields})

    def change(self, rule: Rule, **fields: object) -> None:
        before = {"action": "shape", "direction": "to", "target": str(rule.target), "rate": "1 Mbit/s"}
        self.store.replace(rule.id, parse_rule({**before, **fields}, self.clock()), "test", self.clock())

    def remove(self, rule: Rule) -> None:
        self.store.remove(rule.id, "test", self.clock())

    def tick(self, times: int = 1) -> None:
        """Whatever the controller does from time to time is due."""
        for _ in range(times):
            self.controller._due = dict.fromkeys(self.controller._due, 0.0)
            self.controller.tick()

    def find(self, dst: str, src: str = "192.0.2.7", device: str | None = "lan") -> int | None:
        """The class in which a packet waits."""
        entered = "lan" if device != "lan" else "wan"
        return self.kernel.find_class(
            Packet(ip_address(src), ip_address(dst), in_interface=entered, out_interface=device)
        )

    def use(self, dst: str, packets: int) -> None:
        """A host has received so many packets more, and they have left its class."""
        number = self.find(dst)
        assert number is not None
        used = self.kernel.used.setdefault("lan", {})
        sent = packets + (used[number].packets if number in used else 0)
        used[number] = Usage(sent, 100 * sent, 0, 0, 0, 0)

    def counted(self, rule: Rule) -> int:
        self.controller._count([rule.id])
        return self.store.counters(rule.id)["gw"].total.matched_packets

    def said(self, rule: Rule) -> tuple[State, str] | None:
        """What is said of a rule that is not simply applied."""
        states = self.store.exceptional([rule.id])
        return (states[rule.id]["gw"].state, states[rule.id]["gw"].message) if states else None


@pytest.fixture
def gateway(sqlite_url: str) -> Iterator[Shaper]:
    store = Store(sqlite_url)
    yield Shaper(store)
    store.close()


# -- passes ---------------------------------------------------------------------------------------------------------


def test_a_device_that_goes_while_its_queues_are_written_holds_up_nobody(site: Site) -> None:
    """Containers come and go: what else there is to do must not wait until none does."""
    site.kernel.routes = HOME
    site.add(target="10.1.0.2", direction="to", rate="1 Mbit/s", action="shape")
    site.controller.tick()
    apply = site.kernel.apply

    def lose(step: Step) -> None:
        if isinstance(step, WriteTree) and step.device == "wan":
            site.kernel.routes = WITHOUT_WAN
        apply(step)

    site.kernel.apply = lose  # type: ignore[method-assign]
    site.add(target="10.2.0.2", direction="to", rate="1 Mbit/s", action="shape")
    site.add(target="10.9.0.1", action="block")
    site.controller.tick()
    assert site.send("10.9.0.1") == ["drop"]
    site.controller.tick()
    assert site.store.hosts()[0].last_error is None
    assert set(site.kernel.trees) == {"lan"}


def test_a_device_that_comes_between_the_look_at_devices_and_that_at_rules_has_its_queues(gateway: Shaper) -> None:
    """Who is told that a rule is applied must not find a device without it that was there before the rule."""
    gateway.kernel.routes = WITHOUT_WAN
    gateway.tick()
    changes = gateway.store.changes

    def come(*asked: Any) -> Changes | None:
        gateway.kernel.routes = HOME
        return changes(*asked)

    gateway.store.changes = come  # type: ignore[method-assign]
    gateway.shape("10.2.0.2")
    gateway.tick()
    assert gateway.store.hosts()[0].applied_revision == gateway.store.revision()
    assert "wan" in gateway.kernel.trees


def test_hosts_that_appear_find_room_however_small_sets_are(small_site: Callable[[int], Site]) -> None:
    """Else whoever sends from many addresses would end all passes."""
    site = small_site(8)
    site.kernel.routes = HOME
    site.add(target="10.2.0.0/16", direction="to", rate="1 Mbit/s", per="host", action="shape", interface="wan")
    site.controller.tick()
    for number in range(20):
        site.send("10.1.0.2", f"10.2.0.{number + 1}")
    site.controller._due = dict.fromkeys(site.controller._due, 0.0)
    site.controller.tick()
    (lane,) = (name for name in site.kernel.sets if name.startswith("nl-q4"))
    assert len(site.kernel.elements[lane]) == 21
    site.add(target="10.9.0.1", action="block")
    site.controller.tick()
    assert site.send("10.9.0.1") == ["drop"]


def test_a_rule_shapes_from_the_next_pass_on_and_no_longer_when_removed(gateway: Shaper) -> None:
    rule = gateway.shape("10.1.0.2")
    gateway.controller.sync()
    assert is_host(gateway.find("10.1.0.2") or 0)
    assert gateway.said(rule) is None
    gateway.remove(rule)
    gateway.controller.sync()
    assert (gateway.kernel.trees, gateway.kernel.sets, gateway.kernel.chains) == ({}, {}, {})
    assert gateway.store.numbering("gw").keys() == {MARK_BITS}


def test_one_more_host_is_one_class_and_one_entry(gateway: Shaper) -> None:
    for host in range(2, 9):
        gateway.shape(f"10.1.0.{host}")
    gateway.controller.sync()
    gateway.kernel.applied.clear()
    gateway.shape("10.1.1.1")
    gateway.controller.sync()
    written = [line for step in gateway.kernel.applied for line in step.lines()]
    assert len([line for line in written if line.startswith("ipset")]) == 1
    classes = [line for line in written if line.startswith("tc class")]
    assert len(classes) == 2, "its own, and the one that its child HTB hangs on"


def test_a_pass_without_changes_touches_nothing_nor_does_a_new_start(gateway: Shaper) -> None:
    gateway.shape("10.1.0.0/24", per="host")
    gateway.shape("10.1.0.2")
    gateway.shape("10.1.0.1", ttl="1h")
    gateway.controller.sync()
    gateway.send("192.0.2.7", "10.1.0.3")
    gateway.kernel.applied.clear()
    gateway.controller.sync()
    gateway.restart().sync()
    gateway.tick(3)
    assert gateway.kernel.applied == []
    assert gateway.store.hosts()[0].drift == 0


def test_a_rule_ends_when_its_time_is_over(gateway: Shaper) -> None:
    gateway.shape("10.1.0.2", ttl="10m")
    gateway.shape("10.1.0.1", ttl="10m")
    gateway.controller.sync()
    gateway.clock.pass_by(minutes=11)
    gateway.controller.sync()
    assert (gateway.kernel.trees, gateway.kernel.program) == ({}, None)


def test_a_step_that_fails_anywhere_is_put_right_by_the_next_pass(gateway: Shaper) -> None:
    kept = gateway.shape("10.1.0.0/16", "20 Mbit/s", per="target")
    gateway.controller.sync()
    for step in range(10):
        gateway.change(kept, target=f"10.1.{step}.0/24", rate="20 Mbit/s", per="target")
        gateway.shape(f"10.1.{step}.2", direction="from" if step % 2 else "to")
        gateway.shape(f"10.2.{step}.0/24", per="host", protocol="tcp")
        gateway.kernel.fail_at(step)
        try:
            gateway.controller.sync()
        except KernelError:
            gateway.controller._in_step = False
            gateway.controller.sync()
        gateway.kernel._failing = None
        assert not gateway.controller.plan(), f"step {step}"
        assert gateway.store.hosts()[0].applied_revision == gateway.store.revision()


def test_a_device_that_refuses_keeps_nobody_else_from_what_they_shall_be(gateway: Shaper) -> None:
    gateway.shape("10.1.0.2")
    gateway.add(target="192.0.2.66", action="block")
    steps = gateway.controller.plan().steps
    gateway.kernel.fail_at(next(at for at, step in enumerate(steps) if isinstance(step, WriteTree)))
    with pytest.raises(KernelError, match="told to fail"):
        gateway.controller.sync()
    attack = Packet(ip_address("192.0.2.66"), ip_address("10.1.0.2"), in_interface="wan", out_interface="lan")
    assert (gateway.kernel.trees, gateway.kernel.trace(attack)) == ({}, "drop")


def test_where_nobody_leads_packets_to_classes_the_rules_of_that_device_say_so_and_all_else_is_held(
    gateway: Shaper,
) -> None:
    """The program may be gone when a first class needs it; where it is in place, it goes on, also after a new start."""
    held = gateway.shape("192.0.2.7")
    both = gateway.shape("0.0.0.0/0", per="host")
    gateway.tick()
    note = gateway.said(both)
    assert note is not None
    gateway.kernel.unled = "the program is away"
    wide = gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    assert gateway.said(wide) is None, "they share a class of the root until somebody appears"
    gateway.find("10.1.0.2")
    gateway.add(target="192.0.2.66", action="block")
    gateway.tick(2)
    said = "What leaves by lan is not shaped: the program is away."
    assert gateway.said(wide) == (State.ERROR, said)
    assert gateway.said(both) == (State.DEGRADED, f"{said} {note[1]}")
    assert gateway.said(held) is None
    assert is_host(gateway.find("192.0.2.7", "10.1.0.2", "wan") or 0)
    assert "lan" not in gateway.kernel.trees
    assert gateway.send("192.0.2.66", "10.1.0.2") == ["drop"]
    (status,) = gateway.store.hosts()
    assert (status.last_error, status.applied_revision) == (None, gateway.store.revision())
    gateway.kernel.hooks.clear()
    gateway.tick()
    assert gateway.send("192.0.2.66", "10.1.0.2") == ["drop"]
    gateway.restart()
    gateway.tick()
    assert is_host(gateway.find("192.0.2.7", "10.1.0.2", "wan") or 0)
    gateway.kernel.unled = None
    gateway.tick(2)
    assert (gateway.said(wide), gateway.said(both)) == (None, note)
    gateway.find("10.1.0.2")
    gateway.tick()
    assert is_host(gateway.find("10.1.0.2") or 0)


def test_a_paused_controller_leaves_queues_alone_and_begins_anew(gateway: Shaper) -> None:
    gateway.shape("10.1.0.2")
    gateway.tick()
    gateway.store.pause("gw", True)
    gateway.kernel.trees.clear()
    gateway.tick(2)
    assert gateway.kernel.trees == {}
    gateway.store.pause("gw", False)
    gateway.tick()
    assert gateway.find("10.1.0.2") is not None


# -- hosts that appear ----------------------------------------------------------------------------------------------


def test_a_host_that_appears_gets_a_class_and_loses_it_when_it_is_idle(gateway: Shaper) -> None:
    gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    shared = gateway.find("10.1.0.2")
    assert not is_host(shared or 0)
    gateway.tick()
    own = gateway.find("10.1.0.2")
    assert is_host(own or 0)
    for _ in range(4):
        gateway.clock.pass_by(minutes=1)
        gateway.use("10.1.0.2", 5)
        gateway.tick()
        assert gateway.find("10.1.0.2") == own, "it is busy"
    gateway.clock.pass_by(seconds=130)
    gateway.kernel._expire()
    gateway.tick(2)
    assert gateway.find("10.1.0.2") == shared


def test_who_has_something_waiting_is_not_idle(gateway: Shaper) -> None:
    gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    gateway.find("10.1.0.2")
    gateway.tick()
    own = gateway.find("10.1.0.2")
    assert own is not None
    gateway.kernel.used["lan"] = {own: Usage(5, 500, 0, 0, 1, 100)}
    for _ in range(3):
        gateway.clock.pass_by(minutes=3)
        gateway.kernel._expire()
        gateway.tick()
    assert gateway.find("10.1.0.2") == own


def test_a_host_with_a_rule_of_its_own_keeps_its_class_however_idle(gateway: Shaper) -> None:
    gateway.shape("10.1.0.0/24", per="host")
    gateway.shape("10.1.0.2")
    gateway.tick()
    own = gateway.find("10.1.0.2")
    for _ in range(3):
        gateway.clock.pass_by(minutes=3)
        gateway.tick()
    assert gateway.find("10.1.0.2") == own


def test_who_sends_to_the_host_itself_appears_too(gateway: Shaper) -> None:
    gateway.shape("10.1.0.0/24", direction="from", per="host")
    gateway.tick()
    shared = gateway.find("10.1.0.1", "10.1.0.2", None)
    gateway.tick(2)
    own = gateway.find("10.1.0.1", "10.1.0.2", None)
    assert is_host(own or 0)
    assert own != shared is not None


def test_hosts_keep_their_classes_over_a_restart(gateway: Shaper) -> None:
    gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    for host in (4, 3, 2):
        gateway.find(f"10.1.0.{host}")
        gateway.tick()
    before = {host: gateway.find(f"10.1.0.{host}") for host in (2, 3, 4)}
    gateway.restart()
    gateway.tick()
    assert {host: gateway.find(f"10.1.0.{host}") for host in (2, 3, 4)} == before
    assert gateway.store.hosts()[0].drift == 0


def test_more_hosts_than_a_device_holds_are_said_and_go_on_sharing(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 3)
    wide = gateway.shape("10.1.0.0/24", per="host")
    gateway.shape("10.1.0.2")
    gateway.tick()
    for host in (3, 4, 5):
        gateway.find(f"10.1.0.{host}")
        gateway.tick(2)
    assert sum(is_host(gateway.find(f"10.1.0.{host}") or 0) for host in (2, 3, 4, 5)) == 2
    said = gateway.said(wide)
    assert said is not None
    assert said[0] is State.DEGRADED


def test_a_rule_for_one_host_is_held_however_many_have_appeared(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rules count against rules."""
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 3)
    gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    for host in (3, 4, 5):
        gateway.find(f"10.1.0.{host}")
        gateway.tick(2)
    ruled = [gateway.shape(f"10.1.1.{host}") for host in (1, 2, 3)]
    gateway.tick()
    assert [is_host(gateway.find(f"10.1.1.{host}") or 0) for host in (1, 2, 3)] == [True, True, False]
    assert [gateway.said(rule) for rule in ruled[:2]] == [None, None]
    said = gateway.said(ruled[2])
    assert said is not None
    assert (said[0], "lan has classes for 3 hosts already" in said[1]) == (State.ERROR, True)


def test_a_host_through_whose_class_nothing_has_gone_loses_it_within_half_a_minute(gateway: Shaper) -> None:
    """One packet does not make a host: a scan sends one to each address, whether somebody has it or not. So it is where
    many have appeared."""
    gateway.controller._presence = Presence(few=1)
    gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    gateway.find("10.1.0.2")
    gateway.find("10.1.0.3")
    gateway.tick()
    gateway.use("10.1.0.3", 1)
    for _ in range(2):
        gateway.clock.pass_by(seconds=15)
        gateway.kernel._expire()
        gateway.tick()
    assert [is_host(gateway.find(f"10.1.0.{host}") or 0) for host in (2, 3)] == [False, True]


@pytest.mark.parametrize("most", [3, 100])
def test_where_places_become_few_a_reading_of_classes_rests_for_less_long(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", most)
    gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    gateway.find("10.1.0.2")
    gateway.tick()
    count = gateway.controller._count_queues

    def count_slowly() -> None:
        count()
        time.sleep(0.1)

    monkeypatch.setattr(gateway.controller, "_count_queues", count_slowly)
    began = time.monotonic()
    gateway.tick()
    rest = gateway.controller._due["queues"] - began - QUEUE_SECONDS
    assert (rest < 0.1 * SWEEP_SHARE) is (most == 3)


def test_on_a_full_device_the_longest_idle_makes_room_for_who_keeps_sending(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 4)
    gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    for host in (2, 3, 4):
        gateway.find(f"10.1.0.{host}")
    gateway.tick()
    for turn in range(4):
        for host in (2, 4) if turn else (2, 3, 4):
            gateway.use(f"10.1.0.{host}", 5)
        gateway.clock.pass_by(seconds=15)
        gateway.kernel._expire()
        gateway.find("10.1.0.9")
        gateway.find(f"10.1.0.{100 + turn}")
        gateway.tick()
    found = {host: is_host(gateway.find(f"10.1.0.{host}") or 0) for host in (2, 3, 4, 9)}
    assert found == {2: True, 3: False, 4: True, 9: True}


# -- counters -------------------------------------------------------------------------------------------------------


def test_counters_add_up_while_classes_come_and_go(gateway: Shaper) -> None:
    wide = gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    for host in (2, 3):
        gateway.find(f"10.1.0.{host}")
    gateway.tick()
    gateway.use("10.1.0.2", 10)
    gateway.use("10.1.0.3", 20)
    assert gateway.counted(wide) == 30
    gateway.clock.pass_by(minutes=3)
    gateway.kernel._expire()
    gateway.use("10.1.0.3", 5)
    gateway.tick()
    gateway.clock.pass_by(minutes=3)
    gateway.use("10.1.0.3", 5)
    gateway.tick(2)
    assert not is_host(gateway.find("10.1.0.2") or 0)
    assert gateway.counted(wide) == 40
    gateway.tick(2)
    gateway.use("10.1.0.2", 7)
    assert gateway.counted(wide) == 47


def test_counters_go_on_over_a_restart(gateway: Shaper) -> None:
    rule = gateway.shape("10.1.0.2")
    gateway.tick()
    gateway.use("10.1.0.2", 10)
    assert gateway.counted(rule) == 10
    gateway.use("10.1.0.2", 3)
    gateway.restart()
    gateway.tick()
    gateway.use("10.1.0.2", 2)
    assert gateway.counted(rule) == 15


def test_a_queue_that_ends_or_is_lifted_keeps_what_it_has_counted(gateway: Shaper) -> None:
    ends = gateway.shape("10.1.0.2", ttl="9s")
    yields = gateway.shape("10.1.0.3", on_failure="open")
    gateway.tick()
    gateway.use("10.1.0.2", 10)
    gateway.use("10.1.0.3", 7)
    gateway.clock.pass_by(seconds=9.1)
    gateway.controller._keep_up()
    gateway.controller.relax()
    found = {rule.id: gateway.store.counters(rule.id)["gw"].total.matched_packets for rule in (ends, yields)}
    assert found == {ends.id: 10, yields.id: 7}


def test_an_exception_for_a_host_begins_to_count_with_its_rule(gateway: Shaper) -> None:
    wide = gateway.shape("10.1.0.0/24", per="host")
    gateway.tick()
    gateway.find("10.1.0.2")
    gateway.tick()
    gateway.use("10.1.0.2", 100)
    assert gateway.counted(wide) == 100
    exception = gateway.shape("10.1.0.2", "2 Mbit/s")
    gateway.tick()
    gateway.use("10.1.0.2", 3)
    assert (gateway.counted(exception), gateway.counted(wide)) == (3, 100)
    gateway.remove(exception)
    gateway.tick()
    gateway.use("10.1.0.2", 4)
    assert gateway.counted(wide) == 104


def test_a_rule_that_is_policed_for_a_while_loses_no_count(gateway: Shaper) -> None:
    rule = gateway.shape("10.1.0.2")
    gateway.tick()
    gateway.use("10.1.0.2", 10)
    assert gateway.counted(rule) == 10
    gateway.change(rule, action="drop", rate="100 packets/s")
    gateway.controller.sync()
    gateway.send("192.0.2.7", "10.1.0.2", times=30, length=100)
    assert gateway.counted(rule) == 40
    gateway.change(rule)
    gateway.tick()
    gateway.use("10.1.0.2", 5)
    assert gateway.counted(rule) == 45


# -- devices --------------------------------------------------------------------------------------------------------


def test_rules_move_to_where_their_traffic_leaves_now(gateway: Shaper) -> None:
    far, near = gateway.shape("192.0.2.7"), gateway.shape("10.1.0.2")
    gateway.tick()
    assert gateway.find("192.0.2.7", "10.1.0.2", "wan") is not None
    gateway.kernel.routes = UPLINKS
    gateway.tick()
    assert gateway.find("192.0.2.7", "10.1.0.2", "other") is not None
    assert gateway.said(far) == (
        State.APPLIED,
        "Its traffic can leave by other and wan: the rate holds on each of them by itself. `interface` names one.",
    )
    assert gateway.said(near) is None
    gateway.kernel.routes = HOME
    gateway.tick()
    assert gateway.kernel.trees.keys() == {"lan", "wan"}
    assert gateway.said(far) is None
    assert gateway.store.hosts()[0].drift == 0


def test_a_device_that_goes_takes_its_rules_out_of_force_until_it_is_back(gateway: Shaper) -> None:
    rule = gateway.shape("192.0.2.7")
    named = gateway.shape("192.0.2.8", interface="wan")
    gateway.tick()
    gateway.kernel.routes = WITHOUT_WAN
    gateway.tick()
    assert (gateway.kernel.trees, gateway.controller.standing()) == ({}, (0, 2))
    assert gateway.said(rule) == (State.ERROR, "No route leads to 192.0.2.7; name the device in `interface`.")
    assert gateway.said(named) == (State.ERROR, "There is no device wan on this host; there are lan.")
    gateway.kernel.routes = HOME
    gateway.tick()
    assert gateway.find("192.0.2.7", "10.1.0.2", "wan") is not None
    assert (gateway.said(rule), gateway.said(named), gateway.controller.standing()) == (None, None, (2, 0))


def test_a_device_that_was_away_for_a_moment_gets_its_tree_again(gateway: Shaper) -> None:
    gateway.shape("10.1.0.2")
    gateway.shape("10.1.0.1")
    gateway.tick()
    del gateway.kernel.trees["lan"]
    gateway.kernel.program = None
    gateway.kernel.lanes = {}
    gateway.kernel.routes = Topology(HOME.devices, HOME.routes)
    gateway.tick()
    assert gateway.find("10.1.0.2") is not None
    assert gateway.find("10.1.0.1", "10.1.0.2", None) is not None


@pytest.mark.parametrize("anew", [True, False])
def test_a_device_that_is_made_anew_again_and_again_has_not_been_undone_by_a_program(
    gateway: Shaper, anew: bool
) -> None:
    """A dial-up line on a bad day: its queues come back at once each time, and nobody is blamed."""
    rules = gateway.shape("10.1.0.2"), gateway.shape("10.1.0.1")
    gateway.tick()
    for number in range(2 * MOST_REPAIRS):
        gateway.kernel.trees.pop("lan", None)  # in a fight it is not always back
        gateway.kernel.program, gateway.kernel.lanes = None, {}
        lan = replace(HOME.devices["lan"], index=50 + number * anew)
        gateway.kernel.routes = Topology({**HOME.devices, "lan": lan}, HOME.routes)
        gateway.tick()
        assert gateway.find("10.1.0.2") is not None or not anew
        assert gateway.find("10.1.0.1", "10.1.0.2", None) is not None or not anew
    assert [gateway.said(rule) is None for rule in rules] == [anew, anew]
    assert (gateway.store.hosts()[0].last_error is None) is anew


def test_a_device_that_is_gone_once_its_queues_are_written_has_not_been_undone_by_a_program(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that comes and goes faster than it is looked at."""
    rule, write, away = gateway.shape("10.1.0.2"), gateway.kernel.apply, HOME.devices.keys() - {"lan"}
    gateway.tick()

    def write_and_lose(step: Step) -> None:
        write(step)
        if isinstance(step, WriteTree) and step.device == "lan":
            gateway.kernel.routes = Topology({name: HOME.devices[name] for name in away}, HOME.routes)

    monkeypatch.setattr(gateway.kernel, "apply", write_and_lose)
    for number in range(2 * MOST_REPAIRS):
        gateway.kernel.trees.pop("lan", None)
        lan = replace(HOME.devices["lan"], index=50 + number)
        gateway.kernel.routes = Topology({**HOME.devices, "lan": lan}, HOME.routes)
        gateway.tick()
        assert "lan" not in gateway.kernel.routes.devices, "it was written to"
    assert not gateway.controller._repairs.fights
    gateway.kernel.routes = Topology(HOME.devices, HOME.routes)
    gateway.tick()
    assert gateway.said(rule) is None


def test_a_device_that_goes_while_queues_are_looked_at_has_lost_nothing(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers come and go faster than devices are followed: what went with one is no drift, and no repair."""
    rules = gateway.shape("10.1.0.2"), gateway.shape("10.1.0.1")
    gateway.tick()
    read = gateway.kernel.queues

    def lose_and_read() -> Queues:
        lose(gateway, "lan")
        return read()

    for number in range(2 * MOST_REPAIRS):
        lan = replace(HOME.devices["lan"], index=50 + number)
        gateway.kernel.routes = Topology({**HOME.devices, "lan": lan}, HOME.routes)
        gateway.tick()
        repairs = gateway.store.hosts()[0].drift
        with monkeypatch.context() as patched:
            patched.setattr(gateway.kernel, "queues", lose_and_read)
            gateway.controller._due |= {"structure": 0.0, "trees": 0.0}
            gateway.controller._check_drift()
        assert gateway.store.hosts()[0].drift == repairs
    assert not gateway.controller._repairs.fights
    gateway.kernel.routes = Topology(HOME.devices, HOME.routes)
    gateway.tick()
    assert [gateway.said(rule) for rule in rules] == [None, None]
    assert gateway.find("10.1.0.2") is not None, "the device is back, and has its queues"


def test_a_device_that_goes_before_another_is_put_right_has_not_been_undone_by_a_program(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.shape("10.1.0.2")
    gateway.shape("192.0.2.7")
    gateway.tick()
    compare = gateway.controller._compare

    def lose_and_compare() -> tuple[Plan, KernelState]:
        lose(gateway, "wan")
        return compare()

    monkeypatch.setattr(gateway.controller, "_compare", lose_and_compare)
    for number in range(2 * MOST_REPAIRS):
        gateway.kernel.trees.pop("lan", None)
        lan, wan = (replace(HOME.devices[name], index=50 + number) for name in ("lan", "wan"))
        gateway.kernel.routes = Topology({"lan": lan, "wan": wan}, HOME.routes)
        gateway.controller._repairs.know(Plan((WriteTree("wan", 1),)), {"wan": wan.index})
        gateway.controller._repair({"queues": "the queues of lan"})
        assert "wan" not in gateway.kernel.routes.devices
    assert not gateway.controller._repairs.fights


def test_sessions_that_are_dialled_anew_while_the_program_is_written_have_not_been_undone_by_a_program(
    gateway: Shaper,
) -> None:
    """Many at once: the pass that writes the program for all of them has not seen that the queues of one went."""
    rules = gateway.shape("10.1.0.2"), gateway.shape("10.1.0.1")
    gateway.tick()
    for number in range(2 * MOST_REPAIRS):
        gateway.kernel.trees.pop("lan", None)
        lan = replace(HOME.devices["lan"], index=50 + number)
        gateway.kernel.routes = Topology({**HOME.devices, "lan": lan}, HOME.routes)
        assert gateway.kernel.program is not None
        program = gateway.controller._compiled.state.ingress
        gateway.controller._repairs.know(Plan((WriteIngress(program),)), {"lan": lan.index})
        gateway.tick()
        assert gateway.find("10.1.0.2") is not None
    assert [gateway.said(rule) for rule in rules] == [None, None]


def lose(gateway: Shaper, device: str) -> None:
    """A device goes, and its queues with it."""
    there = gateway.kernel.routes
    left = {name: each for name, each in there.devices.items() if name != device}
    gateway.kernel.trees.pop(device, None)
    gateway.kernel.routes = Topology(left, there.routes)


def test_changes_and_repairs_do_not_wait_for_devices_that_cannot_be_read(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They only tell whom to blame. But of no rule is said that it is applied: it may belong to another device now."""
    gateway.shape("10.1.0.2")
    gateway.tick()
    revision = gateway.store.revision()

    def refuse() -> Topology:
        raise KernelError("read devices and routes", "Dump was interrupted")

    monkeypatch.setattr(gateway.kernel, "topology", refuse)
    gateway.shape("10.1.0.3")
    with pytest.raises(KernelError):
        gateway.controller.sync()
    assert gateway.find("10.1.0.3") is not None
    assert gateway.store.hosts()[0].applied_revision == revision
    tree = gateway.kernel.trees.pop("lan")
    gateway.controller._repair(gateway.controller._find_drift())
    assert gateway.kernel.trees["lan"] == tree


def test_who_undoes_queues_is_blamed_though_another_device_is_made_anew_each_time(gateway: Shaper) -> None:
    rule = gateway.shape("10.1.0.2")
    gateway.tick()
    for number in range(2 * MOST_REPAIRS):
        gateway.kernel.trees.pop("lan", None)
        wan = replace(HOME.devices["wan"], index=50 + number)
        gateway.kernel.routes = Topology({**HOME.devices, "wan": wan}, HOME.routes)
        gateway.tick()
    assert gateway.said(rule) is not None


@pytest.mark.parametrize("what", ["a class", "a rate", "the program", "the device of the ingress"])
def test_what_others_break_is_put_right_and_counted(gateway: Shaper, what: str) -> None:
    gateway.shape("10.1.0.2")
    gateway.shape("10.1.0.1")
    gateway.tick()
    kernel, number = gateway.kernel, gateway.find("10.1.0.2") or 0
    tree = kernel.trees["lan"]
    if what == "a class":
        kernel.trees["lan"] = replace(tree, classes={n: each for n, each in tree.classes.items() if n != number})
    elif what == "a rate":
        slower = tree.classes[number]._replace(rate=1000)
        kernel.trees["lan"] = replace(tree, classes={**tree.classes, number: slower})
    elif what == "the program":
        kernel.program = None
    else:
        del kernel.trees[INGRESS_DEVICE]
        kernel.program, kernel.lanes = None, {}
    gateway.tick()
    assert kernel.trees["lan"] == tree
    assert gateway.find("10.1.0.1", "10.1.0.2", None) is not None
    assert gateway.store.hosts()[0].drift == 1
    assert not gateway.controller.plan()


def test_what_ends_here_waits_for_a_device_and_is_not_missed_meanwhile(gateway: Shaper) -> None:
    down = {name: replace(each, up=False) for name, each in HOME.devices.items()}
    gateway.kernel.routes = Topology(down, HOME.routes)
    rule = gateway.shape("10.1.0.1")
    gateway.tick(20)
    assert gateway.find("10.1.0.1", "10.1.0.2", None) is None
    gateway.kernel.routes = HOME
    gateway.tick(20)
    assert gateway.find("10.1.0.1", "10.1.0.2", None) is not None
    assert gateway.said(rule) is None
    assert gateway.store.hosts()[0].drift == 0
    assert not gateway.controller.plan()


# -- qdiscs of others -----------------------------------------------------------------------------------------------


def test_a_qdisc_of_somebody_else_is_left_alone_and_ours_comes_when_it_is_gone(gateway: Shaper) -> None:
    gateway.kernel.roots["lan"] = PFIFO
    rule = gateway.shape("10.1.0.2")
    gateway.tick()
    said = gateway.said(rule)
    assert said is not None
    assert (said[0], "lan has a qdisc that is not ours (pfifo 1:)" in said[1]) == (State.ERROR, True)
    assert gateway.kernel.queues() == Queues({}, {"lan": "pfifo 1:"})
    del gateway.kernel.roots["lan"]
    gateway.tick(2)
    assert gateway.find("10.1.0.2") is not None
    assert gateway.said(rule) is None


def test_who_is_in_the_way_on_an_ingress_is_told_as_long_as_he_is_there(gateway: Shaper) -> None:
    gateway.kernel.obstacles["lan"] = "a filter of somebody else (u32)."
    sent, received = gateway.shape("10.1.0.2", direction="from"), gateway.shape("10.1.0.3")
    gateway.tick()
    said = (
        State.DEGRADED,
        "What comes in by lan and ends on this host is not shaped: a filter of somebody else (u32).",
    )
    assert (gateway.said(sent), gateway.said(received)) == (said, None)
    gateway.kernel.obstacles.clear()
    gateway.tick(2)
    assert gateway.said(sent) is None
    gateway.kernel.obstacles["lan"] = "a filter of somebody else (u32)."
    gateway.tick(2)
    assert gateway.said(sent) == said


def test_a_device_has_its_program_as_often_as_nobody_is_in_the_way_there(gateway: Shaper) -> None:
    """However often he comes and goes: nobody has undone anything, so that it is no fight to rest from."""
    gateway.shape("10.1.0.2", direction="from")
    gateway.tick()
    for _ in range(MOST_REPAIRS + 1):
        for obstacles, left in (({"lan", "wan"}, {INGRESS_DEVICE}), ({"lan"}, {"wan"}), (set(), {"lan", "wan"})):
            gateway.kernel.obstacles = dict.fromkeys(obstacles, "a chain of nftables.")
            gateway.tick()
            assert gateway.kernel.ingress().keys() == left
            assert not gateway.controller.plan()
    (status,) = gateway.store.hosts()
    assert (status.drift, status.drifted, status.repairs) == (0, 0, {})


def test_somebody_puts_a_qdisc_in_the_place_of_ours(gateway: Shaper) -> None:
    rule, other = gateway.shape("10.1.0.2"), gateway.shape("192.0.2.7")
    gateway.tick()
    del gateway.kernel.trees["lan"]
    gateway.kernel.roots["lan"] = PFIFO
    gateway.tick(2)
    assert gateway.kernel.roots == {"lan": PFIFO}
    said = gateway.said(rule)
    assert said is not None
    assert said[0] is State.ERROR
    assert gateway.said(other) is None
    assert gateway.find("192.0.2.7", "10.1.0.2", "wan") is not None


def test_a_qdisc_that_was_saved_makes_way_and_comes_back(gateway: Shaper) -> None:
    gateway.kernel.roots["lan"] = PFIFO
    gateway.store.save_root("gw", "lan", PFIFO)
    rule = gateway.shape("10.1.0.2")
    gateway.tick()
    assert gateway.find("10.1.0.2") is not None
    assert gateway.kernel.roots == {}
    gateway.tick(2)
    assert gateway.store.hosts()[0].drift == 0
    gateway.remove(rule)
    gateway.tick()
    assert (gateway.kernel.roots, gateway.kernel.trees) == ({"lan": PFIFO}, {})


def test_a_qdisc_that_was_saved_of_a_device_that_is_gone_costs_no_look_at_everything(
    gateway: Shaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.shape("10.1.0.2")
    gateway.tick(2)
    gateway.store.save_root("gw", "ppp0", PFIFO)
    compare, compared = gateway.controller._compare, []
    monkeypatch.setattr(gateway.controller, "_compare", lambda: compared.append(True) or compare())
    gateway.tick(4)
    assert compared == []
    gateway.store.save_root("gw", "wan", PFIFO)
    gateway.remove(gateway.shape("10.1.0.3"))
    gateway.tick(4)
    assert compared, "of one that is there it may be"


# -- what is said ---------------------------------------------------------------------------------------------------


def test_a_rule_in_the_way_of_another_is_tried_again_when_that_is_gone(gateway: Shaper) -> None:
    first = gateway.shape("10.1.0.2")
    second = gateway.shape("10.1.0.0/24", per="target", protocol="tcp")
    gateway.controller.sync()
    said = gateway.said(second)
    assert said is not None
    assert (said[0], f"rule {first.id}" in said[1]) == (State.ERROR, True)
    gateway.remove(first)
    gateway.controller.sync()
    assert gateway.said(second) is None
    assert gateway.controller.standing() == (1, 0)


def test_what_is_held_in_part_is_degraded_and_what_promises_too_much_is_applied(gateway: Shaper) -> None:
    gateway.kernel.facts = gateway.kernel.facts._replace(capabilities={"ifb": "there is no ifb."})
    part = gateway.shape("10.1.0.2", direction="from")
    gateway.controller.sync()
    assert gateway.said(part) == (State.DEGRADED, "What ends on this host is not shaped: there is no ifb.")
    budget = gateway.shape("10.1.0.0/24", "1 Mbit/s", per="target")
    hosts = [gateway.shape(f"10.1.0.{host}", "1 Mbit/s") for host in (3, 4)]
    gateway.controller.sync()
    said = gateway.said(budget)
    assert said is not None
    assert said[0] is State.APPLIED
    assert "adds up to 2 Mbit/s, more than the 1 Mbit/s that it has" in said[1]
    gateway.remove(hosts[0])
    gateway.controller.sync()
    assert gateway.said(budget) is None


def test_whoever_manages_the_host_is_not_shaped_unless_it_was_forced(gateway: Shaper) -> None:
    gateway.shape("10.1.0.0/24", per="target")
    gateway.tick()
    assert gateway.find("10.1.0.2") is not None
    gateway.kernel.where = Addresses(("10.1.0.1", "10.2.0.1"), ("10.1.0.2",))
    gateway.tick(2)
    assert gateway.find("10.1.0.2") is None
    named = gateway.shape("10.1.0.2")
    gateway.tick()
    assert gateway.find("10.1.0.2") is None
    gateway.remove(named)
    gateway.shape("10.1.0.2", forced_by="root")
    gateway.tick()
    assert gateway.find("10.1.0.2") is not None


def test_guarantees_that_follow_who_sends_fill_no_log(gateway: Shaper, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    gateway.shape("0.0.0.0/0", "3 Mbit/s", per="target", interface="lan")
    for host in range(2, 12):
        gateway.shape(f"10.1.0.{host}", ceil="3 Mbit/s")
    gateway.tick()
    caplog.clear()
    hosts = [each for each in map(gateway.find, (f"10.1.0.{host}" for host in range(2, 12))) if each is not None]
    before, at = gateway.kernel.trees["lan"], time.monotonic()
    for seconds in (100, 200):
        sent = Usage(1000, 10**8 * seconds, 0, 0, 0, 0)
        gateway.controller._compiled.shaping.look("lan", dict.fromkeys(hosts, sent), at + seconds)
    gateway.controller.tick()
    assert gateway.kernel.trees["lan"] != before
    assert [each.levelname for each in caplog.records if "is applied" in each.getMessage()] == ["DEBUG"]
    gateway.shape("10.1.0.99")
    gateway.tick()
    assert [each.levelname for each in caplog.records if "is applied" in each.getMessage()][1:] == ["INFO"]
