"""How long a thread may wait for the answers of a database, all of them together."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable


class Allowance:
    """How long one thread may still wait for a database, however many answers that are. Without a word, for ever."""

    def __init__(self, refuse: Callable[[float], Exception]) -> None:
        """`refuse` makes the error for who has waited for so long as he was allowed to, in seconds."""
        self._refuse = refuse
        self._thread: int | None = None
        self._seconds = math.inf
        self._spent = 0.0
        self.breaks = 0
        """How often it was said that what is under way is to end."""

    def grant(self, seconds: float | None) -> None:
        """Let the calling thread, and no other, wait for so long from now on (None: for ever)."""
        self._thread, self._seconds, self._spent = threading.get_ident(), math.inf if seconds is None else seconds, 0.0

    def find_left(self) -> float:
        """How long the calling thread may still wait, in seconds."""
        return self._seconds - self._spent if threading.get_ident() == self._thread else math.inf

    def note(self, seconds: float) -> None:
        """So long has been waited."""
        if threading.get_ident() == self._thread:
            self._spent += seconds

    def spend(self, seconds: float) -> None:
        """So long has been waited. Raises what `refuse` makes."""
        self.note(seconds)
        if self.find_left() < 0:
            raise self._refuse(self._seconds)

    def break_off(self) -> None:
        """Have end what is under way, in whatever thread."""
        self.breaks += 1
