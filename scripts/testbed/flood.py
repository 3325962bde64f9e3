"""Sends prebuilt frames from many spoofed addresses as fast as one core can: what does a packet cost?"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import statistics
import struct
import time
from pathlib import Path

from scripts.testbed.deadline import Deadline, ready
from scripts.testbed.mmsg import Column, Messages
from scripts.testbed.reports import FloodReport

BATCH = 64
SLICE = 0.1  # seconds
SOL_PACKET, PACKET_QDISC_BYPASS = 263, 20  # of AF_PACKET, and not in Python's socket module
PORT = 9


def flood(
    sources: ipaddress.IPv4Network,
    destination: ipaddress.IPv4Address,
    *,
    device: str,
    gateway_mac: str,
    size: int,
    core: int,
    seconds: float,
) -> FloodReport:
    """Sends UDP packets of `size` IP bytes from every address of `sources`, shuffled, again and again.

    All that the machine does for them is done on `core`: on veth pairs the gateway forwards a packet before
    the system call that sent it returns.
    """
    os.sched_setaffinity(0, {core})
    frames = _frames(sources, destination, _mac(device), bytes.fromhex(gateway_mac.replace(":", "")), size)
    messages = Messages(sources.num_addresses, Column(frames, 14 + size))
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.setsockopt(SOL_PACKET, PACKET_QDISC_BYPASS, 1)
        sock.bind((device, 0))
        ready()
        drops, start = _backlog_drops(core), time.perf_counter()
        packets, costs = _send_slices(sock.fileno(), messages, Deadline(seconds))
        elapsed = time.perf_counter() - start
    return FloodReport(packets, elapsed, statistics.median(costs), _backlog_drops(core) - drops)


def _send_slices(descriptor: int, messages: Messages, deadline: Deadline) -> tuple[int, list[float]]:
    total = 0
    costs: list[float] = []
    while not deadline.over() or not costs:
        begin = now = time.perf_counter()
        sent = 0
        while now - begin < SLICE:
            index = (total + sent) % messages.count
            sent += messages.send(descriptor, index, min(BATCH, messages.count - index))
            now = time.perf_counter()
        total += sent
        costs.append((now - begin) / sent * 1e9)
    return total, costs


def _frames(
    sources: ipaddress.IPv4Network, destination: ipaddress.IPv4Address, own: bytes, peer: bytes, size: int
) -> bytearray:
    """Ethernet, IPv4 and UDP (without a checksum, which IPv4 allows) for each source."""
    addresses = list(range(int(sources.network_address), int(sources.broadcast_address) + 1))
    random.Random(0).shuffle(addresses)
    ethernet = peer + own + struct.pack("!H", 0x0800)
    udp = struct.pack("!HHHH", PORT, PORT, size - 20, 0) + bytes(size - 28)
    head = struct.pack("!BBHHHBB", 0x45, 0, size, 0, 0, 64, socket.IPPROTO_UDP)
    fixed = sum(struct.unpack("!6H", head + bytes(2))) + sum(struct.unpack("!2H", destination.packed))
    out = bytearray()
    for address in addresses:
        total = fixed + (address >> 16) + (address & 0xFFFF)
        total = (total >> 16) + (total & 0xFFFF)
        checksum = ~((total >> 16) + total) & 0xFFFF
        out += ethernet + head + struct.pack("!HI4s", checksum, address, destination.packed) + udp
    return out


def _mac(device: str) -> bytes:
    return bytes.fromhex(Path("/sys/class/net", device, "address").read_text().strip().replace(":", ""))


def _backlog_drops(core: int) -> int:
    """Frames that this core's backlog has dropped so far (see /proc/net/softnet_stat)."""
    rows = [row.split() for row in Path("/proc/net/softnet_stat").read_text().splitlines()]
    return next((int(row[1], 16) for row in rows if len(row) > 12 and int(row[12], 16) == core), 0)
