"""What a host that is not shaped notices of those that are: its round trips beside their load."""

from __future__ import annotations

import time
from statistics import median

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.benchmarks.shaping.rules import held, shape
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from scripts.testbed.reports import ETHERNET
from scripts.testbed.streams import SINK, open_sink, round_trips, sending

NEIGHBOUR = "10.1.0.3"
SIZE = 1500
PACKETS = 120e6 / 8 / (SIZE + ETHERNET)  # a second, into 100 Mbit/s: the queue is always full
ROUNDS, PINGS, EVERY = 5, 150, 0.01
MOST_MS = 1.0


def measure() -> list[Figure]:
    """The same load through two gateways in turn: one shapes it, the other holds nothing."""
    with Lab() as bare, Lab() as shaped, Gateway(shaped) as gateway, held(gateway, shape(CLIENT, "100 Mbit/s")):
        labs = {"bare": bare, "shaped": shaped}
        taken: dict[str, list[float]] = {name: [] for name in labs}
        for lab in labs.values():
            lab.add_client_addresses(NEIGHBOUR)
            open_sink(lab)
        for _ in range(ROUNDS):
            for name, lab in labs.items():
                taken[name] += _ping_beside_load(lab)
    without, beside = median(taken["bare"]), median(taken["shaped"])
    return [
        Figure("an unshaped host's ping beside 120 Mbit/s, without HTB", f"{without:.3f} ms"),
        Figure(
            "and beside the same shaped to 100 Mbit/s",
            f"{beside - without:+.3f} ms",
            "1 ms",
            beside - without <= MOST_MS,
        ),
    ]


def _ping_beside_load(lab: Lab) -> list[float]:
    """Milliseconds of each round trip."""
    with sending(lab.client, SINK, rate=PACKETS, seconds=PINGS * EVERY + 5, size=SIZE, sources=[CLIENT]):
        time.sleep(0.3)
        taken = round_trips(lab.client, SERVER, count=PINGS, interval=EVERY, source=NEIGHBOUR)
    assert len(taken) >= 0.9 * PINGS, f"only {len(taken)} of {PINGS} pings were answered"
    return taken
