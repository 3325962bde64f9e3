"""A line that is promised many times over, while few send: who lies alone beside a thousand that are idle."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from netlimit.branches import SHARD_HOSTS
from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import megabits, offer, shape

CUSTOMERS = [f"10.1.{100 + number // 200}.{number % 200 + 1}" for number in range(SHARD_HOSTS + 1)]
FIRST, LAST = CUSTOMERS[:5], CUSTOMERS[-1]
PROMISED = 2.0
CAP = shape("0.0.0.0/0", "20 Mbit/s", direction="from", interface="wan", per="target")
EACH = [
    shape(customer, f"{PROMISED} Mbit/s", ceil="20 Mbit/s", direction="from", interface="wan") for customer in CUSTOMERS
]
ENOUGH = 0.6
"""Of what is promised: for a machine that others use, too. It was a fortieth."""


@pytest.fixture
def hasty(controller: Gateway, lab: Lab) -> Iterator[Gateway]:
    """A gateway that looks every second who sends."""
    lab.add_client_addresses(*FIRST, LAST)
    controller.stop()
    controller.start("-m", "tests.e2e.hasty")
    before = controller.store.revision()
    yield controller
    controller.store.rollback(before, "test", datetime.now(UTC))
    controller.wait_until_applied()
    controller.stop()
    controller.start()


def test_the_first_beyond_a_full_child_htb_has_what_it_is_promised(hasty: Gateway, lab: Lab) -> None:
    hasty.add(CAP, *EACH)
    shards = {hasty.class_of(customer) >> 16 for customer in (*FIRST, LAST)}
    assert len(shards) == 2, "they lie in one child HTB, and nothing is tested"
    with (
        streams.receive(lab.server) as receiver,
        offer(lab.client, SERVER, *FIRST, LAST, megabits=3 * PROMISED, seconds=9) as sender,
    ):
        sender.report()
    report = receiver.report()
    for after in (1, 5):  # before anybody has looked, and afterwards
        passed = [megabits(report, each, after=after, during=2.5) for each in (*FIRST, LAST)]
        assert all(each.megabits >= ENOUGH * PROMISED * (1 - each.stalled) for each in passed), passed


def test_guarantees_follow_those_who_send_and_a_dry_run_finds_them_so(hasty: Gateway, lab: Lab) -> None:
    hasty.add(CAP, *EACH)
    full = hasty.class_of(FIRST[0]) >> 16

    def guaranteed() -> float:
        tree = hasty.kernel.queues().trees["wan"]
        return tree.classes[tree.children[full]].rate * 8 / 1e6

    assert guaranteed() == PROMISED, "what one of them is promised"
    with streams.receive(lab.server), offer(lab.client, SERVER, *FIRST, megabits=PROMISED, seconds=6) as sender:
        hasty.wait(lambda: guaranteed() >= 4 * PROMISED, "a guarantee for those who send")
        hasty.wait(lambda: not hasty.drift(), "a dry run with nothing to do")
        sender.report()
    hasty.wait(lambda: guaranteed() == PROMISED, "an end of the guarantee for those who have ended")
    hasty.wait(lambda: not hasty.drift(), "a dry run with nothing to do")
