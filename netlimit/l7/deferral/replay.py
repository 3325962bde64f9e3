"""Replays deferred requests: each when the limiter lets it pass, those of one key in order."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from netlimit.errors import CountersUnavailable
from netlimit.l7.deferral.backlog import Backlog, BacklogUnavailable, Claim
from netlimit.l7.deferral.outage import Outage
from netlimit.l7.deferral.request import Deferred, Reply, State
from netlimit.l7.deferral.upstream import Served, Unserved, Upstream, break_off
from netlimit.l7.holding import Holding
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.problems import describe_refusal
from netlimit.l7.rules import OnLimit, name_counter

if TYPE_CHECKING:
    from netlimit.l7.deferral.revision import Revision

TRIES = 5
_AT_ONCE = 64
"""Requests that are replayed at the same time, each of another key."""
_AT_ONCE_OF_ONE = 16
"""Of these, clients of one network: slow ones hold up no others."""
_LOOK = 1.0
"""Seconds after which it is looked for what other processes have put, or left behind."""
_SWEEP = 60.0
_RENEWALS = 3
"""In the time of a lease."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_FIRST_GLANCE, _LONGEST_GLANCE = 0.1, 8.0
"""Seconds for which a request stands aside at least, and of its own accord at most where a limit that defers, too,
refuses it."""
_REMEMBERED = 10_000
"""Requests of which it is known how long they have stood aside."""
_GRACE = 5.0
"""Seconds that tries have at the end to come to theirs."""
_AGAIN = 10.0
"""Seconds after which what has not ended is cancelled again."""
_FREE = "Deferred requests were replayed under no limit (%d): the limits of the domain %r have none for them any more."
_FAULT = "Deferred requests cannot be replayed by a fault of netlimit's own. It is tried again until they can be."

log = logging.getLogger(__name__)


class Replayer:
    """Takes requests out of a backlog and sends them to the upstream, at most `tries` times. For one event loop."""

    def __init__(
        self,
        backlog: Backlog,
        limiter: Limiter,
        upstream: Upstream,
        tries: int = TRIES,
        revision: Revision | None = None,
        outage: Outage | None = None,
    ) -> None:
        """`revision` has what waits come under the rules of the moment. `outage` is begun by others, too, and ended by
        this."""
        self._backlog = backlog
        self._limiter = limiter
        self._upstream = upstream
        self._tries = tries
        self._revision = revision
        self._outage = outage or Outage()
        self._free = _Free()
        self._clock = backlog.now
        self._stirred = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._trying: dict[asyncio.Task[None], str] = {}
        """Those that take a place, each by the network of its client: an application that goes on after its answer
        takes none."""
        self._at_work: set[str] = set()
        """Requests that are being tried, by id."""
        self._ended: set[str] = set()
        """Requests that have ended since the backlog was last asked for one, by id."""
        self._pauses: dict[str, float] = {}
        """How long requests stand aside the next time, by id."""
        self._running: asyncio.Task[None] | None = None
        self._ending = False

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
        self._ending = True
        self.stir()
        await asyncio.wait([self._running], timeout=_GRACE)  # a claim that is broken off would count as a try
        await _cancel({self._running})
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_GRACE)
        await _cancel(self._tasks)
        self._free.tell(inf)

    async def _run(self) -> None:
        swept, silent = -inf, False
        while not self._ending:
            self._stirred.clear()
            try:
                now = self._clock()
                if now - swept >= _SWEEP:
                    swept = now
                    await self._backlog.sweep(now)
                await self._begin_all()
                self._free.tell(now)
                await self._end_outage()
                silent = False
            except BacklogUnavailable as error:
                self._outage.begin(error)
            except Exception:
                if not silent:
                    log.exception(_FAULT)
                silent = True
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._stirred.wait()

    async def _end_outage(self) -> None:
        """What could be claimed need not be all that could not be written."""
        if self._outage.goes_on:
            await self._backlog.check()
            self._outage.end()

    async def _begin_all(self) -> None:
        """Begin a try of each request whose turn it is. No network has more places than it leaves free, so that there
        is one for another, though several be slow."""
        while not self._ending and (free := _AT_ONCE - len(self._trying)):
            places = Counter(self._trying.values())
            self._ended.clear()
            claim = await self._backlog.claim(self._clock(), places, min(_AT_ONCE_OF_ONE, free))
            if claim is None:
                return
            if not self._has(claim.request):
                self._begin(claim)

    def _has(self, request: Deferred) -> bool:
        """Whether a claim is of what is being tried here, or has ended since that claim was asked for: a lease that
        nobody could renew in time (the machine slept, nothing could be written) has ended meanwhile."""
        return request.id in self._at_work or request.id in self._ended

    def _begin(self, claim: Claim) -> None:
        self._at_work.add(claim.request.id)
        task = asyncio.create_task(self._work(claim))
        self._tasks.add(task)
        self._trying[task] = claim.request.network
        task.add_done_callback(self._end_try)

    def _end_try(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._leave_place(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("A deferred request is tried again once its lease has ended: %s", task.exception())

    def _leave_place(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._trying.pop(task, None)
        self._stirred.set()

    async def _work(self, claim: Claim) -> None:
        try:
            await self._try(claim)
        finally:
            self._at_work.discard(claim.request.id)

    async def _try(self, claim: Claim) -> None:
        request, tries = claim
        if tries > self._tries:
            return await self._finish(request, State.FAILED, None, "Each try has ended with whoever made it.")
        if request.expires <= self._clock():
            return await self._expire(request)
        revised = await self._revise(request)
        if revised is None:
            return None
        request, claim = revised, claim._replace(request=revised)
        try:
            verdict = await self._ask(request)
        except CountersUnavailable:
            return await self._postpone(request, _LOOK, tried=False)
        if not verdict.allowed and verdict.retry_after == inf:
            return await self._finish(request, State.FAILED, None, describe_refusal(verdict))
        if not verdict.allowed:
            return await self._wait_longer(request, verdict)
        async with self._holding(verdict):
            served = await self._send(claim, verdict.delay)
            if served is not None:
                await self._finish(request, State.DONE, served.reply, "")
                if self._revision is not None and not any(status.rule for status in verdict.statuses):
                    self._free.add(request.domain, self._clock())
                await self._see_off(served)
        return None

    async def _revise(self, request: Deferred) -> Deferred | None:
        """The request under the rules of the moment; None if it is to wait behind others in the line where it belongs
        by these."""
        if self._revision is None:
            return request
        revised = self._revision.revise(request)
        if revised.key == request.key:
            return revised
        try:
            behind = await self._backlog.comes_behind(revised.key, revised.others)
            moved = await self._backlog.move(request, revised)
        except asyncio.CancelledError:
            await self._give_back(request, tried=False)
            raise
        if moved and behind:
            await self._give_back(revised, tried=False)
            return None
        # By now the rules may be others again: what finds none of them would pass.
        line = revised.key if moved else request.key
        return replace(self._revision.revise(revised), key=line)

    async def _ask(self, request: Deferred) -> Verdict:
        """Whether it may be sent now, or as long as it lasts. Raises CountersUnavailable."""
        longest = request.expires - self._clock()  # a leaky bucket is to keep no turn for one that has expired by then
        try:
            return await self._limiter.decide(
                request.domain,
                request.descriptors,
                request.hits,
                client=request.address,
                escalates=False,  # its client does nothing
                longest=longest,
                line=request.key,
            )
        except asyncio.CancelledError:
            await self._give_back(request, tried=False)
            raise

    async def _wait_longer(self, request: Deferred, verdict: Verdict) -> None:
        """Have others of its line wait as well if the limit is theirs, too; else they go on meanwhile. Who stands aside
        does so longer each time, so that many of them do not keep the line busy."""
        refusing = _find_others(request, verdict)
        if not refusing:
            return await self._postpone(request, verdict.retry_after, tried=False)
        pause = max(verdict.retry_after, self._pauses.get(request.id, _FIRST_GLANCE))
        if len(self._pauses) >= _REMEMBERED:
            self._pauses.clear()
        # For a limit that defers, too, he may have to be there before others: no line keeps his place there.
        longest = _LONGEST_GLANCE if all(each is OnLimit.DEFER for each in refusing) else _LONGEST_PAUSE
        self._pauses[request.id] = min(2 * pause, longest)
        return await self._postpone(request, pause, tried=False, aside=True)

    @asynccontextmanager
    async def _holding(self, verdict: Verdict) -> AsyncIterator[None]:
        """Keep what a request holds until it has ended, however it ends."""
        holding = Holding(self._limiter, verdict) if verdict.leases else None
        try:
            yield
        finally:
            if holding is not None:
                holding.end()
            await self._limiter.release(verdict)

    async def _send(self, claim: Claim, delay: float) -> Served | None:
        """None if it is to be tried again, or has failed, or expired."""
        request, tried = claim.request, False
        try:
            async with self._keeping(request):
                await asyncio.sleep(delay)
                if request.expires > self._clock():  # the machine may have slept longer
                    tried = True
                    return await self._upstream.send(request)
        except asyncio.CancelledError:
            await self._give_back(request, tried)
            raise
        except Exception as error:
            await self._try_again(claim, error)
            return None
        await self._expire(request)
        return None

    @asynccontextmanager
    async def _keeping(self, request: Deferred) -> AsyncIterator[None]:
        """Keep a claim, however long it takes: a leaky bucket delays by hours if it is so deep."""
        renewing = asyncio.create_task(self._renew(request))
        try:
            yield
        finally:
            await _cancel({renewing})

    async def _renew(self, request: Deferred) -> None:
        while True:
            await asyncio.sleep(self._backlog.lease / _RENEWALS)
            with suppress(BacklogUnavailable):  # it is asked again before the claim ends
                await self._backlog.renew(request, self._clock())

    async def _see_off(self, served: Served) -> None:
        """Wait until the application has done what it does after its answer; meanwhile others are tried."""
        if served.rest is not None:
            self._leave_place(asyncio.current_task())
            try:
                await asyncio.wait([served.rest])
            except asyncio.CancelledError:
                await break_off(served.rest)
                raise

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
        """Write a request's end, if need be when that can be done again: what has been answered is not sent once
        more, as it would be when its lease has ended."""
        self._pauses.pop(request.id, None)
        while True:
            try:
                await self._backlog.finish(request, state, self._clock(), reply, reason)
            except BacklogUnavailable as error:
                if self._ending:
                    raise
                self._outage.begin(error)
            else:
                return self._ended.add(request.id)
            await asyncio.sleep(_LOOK)

    async def _expire(self, request: Deferred) -> None:
        await self._finish(request, State.EXPIRED, None, "It was not its turn in time.")

    async def _give_back(self, request: Deferred, tried: bool) -> None:
        """Leave a request to whoever comes next: this replayer ends."""
        await self._backlog.postpone(request, self._clock(), tried)

    async def _postpone(self, request: Deferred, seconds: float, tried: bool, aside: bool = False) -> None:
        """Until then, or until it has expired, which is to be told in time."""
        now = self._clock()
        seconds = min(seconds, max(request.expires - now, 0.0))
        await self._backlog.postpone(request, now + seconds, tried, aside)
        asyncio.get_running_loop().call_later(seconds, self._stirred.set)


class _Free:
    """How many requests were replayed under no limit, since the rules have none for them any more."""

    def __init__(self) -> None:
        self._number, self._domain = 0, ""
        self._due = -inf

    def add(self, domain: str, now: float) -> None:
        if not self._number:
            self._due = max(self._due, now + _LOOK)
        self._number += 1
        self._domain = domain

    def tell(self, now: float) -> None:
        """Log it a second after the first, and then once in a minute."""
        if self._number and now >= self._due:
            log.warning(_FREE, self._number, self._domain)
            self._number, self._due = 0, now + _SWEEP


def _find_others(request: Deferred, verdict: Verdict) -> list[OnLimit]:
    """What the limits want that refuse a request, but for the one in whose line it waits."""
    wants = []
    for _, rule, _, _, key in (status for status in verdict.statuses if not status.allowed):
        if rule is None or name_counter(rule, key) != request.key:
            wants.append(OnLimit.REJECT if rule is None else rule.on_limit)
    return wants


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended: `asyncio.wait_for` of Python 3.11, with which redis-py sends, forgets a
    cancellation that comes together with what it waits for."""
    while going_on := {task for task in tasks if not task.done()}:
        for task in going_on:
            task.cancel()
        await asyncio.wait(going_on, timeout=_AGAIN)
