"""What is delivered against what is configured, with real packets."""

from __future__ import annotations

import time

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from scripts.testbed.streams import receive, sending

SECONDS = 5.0
RATES = ((10, 128), (1_000, 128), (7_777, 128), (50_000, 64))
MOST_OFF = 0.01


def measure() -> list[Figure]:
    """Packets at four rates, then bits, one after the other."""
    with Lab() as lab, Gateway(lab) as gateway:
        figures = [_packets(lab, gateway, rate, size) for rate, size in RATES]
        return [*figures, _bits(lab, gateway, 10_000_000)]


def _packets(lab: Lab, gateway: Gateway, rate: int, size: int) -> Figure:
    delivered = _deliver(lab, gateway, f"{rate} packets/s", max(1.6 * rate, 200), size)[0]
    wanted = rate * SECONDS
    met = abs(delivered - wanted) <= max(1, MOST_OFF * wanted)
    off = f"{100 * (delivered / wanted - 1):+.2f} %"
    return Figure(f"{rate:,} packets/s", f"{delivered / SECONDS:,.1f} packets/s ({off})", "1 % or one packet", met)


def _bits(lab: Lab, gateway: Gateway, rate: int) -> Figure:
    size = 1500
    delivered = 8 * _deliver(lab, gateway, f"{rate} bit/s", 2 * rate / 8 / size, size)[1] / SECONDS
    off = f"{100 * (delivered / rate - 1):+.2f} %"
    return Figure(
        f"{rate / 1e6:g} Mbit/s", f"{delivered / 1e6:.3f} Mbit/s ({off})", "1 %", abs(delivered / rate - 1) <= 0.01
    )


def _deliver(lab: Lab, gateway: Gateway, rate: str, sent: float, size: int) -> tuple[int, int]:
    """Packets and IP bytes that arrive in five seconds, once the burst is over."""
    rule = gateway.request("POST", "/rules", json={"target": CLIENT, "rate": rate}).json()
    assert rule["status"]["state"] == "applied", rule
    after = 2.0
    with (
        receive(lab.server) as receiver,
        sending(lab.client, SERVER, rate=sent, seconds=after + SECONDS + 1, size=size),
    ):
        time.sleep(after + SECONDS + 1.5)
        report = receiver.stop()
    assert report.lost == 0, "the receiver could not keep up; the figure would prove nothing"
    gateway.request("DELETE", f"/rules/{rule['id']}")
    found = report.delivered(after=after, during=SECONDS)
    return found.packets, found.bytes
