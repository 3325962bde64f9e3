"""What the traffic counted, as it is printed (JSON) and as callers read it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from scripts.testbed.errors import LabError
from scripts.testbed.stalls import Stall

BIN_SECONDS = 0.01
ETHERNET = 14  # bytes of header that tc and a device's counters add to each IP packet


@dataclass(frozen=True)
class SendReport:
    """What a sender sent.

    packets, bytes: handed to the kernel; bytes are IP bytes.
    refused: what the sending host itself dropped (a rule in its OUTPUT says EPERM, a full queue ENOBUFS).
    started: Unix time of the first packet.
    seconds: from the first packet to the end of the last one's share of time, so packets / seconds is the rate.
    """

    packets: int
    bytes: int
    refused: int
    started: float
    seconds: float

    @property
    def rate(self) -> float:
        """Packets per second, as sent."""
        return self.packets / self.seconds


@dataclass(frozen=True)
class Delivered:
    """What arrived in a stretch of time."""

    packets: int
    bytes: int
    seconds: float

    @property
    def packets_per_second(self) -> float:
        """The mean packet rate."""
        return self.packets / self.seconds

    @property
    def bits_per_second(self) -> float:
        """The mean rate in IP bits."""
        return self.bytes * 8 / self.seconds

    @property
    def ethernet_bits_per_second(self) -> float:
        """The mean rate as tc counts it."""
        return (self.bytes + ETHERNET * self.packets) * 8 / self.seconds


@dataclass(frozen=True)
class ReceiveReport:
    """What a receiver counted.

    bytes: IP bytes. first, last: Unix times of the first and the last packet, by the kernel's clock.
    series: by source address, the bins that are not empty as (number, packets, bytes); bin 0 begins at `start`,
    and each lasts `bin_seconds`.
    lost: packets that came but found the receiver's buffer full; a count with losses proves nothing.
    stalls: Unix times, begin and end, in which a core of the machine let nobody run.
    """

    packets: int
    bytes: int
    first: float | None
    last: float | None
    start: float
    lost: int
    series: Mapping[str, list[tuple[int, int, int]]] = field(repr=False)
    bin_seconds: float = BIN_SECONDS
    stalls: Sequence[Stall] = field(default=(), repr=False)

    @property
    def by_source(self) -> dict[str, int]:
        """Packets by source address."""
        return {source: sum(packets for _, packets, _ in bins) for source, bins in self.series.items()}

    @property
    def bins(self) -> list[int]:
        """Packets in each bin, from `start` to the last that has any."""
        counts = [0] * (1 + max((n for bins in self.series.values() for n, _, _ in bins), default=-1))
        for bins in self.series.values():
            for number, packets, _ in bins:
                counts[number] += packets
        return counts

    def delivered(self, *, after: float = 0, during: float | None = None, source: str | None = None) -> Delivered:
        """What arrived in the `during` seconds that begin `after` seconds behind the first bin.

        Both are rounded to whole bins. Without `during`, up to the last packet. With `source`, from it only.
        To measure a limit, skip the burst by `after` and let the sender go on beyond the end.
        """
        begin = math.ceil(round(after / self.bin_seconds, 6))
        length = len(self.bins) - begin if during is None else round(during / self.bin_seconds)
        end = begin + max(1, length)
        chosen = self.series.values() if source is None else [self.series.get(source, [])]
        hits = [(packets, size) for bins in chosen for n, packets, size in bins if begin <= n < end]
        return Delivered(
            packets=sum(packets for packets, _ in hits),
            bytes=sum(size for _, size in hits),
            seconds=(end - begin) * self.bin_seconds,
        )

    def rates(self, source: str, *, every: float = 0.1, begin: float, end: float) -> list[float]:
        """Ethernet bits a second from `source`, in each whole stretch of `every` seconds between two Unix times."""
        stretches = int((end - begin) / every + 1e-6)
        bits = [0] * stretches
        for number, packets, size in self.series.get(source, []):
            stretch = math.floor((self.start + number * self.bin_seconds - begin) / every + 1e-6)
            if 0 <= stretch < stretches:
                bits[stretch] += 8 * (size + ETHERNET * packets)
        return [each / every for each in bits]

    def began(self, source: str) -> float:
        """The Unix time of the first bin that has a packet from `source`; ValueError when none came."""
        return self.start + self.bin_seconds * min(number for number, _, _ in self.series.get(source, []))


@dataclass(frozen=True)
class MeterReport:
    """What a device received: its counter of Ethernet bytes, read again and again.

    readings: Unix time, and the bytes since the device was made.
    """

    readings: Sequence[tuple[float, int]] = field(repr=False)

    def bits_per_second(self, begin: float, end: float) -> float:
        """The mean rate in Ethernet bits between the first and the last reading within two Unix times.

        Raises LabError when there are not two.
        """
        inside = [reading for reading in self.readings if begin <= reading[0] <= end]
        if len(inside) < 2:
            raise LabError(f"The meter has {len(inside)} readings within {end - begin:g} s; a rate needs two.")
        (first, before), (last, after) = inside[0], inside[-1]
        return 8 * (after - before) / (last - first)


@dataclass(frozen=True)
class TransferReport:
    """What a TCP receiver got from iperf3: bytes of payload, without those of the seconds that were skipped."""

    bytes: int
    seconds: float

    @property
    def bits_per_second(self) -> float:
        """The mean rate in bits of payload."""
        return self.bytes * 8 / self.seconds

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `iperf3 --json` printed; LabError with its own words when it failed."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise LabError(f"iperf3 printed no JSON: {text.strip()[:200]!r}") from error
        if "error" in found:
            raise LabError(f"iperf3: {found['error']}")
        received = found["end"]["sum_received"]
        return cls(received["bytes"], received["seconds"])


@dataclass(frozen=True)
class FloodReport:
    """What raw frames from one core cost.

    ns_per_packet: median over slices of a tenth of a second; it holds all that the core did for a packet:
    sending, the gateway's work, and the delivery.
    backlog_drops: frames that the core's backlog dropped before the gateway saw them.
    """

    packets: int
    seconds: float
    ns_per_packet: float
    backlog_drops: int


@dataclass(frozen=True)
class ConnectReport:
    """What became of the connections that were tried."""

    established: int
    refused: int
    unreachable: int
    timed_out: int


@dataclass(frozen=True)
class ListenReport:
    """How many connections a listener accepted."""

    accepted: int
