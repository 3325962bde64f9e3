"""A real HTTP server that answers as a script says, and a time that passes when somebody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import NamedTuple

from netlimit.l7.memory.counter import SECOND, Clock

DATE = "Mon, 15 Nov 2010 08:12:31 GMT"
"""The server's clock is years behind ours."""
SENT_AT = 1_289_808_751
"""The same since 1970."""


class Answer(NamedTuple):
    """What the server says next. It hangs up without a word if `status` is 0; `drips` is a body without an end."""

    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012, nobody changes it
    body: bytes = b""
    drips: bool = False


class Heard(NamedTuple):
    """What the server was asked, and when."""

    method: str
    path: str
    body: bytes
    at: float


class Time:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)

    @property
    def counters(self) -> Clock:
        return Clock(lambda: round(self.now * SECOND), 0)


@dataclass
class Script:
    """The server's answers, in order; then 200 for ever."""

    port: int
    time: Time = field(default_factory=Time)
    answers: deque[Answer] = field(default_factory=deque)
    heard: list[Heard] = field(default_factory=list)
    ended: Event = field(default_factory=Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def play(self, *answers: Answer) -> None:
        self.answers.extend(answers)

    @property
    def times(self) -> list[float]:
        """When it was asked, in seconds since the first time."""
        return [heard.at - self.heard[0].at for heard in self.heard]


@contextmanager
def serve() -> Iterator[Script]:
    """A server on loopback until the end."""
    script: Script

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            script.heard.append(Heard(self.command, self.path, self.read_body(), script.time.now))
            answer = script.answers.popleft() if script.answers else Answer()
            if not answer.status:
                self.close_connection = True
                return
            self.send_response_only(answer.status)
            for name, value in {"Date": DATE, **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(10**9 if answer.drips else len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)
            if answer.drips:
                self.drip()

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def drip(self) -> None:
            try:
                while not script.ended.wait(0.01):
                    self.wfile.write(b".")
            except OSError:
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        script = Script(server.server_address[1])
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield script
        finally:
            script.ended.set()
            server.shutdown()
            thread.join()
