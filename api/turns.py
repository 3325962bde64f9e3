"""Whose request is worked on next: so much of one asker is in work at a time, and the rest stands in a line of his own.

There is one pool of threads, and Python runs one of them at a time. Were requests served as they come, sixty dear ones
of one token would keep an administrator waiting until the last of them is done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from enum import StrEnum
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar

from fastapi.concurrency import run_in_threadpool
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from .bodies import SMALL
from .problems import Problem

P = ParamSpec("P")
T = TypeVar("T")


class Kind(StrEnum):
    """What a request is for. Each kind has turns of its own: no change waits for those who look."""

    LOOK = "look"
    """To read: that may take a second of one processor."""
    CHANGE = "change"
    """To change a little: most of that is waiting for the database."""
    BULK = "bulk"
    """To change much: that may take a minute."""


class Rank(StrEnum):
    """Who asks. Nobody takes the turns of admins, and strangers have few."""

    ADMIN = "admin"
    KNOWN = "known"
    UNKNOWN = "unknown"


MOST_OF_ONE = {Kind.LOOK: 2, Kind.CHANGE: 8, Kind.BULK: 1}
"""Requests in work at a time of one token or address. More that look would not be done sooner, for it is one processor
that they share, and would hold up all others."""
MOST = {
    Rank.ADMIN: {Kind.LOOK: 3, Kind.CHANGE: 8, Kind.BULK: 2},
    Rank.KNOWN: {Kind.LOOK: 4, Kind.CHANGE: 12, Kind.BULK: 2},
    Rank.UNKNOWN: {Kind.LOOK: 2, Kind.CHANGE: 1, Kind.BULK: 1},
}
"""Of all of a rank together. In all fewer than there are threads (40): what is short and must not wait, such as looking
which tokens are good, always finds one."""
MOST_IN_LINE = 96
"""Requests of one that wait for their turn, of each kind."""
PATIENCE_SECONDS = {Kind.LOOK: 20.0, Kind.CHANGE: 20.0, Kind.BULK: 200.0}
"""How long one waits for his turn, at most: `netlimit` waits thirty seconds for an answer, in bulk three hundred."""
REFUSAL_SECONDS = 1.0
"""How long who asks more is kept: one who asks again at once keeps the API busy with refusals."""


_Name = tuple[Kind, object]


class Turn:
    """The turn of one request. It is taken when there is something to do, and laid down while the request waits for
    something else; it ends with the answer."""

    def __init__(self, turns: Turns, owner: object, rank: Rank, kind: Kind) -> None:
        self.owner, self.rank, self.kind = owner, rank, kind
        self._turns = turns
        self._begun = False
        self._confirm: Callable[[], Awaitable[None]] | None = None
        self._coming: asyncio.Future[None] | None = None
        self.counted: tuple[tuple[object, int], ...] = ()
        """Whom it was given to, each with the most that there may be; nobody while it is not taken."""

    @property
    def name(self) -> _Name:
        """Whose line it stands in."""
        return self.kind, self.owner

    @property
    def begun(self) -> bool:
        """Whether it was taken before. What is begun comes to its end: it is never refused, and goes first."""
        return self._begun

    def show(self, owner: object, rank: Rank, confirm: Callable[[], Awaitable[None]] | None = None) -> None:
        """Tell who asks: what was unknown until a token was looked at. `confirm` is asked when the turn has come first,
        and raises if they may not ask any more."""
        self._confirm = confirm
        if not self.counted:
            self.owner, self.rank = owner, rank

    def read(self, size: int) -> None:
        """Tell how much of a body has come."""
        if not self.counted and size > SMALL:
            self.kind = Kind.BULK

    async def take(self) -> None:
        """Wait for the turn, unless it is taken already. Raises Problem 429, ClientDisconnect, and what `show` says."""
        if self.counted:
            return
        if not self._begun and self._turns.count_line(self) >= MOST_IN_LINE:
            await asyncio.sleep(REFUSAL_SECONDS)
            raise _refuse(f"You have {MOST_IN_LINE} requests in line, the most for one; await some answers.")
        self._coming = asyncio.get_running_loop().create_future()
        self._turns.line_up(self)
        patience = PATIENCE_SECONDS[self.kind]
        try:
            async with asyncio.timeout(None if self._begun else patience):
                await self._coming
        except TimeoutError:
            self.lay_down()
            raise _refuse(f"Your requests before this one took {patience:g} seconds; ask less at once.") from None
        except BaseException:
            self.lay_down()
            raise
        finally:
            self._coming = None
        is_first, self._begun = not self._begun, True
        if is_first and self._confirm is not None:
            await self._confirm()

    def give(self, counted: tuple[tuple[object, int], ...]) -> None:
        """It has come."""
        self.counted = counted
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(None)

    def lay_down(self) -> None:
        """Let others have it, or leave the line."""
        self._turns.leave(self)

    def leave(self) -> None:
        """Whoever asked has gone: what is not begun need not be done."""
        if not self._begun and self._coming is not None and not self._coming.done():
            self._coming.set_exception(ClientDisconnect())


class Turns:
    """Who is in work, and who in line. Nobody waits who would keep to what he may have while there is room."""

    def __init__(self) -> None:
        self._lines: dict[tuple[_Name, bool], dict[Turn, None]] = {}
        """For each asker, of each kind, those that are begun and those that are not, in the order in which they came.
        Only the first of each can be next: looking for that takes no longer because somebody has many in line."""
        self._working: Counter[object] = Counter()
        self._served: dict[_Name, int] = {}
        """Who of those that are here had a turn when: whose is longest ago is next."""
        self._given = 0

    def line_up(self, turn: Turn) -> None:
        """Stand in line; the turn may come at once."""
        self._lines.setdefault((turn.name, turn.begun), {})[turn] = None
        self._serve()

    def leave(self, turn: Turn) -> None:
        """Leave the line, or end the turn. One that has neither is no error."""
        self._remove(turn)
        ended, turn.counted = turn.counted, ()
        for group, _ in ended:
            self._working[group] -= 1
            if not self._working[group]:
                del self._working[group]
        name = turn.name
        if not self._working[name] and not any((name, begun) in self._lines for begun in (False, True)):
            self._served.pop(name, None)
        if ended:
            self._serve()

    def count_line(self, turn: Turn) -> int:
        """How many of the same asker stand in the same line."""
        return len(self._lines.get((turn.name, turn.begun), ()))

    def _serve(self) -> None:
        while True:
            first = (next(iter(line)) for line in self._lines.values())
            turn = min(filter(self._has_room, first), key=self._weigh, default=None)
            if turn is None:
                return
            self._remove(turn)
            groups = _find_groups(turn)
            self._working.update(group for group, _ in groups)
            self._given += 1
            self._served[turn.name] = self._given
            turn.give(groups)

    def _has_room(self, turn: Turn) -> bool:
        return all(self._working[group] < most for group, most in _find_groups(turn))

    def _weigh(self, turn: Turn) -> tuple[bool, int, int]:
        """What is least goes first. Of those that weigh the same, whose line began first."""
        return not turn.begun, self._working[turn.name], self._served.get(turn.name, 0)

    def _remove(self, turn: Turn) -> None:
        line = self._lines.get((turn.name, turn.begun), {})
        line.pop(turn, None)
        if not line:
            self._lines.pop((turn.name, turn.begun), None)


def _find_groups(turn: Turn) -> tuple[tuple[object, int], ...]:
    return (turn.name, MOST_OF_ONE[turn.kind]), ((turn.kind, turn.rank), MOST[turn.rank][turn.kind])


def _refuse(sentence: str) -> Problem:
    return Problem(429, sentence, headers={"Retry-After": "1"})


TURN: ContextVar[Turn | None] = ContextVar("turn", default=None)
"""The turn of the request that is being served."""


async def run_in_turn(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call what takes time in a thread, when it is the request's turn. Raises Problem 429."""
    turn = TURN.get()
    if turn is not None:
        await turn.take()
    return await run_in_threadpool(function, *arguments, **options)


def ask_much() -> None:
    """Tell that the request changes much, though it has no body. Admins wait for nobody else's bulk: they undo."""
    turn = TURN.get()
    if turn is not None and turn.rank is not Rank.ADMIN and not turn.counted:
        turn.kind = Kind.BULK


def lay_down_turn() -> None:
    """Let others have the turn of this request, which is about to wait for something that costs nothing."""
    turn = TURN.get()
    if turn is not None:
        turn.lay_down()


class InTurn(APIRoute):
    """An operation that runs in a thread, when it is the request's turn. Its answer is written there, too: on the event
    loop, a long one would keep everybody waiting."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        inner = endpoint if iscoroutinefunction(endpoint) else _take_turns(endpoint)
        super().__init__(path, inner, **options)


def write_json(answer: object) -> Response:
    """An answer as JSON."""
    return JSONResponse(jsonable_encoder(answer))


def _take_turns(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    def answer(**values: Any) -> Response:
        found = endpoint(**values)
        return found if isinstance(found, Response) else write_json(found)

    @wraps(endpoint)
    async def serve(**values: Any) -> Response:
        return await run_in_turn(answer, **values)

    return serve
