"""What is sent again, and how long after."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

IDEMPOTENT = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PUT", "TRACE"})
"""Methods that do the same however often they are sent (RFC 9110, 9.2.2)."""
REFUSALS = (429, 503)
"""Answers by which a server says: not now."""
_LOST = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)
"""What httpx raises when a connection is not made, or breaks."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How patient a client is.

    A request is sent `attempts` times at most, 1 or more, and the last time not later than `patience` seconds after it
    came: all of its waiting is within that. `base` and `cap`, in seconds, are those of `back_off`.

    Raises ValueError for values that mean nothing.
    """

    attempts: int = 4
    patience: float = 60.0
    base: float = 0.5
    cap: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"{self.attempts} attempts send nothing: 1 sends once and never again.")
        if not (0 <= self.patience < float("inf") and 0 <= self.base <= self.cap < float("inf")):
            raise ValueError("patience, base and cap are seconds, none of them negative, and base is at most cap.")

    def back_off(self, failures: int, share: float) -> float:
        """Seconds to wait after so many failures: min(cap, base * 2 ** (failures - 1)) times `share`.

        With a share drawn evenly from [0, 1) that is exponential back-off with "full jitter": M. Brooker, "Exponential
        Backoff And Jitter", AWS Architecture Blog, 2015.
        """
        return share * min(self.cap, self.base * 2.0 ** min(failures - 1, 64))


def is_replayable(request: httpx.Request) -> bool:
    """Whether the whole body can be sent again: httpx has it in memory, and not as a stream that it reads once."""
    return isinstance(request.stream, httpx.ByteStream)


def is_refused(request: httpx.Request, status: int, told_when: bool) -> bool:
    """Whether an answer says that the same request may come again.

    That is 429 or 503; for what is not idempotent only with Retry-After, by which the server tells that it did nothing.
    """
    return status in REFUSALS and (told_when or request.method in IDEMPOTENT)


def is_lost(request: httpx.Request, error: httpx.TransportError) -> bool:
    """Whether a connection failed, and the request may be sent again though nobody knows whether it arrived."""
    return isinstance(error, _LOST) and request.method in IDEMPOTENT
