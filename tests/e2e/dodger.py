"""A client that makes connection tracking on the way believe what is not so, and the server that goes along with it.

python -m tests.e2e.dodger serve PORT [ADDRESS]                resets whom it is told to, and echoes to all others
python -m tests.e2e.dodger reopen SOURCE SERVER PORT COUNT     one connection after the other, all from one port
python -m tests.e2e.dodger revive SOURCE SERVER PORT COUNT     all again at once from ports that have just been reset
python -m tests.e2e.dodger hide-reset SOURCE SERVER PORT COUNT each, once open, "ended" by what dies before the server
python -m tests.e2e.dodger hide-close SOURCE SERVER PORT COUNT likewise, by FIN

The server prints "ready", a client how many of its connections it has got ("reopen") or has in use at the end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator

from tests.e2e.frames import tcp

FIN, RST, ACK = 1, 4, 16
WAIT, PAUSE = 0.25, 0.02
FIRST_PORT = 21_000 + os.getpid() * 37 % 30_000
"""One that nobody has used lately: connection tracking remembers connections for some time."""
_REPAIR, _REPAIR_QUEUE, _QUEUE_SEQ, _NO_PROBE = 19, 20, 21, -1
"""TCP_REPAIR (linux/tcp.h): how a socket tells its sequence numbers."""
_RECEIVED, _SENT = 1, 2
_RESET_ME, _ECHO_ME = b"r", b"e"
_LINGER_NOT = struct.pack("ii", 1, 0)


def serve(port: int, address: str = "") -> None:
    """Until it is killed; at one address, or at all."""
    family = socket.AF_INET6 if ":" in address or not address else socket.AF_INET
    listener = socket.create_server((address or "::", port), family=family, backlog=256, dualstack_ipv6=not address)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif not _answer(sock):
                    selector.unregister(sock)
                    sock.close()


def _answer(sock: socket.socket) -> bool:
    """Whether the connection stays."""
    try:
        said = sock.recv(100)
        if said == _RESET_ME:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        elif said:
            sock.send(said)
        return bool(said) and said != _RESET_ME
    except OSError:
        return False


def _open(source: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)  # it is gone when it is closed
    sock.settimeout(WAIT)
    sock.bind((source, port))
    return sock


def _be_reset(source: str, port: int, server: tuple[str, int]) -> bool:
    """Whether the server took a connection from this port, which is closed then, by a reset of the server's."""
    with _open(source, port) as sock:
        try:
            sock.connect(server)
        except OSError:
            return False
        with contextlib.suppress(ConnectionError):
            sock.send(_RESET_ME)
            sock.recv(1)
        return True


def reopen(source: str, server: tuple[str, int], count: int) -> int:
    """How many connections there were from one port."""
    return sum(_be_reset(source, FIRST_PORT, server) for _ in range(count))


def revive(source: str, server: tuple[str, int], count: int) -> int:
    """How many connections there are from ports that have been reset. Answers are to come late: whoever runs this lets
    none out of the server between the lines "now" and "answers"."""
    ports = [FIRST_PORT + number for number in range(count)]
    for port in ports:
        assert _be_reset(source, port, server)
        time.sleep(PAUSE)  # what is over is forgotten once a tick
    print("now", flush=True)
    sys.stdin.readline()
    tried = [_open(source, port) for port in ports]
    for sock in tried:
        sock.setblocking(False)
        sock.connect_ex(server)
        time.sleep(PAUSE)
    print("answers", flush=True)
    sys.stdin.readline()
    time.sleep(1.5)  # a SYN is repeated after a second, and so is what grants one
    return sum(map(_echoes, tried))


def hide(source: str, server: tuple[str, int], count: int, how: str) -> int:
    """How many connections there are at the end, each of which has been "ended"."""
    held = []
    for number in range(count):
        sock = _open(source, FIRST_PORT + number)
        with contextlib.suppress(OSError):
            sock.connect(server)
            held.append(sock)
            assert _echoes(sock)
            _end_unheard(sock, how)
    return sum(map(_echoes, held))


def _end_unheard(sock: socket.socket, how: str) -> None:
    """Say that the connection is over, so that nobody but the first router hears it."""
    if how == "hide-reset":
        _send_unheard(sock, RST)
    else:  # both ends seem to close, for what the server says in between is an answer
        for _ in range(2):
            _send_unheard(sock, FIN | ACK)
            _echoes(sock)
    time.sleep(PAUSE)


def _send_unheard(sock: socket.socket, flags: int) -> None:
    here, there = sock.getsockname(), sock.getpeername()
    sequence, answer = _read_numbers(sock)
    packet = tcp(here[0], there[0], there[1], here[1], flags, sequence, answer if flags & ACK else 0)
    with socket.socket(sock.family, socket.SOCK_RAW, socket.IPPROTO_TCP) as raw:
        if sock.family == socket.AF_INET6:
            raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 1)
        else:
            raw.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
        raw.bind((here[0], 0))
        raw.sendto(packet, (there[0], 0))


def _read_numbers(sock: socket.socket) -> Iterator[int]:
    """The sequence numbers that come next: its own, and the peer's."""
    sock.setsockopt(socket.IPPROTO_TCP, _REPAIR, 1)
    numbers = []
    for queue in (_SENT, _RECEIVED):
        sock.setsockopt(socket.IPPROTO_TCP, _REPAIR_QUEUE, queue)
        numbers.append(sock.getsockopt(socket.IPPROTO_TCP, _QUEUE_SEQ) & 0xFFFFFFFF)
    sock.setsockopt(socket.IPPROTO_TCP, _REPAIR, _NO_PROBE)
    return iter(numbers)


def _echoes(sock: socket.socket) -> bool:
    """Whether the server still has the connection."""
    sock.settimeout(WAIT)
    try:
        sock.send(_ECHO_ME)
        return bool(sock.recv(100))
    except OSError:
        return False


def main() -> None:
    """See above."""
    what, *words = sys.argv[1:]
    if what == "serve":
        serve(int(words[0]), *words[1:])
        return
    source, (host, port, count) = words[0], (words[1], int(words[2]), int(words[3]))
    ways = {"reopen": reopen, "revive": revive}
    done = ways[what](source, (host, port), count) if what in ways else hide(source, (host, port), count, what)
    print(done, flush=True)


if __name__ == "__main__":
    main()
