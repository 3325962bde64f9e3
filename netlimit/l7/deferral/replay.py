"""Replays deferred requests: each when the limiter lets it pass, those of one key in order."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from math import inf

from netlimit.errors import CountersUnavailable
from netlimit.l7.deferral.backlog import Backlog, BacklogUnavailable, Claim
from netlimit.l7.deferral.request import Deferred, Reply, State
from netlimit.l7.deferral.upstream import Unserved, Upstream
from netlimit.l7.limiter import Limiter
from netlimit.l7.problems import describe_refusal

TRIES = 5
_AT_ONCE = 16
"""Requests that are replayed at the same time, each of another key."""
_LOOK = 1.0
"""Seconds after which it is looked for what other processes have put, or left behind."""
_SWEEP = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_GRACE = 5.0
"""Seconds that tries have at the end to come to theirs."""

log = logging.getLogger(__name__)


class Replayer:
    """Takes requests out of a backlog and sends them to the upstream, at most `tries` times. For one event loop."""

    def __init__(
        self,
        backlog: Backlog,
        limiter: Limiter,
        upstream: Upstream,
        tries: int = TRIES,
    ) -> None:
        self._backlog = backlog
        self._limiter = limiter
        self._upstream = upstream
        self._tries = tries
        self._clock = backlog.now
        self._stirred = asyncio.Event()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._trying: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, if it has not begun."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    def stir(self) -> None:
        """Look at once: something has been put."""
        self._stirred.set()

    async def stop(self) -> None:
        """Try no more. What is being tried has a while; then it is given back, and tried again another time."""
        if self._running is None:
            return
        self._running.cancel()
        await asyncio.wait([self._running])
        if self._trying:
            await asyncio.wait(self._trying, timeout=_GRACE)
        for task in self._trying:
            task.cancel()
        if self._trying:
            await asyncio.wait(self._trying)

    async def _run(self) -> None:
        swept, silent = -inf, False
        while True:
            self._stirred.clear()
            try:
                now = self._clock()
                if now - swept >= _SWEEP:
                    swept = now
                    await self._backlog.sweep(now)
                await self._begin_all()
                silent = False
            except BacklogUnavailable as error:
                if not silent:
                    log.warning("%s It is asked again until it can be.", error)
                silent = True
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._stirred.wait()

    async def _begin_all(self) -> None:
        """Begin a try of each request whose turn it is."""
        while True:
            await self._room.acquire()
            claim = None
            try:
                claim = await self._backlog.claim(self._clock())
            finally:
                if claim is None:
                    self._room.release()
            if claim is None:
                return
            task = asyncio.create_task(self._try(claim))
            self._trying.add(task)
            task.add_done_callback(self._end_try)

    def _end_try(self, task: asyncio.Task[None]) -> None:
        self._trying.discard(task)
        self._room.release()
        self._stirred.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("A deferred request is tried again once its lease has ended: %s", task.exception())

    async def _try(self, claim: Claim) -> None:
        request, tries = claim
        now = self._clock()
        if request.expires <= now:
            return await self._finish(request, State.EXPIRED, None, "It was not its turn in time.")
        if tries > self._tries:
            return await self._finish(request, State.FAILED, None, "Each try has ended with whoever made it.")
        try:
            verdict = await self._limiter.decide(
                request.domain, request.descriptors, request.hits, client=request.address
            )
        except CountersUnavailable:
            return await self._postpone(request, _LOOK, tried=False)
        if not verdict.allowed and verdict.retry_after == inf:
            return await self._finish(request, State.FAILED, None, describe_refusal(verdict))
        if not verdict.allowed:
            return await self._postpone(request, verdict.retry_after, tried=False)
        try:
            await asyncio.sleep(verdict.delay)
            reply = await self._upstream.send(request)
        except asyncio.CancelledError:
            await self._backlog.postpone(request, self._clock(), tried=True)
            raise
        except Exception as error:
            return await self._try_again(claim, error)
        finally:
            await self._limiter.release(verdict)
        return await self._finish(request, State.DONE, reply, "")

    async def _try_again(self, claim: Claim, error: Exception) -> None:
        """After a pause, unless it has been tried often enough."""
        request, tries = claim
        if not isinstance(error, Unserved):
            log.error("A deferred request could not be sent.", exc_info=error)
            error = Unserved(f"It could not be sent: {type(error).__name__}.")
        if tries >= self._tries:
            return await self._finish(request, State.FAILED, None, str(error))
        pause = min(_FIRST_PAUSE * 2 ** (tries - 1), _LONGEST_PAUSE)
        return await self._postpone(request, max(pause, error.retry_after), tried=True)

    async def _finish(self, request: Deferred, state: State, reply: Reply | None, reason: str) -> None:
        await self._backlog.finish(request, state, self._clock(), reply, reason)

    async def _postpone(self, request: Deferred, seconds: float, tried: bool) -> None:
        await self._backlog.postpone(request, self._clock() + seconds, tried)
        asyncio.get_running_loop().call_later(seconds, self._stirred.set)
