"""Counts UDP packets by source and time of arrival, as the kernel stamped it."""

from __future__ import annotations

import ipaddress
import select
import socket
import struct
import time
from collections import defaultdict

from scripts.testbed.deadline import Deadline, ready
from scripts.testbed.mmsg import Column, Messages
from scripts.testbed.reports import BIN_SECONDS, ReceiveReport
from scripts.testbed.sender import HEADERS
from scripts.testbed.stalls import Stall, Watch

# Of Linux, and not in Python's socket module.
SO_RCVBUFFORCE, SO_TIMESTAMPNS, SO_MEMINFO = 33, 35, 55
MEMINFO_DROPS = 8  # the place of the socket's drop count in SO_MEMINFO

BUFFER = 64 << 20  # bytes: about 80,000 small packets, which cost the kernel some 800 bytes each
BATCH = 512
REST = 0.002  # seconds between reads: fewer wake-ups leave the cores to those who are measured
BIN = round(BIN_SECONDS * 1e9)

NAME = struct.Struct("=8s16s4s")  # sockaddr_in6: IPv4 senders appear as ::ffff:a.b.c.d
STAMP = struct.Struct("=16xqq")  # cmsghdr, struct timespec

Counts = defaultdict[tuple[bytes, int], list[int]]


def receive(port: int, *, answer: bool, deadline: Deadline) -> ReceiveReport:
    """Counts what arrives for `port`, v4 and v6, until the deadline, and then what is still in the buffer.

    answer: sends one byte back for each packet, so that connection tracking sees an answered flow.
    """
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sock.bind(("::", port))
        ready()
        tally = _Tally(sock, answer)
        with Watch() as watch:
            while not deadline.over():
                if select.select([sock], [], [], 0.01)[0]:
                    tally.drain()
                    time.sleep(REST)
        tally.drain()
        drops = sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 64)
        return tally.report(struct.unpack_from("=I", drops, 4 * MEMINFO_DROPS)[0], watch.found)


class _Tally:
    """Counts by source and bin, fed from a socket."""

    def __init__(self, sock: socket.socket, answer: bool) -> None:
        self.sock = sock
        self.counts: Counts = defaultdict(lambda: [0, 0])
        self.first = self.last = 0
        self.names = Column(bytes(NAME.size * BATCH), NAME.size)
        self.stamps = Column(bytes(STAMP.size * BATCH), STAMP.size)
        # One byte is enough of a payload: with MSG_TRUNC the kernel tells the whole length.
        payload = Column(bytes(1), 1, stride=0)
        self.messages = Messages(BATCH, payload, self.names, self.stamps)
        self.answers = Messages(BATCH, payload, self.names) if answer else None

    def drain(self) -> None:
        """Reads until nothing is left."""
        while True:
            try:
                count = self.messages.receive(self.sock.fileno(), socket.MSG_DONTWAIT | socket.MSG_TRUNC)
            except BlockingIOError:
                return
            self._count(count)
            if self.answers is not None:
                self.answers.send(self.sock.fileno(), 0, count)
            if count < BATCH:
                return

    def _count(self, count: int) -> None:
        names = NAME.iter_unpack(memoryview(self.names.buffer)[: count * NAME.size])
        stamps = STAMP.iter_unpack(memoryview(self.stamps.buffer)[: count * STAMP.size])
        stamp = 0
        for (_, address, _), (seconds, rest), length in zip(names, stamps, self.messages.lengths(count), strict=True):
            stamp = seconds * 1_000_000_000 + rest
            cell = self.counts[address, stamp // BIN]
            cell[0] += 1
            cell[1] += length
            if not self.first:
                self.first = stamp
        self.last = stamp

    def report(self, lost: int, stalls: list[Stall]) -> ReceiveReport:
        start = self.first // BIN
        series: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for (packed, number), (packets, payload) in sorted(self.counts.items()):
            source, headers = _source(packed)
            series[source].append((number - start, packets, payload + packets * headers))
        bins = [bin_ for bins in series.values() for bin_ in bins]
        return ReceiveReport(
            packets=sum(packets for _, packets, _ in bins),
            bytes=sum(size for _, _, size in bins),
            first=self.first / 1e9 if self.first else None,
            last=self.last / 1e9 if self.last else None,
            start=start * BIN_SECONDS,
            lost=lost,
            series=dict(series),
            stalls=stalls,
        )


def _source(packed: bytes) -> tuple[str, int]:
    """A sender's address as text, and the bytes of IP and UDP headers that its packets have."""
    address = ipaddress.IPv6Address(packed)
    mapped = address.ipv4_mapped
    return (str(address), HEADERS[6]) if mapped is None else (str(mapped), HEADERS[4])
