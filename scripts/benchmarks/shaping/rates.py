"""What a shaped host gets against what is configured: UDP that would fill more, and TCP."""

from __future__ import annotations

import time

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.benchmarks.shaping.rules import held, shape
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from scripts.testbed.reports import ETHERNET, MeterReport
from scripts.testbed.streams import SINK, Stream, metering, open_sink, sending
from scripts.testbed.transfers import transferring

MEGABITS = (1, 10, 100, 500)
SKIP, SECONDS = 1.0, 10.0  # a burst and a slow start are over in the first second
SIZE, OFFERED = 1500, 1.2  # IP bytes; how many times the rate is sent
MOST_OFF = 0.02


def measure() -> list[Figure]:
    """UDP and TCP at four rates, one after the other, in Ethernet bits as the server's device counts them."""
    figures = []
    with Lab() as lab, Gateway(lab) as gateway:
        open_sink(lab)
        for megabits in MEGABITS:
            with held(gateway, shape(CLIENT, f"{megabits} Mbit/s")):
                figures.append(
                    compare_rate(f"{megabits} Mbit/s, UDP", _deliver_udp(lab, megabits * 1e6), megabits * 1e6)
                )
                figures.append(compare_rate(f"{megabits} Mbit/s, TCP", _deliver_tcp(lab), megabits * 1e6))
    return figures


def compare_rate(what: str, delivered: float, wanted: float) -> Figure:
    """A rate in bits a second against the one that was wanted."""
    off = delivered / wanted - 1
    return Figure(what, f"{delivered / 1e6:.3f} Mbit/s ({100 * off:+.2f} %)", "2 %", abs(off) <= MOST_OFF)


def _deliver_udp(lab: Lab, rate: float) -> float:
    packets = OFFERED * rate / 8 / (SIZE + ETHERNET)
    with (
        metering(lab.server) as meter,
        sending(lab.client, SINK, rate=packets, seconds=SKIP + SECONDS + 1, size=SIZE) as sender,
    ):
        delivered = _watch(meter)
        sent = sender.stop()
    assert 8 * (SIZE + ETHERNET) * sent.rate > rate, (
        "the sender could not fill the rate; the figure would prove nothing"
    )
    return delivered


def _deliver_tcp(lab: Lab) -> float:
    with metering(lab.server) as meter, transferring(lab.client, lab.server, SERVER, seconds=SKIP + SECONDS + 1):
        return _watch(meter)


def _watch(meter: Stream[MeterReport]) -> float:
    """Bits a second while traffic flows, without its start."""
    time.sleep(SKIP)
    begin = time.time()
    time.sleep(SECONDS)
    return meter.stop().bits_per_second(begin, begin + SECONDS)
