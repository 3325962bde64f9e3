"""How much work a judgement may be: others wait meanwhile, for it is done while nothing else can be changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from netlimit.errors import NetlimitError

MOST_STEPS = 3_000_000
"""A step is a look at one rule; so many take some four seconds."""


class TooMuchToJudge(NetlimitError):
    """A change that would be judged for so long that others could change nothing meanwhile."""


class _Effort:
    def __init__(self, left: int) -> None:
        self.left = left


_EFFORT: ContextVar[_Effort | None] = ContextVar("effort", default=None)


@contextmanager
def bounded(steps: int) -> Iterator[None]:
    """Let what is done within take so many steps, and no more. It raises TooMuchToJudge."""
    token = _EFFORT.set(_Effort(steps))
    try:
        yield
    finally:
        _EFFORT.reset(token)


def spend(steps: int) -> None:
    """Tell of steps that are about to be taken. Raises TooMuchToJudge when they are too many."""
    effort = _EFFORT.get()
    if effort is not None:
        effort.left -= steps
        if effort.left < 0:
            raise TooMuchToJudge(
                "It would take too long to find out whether these rules close a gateway together with those that are "
                "kept, and nobody could change anything meanwhile."
            )
