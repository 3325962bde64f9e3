"""Keeps the leases of a request in flight."""

from __future__ import annotations

import asyncio
import logging

from netlimit.errors import CountersUnavailable
from netlimit.l7.limiter import Limiter, Verdict

log = logging.getLogger(__name__)


class Holding:
    """Renews a verdict's leases whenever half their time has passed, until the end."""

    def __init__(self, limiter: Limiter, verdict: Verdict) -> None:
        self._limiter = limiter
        self.verdict = verdict
        self._half = min(ask.limit.seconds for ask in verdict.leases) / 2
        self._renewing: asyncio.Task[None] | None = None
        self._set_timer()

    def end(self) -> None:
        """Renew no more. The leases are still to be released."""
        self._timer.cancel()
        if self._renewing is not None:
            self._renewing.cancel()

    def _set_timer(self) -> None:  # a timer, since few requests live so long and a task for each would cost more
        self._timer = asyncio.get_running_loop().call_later(self._half, self._begin)

    def _begin(self) -> None:
        self._renewing = asyncio.create_task(self._renew())
        self._set_timer()

    async def _renew(self) -> None:
        try:
            await self._limiter.renew(self.verdict, anew=True)  # it may have ended while this process stood still
        except CountersUnavailable as error:
            log.warning("A lease was not renewed: %s", error)
