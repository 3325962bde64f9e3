"""An application that answers everything, and remembers what reached it."""

from __future__ import annotations

import asyncio
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1

MARK = b"X-Mark"
"""The field by which a request is known again."""
_MARK = re.compile(rb"^x-mark:[ \t]*(\S+)", re.IGNORECASE | re.MULTILINE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_UPGRADE = re.compile(rb"^upgrade:[ \t]*(\S[^\r]*)", re.IGNORECASE | re.MULTILINE)
_KEY = re.compile(rb"^sec-websocket-key:[ \t]*(\S+)", re.IGNORECASE | re.MULTILINE)
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Recorder:
    """Whatever begins like a request is one. An application that `switches` speaks whatever protocol a client wants
    (101), and takes what comes by it for requests all the same."""

    def __init__(self, switches: bool = False) -> None:
        self._switches = switches
        self.reached: dict[str, bytes] = {}
        """By mark the first line of what has come."""
        self.wanted: dict[str, list[bytes]] = {}
        """By mark the values of `Upgrade`, of those that have one."""
        self.unmarked = 0
        self.heads: dict[str, bytes] = {}
        """By mark the fields of what has come."""
        self.place = ""
        self._started = threading.Event()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20, backlog=8192)
        self.place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._ending.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                marks = _MARK.findall(head)
                for mark in marks:
                    self.reached.setdefault(mark.decode(), head.split(b"\r\n")[0])
                    self.heads.setdefault(mark.decode(), head.partition(b"\r\n")[2])
                    if wanted := _UPGRADE.findall(head):
                        self.wanted.setdefault(mark.decode(), wanted)
                if not marks:
                    self.unmarked += 1
                length = re.search(rb"^content-length:[ \t]*(\d+)", head, re.IGNORECASE | re.MULTILINE)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(self._answer(head))
                if b"chunked" in head.lower():
                    await reader.readuntil(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        if self._switches and head.startswith(b"CONNECT "):
            return b"HTTP/1.1 200 OK\r\n\r\n"
        wanted, key = _UPGRADE.search(head), _KEY.search(head)
        if not self._switches or wanted is None:
            return _ANSWER
        fields = b"Connection: Upgrade\r\nUpgrade: " + wanted[1].split(b",")[0]
        if key is not None:
            fields += b"\r\nSec-WebSocket-Accept: " + b64encode(sha1(key[1] + _MAGIC, usedforsecurity=False).digest())
        return b"HTTP/1.1 101 Switching Protocols\r\n" + fields + b"\r\n\r\n"

    def wait(self) -> None:
        assert self._started.wait(30)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)


@contextmanager
def recording(switches: bool = False) -> Iterator[Recorder]:
    recorder = Recorder(switches)
    thread = threading.Thread(target=recorder.run)
    thread.start()
    recorder.wait()
    try:
        yield recorder
    finally:
        recorder.end()
        thread.join()
