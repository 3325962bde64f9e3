"""Sends packets as they are, and counts those that arrive: a program of its own, for it runs in another namespace.

python -m tests.e2e.evasion.wire send DEVICE      frames from standard input, a line of digits each
python -m tests.e2e.evasion.wire raw 4|6          IP packets, likewise, by a raw socket: they pass OUTPUT
python -m tests.e2e.evasion.wire count DEVICE     until standard input ends; then the datagrams seen, as JSON
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import struct
import sys
from collections.abc import Iterable, Iterator

_ETH_P_ALL, _RCVBUFFORCE, _ROOM = 3, 33, 1 << 27
_FREEBIND = 15
"""IP_FREEBIND (ip(7)): to be bound to an address that this host does not have."""
_ETHERTYPES = {4: 0x0800, 6: 0x86DD}


def frame(packet: bytes, target_mac: str, source_mac: str) -> bytes:
    """An Ethernet frame with an IP packet; broadcast and multicast go to their own MAC addresses."""
    version = packet[0] >> 4
    destination = packet[16:20] if version == 4 else packet[24:40]
    mac = bytes.fromhex(target_mac.replace(":", ""))
    if version == 6 and destination[0] == 0xFF:
        mac = b"\x33\x33" + destination[-4:]
    elif version == 4 and destination[0] >= 224:
        mac = (
            b"\xff" * 6 if destination[0] == 255 else b"\x01\x00\x5e" + bytes((destination[1] & 127,)) + destination[2:]
        )
    return mac + bytes.fromhex(source_mac.replace(":", "")) + struct.pack("!H", _ETHERTYPES[version]) + packet


def pack(messages: Iterable[bytes]) -> str:
    """A line each, as this program reads them."""
    return "".join(f"{message.hex()}\n" for message in messages)


def _unpack() -> Iterator[bytes]:
    return (bytes.fromhex(line) for line in sys.stdin)


def send(device: str) -> None:
    """Send frames from a device."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((device, 0))
        for message in _unpack():
            sock.send(message)


def send_raw(family: int) -> None:
    """Send IP packets with their headers; those that the kernel itself refuses are not sent."""
    domain = socket.AF_INET if family == 4 else socket.AF_INET6
    with socket.socket(domain, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        if family == 4:
            sock.setsockopt(socket.SOL_IP, _FREEBIND, 1)
        for message in _unpack():
            destination = message[16:20] if family == 4 else message[24:40]
            with contextlib.suppress(OSError):
                if family == 4:  # policies of IPsec go by the address that a socket is bound to, not by the header's
                    sock.bind((str(ipaddress.ip_address(message[12:16])), 0))
                sock.sendto(message, (str(ipaddress.ip_address(destination)), 0))


def count(device: str) -> None:
    """Print how many datagrams came by, by source and destination. Fragments of one count once."""
    seen: dict[tuple[str, str], set[int]] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _ROOM)
        sock.bind((device, _ETH_P_ALL))
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([sock, sys.stdin], [], [])
            if sock in readable:
                _note(seen, *sock.recvfrom(65536))
            elif sys.stdin.read() == "":
                break
    print(json.dumps([[source, target, len(numbers)] for (source, target), numbers in seen.items()]))


def _note(seen: dict[tuple[str, str], set[int]], data: bytes, address: tuple[str, int, int, int, bytes]) -> None:
    (kind,) = struct.unpack_from("!H", data, 12)
    if address[2] == 4:  # PACKET_OUTGOING: this host's own
        return
    packet = data[14:]
    if kind == _ETHERTYPES[4]:
        ends, number = (packet[12:16], packet[16:20]), struct.unpack_from("!H", packet, 4)[0]
    elif kind == _ETHERTYPES[6]:
        ends, number = (packet[8:24], packet[24:40]), struct.unpack_from("!I", packet)[0] & 0xFFFFF
    else:
        return
    source, target = (str(ipaddress.ip_address(end)) for end in ends)
    seen.setdefault((source, target), set()).add(number)


if __name__ == "__main__":
    {"send": send, "raw": lambda family: send_raw(int(family)), "count": count}[sys.argv[1]](sys.argv[2])
