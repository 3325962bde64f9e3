"""How much a server may say. What reads its answers makes room for whatever they announce: for two thousand million
entries of an array, say, which takes this process seconds to give back."""

from __future__ import annotations

import re
from typing import Any

from redis.asyncio.connection import DefaultParser
from redis.exceptions import InvalidResponse

MOST_BYTES = 64 * 2**20
"""Of one answer: a deferred request may have 20 MiB."""
MOST_ENTRIES = 2**18
"""Of all arrays of one answer together, those in one another too: so many has the map of a cluster in which no slot is
where its neighbour is."""
_LONGEST_LINE = 64 * 2**10
_DIGITS = 19
_LINES = re.compile(rb"(?:[^*$%~>|=!\r\n][^\r\n]*\r\n)*")
"""Of which each is a value by itself."""
_HEADER = re.compile(rb"([*$%~>|=!])(-?\d+|\?)\r\n")
_TEXTS = (b"$", b"=", b"!")
_PAIRS = (b"%", b"|")


class TooMuch(InvalidResponse):
    """A server says more than it may."""


class Bound:
    """Looks through answers (RESP) before they are read, wherever they are cut."""

    def __init__(self, most_bytes: int = MOST_BYTES, most_entries: int = MOST_ENTRIES) -> None:
        self._most_bytes = most_bytes
        self._most_entries = most_entries
        self._bytes = 0
        self._entries = 0
        self._rest = b""
        """The beginning of a line."""
        self._skipped = 0
        """Bytes of a text that are still to come, with the end of their line."""

    def begin(self) -> None:
        """Another answer is waited for."""
        self._bytes = self._entries = 0

    def take(self, data: bytes) -> None:
        """Look at what has come. Raises TooMuch."""
        self._bytes += len(data)
        if self._bytes > self._most_bytes:
            raise TooMuch(f"an answer has more than {self._most_bytes} bytes")
        data = self._rest + data
        at = self._skip(data, 0)
        while at < len(data):
            at = _LINES.match(data, at).end()  # type: ignore[union-attr]  # no line is a match, too
            header = _HEADER.match(data, at)
            if header is None:
                break
            self._heed(header[1], header[2])
            at = self._skip(data, header.end())
        self._rest = data[at:]
        if len(self._rest) > _LONGEST_LINE:
            raise TooMuch(f"a line of an answer has more than {_LONGEST_LINE} bytes")

    def _skip(self, data: bytes, at: int) -> int:
        """Go on behind the text that begins here."""
        step = min(self._skipped, len(data) - at)
        self._skipped -= step
        return at + step

    def _heed(self, kind: bytes, length: bytes) -> None:
        """An array or a text is announced."""
        endless = length == b"?" or len(length) >= _DIGITS
        number = 2**63 if endless else max(int(length), 0)
        if kind in _TEXTS:
            if number > self._most_bytes:
                raise TooMuch(f"a text of an answer has more than {self._most_bytes} bytes")
            self._skipped = number + 2 if length[:1] != b"-" else 0
            return
        self._entries += 2 * number if kind in _PAIRS else number
        if self._entries > self._most_entries:
            raise TooMuch(f"an answer has more than {self._most_entries} entries")


class _Stream:
    """What a connection reads from."""

    def __init__(self, stream: Any, bound: Bound) -> None:
        self._stream = stream
        self._bound = bound

    async def read(self, size: int) -> bytes:
        """What comes next."""
        data: bytes = await self._stream.read(size)
        self._bound.take(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]  # which one, redis-py finds out
    """Reads the answers of a connection of redis-py, within bounds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bound = Bound()

    def on_connect(self, connection: Any) -> None:
        """What redis-py calls."""
        super().on_connect(connection)
        self._bound = Bound()
        self._stream: Any = _Stream(connection._reader, self._bound)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """What redis-py calls. Raises TooMuch, too."""
        self._bound.begin()
        return await super().read_response(*args, **options)
