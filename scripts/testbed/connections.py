"""Opens and accepts TCP connections, and holds them."""

from __future__ import annotations

import errno
import ipaddress
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence

from scripts.testbed.deadline import Deadline, ready
from scripts.testbed.reports import ConnectReport, ListenReport

UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM)


def connect(
    destination: str,
    port: int,
    *,
    count: int,
    rate: float | None,
    sources: Sequence[str],
    wait: float,
    deadline: Deadline,
    show: Callable[[ConnectReport], None],
) -> None:
    """Opens `count` connections, `rate` a second or all at once, shows what became of them and holds them.

    wait: seconds that each has; below one second a SYN is sent only once (the kernel repeats it after one).
    """
    _allow_files()
    family = socket.AF_INET6 if ipaddress.ip_address(destination).version == 6 else socket.AF_INET
    tries = _Tries()
    ready()
    start = time.monotonic()
    for number in range(count):
        due = start + number / rate if rate else start
        while not deadline.over() and (left := due - time.monotonic()) > 0:
            tries.settle(min(left, 0.1))
        tries.open(family, (destination, port), sources[number % len(sources)] if sources else None, wait)
        tries.settle(0)
    while tries.pending and not deadline.over():
        tries.settle(0.01)
    show(tries.report())
    deadline.wait()
    tries.close()


class _Tries:
    """Connections on their way and open."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.pending: dict[socket.socket, float] = {}
        self.open_sockets: list[socket.socket] = []
        self.ends: Counter[str] = Counter()

    def open(self, family: int, destination: tuple[str, int], source: str | None, wait: float) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if source is not None:
            # The port is chosen at connect, so that sources share none needlessly.
            sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
        code = sock.connect_ex(destination)
        if code == errno.EINPROGRESS:
            self.pending[sock] = time.monotonic() + wait
            self.selector.register(sock, selectors.EVENT_WRITE)
        else:
            self._end(sock, code)

    def settle(self, seconds: float) -> None:
        """Waits up to `seconds` for answers, and gives up what has waited long enough."""
        for key, _ in self.selector.select(seconds):
            sock = key.fileobj
            if isinstance(sock, socket.socket):
                self._forget(sock)
                self._end(sock, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        now = time.monotonic()
        for sock in [sock for sock, end in self.pending.items() if end <= now]:
            self._forget(sock)
            self._end(sock, errno.ETIMEDOUT)

    def _forget(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)
        del self.pending[sock]

    def _end(self, sock: socket.socket, code: int) -> None:
        if code == 0:
            self.ends["established"] += 1
            self.open_sockets.append(sock)
            return
        sock.close()
        if code in (errno.ECONNREFUSED, errno.ECONNRESET):
            self.ends["refused"] += 1
        elif code in UNREACHABLE:
            self.ends["unreachable"] += 1
        elif code == errno.ETIMEDOUT:
            self.ends["timed_out"] += 1
        else:
            raise OSError(code, f"A connection failed: {errno.errorcode.get(code, code)}.")

    def report(self) -> ConnectReport:
        timed_out = self.ends["timed_out"] + len(self.pending)
        return ConnectReport(self.ends["established"], self.ends["refused"], self.ends["unreachable"], timed_out)

    def close(self) -> None:
        for sock in (*self.open_sockets, *self.pending):
            sock.close()
        self.selector.close()


IP_BIND_ADDRESS_NO_PORT = 24  # of Linux, and not in Python's socket module


def listen(port: int, *, deadline: Deadline) -> ListenReport:
    """Accepts connections on `port`, v4 and v6, and holds them; what they send is read and dropped."""
    _allow_files()
    accepted = 0
    with selectors.DefaultSelector() as selector, _listener(port) as listener:
        selector.register(listener, selectors.EVENT_READ)
        ready()
        while not deadline.over():
            for key, _ in selector.select(0.01):
                sock = key.fileobj
                if sock is listener:
                    accepted += _accept(listener, selector)
                elif isinstance(sock, socket.socket) and not _drop(sock):
                    selector.unregister(sock)
                    sock.close()
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
    return ListenReport(accepted)


def _listener(port: int) -> socket.socket:
    listener = socket.create_server(("::", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    listener.setblocking(False)
    return listener


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> int:
    accepted = 0
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return accepted
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        accepted += 1


def _drop(sock: socket.socket) -> bool:
    """Reads what came and forgets it; whether the connection is still open."""
    try:
        return bool(sock.recv(1 << 16))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def _allow_files() -> None:
    """Every connection is an open file: as many as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
