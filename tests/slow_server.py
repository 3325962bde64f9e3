"""A database server that answers slowly: an overloaded one, or one at the end of a bad line."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path


class SlowServer:
    """Stands before a PostgreSQL server, on a socket in `directory`; each of its answers takes `delay` seconds more,
    also those that come on connections that are there already."""

    def __init__(self, directory: Path, upstream: Path) -> None:
        self.directory = directory
        self.delay = 0.0
        self._path, self._upstream = directory / upstream.name, upstream
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="slow server")

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.directory}"

    async def _run(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o777)  # the API has a user of its own
        self._ready.set()
        await self._ended.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, questions = await asyncio.open_unix_connection(self._upstream)
        await asyncio.gather(self._pass_on(reader, questions, False), self._pass_on(answers, writer, True))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_slow: bool) -> None:
        with contextlib.suppress(OSError), contextlib.closing(sink):
            while data := await source.read(65536):
                if is_slow and self.delay:
                    await asyncio.sleep(self.delay)
                sink.write(data)
                await sink.drain()


@contextlib.contextmanager
def run_slow_server(upstream: Path) -> Iterator[SlowServer]:
    """Stand before the server that listens in a directory, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="netlimit-slow-") as directory:
        Path(directory).chmod(0o755)
        server = SlowServer(Path(directory), upstream / ".s.PGSQL.5432")
        server.start()
        try:
            yield server
        finally:
            server.stop()
