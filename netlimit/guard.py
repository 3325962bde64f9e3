"""The guard: a process of its own that undoes what nobody has confirmed, whatever has become of the controller and of
the database.

It holds the rules that may have to come back in memory, and goes by a clock that nobody sets. The database is spoken
to in a thread: an answer that does not come must not keep the kernel from being put right.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from netlimit.confirmed import Ending, LastEnd
from netlimit.errors import KernelError, NetlimitError, StoreError
from netlimit.mishaps import Mishaps
from netlimit.overdue import read_clock
from netlimit.records import Actor, Exceptional, Outcome, Pause, State, Window
from netlimit.store.replica import Replica, Snapshot, take_snapshot
from netlimit.teardown import find_left, restore_nothing

if TYPE_CHECKING:  # for the types alone: a guard is given its store
    from netlimit.controller import Controller
    from netlimit.kernel.base import Kernel
    from netlimit.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_SECONDS = 5.0
COPY_SECONDS = 5.0
"""How often it is tried again to tell the copy how a window has ended."""
RECALL_SECONDS = 1.0
"""How long it is waited for the copy, which may know that a window was confirmed: its disk may hang."""
LOOK_SECONDS = 0.25
"""How often it is looked for whether a window is open."""
RECORD_SECONDS = 3.0
"""How long the database may take to undo before the kernel is put right without it."""
CONTROLLER_SECONDS = 2.0
"""How long the controller may take to apply what came back."""
OVERTAKEN_SECONDS = 10.0
"""So long after its end a window was undone by the controller, which waits for the guard a few seconds only."""
OVERSEE_SECONDS = 1.0
"""How often it is looked, past the end of a window, whether the one who writes to the kernel hangs."""
_WINDOW = "window"
"""What the database is asked all the time."""
_LIFTED = "Out of force: no controller has run here for too long, and `on_failure` is open. The next one puts it back."
_FORGOTTEN = (
    "The database knows nothing of the window of confirmation any more: it was restored, or a standby that lagged has "
    "taken its place."
)
_UNSEEN = "Who hangs while he writes to the kernel is not found."
PASS_SECONDS = 20.0
"""How long the controller's pass, or the guard's own, may take before it is taken that the database hangs in it."""


class Guard:
    """Guards one gateway. `make_kernel` and `make_controller` make what a pass over the kernel needs; `open_copy` opens
    the copy on which a controller runs that has lost the database. After `failure_seconds` without a controller, rules
    with `on_failure: open` are taken out of force until one runs (None: never). `refuse` raises StoreError while the
    database is another than the one whose rules are in force here: nothing of it is put into this kernel."""

    def __init__(
        self,
        store: Store,
        host: str,
        make_kernel: Callable[[], Kernel],
        make_controller: Callable[[Store, Kernel], Controller],
        open_copy: Callable[[], AbstractContextManager[Replica | None]],
        failure_seconds: float | None = None,
        refuse: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._refuse = refuse
        self._host = host
        self._actor = Actor(f"guard of {host}")
        self._make_kernel = make_kernel
        self._make_controller = make_controller
        self._open_copy = open_copy
        self._database = ThreadPoolExecutor(1, "database")
        self._past = ThreadPoolExecutor(1, "past")
        self._ends = LastEnd(self._actor, self._recall)
        self._recalling: tuple[Window, Future[Ending | None]] | None = None
        self._making_up: tuple[datetime, Future[None]] | None = None
        self._failure_seconds = failure_seconds
        self._pauses = False
        self._last_pause: Pause | None = None
        """The last pause of which the database has told."""
        self._done: datetime | None = None
        self._controlled_at: float | None = read_clock()
        self._beat_at = 0.0
        self._copy_at = math.inf
        self._said: dict[str, str] = {}
        """What is wrong and was told, by what it is about."""
        self._untold: frozenset[int] = frozenset()
        self._mishaps = Mishaps()
        self._spare: Replica | None = None

    def run(self, stopped: Callable[[], bool], once: bool = False) -> None:
        """Guard until `stopped`, or with `once` until the database says that no window is open; but never end while
        one is known to be open."""
        while True:
            self._prepare_spare()
            window = self._look()
            if window is not None:
                self._watch_over(window)
                continue
            self._tell_copy()
            if stopped() or (once and _WINDOW not in self._said and self._making_up is None):
                break
            self._look_for_controller()
            time.sleep(LOOK_SECONDS)
        self._past.shutdown()
        if self._spare is not None:
            self._spare.close()
        self._try(lambda: self._store.unguarded(self._host))
        self._database.shutdown()

    # -- a window

    def _look(self) -> Window | None:
        """The open window, if there is one and the database tells."""

        def look() -> Window | None:
            self._beat()
            window = self._store.window()
            if window is not None and window.outcome is None:
                self._refuse()
                if not self._ends.confirm_anew(self._store, window):
                    return window
                window = self._store.window()
                if window is not None and window.outcome is None:
                    return window
            self._ends.note(self._store, window)
            if window is None or window.opened_at == self._done:
                self._forget_past()
            elif self._has_made_up(window):
                self._done, self._copy_at = window.opened_at, 0.0
            return None

        return self._try(look, _WINDOW)

    def _recall(self, window: Window) -> Ending | None:
        """How a window has ended, as the copy knows: a guard that has just begun has seen none end. None if it does not
        tell in time."""

        def read() -> Ending | None:
            try:
                with self._open_copy() as copy:
                    return copy.find_ending(window) if copy is not None else None
            except Exception as error:
                self._complain(error, "copy")
                return None

        if self._recalling is None or self._recalling[0] != window:
            self._recalling = window, self._past.submit(read)
        asked = self._recalling[1]
        wait([asked], RECALL_SECONDS)
        if not asked.done():
            return None
        self._recalling = None
        return asked.result()

    def _has_made_up(self, window: Window) -> bool:
        """Whether what is due since that window has ended is done. It is done in a thread of its own: who writes to the
        kernel may hang, and another window that is opened meanwhile has to be watched over. Raises as `_make_up`."""
        if self._making_up is None:
            self._making_up = window.opened_at, self._past.submit(self._make_up, window)
        opened_at, making = self._making_up
        wait([making], LOOK_SECONDS)
        if not making.done():
            return False
        self._making_up = None
        making.result()
        return opened_at == window.opened_at

    def _forget_past(self) -> None:
        """What a window has left is done, and another one has ended since, or none is known any more. Raises as
        `_make_up`: nothing is tried again, for the later one's end has put the kernel right."""
        if self._making_up is not None and self._making_up[1].done():
            making, self._making_up = self._making_up[1], None
            making.result()

    def _make_up(self, window: Window) -> None:
        """Do in the kernel what is due since a window has ended that this guard has not watched over: the one before
        was killed meanwhile, or another gateway's has ended it in the database. Raises StoreError, KernelError."""
        if window.outcome is Outcome.CONFIRMED:
            return
        self._refuse()
        if self._is_torn_down():
            if self._host in window.paused:
                with self._overseeing():
                    restore_nothing(self._store, self._make_kernel(), self._host, self._is_torn_down)
        elif self._holds_undone(window) and not self._make_kernel().controlled():
            self._say(
                "past", f"The window of confirmation was {window.outcome}, but its rules may be in the kernel yet."
            )
            with self._overseeing():
                self._settle(window.revision)

    def _holds_undone(self, window: Window) -> bool:
        """Whether the kernel may hold what was changed in a window that was undone. What is older than its base is
        nothing of it. Nor is the base, unless an `apply` was killed half way: what has come back is no other than it,
        as long as no rule has changed since."""
        applied = next((each.applied_revision for each in self._store.hosts() if each.host == self._host), None)
        if applied is None or window.revision is None:
            return False
        may_be_base = applied == window.base and self._store.revision() == window.revision
        return may_be_base or window.base < applied < window.revision

    def _watch_over(self, window: Window) -> None:
        """Wait until the window has ended; see to it that what was not confirmed is undone."""
        left = self._try(lambda: window.left(self._store.now()))
        end = read_clock() + (window.seconds if left is None else left)
        snapshot = self._try(lambda: self._remember(window))
        if snapshot is None:
            time.sleep(min(LOOK_SECONDS, max(0.0, end - read_clock())))
            if read_clock() < end:
                return  # and try again
        log.info("%s has opened a window of confirmation: revision %d comes back in %.0f s unless it is confirmed.",
                 window.actor, window.base, end - read_clock())  # fmt: skip
        ended = self._wait_for_end(window, end)
        if ended is not None and ended.outcome is None and ended.opened_at == window.opened_at:
            return  # less is to be undone than is remembered here: that is another one to watch over
        if ended is None or ended.opened_at != window.opened_at or ended.outcome is not Outcome.CONFIRMED:
            with self._overseeing():
                self._undo(window, snapshot and replace(snapshot, paused=self._pauses), end)
        self._done, self._copy_at = window.opened_at, 0.0
        self._said.clear()
        log.info("The window of confirmation has ended.")

    def _remember(self, window: Window) -> Snapshot:
        self._last_pause = self._store.last_pause(self._host)
        self._pauses = self._find_pause(window)
        return take_snapshot(self._store, self._host, window.base, self._pauses)

    def _wait_for_end(self, window: Window, end: float) -> Window | None:
        """How the window has ended, or which one has been opened since; None if nobody has ended it until the
        deadline."""
        looking: Future[Window | None] | None = None
        while (left := end - read_clock()) > 0:
            looking = looking or self._try(lambda: self._database.submit(self._find_end, window))
            if looking is None:  # no room for a thread
                time.sleep(min(left, LOOK_SECONDS))
                continue
            wait([looking], min(left, LOOK_SECONDS))
            if not looking.done():
                continue
            ended = self._try(looking.result, _WINDOW)
            if ended is not None:
                return ended
            looking = None
            time.sleep(max(0.0, min(LOOK_SECONDS, end - read_clock())))
        return None

    def _find_end(self, window: Window) -> Window | None:
        self._beat()
        last = self._store.window()
        if last is None or last.opened_at != window.opened_at:
            self._refuse()
            if window.is_forgotten(last) and (last is None or last.outcome is not None):
                return None  # the deadline counts; but one that is open has to be watched over now
            return last
        if last.outcome is not None:
            self._try(lambda: self._ends.note(self._store, last), "end")
            return last
        if last.base != window.base:
            return last
        self._pauses = self._find_pause(last)
        return None

    def _find_pause(self, window: Window) -> bool:
        """Whether this gateway is to be torn down when the window has ended: again, or because it is anyway. Either
        may change while it is open. Which pause it is takes a search of the audit, so that is asked when one begins."""
        pauses = self._host in window.paused or self._store.paused(self._host)
        if pauses and not self._pauses:
            self._last_pause = self._store.last_pause(self._host)
        return pauses

    # -- undoing

    def _undo(self, window: Window, snapshot: Snapshot | None, end: float) -> None:
        """Bring the rules back, in the database and in the kernel; in the kernel first if the database does not do its
        part. Ends when both are done.

        Whoever wakes up long after the `end` finds that the controller has done it, if there is one, and puts nothing
        into the kernel by himself: other changes may have come since."""
        restored = False
        undoing: Future[Callable[[], None] | None] | None = None
        while True:
            try:
                undoing = self._database.submit(self._expire, window)
                settle = undoing.result(None if restored else RECORD_SECONDS)
                if settle is None and restored:
                    settle = self._take_back
                if settle is not None:
                    settling = self._database.submit(settle)
                    settling.result(None if restored else CONTROLLER_SECONDS + PASS_SECONDS)
                return
            except KernelError as error:
                self._say("kernel", f"{error} Trying again.")
            except Exception as error:
                self._complain(error, "undoing")
                if snapshot is not None and not restored and not self._is_overtaken(end):
                    restored = self._restore(window, snapshot, partial(_is_unanswered, undoing))
            time.sleep(LOOK_SECONDS)

    @contextmanager
    def _overseeing(self) -> Iterator[None]:
        """Meanwhile, nobody who hangs keeps the kernel from being written: he is ended, and the database told."""
        ended: list[str] = []
        done = threading.Event()
        thread = threading.Thread(target=self._oversee, args=(ended, done), name="writers", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no room for a thread: it only helps
            self._mishaps.note(error, _UNSEEN)
        try:
            yield
        finally:
            done.set()
            if thread.is_alive():
                thread.join()
            for said in ended:
                self._try(partial(self._store.repaired, self._host, "writer", said, 0.0, datetime.now(UTC)))

    def _oversee(self, ended: list[str], done: threading.Event) -> None:
        try:
            kernel = self._make_kernel()
            while not done.wait(OVERSEE_SECONDS):
                said = kernel.end_hanging_writer()
                if said is not None:
                    log.error("%s", said)
                    ended.append(said)
        except Exception as error:
            self._mishaps.note(error, _UNSEEN)

    def _is_overtaken(self, end: float) -> bool:
        """Where the kernel does not tell whether there is a controller, it is asked again: so late, nothing is put in
        by chance."""
        try:
            return read_clock() > end + OVERTAKEN_SECONDS and self._make_kernel().controlled()
        except Exception as error:
            self._complain(error, "overtaken")
            return True

    def _expire(self, window: Window) -> Callable[[], None] | None:
        """Undo the window in the database, unless that is done; what puts the kernel right now, None if it may stay as
        it is. Raises StoreError."""
        self._refuse()
        last = self._store.window()
        if last is not None and last.opened_at == window.opened_at and self._ends.confirm_anew(self._store, last):
            return None
        ended = self._store.expire(window, self._actor, self._store.now()) or self._store.window()
        if ended is None or ended.opened_at != window.opened_at:
            return partial(self._follow, window.is_forgotten(ended))
        if ended.outcome is Outcome.CONFIRMED:
            return None
        if ended.base != window.base:
            log.info("The window of confirmation was given up before anything was written to the kernel.")
            return None
        came = f"Revision {ended.base} has come back as revision {ended.revision}"
        self._say("undone", f"{came}: the window of confirmation was {ended.outcome}.")
        return partial(self._settle, ended.revision)

    def _follow(self, forgotten: bool) -> None:
        """Bring the kernel to what the database says now, which does not tell how the window has ended: it has
        `forgotten` it, or another one has been opened since. What any gateway tells that it holds is from before, too;
        but one that was to be torn down again is. Raises StoreError, KernelError."""
        if forgotten and self._pauses and not self._store.paused(self._host):
            self._store.pause(self._host, True, self._actor, datetime.now(UTC))
        why = _FORGOTTEN if forgotten else "Another window of confirmation has been opened since."
        self._say("undone", f"{why} What the database says now is put into the kernel.")
        if self._is_torn_down():
            restore_nothing(self._store, self._make_kernel(), self._host, self._is_torn_down)
        else:
            self._make_controller(self._store, self._make_kernel()).sync()

    def _settle(self, revision: int | None) -> None:
        """See to it that the kernel holds a revision: wait for the controller, then do it here. Raises StoreError,
        KernelError."""
        if revision is None:
            return
        if self._is_torn_down():
            restore_nothing(self._store, self._make_kernel(), self._host, self._is_torn_down)
            return
        end = read_clock() + CONTROLLER_SECONDS
        while not self._applied(revision):
            if read_clock() >= end:
                self._say("settling", f"The controller has not applied revision {revision}; doing it here.")
                self._make_controller(self._store, self._make_kernel()).sync()
                return
            time.sleep(0.05)

    def _take_back(self) -> None:
        """It was confirmed in the last moment, as the database tells now that the kernel was put back."""
        log.warning("The window of confirmation was confirmed after all.")
        if not self._is_torn_down():
            self._make_controller(self._store, self._make_kernel()).sync()

    def _is_torn_down(self) -> bool:
        """Whoever puts off ends that when the database is told, which is asked last."""
        is_put_off = self._make_kernel().is_put_off()
        return is_put_off or self._store.paused(self._host) or bool(self._try(self._keep_pause, "copy"))

    def _keep_pause(self) -> bool:
        """Tell the database of a teardown that only the copy knows; whether there is one. Raises StoreError."""
        with self._open_copy() as copy:
            pause = None if copy is None else copy.find_unheard(self._store)
        return pause is not None and self._store.keep_pause(self._host, pause, self._actor)

    def _applied(self, revision: int) -> bool:
        return any(each.host == self._host and each.applied_revision >= revision for each in self._store.hosts())

    def _restore(self, window: Window, snapshot: Snapshot, still: Callable[[], bool]) -> bool:
        """Put the kernel right from memory, unless that is not `still` to be done: the database may have answered
        meanwhile, after all; whether that went well. A controller that runs without the database hears of it by its
        copy; if that cannot be written, there is one in memory for this pass."""
        ended = replace(window, outcome=Outcome.EXPIRED, ended_at=datetime.now(UTC), revision=snapshot.revision)
        wanted = snapshot
        self._say("memory", f"The database has not done its part: revision {snapshot.revision} comes back from memory.")
        try:
            try:
                with self._open_copy() as copy:
                    if copy is None:
                        raise StoreError("There is no copy of the applied rules.")
                    wanted = self._heed_teardown(copy, snapshot)
                    self._hold(copy, wanted, ended, still)
            except Exception as error:
                self._complain(error, "copy")
                spare, self._spare = self._spare, None
                with closing(spare or self._make_spare()) as copy:
                    self._hold(copy, wanted, ended, still)
        except Exception as error:
            self._complain(error, "restoring")
            return False
        return True

    def _heed_teardown(self, copy: Replica, snapshot: Snapshot) -> Snapshot:
        """What comes back: nothing where there has been a teardown since the database told of pauses last, for that
        holds until `netlimit apply`."""
        pause = copy.known_pause()
        return replace(snapshot, paused=True) if pause not in (None, self._last_pause) else snapshot

    def _prepare_spare(self) -> None:
        """Have a copy in memory before it is needed: making its tables reads programs, whose disk may be gone then."""
        if self._spare is None:
            self._spare = self._try(self._make_spare, "spare")

    def _make_spare(self) -> Replica:
        """A copy without a file: who may log in can fill /dev/shm, too."""
        spare = Replica(None, self._host)
        spare.upgrade()
        return spare

    def _hold(self, copy: Replica, snapshot: Snapshot, ended: Window, still: Callable[[], bool]) -> None:
        if not still():
            return
        copy.hold(snapshot, ended)
        if snapshot.paused or self._make_kernel().is_put_off():
            restore_nothing(copy, self._make_kernel(), self._host, still)
        else:
            self._make_controller(copy, self._make_kernel()).sync()

    # -- the copy

    def _tell_copy(self) -> None:
        """Have the copy know how a window has ended. In a thread of its own: its disk may hang, and another window that
        is opened meanwhile has to be watched over."""
        if read_clock() < self._copy_at:
            return
        self._copy_at = math.inf
        if self._try(lambda: self._past.submit(self._bring_copy), "copy") is None:  # no room for a thread
            self._copy_at = read_clock() + COPY_SECONDS

    def _bring_copy(self) -> None:
        """Bring the copy, with which a machine begins that starts anew, to what a window's end has left: a pause; and
        where no controller does that, what is in force. It is tried again until that is done."""
        try:
            self._refuse()
            window = self._store.window()
            if window is not None and window.outcome is None:
                return  # its end has this done
            with self._open_copy() as copy:
                if copy is None:
                    return
                if self._store.paused(self._host):
                    self._pause_copy(copy)
                elif not self._make_kernel().controlled():
                    self._renew(copy)
                copy.note_window(self._store, window)
        except Exception as error:
            self._complain(error, "copy")
            self._copy_at = read_clock() + COPY_SECONDS

    def _pause_copy(self, copy: Replica) -> None:
        copy.follow_pause(True, self._store.last_pause(self._host))
        if not self._store.paused(self._host):  # an `apply` has ended that meanwhile, and may have told the copy before
            copy.follow_pause(False)

    def _renew(self, copy: Replica) -> None:
        """Bring the copy to what is applied here, where the database knows better: a window may have been confirmed
        while no controller ran. A pause that only the copy knows is that of a teardown, unless anything of ours is in
        the kernel. Raises StoreError, NoSuchRevision, KernelError."""
        self._refuse()
        applied = next((each.applied_revision for each in self._store.hosts() if each.host == self._host), 0)
        copy.note_ends(self._store)
        is_paused = copy.paused(self._host)
        if not applied or (applied <= copy.revision() and not is_paused):
            return
        if not is_paused or (find_left(self._make_kernel()) and copy.find_unheard(self._store) is None):
            copy.hold(take_snapshot(self._store, self._host, applied, self._store.paused(self._host)), None)

    # -- the controller

    def _look_for_controller(self) -> None:
        """Where none has run for too long, take out of force what would rather not limit than go on unattended."""
        if self._failure_seconds is None:
            return
        try:
            kernel = self._make_kernel()
            if kernel.controlled():
                self._controlled_at, self._untold = read_clock(), frozenset()
            elif self._untold:
                self._tell_lifted()
            elif self._controlled_at is not None and read_clock() - self._controlled_at >= self._failure_seconds:
                self._relax(kernel)
        except Exception as error:
            self._complain(error, "controller")

    def _relax(self, kernel: Kernel) -> None:
        try:
            with self._open_copy() as copy:
                if copy is not None and copy.revision() and not self._is_kept_off(copy, kernel):
                    self._try(partial(self._renew, copy), "renewing")
                    self._untold = self._make_controller(copy, kernel).relax()
        except Exception as error:
            self._complain(error, "relaxing")
            return
        self._controlled_at = None  # once is enough: the next controller puts everything back

    def _is_kept_off(self, copy: Replica, kernel: Kernel) -> bool:
        """Whether a teardown has paused this gateway; one may have told the database, but not the copy."""
        is_paused_there = self._try(lambda: self._store.paused(self._host), "pause")
        return kernel.is_put_off() or copy.paused(self._host) or bool(is_paused_there)

    def _tell_lifted(self) -> None:
        """Have the database know what is not in force, once it answers: it takes a rule for as it was told last."""
        told = [Exceptional(rule_id, State.ERROR, _LIFTED) for rule_id in sorted(self._untold)]
        self._store.mark_lifted(self._host, told)
        self._untold = frozenset()

    # -- the database

    def _beat(self) -> None:
        """Say that there is a guard. A database that takes no writes may tell of windows all the same."""
        if read_clock() < self._beat_at:
            return
        self._beat_at = read_clock() + HEARTBEAT_SECONDS
        try:
            self._store.guarded(self._host)
        except StoreError as error:
            self._beat_at = read_clock() + LOOK_SECONDS
            self._say("beat", str(error))
        else:
            self._said.pop("beat", None)

    def _try(self, ask: Callable[[], T], about: str = "database") -> T | None:
        """Ask the database; None if it does not answer, and a line in the log the first time. A guard that ends over an
        error leaves what nobody has confirmed."""
        try:
            answer = ask()
        except Exception as error:
            self._complain(error, about)
            return None
        self._said.pop(about, None)
        return answer

    def _complain(self, error: Exception, about: str) -> None:
        if isinstance(error, NetlimitError | TimeoutError):
            sentence = str(error) or "The database does not answer in time."
        else:
            sentence = self._mishaps.note(error, "The guard tries again.")
        self._say(about, sentence)

    def _say(self, about: str, sentence: str) -> None:
        """Log what is wrong with something once, until it is another thing, or was right meanwhile: all is tried again
        several times a second."""
        if self._said.get(about) != sentence:
            log.error("%s", sentence)
        self._said[about] = sentence


def _is_unanswered(undoing: Future[Callable[[], None] | None] | None) -> bool:
    """Whether the database has not told yet that the kernel may stay as it is."""
    return undoing is None or not undoing.done() or undoing.exception() is not None or undoing.result() is not None
