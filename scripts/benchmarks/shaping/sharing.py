"""How hosts share a budget: who borrows gives back at once, and equals get the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import takewhile
from statistics import fmean

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.benchmarks.shaping.rates import compare_rate
from scripts.benchmarks.shaping.rules import held, shape
from scripts.testbed.fairness import jain
from scripts.testbed.namespaces import SERVER, Lab
from scripts.testbed.reports import ETHERNET, ReceiveReport, SendReport
from scripts.testbed.streams import Stream, receive, sending
from scripts.testbed.transfers import PORT, transferring

NETWORK = "10.77.0.0/24"
HOSTS = [f"10.77.0.{number}" for number in range(1, 11)]
BUDGET, RATE = 10e6, 5e6  # bits a second
SKIP, SECONDS = 2.0, 5.0
SIZE = 1500
STRETCH, NOISE = 0.1, 1.1  # seconds; within them a packet more or less is 2 %
LEAST_JAIN = 0.99


def measure() -> list[Figure]:
    """A borrower whose neighbour wakes up, then ten hosts by UDP and by TCP."""
    with Lab() as lab, Gateway(lab) as gateway:
        lab.add_client_addresses(*HOSTS)
        budget = shape(NETWORK, "10 Mbit/s", per="target")
        with held(gateway, budget, *(shape(host, "5 Mbit/s", ceil="10 Mbit/s") for host in HOSTS[:2])):
            figures = _borrow(lab)
        with held(gateway, budget, shape(NETWORK, "500 kbit/s", ceil="10 Mbit/s", per="host")):
            return [*figures, _compare_shares("UDP", _share_udp(lab)), _compare_shares("TCP", _share_tcp(lab))]


def _borrow(lab: Lab) -> list[Figure]:
    """Two hosts of 5 Mbit/s each in a budget of 10: one alone, then beside the other."""
    borrower, other = HOSTS[:2]
    with receive(lab.server) as receiver, _offer(lab, [borrower], 1.2 * BUDGET):
        time.sleep(SKIP + SECONDS)
        with _offer(lab, [other], 1.2 * BUDGET):
            time.sleep(SECONDS)
            report = receiver.stop()
    joined = report.began(other)
    alone = report.rates(borrower, every=STRETCH, begin=joined - SECONDS, end=joined)
    beside = report.rates(borrower, every=STRETCH, begin=joined, end=joined + SECONDS - 1)
    fallen = STRETCH * (1 + len(list(takewhile(lambda rate: rate > NOISE * RATE, beside))))
    return [
        compare_rate("borrows 10 Mbit/s while the budget is free", fmean(alone), BUDGET),
        Figure("gives back when its neighbour sends, within", f"{fallen:.1f} s", "1 s", fallen <= 1),
        compare_rate("and keeps 5 Mbit/s from 1 s on", fmean(beside[round(1 / STRETCH) :]), RATE),
    ]


def _share_udp(lab: Lab) -> list[float]:
    """Bits a second of each host, though they offer from 1.5 to 8 times their share."""
    offers = [host for weight, host in enumerate(HOSTS, 2) for _ in range(weight)]
    with receive(lab.server) as receiver, _offer(lab, offers, len(offers) * 0.75e6):
        time.sleep(SKIP + SECONDS + 0.5)
        report = receiver.stop()
    return [_rate(report, host) for host in HOSTS]


def _rate(report: ReceiveReport, host: str) -> float:
    return report.delivered(after=SKIP, during=SECONDS, source=host).ethernet_bits_per_second


def _share_tcp(lab: Lab) -> list[float]:
    """Bits of payload a second of each host, by one connection each."""
    with ExitStack() as stack:
        transfers = [
            stack.enter_context(
                transferring(
                    lab.client, lab.server, SERVER, seconds=SECONDS, skip=SKIP, source=host, port=PORT + number
                )
            )
            for number, host in enumerate(HOSTS)
        ]
        return [transfer.report().bits_per_second for transfer in transfers]


def _compare_shares(protocol: str, shares: list[float]) -> Figure:
    index = jain(shares)
    value = f"{index:.4f} ({min(shares) / 1e6:.2f} to {max(shares) / 1e6:.2f} Mbit/s)"
    return Figure(f"ten hosts in 10 Mbit/s, {protocol}: Jain's index", value, "0.99", index >= LEAST_JAIN)


def _offer(lab: Lab, hosts: Sequence[str], rate: float) -> Stream[SendReport]:
    """UDP from hosts in turn, `rate` Ethernet bits a second in all, for longer than anybody watches."""
    packets = rate / 8 / (SIZE + ETHERNET)
    return sending(lab.client, SERVER, rate=packets, seconds=SKIP + 2 * SECONDS + 5, size=SIZE, sources=hosts)
