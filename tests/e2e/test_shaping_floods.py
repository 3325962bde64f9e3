"""A flood from many addresses that are shaped: once it has ended, others have the line again."""

from __future__ import annotations

import time

from scripts.testbed import streams
from scripts.testbed.namespaces import LAN_MAC, SERVER, Lab
from scripts.testbed.reports import FloodReport
from tests.e2e.gateway import Gateway
from tests.e2e.loads import offer, shape

OTHER = "10.1.200.7"
FLOODING = "10.1.16.0/24"
SHARING = (
    shape("0.0.0.0/0", "19 Mbit/s", direction="to", interface="wan", per="target"),
    shape("10.1.0.0/16", "1 Mbit/s", ceil="19 Mbit/s", per="host", direction="from", interface="wan"),
)
"""The rules of README, "Sharing a line"."""
WELL_AGAIN = 12.0
"""Seconds after the flood. What waits is sent in two; the rest is for a machine that others use too, and for what is
looked at itself. With a queue for each as if it were alone, nothing passed for 40."""


def test_others_have_the_line_again_soon_after_a_flood_from_many_addresses(gateway: Gateway, lab: Lab) -> None:
    lab.add_client_addresses(OTHER)
    gateway.put(*SHARING)
    assert _pass(lab) > 0.9, "the line is not what it should be without any flood"
    _flood(lab, 3)
    ended = time.monotonic()
    assert sum(each.leaf is not None for each in gateway.classes("wan").values()) > 200, "the flood had no classes"
    shares = [_pass(lab)]
    while shares[-1] < 0.9 and time.monotonic() - ended < WELL_AGAIN:
        shares.append(_pass(lab))
    assert shares[-1] >= 0.9, f"what has passed of 2 Mbit/s, second by second: {shares}"


def _pass(lab: Lab) -> float:
    """How much of what the other host sends arrives, and is answered."""
    with streams.receive(lab.server) as receiver:
        with offer(lab.client, SERVER, OTHER, megabits=2, seconds=1) as sender:
            sent = sender.report().packets
        answered = lab.client.run(
            *("ping", "-q", "-I", OTHER, "-c", "5", "-i", "0.1", "-W", "1", SERVER), check=False
        ).returncode
    return receiver.report().by_source.get(OTHER, 0) / sent if answered == 0 else 0.0


def _flood(lab: Lab, seconds: float) -> None:
    with streams.Stream(
        lab.client,
        lambda found: FloodReport(**found),
        *("flood", SERVER, f"--sources={FLOODING}", f"--gateway-mac={LAN_MAC}", "--size=1400"),
        f"--seconds={seconds}",
    ) as stream:
        stream.report()


def test_who_starts_anew_after_a_flood_finds_the_queues_as_they_shall_be(gateway: Gateway, lab: Lab) -> None:
    line, each = SHARING
    gateway.put(line, {**each, "rate": "50 kbit/s"})  # all of which the line has
    _flood(lab, 1)
    gateway.wait(lambda: len(_queues(gateway)) > 200, "classes of the flood")
    gateway.stop()
    before = _queues(gateway)
    assert len(set(before.values()) - {"bfifo limit 475000"}) > 1, "nothing is shared"
    assert not gateway.drift(), str(gateway.drift())
    gateway.start()
    assert {each: leaf for each, leaf in _queues(gateway).items() if before.get(each, leaf) != leaf} == {}
    assert not gateway.drift(), str(gateway.drift())


def _queues(gateway: Gateway) -> dict[int, str]:
    """The queue of each class."""
    return {number: str(each.leaf) for number, each in gateway.classes("wan").items() if each.leaf}
