"""Answers that take long are worked out by a copy of this process, beside it: what enforces goes on meanwhile.

A copy (fork) has all that this process knows, and need not load it. It is never in the way: it has the lowest priority,
is the first to go where memory runs out, ends with the process that made it, and keeps none of its descriptors, for a
claim on the network namespace that it kept would stop the next controller.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from netlimit.errors import say_fault
from netlimit.questions import Questions
from netlimit.records import Request
from netlimit.spool import open_spool

LONGEST = 30.0
"""Seconds after which an answer is given up."""
_FIRST_LOOK, _LOOK_SHARE, _LAST_LOOK = 0.01, 0.25, 0.1
"""Seconds until it is looked again whether an answer is there: a quarter of the time it has taken, within these."""
_LEAST_PRIORITY, _FIRST_TO_GO = 19, 1000
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

Answer = dict[str, Any]


class Errand:
    """One answer that a copy of this process works out. No connection to a database may be open when it begins."""

    def __init__(self, work: Callable[[], Mapping[str, object]]) -> None:
        """Raises OSError where no copy can be made."""
        self.began = time.monotonic()
        self._answer = open_spool()  # it is closed when the answer is read
        here = os.getpid()
        try:
            self._process = os.fork()
        except OSError:
            self._answer.close()
            raise
        if not self._process:
            _serve(work, self._answer.fileno(), here)

    def result(self) -> Answer | None:
        """The answer, or why there is none; None while it is worked out."""
        if not self._has_ended():
            if time.monotonic() - self.began < LONGEST:
                return None
            self.stop()
            return {"error": f"To work this out took longer than {LONGEST:g} seconds, and was given up."}
        with self._answer:
            try:
                self._answer.seek(0)
                found = json.loads(self._answer.read())
            except (OSError, ValueError):
                found = None
        if not isinstance(found, dict):
            return {"error": "The process that was to work this out has ended before; ask again."}
        return found

    def stop(self) -> None:
        """Give it up."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        self._answer.close()

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self._process, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True


class Errands:
    """Answers one question after the other by an errand: at most one is under way."""

    def __init__(self) -> None:
        self._turns = Questions()
        self._errand: Errand | None = None
        self._asked: list[Request] = []
        self._next_look = 0.0

    @property
    def due(self) -> float | None:
        """When it is to be looked again, None if nobody waits."""
        return self._turns.due if self._errand is None else self._next_look

    def choose(self, waiting: Sequence[Request]) -> list[Request]:
        """Those that are to be answered now, by one errand; none while one is under way."""
        return [] if self._errand is not None else self._turns.choose(waiting, time.monotonic())

    def start(self, asked: list[Request], work: Callable[[], Mapping[str, object]]) -> None:
        """Have an answer worked out. Raises OSError where no copy of this process can be made."""
        self._errand, self._asked = Errand(work), asked
        self._next_look = time.monotonic() + _FIRST_LOOK

    def end(self, waiting: Sequence[Request]) -> tuple[list[Request], Answer] | None:
        """What was asked and is answered now. For what nobody waits any more is given up."""
        errand, now = self._errand, time.monotonic()
        if errand is None or now < self._next_look:
            return None
        waits = {each.id for each in waiting}
        if waits.isdisjoint(each.id for each in self._asked):
            self.stop()
            return None
        answer = errand.result()
        if answer is None:
            self._next_look = now + min(max(_FIRST_LOOK, _LOOK_SHARE * (now - errand.began)), _LAST_LOOK)
            return None
        self._errand = None
        self._turns.rest(errand.began, now)
        return self._asked, answer

    def stop(self) -> None:
        """Give up what is under way."""
        errand, self._errand = self._errand, None
        if errand is not None:
            errand.stop()
            self._turns.rest(errand.began, time.monotonic())


def _serve(work: Callable[[], Mapping[str, object]], answer: int, parent: int) -> NoReturn:
    """Nothing of what the parent would do when it ends is done here."""
    try:
        _set_apart(answer, parent)
        try:
            found = work()
        except Exception as error:
            found = {"error": f"A fault of netlimit's own ({say_fault(error)})."}
        with open(answer, "wb", closefd=False) as file:
            file.write(json.dumps(found).encode())
    finally:
        os._exit(0)


def _set_apart(answer: int, parent: int) -> None:
    """Be in nobody's way. Objects that hold descriptors of the parent stay, for to close them once more would close
    another's: nothing is collected."""
    gc.disable()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != answer:
            with suppress(OSError):  # that of the listing is closed already
                os.close(descriptor)
    with suppress(OSError):
        os.nice(_LEAST_PRIORITY)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_GO), encoding="ascii")
