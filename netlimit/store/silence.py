"""A connection to PostgreSQL that is given up when the server says nothing: one that has stopped, not gone, would be
waited for without end, for its kernel goes on answering for it. Or when each answer comes, but all of them together
take too long."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import psycopg

from netlimit.store.allowance import Allowance

_LONGEST_LOOK = 0.5
"""Seconds of silence that one look counts at most: who has been suspended himself must not blame the server."""


class TooSlow(psycopg.OperationalError):
    """All that a thread was `allowed` to wait, in seconds, was waited."""

    def __init__(self, allowed: float) -> None:
        super().__init__(f"the connection was given up: its answers have taken {allowed:g} seconds in all")
        self.allowed = allowed


class ImpatientConnection(psycopg.Connection[Any]):
    """Is closed, with psycopg.OperationalError, when nothing comes of the server for longer than `silence`, in
    seconds, while it is asked; or when what the asking thread may wait is used up."""

    silence = 2.0
    allowance = Allowance(TooSlow)

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
                waited = min(looked - before, _LONGEST_LOOK)
                silent = 0.0 if ready else silent + waited
                try:
                    self.allowance.spend(waited)
                except TooSlow:
                    self.pgconn.finish()
                    raise
                if silent > self.silence:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"the connection was given up: the server has said nothing for {self.silence:g} seconds"
                    )
                wanted = asking.send(ready)
        except StopIteration as ended:
            return ended.value
