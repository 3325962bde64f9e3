"""A program on an NFQUEUE that marks each packet and has it repeated (NF_REPEAT), as Suricata's `mode: repeat` does."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_NFQUEUE, _PACKET, _VERDICT, _CONFIG = 3, 0, 1, 2
_REPEAT = 4
_ATTRIBUTE, _MESSAGE = struct.Struct("=HH"), struct.Struct("=IHHII")


def main() -> None:
    """Answer until somebody ends it; "ready" tells that it is asked."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as sock:
        sock.bind((0, 0))
        _send(sock, _CONFIG, _attribute(1, struct.pack("!BBH", 1, 0, 0)))  # bind
        _send(sock, _CONFIG, _attribute(2, struct.pack("!IB", 0xFFFF, 2)))  # copy whole packets
        print("ready", flush=True)
        while True:
            for number in _read_numbers(sock.recv(1 << 17)):
                verdict = _attribute(2, struct.pack("!II", _REPEAT, number))
                _send(sock, _VERDICT, verdict + _attribute(3, struct.pack("!I", 1)))


def _send(sock: socket.socket, kind: int, attributes: bytes) -> None:
    body = struct.pack("!BBH", 0, 0, 0) + attributes
    sock.send(_MESSAGE.pack(_MESSAGE.size + len(body), _NFQUEUE << 8 | kind, 1, 0, 0) + body)


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _read_numbers(answer: bytes) -> Iterator[int]:
    """The numbers of the packets that wait."""
    while len(answer) >= _MESSAGE.size:
        length, kind, *_ = _MESSAGE.unpack_from(answer)
        attributes, answer = answer[_MESSAGE.size + 4 : length], answer[length + 3 & ~3 :]
        if kind != _NFQUEUE << 8 | _PACKET:
            continue
        while len(attributes) >= _ATTRIBUTE.size:
            size, name = _ATTRIBUTE.unpack_from(attributes)
            if name & 0x7FFF == 1:
                yield struct.unpack_from("!I", attributes, _ATTRIBUTE.size)[0]
            attributes = attributes[size + 3 & ~3 :]


if __name__ == "__main__":
    main()
