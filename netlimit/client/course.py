"""What becomes of a request, step by step; whoever carries the steps out does the waiting and the sending.

A course is a generator: it yields what is to be done next, is sent what came of it, and yields the answer last. It
decides everything and does nothing, so that programs with threads and programs with tasks share every decision.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import httpx

from netlimit.client.advice import read_advice
from netlimit.client.budget import Charge, Ledger
from netlimit.client.errors import BudgetExhausted, QuotaExhausted
from netlimit.client.holds import LONGEST, Holds, Place, locate
from netlimit.client.retry import Retry, is_lost, is_refused, is_replayable
from netlimit.l7.decision import Decision
from netlimit.l7.memory.counter import SECOND, Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.store import Ask

Line = tuple[str, ...]
"""The counters that those who stand in one line wait for."""


class Wait(NamedTuple):
    """Wait so many seconds."""

    seconds: float


class Enter(NamedTuple):
    """Stand in line until one is at its head. Tasks are served in order, threads nearly so.

    It takes no longer than anybody's patience: who came earlier gives up earlier.
    """

    line: Line


class Leave(NamedTuple):
    """Leave the line: the next one is at its head. (Whoever gives up is out of it, too.)"""


class Count(NamedTuple):
    """Ask a counter; its decision."""

    ask: Ask


class Send(NamedTuple):
    """Send the request; its answer, or what httpx raised instead. `charges` are asked about again when it goes out."""

    charges: tuple[Charge, ...] = ()


class Drop(NamedTuple):
    """Close an answer that nobody will read."""

    response: httpx.Response


Step = Wait | Enter | Leave | Count | Send | Drop
Outcome = None | Decision | httpx.Response | httpx.TransportError
Course = Generator[Step | httpx.Response, Outcome, None]
"""It ends with the answer."""
Part = Generator[Step, Outcome, None]


@dataclass(frozen=True, slots=True)
class Errand:
    """A request on its way."""

    request: httpx.Request
    place: Place
    charges: tuple[Charge, ...]
    deadline: float
    """When it is sent at the latest, by the steady clock."""


class Conduct:
    """How a client behaves: what it has been told, what it may spend, and how patient it is."""

    def __init__(self, ledger: Ledger, retry: Retry, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._retry = retry
        self._clock = clock
        self._holds = Holds(max(LONGEST, retry.patience))
        self._sent = MemoryStore(Clock(lambda: round(clock() * SECOND), 0))
        """What has gone out, which may be long after it was paid for: there was no connection before."""
        self._bound = f", and it may wait {retry.patience:g} s in all."

    def pursue(self, request: httpx.Request) -> Course:
        """The course of a request. Raises BudgetExhausted, QuotaExhausted, and what sending it came to."""
        deadline = self._clock() + self._retry.patience
        errand = Errand(request, locate(request), self._ledger.find_charges(request), deadline)
        attempt = 0
        while True:
            yield from self._await_turn(errand)
            attempt += 1
            sent = self._clock()
            outcome = yield Send(tuple(charge for charge in errand.charges if charge.is_exact))
            if isinstance(outcome, httpx.TransportError):
                pause = self._back_off(attempt)
                if not is_lost(request, outcome) or not self._may_repeat(errand, attempt, pause):
                    raise outcome
            else:
                assert isinstance(outcome, httpx.Response)
                again = self._hear(errand, attempt, outcome, sent)
                if again is None:
                    yield outcome
                    return
                yield Drop(outcome)
                pause = again
            if pause:
                yield Wait(pause)

    def go_out(self, charges: Iterable[Charge]) -> float:
        """Seconds until a request that has its connection may go out on it; 0: it goes now, and is counted."""
        for charge in charges:
            decision = self._sent.decide_now([charge.ask])[0]
            if not decision.admitted:
                return decision.retry_after
        return 0.0

    def _hear(self, errand: Errand, attempt: int, response: httpx.Response, sent: float) -> float | None:
        """How long to back off before the request is sent again; None: this is the answer."""
        advice = read_advice(response.headers, time.time())
        self._holds.note(errand.place, response.status_code, advice, sent, self._clock())
        told = advice.retry_after is not None
        said = max(advice.retry_after or 0.0, self._holds.wait(errand.place, self._clock()))
        pause = 0.0 if told or said else self._back_off(attempt)  # what the server said is a hold by now
        again = is_refused(errand.request, response.status_code, told)
        return pause if again and self._may_repeat(errand, attempt, said or pause) else None

    def _await_turn(self, errand: Errand) -> Part:
        """Wait until the server takes requests again and every budget has room, both at the same moment."""
        paid = False
        while not paid:
            yield from self._sit_out_holds(errand)
            line = tuple(charge.rule.name for charge in errand.charges)
            if not line:
                return
            yield Enter(line)
            paid = yield from self._pay(errand)
            yield Leave()

    def _sit_out_holds(self, errand: Errand) -> Part:
        while wait := self._holds.wait(errand.place, self._clock()):
            if wait > self._time_left(errand):
                host = errand.request.url.host
                raise QuotaExhausted(f"{host} takes no such request for another {wait:.1f} s{self._bound}", wait)
            yield Wait(wait)

    def _pay(self, errand: Errand) -> Generator[Step, Outcome, bool]:
        """At the head of the line, spend from every budget; False if there is a hold to be sat out first.

        The shortest unit is asked first, and all again after a wait: what is spent in vain comes back soonest, and no
        crowd that a long budget held up passes a short one at once.
        """
        while not self._holds.wait(errand.place, self._clock()):
            for charge in errand.charges:
                decision = yield Count(charge.ask)
                assert isinstance(decision, Decision)
                wait = decision.delay if decision.admitted else decision.retry_after
                if wait > self._time_left(errand):
                    raise BudgetExhausted(f"{charge}: {self._tell_room(wait)}", wait)
                if wait:
                    yield Wait(wait)
                if not decision.admitted:
                    break
            else:
                return True
        return False

    def _tell_room(self, wait: float) -> str:
        return f"there is room for it in {wait:.1f} s{self._bound}" if wait < inf else "it never holds as much."

    def _back_off(self, attempt: int) -> float:
        return self._retry.back_off(attempt, random.random())  # noqa: S311, it only spreads

    def _may_repeat(self, errand: Errand, attempt: int, wait: float) -> bool:
        in_time = attempt < self._retry.attempts and wait <= self._time_left(errand)
        return in_time and is_replayable(errand.request)

    def _time_left(self, errand: Errand) -> float:
        return max(0.0, errand.deadline - self._clock())
