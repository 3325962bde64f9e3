"""What a child process has to have for itself after a fork."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forking(Protocol):
    """Something with locks that other threads take, or with what its parent is to end."""

    def __hash__(self) -> int: ...

    def start_anew(self) -> None:
        """Make that anew: this is a child. None of the threads that held a lock is there to let go of it."""
        ...


_forking: WeakSet[Forking] = WeakSet()


def renew_after_fork(each: Forking) -> None:
    """Have this renewed in every child, as long as it is there."""
    _forking.add(each)


def _renew_all() -> None:
    for each in list(_forking):
        each.start_anew()


os.register_at_fork(after_in_child=_renew_all)
