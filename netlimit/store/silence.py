"""A connection to PostgreSQL that is given up when the server says nothing: one that has stopped, not gone, would be
waited for without end, for its kernel goes on answering for it."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import psycopg

_LONGEST_LOOK = 0.5
"""Seconds of silence that one look counts at most: who has been suspended himself must not blame the server."""


class ImpatientConnection(psycopg.Connection[Any]):
    """Is closed, with psycopg.OperationalError, when nothing comes of the server for longer than `silence`, in
    seconds, while it is asked."""

    silence = 2.0

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **named: Any) -> Any:
        """Wait for an answer."""
        return super().wait(self._bound(gen), *arguments, **named)

    def _bound(self, asking: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same question; psycopg looks in several times a second, whether something has come (`ready`) or not."""
        silent, looked = 0.0, time.monotonic()
        try:
            wanted = next(asking)
            while True:
                ready = yield wanted
                looked, before = time.monotonic(), looked
                silent = 0.0 if ready else silent + min(looked - before, _LONGEST_LOOK)
                if silent > self.silence:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"the connection was given up: the server has said nothing for {self.silence:g} seconds"
                    )
                wanted = asking.send(ready)
        except StopIteration as ended:
            return ended.value
