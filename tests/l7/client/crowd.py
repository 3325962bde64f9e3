"""Many requests at once, in a time that no clock takes: a third way to carry out courses, for tests of decisions."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import httpx

from netlimit.client.budget import Budgets, Ledger
from netlimit.client.course import Conduct, Count, Course, Drop, Enter, Leave, Line, Outcome, Send, Step, Wait
from netlimit.client.errors import Exhausted
from netlimit.client.retry import Retry
from netlimit.l7.memory.counter import SECOND, Clock
from netlimit.l7.memory.store import MemoryStore


@dataclass(eq=False)
class Person:
    """A request, from when it came to how it ended."""

    number: int
    came: float
    course: Course
    sent: list[float] = field(default_factory=list)
    ended: httpx.Response | Exhausted | None = None
    line: Line | None = None


class Crowd:
    """A client, the requests that it is given, and a server that takes `latency` seconds."""

    def __init__(
        self, budgets: Budgets, retry: Retry, answer: Callable[[float], httpx.Response], latency: float = 0.0
    ) -> None:
        self.now = 0.0
        self.store = MemoryStore(Clock(lambda: round(self.now * SECOND), 0))
        self.conduct = Conduct(Ledger(budgets), retry, lambda: self.now)
        self.answer = answer
        self.latency = latency
        self.people: list[Person] = []
        self.lines: dict[Line, deque[Person]] = {}
        self._agenda: list[tuple[float, int, Person, Outcome]] = []
        self._turns = count()

    def come(self, at: float, request: httpx.Request) -> Person:
        person = Person(len(self.people), at, self.conduct.pursue(request))
        self.people.append(person)
        self._plan(at, person, None)
        return person

    def run(self) -> None:
        while self._agenda:
            at, _, person, outcome = heapq.heappop(self._agenda)
            self.now = at
            try:
                step = person.course.send(outcome)
            except Exhausted as error:
                person.ended = error
                self._leave(person)
            else:
                self._carry_out(step, person)

    def _carry_out(self, step: Step | httpx.Response, person: Person) -> None:
        match step:
            case httpx.Response():
                person.ended = step
                self._leave(person)
            case Wait(seconds):
                assert seconds > 0
                self._plan(self.now + seconds, person, None)
            case Enter(line):
                person.line = line
                queue = self.lines.setdefault(line, deque())
                queue.append(person)
                if queue[0] is person:
                    self._plan(self.now, person, None)
            case Leave():
                self._leave(person)
                self._plan(self.now, person, None)
            case Count(ask):
                self._plan(self.now, person, self.store.decide_now([ask])[0])
            case Send():
                person.sent.append(self.now)
                self._plan(self.now + self.latency, person, self.answer(self.now))
            case Drop():
                self._plan(self.now, person, None)

    def _leave(self, person: Person) -> None:
        if person.line is None:
            return
        queue = self.lines[person.line]
        assert queue.popleft() is person
        person.line = None
        if queue:
            self._plan(self.now, queue[0], None)

    def _plan(self, at: float, person: Person, outcome: Outcome) -> None:
        heapq.heappush(self._agenda, (at, next(self._turns), person, outcome))

    @property
    def sent(self) -> list[float]:
        """When requests were sent, in order."""
        return sorted(at for person in self.people for at in person.sent)
