"""Why a request was not sent. Programs that handle httpx.TransportError handle these too."""

from __future__ import annotations

import httpx

from netlimit.errors import NetlimitError


class Exhausted(NetlimitError, httpx.TransportError):
    """A request was not sent, for its turn comes later than it may wait.

    `wait` is how many seconds later one may come again: `inf` is never.
    """

    def __init__(self, sentence: str, wait: float) -> None:
        httpx.TransportError.__init__(self, sentence)
        self.wait = wait


class BudgetExhausted(Exhausted):
    """Our own budget has no room for it in time."""


class QuotaExhausted(Exhausted):
    """The server said that nothing remains of its quota for longer than the request may wait."""
