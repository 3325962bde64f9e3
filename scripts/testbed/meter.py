"""Reads the rate at a device while traffic flows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from scripts.testbed.deadline import Deadline, ready
from scripts.testbed.namespaces import Namespace
from scripts.testbed.reports import MeterReport


def rates(namespace: Namespace, device: str = "eth0", *, every: float = 0.1, seconds: float = 60) -> Iterator[float]:
    """Packets per second that a device receives, one number after each `every` seconds, for `seconds`."""
    start = before = time.perf_counter()
    packets = namespace.received_packets(device)
    for number in range(1, round(seconds / every) + 1):
        time.sleep(max(0, start + number * every - time.perf_counter()))
        now, count = time.perf_counter(), namespace.received_packets(device)
        yield (count - packets) / (now - before)
        before, packets = now, count


def meter(device: str, *, every: float, deadline: Deadline) -> MeterReport:
    """Reads the bytes that a device of this namespace has received, every so many seconds, until the deadline."""
    counter = Path("/sys/class/net", device, "statistics/rx_bytes")
    readings = [(time.time(), int(counter.read_text()))]
    ready()
    while not deadline.over():
        time.sleep(every)
        readings.append((time.time(), int(counter.read_text())))
    return MeterReport(readings)
