"""One connection to one Redis server; what is asked for together travels together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, ResponseError

from netlimit.errors import CountersUnavailable
from netlimit.l7.breaker import Breaker, State
from netlimit.l7.decision import Decision
from netlimit.l7.redis.algorithms import Counting
from netlimit.l7.redis.script import Script, pack
from netlimit.l7.store import Ask

MOST = 256
"""Questions that go together at most: Redis does nothing else while it runs a script."""
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class Ticket:
    """Somebody who waits for the answers to several questions, in order, until a deadline (the loop's time)."""

    __slots__ = ("_missing", "answers", "deadline", "future")

    def __init__(self, count: int, deadline: float, future: asyncio.Future[list[Decision]]) -> None:
        self.answers: list[Any] = [None] * count
        self.deadline = deadline
        self.future = future
        self._missing = count

    def answer(self, position: int, decision: Decision) -> None:
        """One of the answers; the last one ends the waiting."""
        self.answers[position] = decision
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(self.answers)

    def fail(self, where: str, reason: str) -> None:
        """One of the questions will not be answered."""
        if not self.future.done():
            self.future.set_exception(CountersUnavailable(f"The counters at {where} cannot be asked: {reason}."))


class Question(NamedTuple):
    """An Ask as it travels."""

    ask: Ask
    counting: Counting
    name: bytes
    """The counter's."""
    ticket: Ticket
    position: int
    """Which of the ticket's answers this is."""
    hops: int = 0
    """How often it has been sent elsewhere."""
    asking: bool = False
    """Whether it goes to a node that is about to take over the counter's slot."""


Redirect = Callable[[Question, ResponseError], bool]
"""Takes a question elsewhere if that is what an error asks for, and says whether it did."""


class Link:
    """A connection, made when it is needed, and the questions that wait for it. It belongs to one event loop.

    While one batch is on the wire, or until the loop's next round, questions gather; then they go together, those of
    one script as one call unless a `redirect` is given: in a cluster each counter has a call of its own. A batch is
    sent once: after a failure nobody knows whether it was counted. What is not answered by the deadline of the question
    that waits longest fails with all that wait, and the breaker opens.
    """

    def __init__(
        self, connection: AbstractConnection, where: str, breaker: Breaker, redirect: Redirect | None = None
    ) -> None:
        self.where = where
        self.breaker = breaker
        self._connection = connection
        self._redirect = redirect
        self._waiting: list[Question] = []
        self._pump: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        """What the breaker thinks of the server."""
        return self.breaker.state

    def ask(self, question: Question) -> None:
        """Send a question with the next batch, or fail its ticket at once while the breaker is open."""
        if not self.breaker.admit():
            question.ticket.fail(self.where, "they did not answer, and will be tried again soon")
            return
        self._waiting.append(question)
        if self._pump is None:
            self._pump = asyncio.create_task(self._send_all())

    async def aclose(self) -> None:
        """Close the connection; who still waits is told so."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        await self._connection.disconnect()

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._send(batch)
        finally:
            self._pump = None

    async def _send(self, batch: Sequence[Question]) -> None:
        calls: dict[tuple[Script, bytes, bool], list[Question]] = {}
        for question in batch:
            group = question.counting.script, question.name if self._redirect else b"", question.asking
            calls.setdefault(group, []).append(question)
        try:
            async with asyncio.timeout_at(batch[0].ticket.deadline):
                replies = await self._exchange([*calls.values()])
            await self._deliver([*calls.values()], replies)
        except asyncio.CancelledError:
            await self._give_up(batch, "they were closed")
            raise
        except Exception as error:  # whatever it is, nobody may wait for ever
            await self._give_up(batch, str(error) or "no answer in time")

    async def _exchange(self, calls: Sequence[Sequence[Question]]) -> list[Any]:
        if self._connection.is_connected and await self._connection.can_read():
            await self._connection.disconnect(nowait=True)  # the server has closed it while it was idle
        replies = await self._call(calls, by_source=False)
        unknown = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = await self._call([calls[index] for index in unknown], by_source=True)
            for index, reply in zip(unknown, again, strict=True):
                replies[index] = reply
        return replies

    async def _call(self, calls: Sequence[Sequence[Question]], by_source: bool) -> list[Any]:
        command = b"".join(_pack_call(questions, by_source) for questions in calls)
        await self._connection.send_packed_command(command, check_health=False)
        replies = []
        for questions in calls:
            if questions[0].asking:
                await self._read()
            replies.append(await self._read())
        return replies

    async def _read(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error

    async def _deliver(self, calls: Sequence[Sequence[Question]], replies: Sequence[Any]) -> None:
        refused: list[Question] = []
        reason = ""
        for questions, reply in zip(calls, replies, strict=True):
            if isinstance(reply, ResponseError):
                stuck = [each for each in questions if not (self._redirect and self._redirect(each, reply))]
                refused += stuck
                reason = str(reply) if stuck else reason
                continue
            width = questions[0].counting.script.width
            for place, question in enumerate(questions):
                question.ticket.answer(question.position, question.counting.read(question.ask, reply, place * width))
        if refused:  # a replica, perhaps, or full: the next connection may reach another server
            await self._give_up(refused, reason)
        else:
            self.breaker.succeed()

    async def _give_up(self, questions: Sequence[Question], reason: str) -> None:
        """Nothing that waits will be answered by this connection."""
        self.breaker.fail()
        waiting, self._waiting = self._waiting, []
        for question in (*questions, *waiting):
            question.ticket.fail(self.where, reason)
        await self._connection.disconnect(nowait=True)


def _pack_call(questions: Sequence[Question], by_source: bool) -> bytes:
    script = questions[0].counting.script
    count = len(questions)
    return b"".join(
        (
            _ASKING if questions[0].asking else b"",
            b"*%d\r\n" % (3 + count * (1 + script.arguments)),
            script.by_source if by_source else script.by_hash,
            pack(count, *(question.name for question in questions)),
            *(question.counting.pack(question.ask) for question in questions),
        )
    )
