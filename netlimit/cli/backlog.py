"""Lines that wait to be read, as many as there is room for, and how many were lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

HELD_BYTES = 256 * 1024
"""What waits at most."""


class _Text(NamedTuple):
    """Some lines, and how many are lost with them if they are: a notice of lost lines stands for all of those."""

    data: bytes
    lines: int


class Backlog:
    """Lines in their order. Those that find no room are lost; in their place stands what `word_loss` says of them, a
    line that is given their number."""

    def __init__(self, encode: Callable[[str], bytes], word_loss: Callable[[int], str]) -> None:
        self._encode = encode
        self._word_loss = word_loss
        self._waiting: deque[_Text] = deque()
        self._size = 0
        self._sent = 0
        self._lost = 0

    def __bool__(self) -> bool:
        return bool(self._waiting or self._lost)

    def add(self, text: str) -> None:
        """Have whole lines wait. After a loss half must be free again, so that few notices tell of many lines."""
        data, lines = self._encode(text), text.count("\n")
        if self._size + len(data) > (HELD_BYTES // 2 if self._lost else HELD_BYTES):
            self._lost += lines
            return
        self._tell_loss()
        self._append(_Text(data, lines))

    def peek(self) -> bytes:
        """What is to be sent next, of a backlog that is not empty."""
        if not self._waiting:
            self._tell_loss()
        return self._waiting[0].data[self._sent :]

    def advance(self, sent: int) -> None:
        """So many bytes of it are sent."""
        self._sent += sent
        if self._sent == len(self._waiting[0].data):
            self._size -= self._sent
            self._sent = 0
            self._waiting.popleft()

    def lose(self) -> None:
        """Nobody will read it: all of it is lost."""
        self._lost += sum(text.lines for text in self._waiting)
        self._waiting.clear()
        self._size = self._sent = 0

    def _tell_loss(self) -> None:
        if self._lost:
            lost, self._lost = self._lost, 0
            self._append(_Text(self._encode(f"{self._word_loss(lost)}\n"), lost))

    def _append(self, text: _Text) -> None:
        self._waiting.append(text)
        self._size += len(text.data)
