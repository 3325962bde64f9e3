"""One connection to one Redis server; what is asked for together travels together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hiredis import ReplyError
from redis.asyncio.connection import AbstractConnection

from netlimit.errors import CountersUnavailable
from netlimit.l7.breaker import RESTING, Breaker, State
from netlimit.l7.decision import Decision
from netlimit.l7.redis.algorithms import HEAVIEST, Counting
from netlimit.l7.redis.channel import Channel
from netlimit.l7.redis.script import Script, pack
from netlimit.l7.store import Ask

MOST = 256
"""Questions that go together at most: Redis does nothing else while it runs a script."""
Answer = Decision | CountersUnavailable
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class Ticket:
    """Somebody who waits for the answers to several questions, in order, until a deadline (the loop's time)."""

    __slots__ = ("_missing", "answers", "deadline", "future")

    def __init__(self, count: int, deadline: float, future: asyncio.Future[list[Answer]]) -> None:
        self.answers: list[Any] = [None] * count
        self.deadline = deadline
        self.future = future
        self._missing = count

    def answer(self, position: int, answer: Answer) -> None:
        """One of the answers; the last one ends the waiting."""
        if self.answers[position] is None:
            self.answers[position] = answer
            self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(self.answers)


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

    def fail(self, where: str, reason: str) -> None:
        """There will be no decision."""
        error = CountersUnavailable(f"The counters at {where} cannot be asked: {reason.rstrip('.')}.")
        self.ticket.answer(self.position, error)


Redirect = Callable[[Question, str], bool]
"""Takes a question elsewhere if that is what an error asks for, and says whether it did."""


class Link:
    """A connection, made when it is needed, and the questions that wait for it. It belongs to one event loop.

    While one batch is on the wire, or until the loop's next round, questions gather; then they go together, those of
    one script as one call unless a `redirect` is given: in a cluster each counter has a call of its own. Heavy ones go
    in several batches, between which others are answered. A batch is sent once: after a failure nobody knows whether it
    was counted. What is not answered by the deadline of the question that waits longest fails with all that wait, and
    the breaker opens.
    """

    def __init__(
        self, connect: Callable[[], AbstractConnection], where: str, breaker: Breaker, redirect: Redirect | None = None
    ) -> None:
        self._connect = connect
        self._where = where
        self._breaker = breaker
        self._redirect = redirect
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._waiting: list[Question] = []
        self._calls: list[list[Question]] = []
        """What is on the wire."""
        self._flying = 0
        """How many questions that were."""
        self._busy = False
        self._deadline: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._losses = 0

    @property
    def state(self) -> State:
        """What the breaker thinks of the server."""
        return self._breaker.state

    @property
    def losses(self) -> int:
        """How many connections have been closed by the server while nothing was asked."""
        return self._losses

    @property
    def load(self) -> int:
        """How many questions have no answer yet."""
        return len(self._waiting) + self._flying

    def ask(self, question: Question) -> None:
        """Send a question with the next batch, or fail its ticket at once while the breaker is open."""
        if not self._breaker.admit():
            question.fail(self._where, RESTING)
            return
        self._waiting.append(question)
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send)

    async def aclose(self) -> None:
        """Close the connection; who still waits is told so."""
        self._give_up("they were closed")
        if self._closing:
            await asyncio.wait(self._closing)

    def _send(self) -> None:
        if self._calls:
            return
        size = _find_batch(self._waiting)
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        self._busy = bool(batch)
        if not batch:
            return
        calls: dict[tuple[Script, bytes, bool], list[Question]] = {}
        for question in batch:
            group = question.counting.script, question.name if self._redirect else b"", question.asking
            calls.setdefault(group, []).append(question)
        self._calls = [*calls.values()]
        self._flying = len(batch)
        self._deadline = self._loop.call_at(batch[0].ticket.deadline, self._give_up, "no answer in time")
        if self._channel is None:
            self._opening = self._loop.create_task(self._open())
        else:
            self._call(self._channel, by_source=False)

    async def _open(self) -> None:
        channel = Channel(self._receive, self._lose)
        try:
            await channel.open(self._connect())
        except Exception as error:  # whatever it is: it must not leave anybody waiting
            self._opening = None
            self._give_up(str(error))
        else:
            self._opening = None
            self._channel = channel
            self._call(channel, by_source=False)

    def _call(self, channel: Channel, by_source: bool) -> None:
        command = b"".join(_pack_call(questions, by_source) for questions in self._calls)
        channel.send(command, len(self._calls) + sum(questions[0].asking for questions in self._calls))

    def _receive(self, replies: Sequence[Any]) -> None:
        coming = iter(replies)
        unknown: list[list[Question]] = []
        refused: list[list[Question]] = []
        reason = ""
        for questions in self._calls:
            if questions[0].asking:
                next(coming)
            reply = next(coming)
            if not isinstance(reply, ReplyError):
                _answer(questions, reply)
            elif str(reply).startswith("NOSCRIPT"):
                unknown.append(questions)
            elif stuck := [each for each in questions if not (self._redirect and self._redirect(each, str(reply)))]:
                refused.append(stuck)
                reason = str(reply)
        self._calls = refused + unknown
        if refused:  # by a replica, perhaps, or one that is full: the next connection may reach another server
            self._give_up(reason)
        elif unknown and self._channel is not None:
            self._call(self._channel, by_source=True)
        else:
            self._end_batch()
            self._breaker.succeed()
            self._busy = True
            self._loop.call_soon(self._send)  # after those who have been answered now, and may ask again

    def _lose(self, reason: str) -> None:
        if self._calls:
            self._give_up(reason)
        else:  # closed while it was idle: the next batch opens another
            self._losses += 1
            self._drop_channel()

    def _give_up(self, reason: str) -> None:
        """Nothing that waits will be answered by this connection."""
        self._breaker.fail()
        failed = [*(question for questions in self._calls for question in questions), *self._waiting]
        self._waiting = []
        self._end_batch()
        self._busy = False
        self._drop_channel()
        for question in failed:
            question.fail(self._where, reason)

    def _end_batch(self) -> None:
        self._calls = []
        self._flying = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop_channel(self) -> None:
        if self._opening is not None:
            self._end(self._opening)
            self._opening.cancel()
            self._opening = None
        if self._channel is not None:
            self._channel.abort()  # now: the loop may end before a task of its own begins
            self._end(self._loop.create_task(self._channel.close()))
            self._channel = None

    def _end(self, task: asyncio.Task[None]) -> None:
        """Keep a task that is about to end until it has."""
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _find_batch(waiting: Sequence[Question]) -> int:
    """How many of those that wait go next: one at least, and no more than Redis answers without a pause."""
    entries = 0
    for place, question in enumerate(waiting[:MOST]):
        if question.counting.script.lists:
            entries += min(question.ask.hits, HEAVIEST)
            if entries > HEAVIEST and place:
                return place
    return min(len(waiting), MOST)


def _answer(questions: Sequence[Question], reply: Sequence[int]) -> None:
    width = questions[0].counting.script.width
    for place, question in enumerate(questions):
        question.ticket.answer(question.position, question.counting.read(question.ask, reply, place * width))


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
