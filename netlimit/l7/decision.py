"""What a counter says of a request."""

from __future__ import annotations

from typing import NamedTuple

new = tuple.__new__
"""Makes a named tuple of a tuple. Its own constructor takes as long as half of all the rest of a decision."""


class Decision(NamedTuple):
    """Whether a request is within a limit, and how it stands with it afterwards. Times are in seconds."""

    admitted: bool
    remaining: int
    """Hits that would still be admitted now, those beyond the limit that are tolerated left out."""
    retry_after: float
    """So long from now the next request of the same weight (one hit, if it has none) is admitted if no other comes: 0
    is at once, and `inf` never, for one that is heavier than the limit."""
    reset_after: float
    """So long from now the limit is as good as untouched."""
    delay: float = 0.0
    """So long an admitted request is to wait for its turn; only a leaky bucket has it wait."""
    over: bool = False
    """Whether it was admitted beyond the limit, as a soft or elastic one tolerates."""


class Unanswered(Decision):
    """A refusal because the counter could not be asked: nobody knows how the request stands with the limit."""

    __slots__ = ()


class Crowded(Decision):
    """What a counter says that a key shares with others because there is no room for one of its own: of what it refuses
    who asks may have used up nothing. (Where it admits, any Decision will do.)"""

    __slots__ = ()
