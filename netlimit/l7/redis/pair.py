"""Two links to one server: while it answers a batch of the one, that of the other is written or read."""

from __future__ import annotations

from netlimit.l7.breaker import State
from netlimit.l7.redis.link import Link, Question, Ticket


class Pair:
    """The links of one event loop to a server; they share a breaker. The other is opened once the one is busy."""

    def __init__(self, one: Link, other: Link) -> None:
        self._one = one
        self._other = other
        self._chosen = one
        self._ticket: Ticket | None = None

    @property
    def state(self) -> State:
        """What their breaker thinks of the server."""
        return self._one.state

    @property
    def losses(self) -> int:
        """How many connections have been closed by the server while nothing was asked."""
        return self._one.losses + self._other.losses

    def ask(self, question: Question) -> None:
        """Send a question by the link that has less to do; those of one ticket go together."""
        if question.ticket is not self._ticket:
            self._ticket = question.ticket
            self._chosen = self._one if self._one.load <= self._other.load else self._other
        self._chosen.ask(question)

    async def aclose(self) -> None:
        """Close the connections; who still waits is told so."""
        await self._one.aclose()
        await self._other.aclose()
