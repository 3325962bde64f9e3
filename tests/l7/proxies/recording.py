"""An application that answers everything, and remembers what reached it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MARK = b"X-Mark"
"""The field by which a request is known again."""
_MARK = re.compile(rb"^x-mark:[ \t]*(\S+)", re.IGNORECASE | re.MULTILINE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Recorder:
    """Whatever begins like a request is one."""

    def __init__(self) -> None:
        self.reached: dict[str, bytes] = {}
        """By mark the first line of what has come."""
        self.unmarked = 0
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
                if not marks:
                    self.unmarked += 1
                length = re.search(rb"^content-length:[ \t]*(\d+)", head, re.IGNORECASE | re.MULTILINE)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(_ANSWER)
                if b"chunked" in head.lower():
                    await reader.readuntil(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass
        finally:
            writer.close()

    def wait(self) -> None:
        assert self._started.wait(30)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    thread = threading.Thread(target=recorder.run)
    thread.start()
    recorder.wait()
    try:
        yield recorder
    finally:
        recorder.end()
        thread.join()
