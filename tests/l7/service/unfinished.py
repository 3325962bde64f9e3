"""A connection over gRPC with many long questions that are never finished, as fast as it is let."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from netlimit.l7.service.rpc import LARGEST, SERVICE

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
INITIAL_WINDOW_SIZE = 4
_FIELDS = ((":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/ShouldRateLimit"), (":authority", "a"),
           ("content-type", "application/grpc"), ("te", "trailers"))  # fmt: skip
_HEAD = b"".join(b"\0" + b"".join(bytes([len(part)]) + part.encode() for part in field) for field in _FIELDS)
_PART = 2**14
"""A frame has so many bytes at most."""


def frame(kind: int, flags: int, payload: bytes, stream: int) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


class Unfinished:
    """So many questions, of which all comes but the end; their windows are heeded (RFC 9113, 6.9)."""

    def __init__(self, place: str, number: int) -> None:
        host, _, port = place.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=30)
        self._lock = threading.Condition()
        self._streams = range(1, 2 * number, 2)
        self._windows = dict.fromkeys((0, *self._streams), 65535)
        self._initial = 65535
        self._ended = False
        self.sent = 0
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, b"", 0))
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._push)]
        for each in self._threads:
            each.start()

    def close(self) -> None:
        self._ended = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        for each in self._threads:
            each.join()
        self._connection.close()

    def _send(self, said: bytes) -> None:
        with suppress(OSError):
            self._connection.sendall(said)

    def _listen(self) -> None:
        with suppress(OSError, struct.error), self._connection.makefile("rb") as incoming:
            while not self._ended:
                head = incoming.read(9)
                length, kind, flags = struct.unpack(">IBB", b"\0" + head[:5])
                (stream,) = struct.unpack(">I", head[5:])
                self._hear(kind, flags, stream, incoming.read(length))

    def _hear(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        with self._lock:
            if kind == WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += struct.unpack(">I", payload)[0]
            elif kind == SETTINGS and not flags & 1:
                initial = dict(struct.iter_unpack(">HI", payload)).get(INITIAL_WINDOW_SIZE, self._initial)
                for each in self._streams:
                    self._windows[each] += initial - self._initial
                self._initial = initial
            self._lock.notify_all()
        if kind in (SETTINGS, PING) and not flags & 1:
            self._send(frame(kind, 1, payload if kind == PING else b"", 0))

    def _push(self) -> None:
        left = dict.fromkeys(self._streams, LARGEST - 200)
        begin = b"\0" + struct.pack(">I", LARGEST - 100)
        for each in self._streams:
            self._send(frame(HEADERS, 4, _HEAD, each) + frame(DATA, 0, begin, each))
        with self._lock:
            self._windows = {stream: window - len(begin) for stream, window in self._windows.items()}
            self._windows[0] -= len(begin) * (len(left) - 1)
        while not self._ended:
            for stream in left:
                size = self._take(stream, left[stream])
                left[stream] -= size
                self.sent += size
                if size:
                    self._send(frame(DATA, 0, bytes(size), stream))

    def _take(self, stream: int, most: int) -> int:
        with self._lock:
            if self._windows[0] <= 0:
                self._lock.wait(0.05)
            size = max(min(self._windows[0], self._windows[stream], most, _PART), 0)
            self._windows[0] -= size
            self._windows[stream] -= size
        return size
