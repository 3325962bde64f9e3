"""A change of many trees takes long: what others undo meanwhile is mended, and new rules come into force."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import pytest

import netlimit.controller
from netlimit.errors import KernelError, StoreError
from netlimit.packet import Packet
from netlimit.plan import Step, WriteTree
from netlimit.rules import Rule
from netlimit.store import Store
from netlimit.tree import Device, Queues, Route, Topology
from tests.controller.conftest import Site

DEVICES = 12
NAMES = [f"d{number}" for number in range(DEVICES)]
TOPOLOGY = Topology(
    {name: Device(2 + number, True) for number, name in enumerate(NAMES)},
    (*(Route(f"10.100.{n}.0/24", (name,), True) for n, name in enumerate(NAMES)), Route("0.0.0.0/0", ("d0",))),
)


class Slow(Site):
    """A gateway with many devices, of which something happens behind the first tree that is written; `seen` are the
    answers of a probe before each further tree."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kernel.routes = TOPOLOGY
        self.seen: list[str] = []
        self.trees: list[str] = []
        self.happens: Callable[[], object] = lambda: None
        self.probe = "203.0.113.9"
        apply = self.kernel.apply

        def apply_slowly(step: Step) -> None:
            if isinstance(step, WriteTree):
                self.seen += self.send(self.probe, "192.0.2.7")
                self.trees.append(step.device)
            apply(step)
            if isinstance(step, WriteTree):
                happens, self.happens = self.happens, lambda: None
                happens()

        self.kernel.apply = apply_slowly  # type: ignore[method-assign]

    def shape(self, host: int) -> None:
        self.add(action="shape", direction="from", target=f"10.1.5.{host}", rate="1 Mbit/s")

    def settle(self) -> None:
        """One pass; whether nothing is left to do."""
        self.controller.sync()
        assert self.store.hosts()[0].applied_revision == self.store.revision()
        assert not self.controller.plan()
        packet = Packet(ip_address("10.1.5.1"), ip_address("192.0.2.7"), in_interface="d1", out_interface="d3")
        assert self.kernel.find_class(packet)


@pytest.fixture
def gateway(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(netlimit.controller, "STRUCTURE_SECONDS", 0.0)
    monkeypatch.setattr(netlimit.controller, "BETWEEN_SHARE", 0.0)
    store = Store(sqlite_url)
    made = Slow(store)
    made.add(target="203.0.113.9", action="block")
    made.controller.sync()
    made.shape(1)
    yield made
    store.close()


@pytest.mark.parametrize("what", ["hooks", "chains", "sets"])
def test_what_others_undo_is_mended_before_all_trees_are_written(gateway: Slow, what: str) -> None:
    def undo() -> None:
        gateway.kernel.hooks.clear()
        if what != "hooks":
            gateway.kernel.chains.clear()
        if what == "sets":
            gateway.kernel.sets.clear()
            gateway.kernel.elements.clear()

    gateway.happens = undo
    gateway.settle()
    assert gateway.seen[-1] == "drop"
    assert gateway.seen.count("accept") <= 2
    assert sorted(gateway.trees) == sorted([*NAMES, "nl-in"]), "each is written once"
    (status,) = gateway.store.hosts()
    assert status.drift == 1
    assert sum(status.repairs.values()) >= 1
    assert status.last_error is None


def test_a_new_block_is_in_force_before_all_trees_are_written(gateway: Slow) -> None:
    gateway.probe = "203.0.113.10"
    gateway.happens = lambda: gateway.add(target="203.0.113.10", action="block")
    gateway.settle()
    assert (gateway.seen[0], gateway.seen[-1]) == ("accept", "drop")
    assert gateway.seen.count("accept") <= 2
    assert sorted(gateway.trees) == sorted([*NAMES, "nl-in"])


def test_a_rule_that_goes_meanwhile_and_one_that_comes_to_all_devices(gateway: Slow) -> None:
    (shaped,) = [kept.rule for kept in gateway.store.select(limit=9)[0] if kept.rule.rate]
    other = shaped.id

    def change() -> None:
        gateway.shape(2)
        gateway.store.remove(other, "test", gateway.clock())

    gateway.happens = change
    gateway.controller.sync()
    assert not gateway.controller.plan()
    packet = Packet(ip_address("10.1.5.2"), ip_address("192.0.2.7"), in_interface="d1", out_interface="d3")
    assert gateway.kernel.find_class(packet)
    assert gateway.store.hosts()[0].applied_revision == gateway.store.revision()


def test_where_the_database_fails_meanwhile_the_next_pass_goes_on(
    gateway: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it fails when a part of what is new was taken in."""
    put = gateway.controller._put

    def fail(rule: Rule) -> None:
        put(rule)
        raise StoreError("the database is away")

    def lose() -> None:
        gateway.add(target="203.0.113.10", action="block")
        monkeypatch.setattr(gateway.controller, "_put", fail)

    gateway.happens = lose
    with pytest.raises(StoreError, match="is away"):
        gateway.controller.sync()
    monkeypatch.setattr(gateway.controller, "_put", put)
    assert 0 < len(gateway.trees) < DEVICES
    gateway.settle()
    assert gateway.send("203.0.113.10") == ["drop"]
    assert sorted(gateway.trees) == sorted([*NAMES, "nl-in"])


def test_a_change_that_is_broken_off_for_good_is_finished_by_the_next_pass(gateway: Slow) -> None:
    def fail() -> None:
        gateway.kernel.hooks.clear()
        gateway.kernel.fail_at(0)

    gateway.happens = fail
    with pytest.raises(KernelError, match="told to fail"):
        gateway.controller.sync()
    gateway.kernel._failing = None
    gateway.settle()
    assert gateway.send("203.0.113.9") == ["drop"]


def test_who_undoes_over_and_over_keeps_no_change_from_its_end(gateway: Slow) -> None:
    def undo() -> None:
        gateway.kernel.hooks.clear()
        gateway.happens = undo

    gateway.happens = undo
    gateway.controller.sync()
    gateway.happens = lambda: None
    assert set(gateway.trees) == {*NAMES, "nl-in"}
    assert gateway.controller._repairs.counts["chains"] >= 1
    assert gateway.send("203.0.113.9") == ["accept"], "it was undone behind the last tree"
    gateway.controller._due = dict.fromkeys(gateway.controller._due, 0.0)
    gateway.controller.tick()
    assert gateway.send("203.0.113.9") == ["drop"]
    assert not gateway.controller.plan()


def test_trees_that_take_long_to_read_keep_no_look_at_chains_waiting(
    gateway: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.settle()
    queues, read = gateway.kernel.queues, list[float]()

    def read_long() -> Queues:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        read.append(time.monotonic())
        return queues()

    monkeypatch.setattr(gateway.kernel, "queues", read_long)
    gateway.controller._due = dict.fromkeys(gateway.controller._due, 0.0)
    gateway.controller.tick()
    assert read
    due = gateway.controller._due
    assert due["trees"] > read[-1] + 5
    assert due["structure"] < due["trees"] - 4
    read.clear()
    gateway.kernel.hooks.clear()
    gateway.controller._due["structure"] = 0.0
    gateway.controller._check_drift()
    assert gateway.send("203.0.113.9") == ["drop"]
