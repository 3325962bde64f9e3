"""Waiting for controllers: until they have applied a change, until they have answered a question.

Nobody blocks a thread meanwhile, so a hundred who wait do not keep others from being served.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from fastapi.concurrency import run_in_threadpool

from netlimit.errors import StoreError
from netlimit.liveness import is_gone
from netlimit.records import HostStatus
from netlimit.store import Leave, Store

from .problems import Problem, say_ending
from .standing import is_live
from .turns import TURN, Rank, lay_down_turn, run_in_turn

POLL_SECONDS = 0.01
MOST_ASKING = 16
"""Requests of one token (or address) that may wait for answers of controllers at once."""
REFUSAL_SECONDS = 1.0
"""How long who asks more is kept: one who asks again at once keeps the API busy with refusals."""
CLIENT: ContextVar[object] = ContextVar("client", default=None)
"""Whose request this is."""
Answers = dict[str, dict[str, Any]]
_log = logging.getLogger(__name__)


class Waiting:
    """Waits for the controllers behind a store. However many wait for a revision, one task reads what is applied."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._poller: asyncio.Task[None] | None = None
        self._asking: Counter[object] = Counter()
        self._ending = False

    def end(self) -> None:
        """The API is about to end: who waits for a revision waits no more, and who waits for answers hears why there
        are none."""
        self._ending = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def applied(self, revision: int, seconds: float) -> bool:
        """Wait until every live gateway has applied `revision`, at most so long; whether they have.

        A paused gateway is not waited for, for it applies nothing until an operator says so. If there is no live
        one at all, one may come.
        """
        if seconds <= 0 or self._ending:
            return False
        lay_down_turn()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = revision
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            await asyncio.wait_for(waiter, seconds)
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(waiter, None)
        return not self._ending

    async def ask(self, hosts: Sequence[str], kind: str, argument: Mapping[str, object], seconds: float) -> Answers:
        """Ask the controllers of these gateways; what those answered that did so in time, in the order of `hosts`.

        Questions that have no answer by then are withdrawn: no controller works for somebody who has gone. Raises
        Problem 429, 503 when the API is told to end, and NoRoom.
        """
        client = CLIENT.get()
        if self._asking[client] >= MOST_ASKING:
            await asyncio.sleep(REFUSAL_SECONDS)
            raise Problem(
                429,
                f"You have {MOST_ASKING} requests waiting for controllers, the most for one; await some answers.",
                headers={"Retry-After": "1"},
            )
        self._asking[client] += 1
        lay_down_turn()
        try:
            return await self._ask(hosts, kind, argument, seconds)
        finally:
            self._asking[client] -= 1
            if not self._asking[client]:
                del self._asking[client]

    async def _ask(self, hosts: Sequence[str], kind: str, argument: Mapping[str, object], seconds: float) -> Answers:
        asked: dict[str, int] = {}
        answers: Answers = {}
        try:
            for host in hosts:
                asked[host] = await run_in_threadpool(self._store.ask, host, kind, argument, _find_share())
            end = asyncio.get_running_loop().time() + seconds
            while len(answers) < len(asked) and asyncio.get_running_loop().time() < end:
                if self._ending:
                    raise say_ending()
                await asyncio.sleep(POLL_SECONDS)
                for host, question in asked.items():
                    answer = None if host in answers else await run_in_threadpool(self._store.answered, question)
                    if answer is not None:
                        answers[host] = answer
        finally:
            if left := [question for host, question in asked.items() if host not in answers]:
                await self._withdraw(left)
        return {host: answers[host] for host in hosts if host in answers}

    async def _withdraw(self, questions: Sequence[int]) -> None:
        try:
            await run_in_threadpool(self._store.withdraw, questions)
        except StoreError as error:  # they are forgotten a minute later
            _log.warning("Questions that nobody waits for stay open: %s", error)

    async def find_hosts(self, host: str | None = None) -> tuple[list[str], list[str]]:
        """The gateways, or only this one, whose controllers have reported lately, and the others that are not gone.
        Raises Problem 404 and 503."""
        hosts = await run_in_turn(self._store.hosts)
        wanted = choose_hosts(hosts, host)
        live = [each.host for each in wanted if is_live(each)]
        if not live:
            whose = f"of {host!r} " if host is not None else ""
            raise Problem(503, f"No controller {whose}has reported lately; run `netlimit serve` on the gateway.")
        return live, [each.host for each in wanted if not is_live(each) and not is_gone(each.silence)]

    async def ask_live(self, kind: str, seconds: float, host: str | None = None) -> tuple[Answers, list[str]]:
        """Ask every live gateway, or one: the answers, and which were silent, now or for a while.

        Raises Problem 404 for a gateway that is not known, and 503 when there is no answer at all.
        """
        hosts, silent = await self.find_hosts(host)
        answers = await self.ask(hosts, kind, {}, seconds)
        if not answers:
            raise Problem(503, f"No controller answered in {seconds:g} seconds; asked were {', '.join(hosts)}.")
        return answers, sorted({*silent, *hosts} - answers.keys())

    async def _poll(self) -> None:
        while self._waiters:
            try:
                hosts = await run_in_threadpool(self._store.hosts)
            except StoreError as error:
                _log.warning("Cannot see what is applied: %s", error)
                hosts = []
            for waiter, revision in list(self._waiters.items()):
                if not waiter.done() and _have_applied(hosts, revision):
                    waiter.set_result(None)
            await asyncio.sleep(POLL_SECONDS)


def _find_share() -> Leave:
    """What a question has to leave of the disk of the database, with its answer."""
    turn = TURN.get()
    return Leave.HALF if turn is not None and turn.rank is Rank.ADMIN else Leave.ALL


def _have_applied(hosts: Sequence[HostStatus], revision: int) -> bool:
    live = [host for host in hosts if is_live(host)]
    return bool(live) and all(host.paused or host.applied_revision >= revision for host in live)


def choose_hosts(hosts: Sequence[HostStatus], host: str | None) -> list[HostStatus]:
    """All gateways, or the one that is named. Raises Problem 404 if it is not known."""
    chosen = [each for each in hosts if host in (None, each.host)]
    if host is not None and not chosen:
        known = f"known are {', '.join(each.host for each in hosts)}" if hosts else "none has reported yet"
        raise Problem(404, f"There is no gateway named {host!r}; {known}.")
    return chosen
