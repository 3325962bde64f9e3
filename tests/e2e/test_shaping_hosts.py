"""Hosts of a subnet that is shaped per host: they appear, have classes of their own, and go again."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import megabits, offer, passed, shape

DRAINED = 2.0
"""Seconds by which what waited in the class that newcomers share has been sent: a merged packet has to fit in."""
NETWORK = "10.1.70.0/24"
HOSTS = [f"10.1.70.{number}" for number in range(1, 6)]
BUSY, QUIET, *_ = HOSTS
BLOCK = "fd00:70:0:1::/64"
IN_BLOCK = ["fd00:70:0:1::1", "fd00:70:0:1::2"]


@pytest.fixture(autouse=True)
def addresses(lab: Lab) -> None:
    lab.add_client_addresses(*HOSTS, *IN_BLOCK)


@pytest.fixture
def hasty(controller: Gateway) -> Iterator[Gateway]:
    """A gateway that does not wait long for hosts to come back."""
    controller.stop()
    controller.start("-m", "tests.e2e.hasty")
    yield controller
    controller.stop()
    controller.start()
    controller.clear()


def test_each_that_appears_has_its_own_class(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape(NETWORK, "500 kbit/s", per="host"))
    assert not any(map(gateway.class_of, HOSTS)), "nobody has been there yet"
    with (
        streams.receive(lab.server) as receiver,
        offer(lab.client, "", *HOSTS, megabits=1, seconds=DRAINED + 5) as sender,
    ):
        began = time.time()
        gateway.wait(lambda: all(map(gateway.class_of, HOSTS)), "classes of all hosts")
        joined = time.time()
        assert joined - began < 3, "It takes too long for what has its own class to be measured."
        assert len(set(map(gateway.class_of, HOSTS))) == len(HOSTS)
        sender.report()
    report = receiver.report()
    for host in HOSTS:
        assert passed(report, host, begin=joined + DRAINED, end=joined + DRAINED + 2).is_about(0.5)


def test_until_then_all_that_are_new_share_what_one_has(gateway: Gateway, lab: Lab) -> None:
    """Nobody gets through the gap: whoever has no class yet is in one of the rule's rate."""
    gateway.put(shape(NETWORK, "500 kbit/s", per="host"))
    gateway.stop(signal.SIGKILL)
    with streams.receive(lab.server) as receiver, offer(lab.client, "", *HOSTS, megabits=1, seconds=2.7) as sender:
        sender.report()
    gateway.start()
    report = receiver.report()
    assert megabits(report, *HOSTS, after=0.5, during=2).is_about(0.5)


def test_thousands_that_appear_at_once_are_remembered(gateway: Gateway, lab: Lab) -> None:
    """A set that packets fill does not grow: in a small one 768 would shut out all others."""
    gateway.put(shape("10.64.0.0/16", "500 kbit/s", per="host", interface="wan"))
    with gateway.frozen():
        streams.flood(lab, seconds=1, sources="10.64.0.0/20", destination=SERVER)
        said = lab.gateway.run("ipset", "list", "-t").stdout
    (held,) = re.findall(r"Name: nl-seen\S+\n(?:.*\n)*?Number of entries: (\d+)", said)
    assert int(held) > 4000


def test_a_block_has_one_class(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape("fd00:70::/48", per="/64"))
    with offer(lab.client, "", *IN_BLOCK, megabits=1, seconds=2):
        gateway.wait(lambda: gateway.class_of(BLOCK) != 0, "the block's class")
        assert not any(map(gateway.class_of, IN_BLOCK))


def test_who_is_idle_goes_and_who_is_not_stays(hasty: Gateway, lab: Lab) -> None:
    hasty.put(shape(NETWORK, "500 kbit/s", per="host"))
    with streams.receive(lab.server) as receiver, offer(lab.client, "", BUSY, megabits=1, seconds=15) as sender:
        with offer(lab.client, "", QUIET, megabits=1, seconds=1) as visitor:
            hasty.wait(lambda: all(map(hasty.class_of, (BUSY, QUIET))), "both classes")
            busy, quiet = map(hasty.class_of, (BUSY, QUIET))
            assert {busy, quiet} <= hasty.classes("wan").keys()
            visitor.report()
        hasty.wait(lambda: hasty.class_of(QUIET) == 0, "the idle host to go")
        assert hasty.class_of(BUSY) == busy
        hasty.wait(lambda: quiet not in hasty.classes("wan"), "its class to go")
        with offer(lab.client, "", QUIET, megabits=1, seconds=1):
            hasty.wait(lambda: hasty.class_of(QUIET) != 0, "its return")
        seconds = sender.stop().seconds
    report = receiver.report()
    assert megabits(report, BUSY, after=1, during=seconds - 1.5).is_about(0.5)


def test_who_has_a_class_keeps_it_while_the_controller_starts_anew(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape(NETWORK, "500 kbit/s", per="host"), shape("10.1.71.1"))
    with streams.receive(lab.server) as receiver, offer(lab.client, "", *HOSTS, megabits=1, seconds=10) as sender:
        began = time.monotonic()
        gateway.wait(lambda: all(map(gateway.class_of, HOSTS)), "classes of all hosts")
        settled = time.monotonic() - began + 1  # a class begins with its burst
        before = {host: gateway.class_of(host) for host in (*HOSTS, "10.1.71.1")}
        for number in (signal.SIGKILL, signal.SIGTERM):
            gateway.stop(number)
            gateway.start()
            assert {host: gateway.class_of(host) for host in before} == before
        time.sleep(3)
        seconds = sender.stop().seconds
    assert not gateway.drift(), str(gateway.drift())
    report = receiver.report()
    for host in HOSTS:
        assert megabits(report, host, after=settled, during=seconds - settled - 0.5).is_about(0.5)
