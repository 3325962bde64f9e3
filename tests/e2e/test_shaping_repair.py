"""Whoever meddles with the queues, and whenever the controller dies: it is put right."""

from __future__ import annotations

import random
import signal
import time

import pytest

from netlimit.rules import Rule
from netlimit.tree import FIRST_CHILD, TOP, format_classid, format_handle
from scripts.testbed import streams
from scripts.testbed.namespaces import LAN, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import megabits, offer, passed, shape

PERSISTENT = True
HOST = "10.1.110.1"
DEATHS, COME, GO = 4, 200, 30
DAMAGES = {
    "the root qdisc": "tc qdisc del dev wan root",
    "the root filter": "tc filter del dev wan parent {root}",
    "a child": "tc qdisc del dev wan parent {child}",
    "a host's class": "tc class del dev wan classid {class}",
    "a host's rate": "tc class change dev wan classid {class} htb rate 9mbit ceil 9mbit",
    "an entry of the lane's set": "ipset del {set} 10.1.110.1",
    "the rules that ask the sets": "iptables-legacy -t mangle -F NL-FORWARD",
    "the filter on the ingress": "tc filter del dev lan ingress",
    "the ingress of a device": "tc qdisc del dev lan clsact",
    "the filter on the egress": "tc filter del dev wan egress",
    "what holds that": "tc qdisc del dev wan clsact",
    "the device for what ends here": "ip link del nl-in",
    "the root qdisc of that device": "tc qdisc replace dev nl-in root pfifo",
}


@pytest.fixture(autouse=True)
def addresses(lab: Lab) -> None:
    lab.add_client_addresses(HOST)


def test_what_somebody_takes_away_comes_back(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape(HOST), shape("10.1.111.0/24", per="host"))
    repaired = {}
    with (
        streams.receive(lab.gateway) as inside,
        streams.receive(lab.server) as outside,
        offer(lab.client, LAN, HOST, megabits=3, seconds=100) as ending,
        offer(lab.client, "", HOST, megabits=3, seconds=100) as passing,
    ):
        for name, damage in DAMAGES.items():
            repaired[name] = suffer(gateway, lab, damage) + 0.2
            time.sleep(1.3)
        ending.stop()
        passing.stop()
    for receiver in (inside, outside):
        report = receiver.report()
        for name, begin in repaired.items():
            assert passed(report, HOST, begin=begin, end=begin + 1).is_about(1), name


def suffer(gateway: Gateway, lab: Lab, damage: str) -> float:
    """Do a damage and wait until it has been noticed and repaired; the Unix time when that was."""
    tree, number = gateway.kernel.queues().trees["wan"], gateway.class_of(HOST)
    parts = {"root": format_handle(tree.handle), "class": format_classid(number), "set": gateway.set_of(HOST)}
    parts["child"] = format_classid(min(tree.children.values()))
    before = repairs(gateway)
    lab.gateway.run(*damage.format(**parts).split())
    gateway.wait(lambda: repairs(gateway) > before, f"{damage} to be repaired")
    assert not gateway.drift(), damage
    return time.time()


def repairs(gateway: Gateway) -> int:
    (status,) = gateway.store.hosts()
    return status.drift


def test_killed_at_any_moment_of_a_change_of_many(controller: Gateway, lab: Lab) -> None:
    """Hosts come and go by the hundred; one that stays is shaped all the time, and keeps its class."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    controller.put(shape(HOST))
    number = controller.class_of(HOST)
    there: list[Rule] = []
    with streams.receive(lab.server) as receiver, offer(lab.client, "", HOST, megabits=3, seconds=60) as sender:
        for death in range(DEATHS):
            controller.erase(*there[:GO])
            there[:GO] = []
            there += controller.write(*(shape(f"10.1.{112 + death}.{each}") for each in range(COME)))
            time.sleep(chance.uniform(0, 0.3))
            controller.stop(signal.SIGKILL)
            controller.start()
            assert not controller.drift(), f"seed {seed}, death {death}"
            assert controller.class_of(HOST) == number
            hosts = [each for each in controller.classes("wan") if each >> 16 >= FIRST_CHILD and each & 0xFFFF != TOP]
            assert len(hosts) == 1 + len(there), f"seed {seed}, death {death}"
        seconds = sender.stop().seconds
    report = receiver.report()
    assert megabits(report, HOST, after=0.5, during=seconds - 1).is_about(1)
