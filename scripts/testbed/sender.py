"""Sends UDP at an exact rate, from one address or many."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import time
from collections.abc import Sequence

from scripts.testbed.deadline import Deadline, ready
from scripts.testbed.mmsg import Column, Messages
from scripts.testbed.reports import SendReport

BATCH = 256  # more than a core's backlog (1,000 packets) at once would be dropped before the gateway sees it
REST = 200e-6  # seconds between batches: short against a jiffy, long enough for a few packets at high rates
NAP = 0.1  # seconds between looks at the deadline, at low rates
IP_PKTINFO = 8  # Python's socket module has it from 3.14 on
HEADERS = {4: 28, 6: 48}  # IP and UDP


def send(
    destination: str,
    port: int,
    *,
    rate: float | None,
    count: int,
    size: int,
    sources: Sequence[str],
    source_port: int,
    deadline: Deadline,
) -> SendReport:
    """Sends `count` packets of `size` IP bytes, `rate` a second; without a rate as fast as it can.

    They leave from the sources in turn (none: the address that the kernel chooses). Packets are due by the
    clock: a delay is caught up with, so that the mean is exact, in batches of no more than 256.
    """
    address = ipaddress.ip_address(destination)
    messages = _messages(address, port, size, sources)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        sock.bind(("", source_port))
        ready()
        started = time.time()
        sent, refused, seconds = _pace(sock.fileno(), messages, rate, count, deadline)
    return SendReport(sent, sent * size, refused, started, seconds)


def _pace(
    descriptor: int, messages: Messages, rate: float | None, count: int, deadline: Deadline
) -> tuple[int, int, float]:
    done = refused = 0
    start = time.perf_counter()
    while done < count and not deadline.over():
        elapsed = time.perf_counter() - start
        due = count if rate is None else min(count, int(elapsed * rate) + 1)
        if due == done:
            time.sleep(min(max(done / rate - elapsed, REST), NAP) if rate else 0)
            continue
        index = done % messages.count
        try:
            done += messages.send(descriptor, index, min(due - done, messages.count - index, BATCH))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOBUFS):
                raise
            done, refused = done + 1, refused + 1
    if rate and done == count:
        time.sleep(max(0, count / rate - (time.perf_counter() - start)))
    return done - refused, refused, time.perf_counter() - start


def _messages(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, size: int, sources: Sequence[str]
) -> Messages:
    payload = size - HEADERS[address.version]
    if payload < 0:
        raise ValueError(f"A UDP packet of IPv{address.version} has at least {HEADERS[address.version]} bytes.")
    rounds = -(-BATCH // max(1, len(sources)))
    controls = [_from(ipaddress.ip_address(source)) for source in sources] * rounds
    return Messages(
        count=len(controls) or BATCH,
        data=Column(bytes(max(1, payload)), payload, stride=0),
        name=Column(name := _socket_name(address, port), len(name), stride=0),
        control=Column(b"".join(controls), len(controls[0])) if controls else None,
    )


def _socket_name(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> bytes:
    """The C structure sockaddr_in or sockaddr_in6."""
    if address.version == 4:
        return struct.pack("=H2s4s8x", socket.AF_INET, struct.pack("!H", port), address.packed)
    return struct.pack("=H2sI16sI", socket.AF_INET6, struct.pack("!H", port), 0, address.packed, 0)


def _from(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bytes:
    """A control message that makes a packet leave from `address`: one socket serves all sources."""
    if address.version == 4:
        body = struct.pack("=i4s4x", 0, address.packed)
        return _control(socket.IPPROTO_IP, IP_PKTINFO, body)
    return _control(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, struct.pack("=16si", address.packed, 0))


def _control(level: int, kind: int, body: bytes) -> bytes:
    length = 16 + len(body)
    return struct.pack("=Qii", length, level, kind) + body + bytes(-length % 8)
