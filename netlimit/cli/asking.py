"""Questions to a server by HTTP. How long an answer takes, and how large it gets, is not for who answers to choose."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from netlimit.cli.errors import CommandError

if TYPE_CHECKING:  # it takes long to load, and those who run here do not need it
    import httpx

MOST = 128 * 2**20
"""Bytes of an answer at most: a thousand rules on many gateways have less."""
PLAIN = {"Accept-Encoding": "identity"}
"""The header of every question: of an encoded answer nobody knows how large it is."""
_AGAIN_SECONDS = 1.0


class _TooLate(Exception):  # no error of who is interrupted by it: nobody else is to handle it
    pass


@dataclass(frozen=True)
class Answer:
    """What a server has answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether it says that what was asked is done."""
        return 200 <= self.status <= 299

    @property
    def text(self) -> str:
        """The body as text, whatever it is."""
        return self.body.decode("utf-8", "replace")

    def read_json(self) -> Any:
        """The body as a document. Raises ValueError."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("It is nested too deeply") from None


def ask(http: httpx.Client, method: str, url: str, seconds: float, **arguments: Any) -> Answer:
    """Ask, and read the whole answer; all of that within so many seconds, in the main thread (setitimer(2)). Raises
    httpx.HTTPError (TimeoutException in the end), httpx.InvalidURL, and CommandError for what is not read."""
    import httpx

    try:
        with _ending_within(seconds), http.stream(method, url, timeout=seconds, **arguments) as answer:
            return Answer(answer.status_code, answer.headers, _read_body(answer))
    except _TooLate:
        raise httpx.ReadTimeout("It takes too long") from None


def _read_body(answer: httpx.Response) -> bytes:
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise CommandError(
            f"What answers at {answer.url} encodes its answer ({encoding}), which nobody has asked it to do."
        )
    body = bytearray()
    for some in answer.iter_raw():
        body += some
        if len(body) > MOST:
            raise CommandError(
                f"What answers at {answer.url} answers with more than {MOST // 2**20} MB, which is not read."
            )
    return bytes(body)


@contextmanager
def _ending_within(seconds: float) -> Iterator[None]:
    """Raise _TooLate in the block when it takes longer. A timeout of httpx is that of each read, however little comes
    by it."""
    before = signal.signal(signal.SIGALRM, _interrupt)
    # Again and again: raised while garbage is collected, an exception is lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(number: int, frame: object) -> None:
    raise _TooLate
