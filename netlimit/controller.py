"""The loop: load, compile, observe, plan, apply, verify, record.

A pass costs what changed; a sweep looks at everything in time. Whatever happens to the kernel or to this process, one
more pass puts it right: nothing is remembered that the store or the kernel does not hold.
"""

from __future__ import annotations

import heapq
import logging
import math
import resource
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from netlimit.account import tell
from netlimit.compile import Compilation
from netlimit.confirmed import Ending
from netlimit.connections import OpenConnections, write_living
from netlimit.copying import PREFIX as COPY
from netlimit.copying import SAFE_SECONDS, Copying
from netlimit.counting import Tally
from netlimit.disputes import Disputes, find_concerned
from netlimit.drift import CALM_SECONDS, PLACES, Histogram, Repairs, describe, find_kinds, find_lost
from netlimit.endings import Endings, Leaving
from netlimit.errands import Errands
from netlimit.errors import Busy, KernelError, LeadMissing, NetlimitError, Occupied, Slow, StoreError
from netlimit.escalating import LABEL
from netlimit.exchange import Exchange, Ledger, News, find_changed, renumber
from netlimit.fallback import Fallback
from netlimit.forgotten import NOTHING, Held, compare, find_forgotten, has_lost, say_loss, say_other_loss
from netlimit.inspection import Drift, Inspection
from netlimit.kernel.base import TURN_SECONDS, Door, Kernel, observe, read_entries
from netlimit.limits import Fragment, purpose_sets
from netlimit.malformed import Malformed
from netlimit.mishaps import Mishaps
from netlimit.namesakes import make_reporter
from netlimit.numbers import find_mark_bits, find_translated
from netlimit.origins import Origin, Trace
from netlimit.outage import Outage
from netlimit.overdue import OVERDUE_SECONDS, Overdue, read_clock
from netlimit.plan import Plan, Step, SwitchTable, WriteIngress, WriteTree, diff, follow
from netlimit.premises import CLOCK_SLACK, Premises
from netlimit.presence import IDLE, Presence
from netlimit.preview import Ground, answer, find_former, find_rules
from netlimit.questions import Questions
from netlimit.records import (
    Actor,
    Changes,
    Exceptional,
    HostStatus,
    Pause,
    Repair,
    Request,
    RuleCounters,
    State,
    Window,
)
from netlimit.roster import Roster
from netlimit.rules import Action, Rule
from netlimit.spared import Spared, Surroundings
from netlimit.state import OFFENDER_PREFIX, IpSet, Structure
from netlimit.state import State as KernelState
from netlimit.teardown import restore_nothing
from netlimit.telling import Telling
from netlimit.tree import INGRESS_DEVICE, SavedRoot
from netlimit.unforced import tell_host, tell_rule

if TYPE_CHECKING:  # for the types alone: a controller is given its store
    from netlimit.store import Kept, Replica, Store, Watch

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
WINDOW_SECONDS = 1.0
"""How often it is looked whether a window of confirmation is open, or overdue."""
STRUCTURE_SECONDS = 0.85
BLIND_SECONDS = 5.0
"""How long passes fail before rules are told of that hold no more for sure."""
WAIT_SECONDS = 2.5
"""How long the database is waited for, all answers together, from one look at the kernel to the next."""
LOAD_WAIT_SECONDS = 10.0
"""The same while everything is loaded: that takes many answers."""
LONGEST_LOAD_SECONDS = 40.0
"""The same once that was too short, and again: many rules over a slow line would never be loaded."""
END_SECONDS = 30.0
"""How long a controller that is to end has the copy written that is behind."""
BESIDE_SECONDS = 30.0
"""How often a slow database is told the counters, and asked who has spoken to the API."""
SLOW_SECONDS, LONGEST_SLOW_SECONDS = 10.0, 300.0
"""A database that was slow again within a minute counts as slow for so long at least, and then for twice as long."""
SURVEY_SECONDS = 30.0
"""How often the host is looked over for what gets in the way of limits."""
SWEEP_SECONDS = 50.0
"""How long it may take to look at the entries of all sets in turn, unless it would cost too much."""
NEWCOMER_SECONDS = 0.2
"""How often hosts are looked for that have appeared; until they have a class they share one."""
NEWCOMER_SHARE = 10
"""Looking for them rests that many times as long as it took: there can be many that never get a class."""
QUEUE_SECONDS = 15.0
"""How often the counters of classes are read, and idle hosts are looked for."""
FULL_SHARE = 10
"""Such a reading rests that many times as long as it took where places for hosts become few: it makes room."""
LOOK_SHARE = 20
"""A look at chains and sets is followed by that many times the processor time it took of rest, and a moment, and so is
one at trees, each by itself; but the one that finds drift and the one after the repair, which read all anew, by no more
than the moment."""
BETWEEN_SHARE = 10
"""A look between the trees of one change is followed by that many times the time it took, and by as much time as it
took to plan the rest anew, if it did: the change must come to its end."""
SWEEP_SHARE, CALM = 50, 4
"""A sweep that took t seconds is followed by that many times t of rest, or as many times that if there is time."""
MOST_OFFENDERS = 100
PROBE_SECONDS = 5.0
"""How often the host is probed again while there are rules that it cannot enforce."""
PROBE_SHARE = 50
"""A probe is followed by that many times the processor time it took of rest."""
MARKS_SECONDS = 1.0
"""How often it is looked who else uses packet marks."""
FIRST_LOOK_SECONDS = 1.0
"""How long the first pass waits to hear it; a look that takes longer counts when it ends."""
HANDOVER_SECONDS = 5.0
"""How long a pass waits for limiters that run to load what the kernel cannot enforce; from then on it waits no more."""
_HANDOVER_LOOK = 0.01
MUCH = 500
"""With more rules and entries of sets, plans and previews are worked out in another process."""
_COSTLY = ("plan", "preview")
_CHANGED_MEANWHILE = "The kernel was changed while this was worked out: what is told here may be done already."
_TASKS = (
    "heartbeat",
    "window",
    "survey",
    "structure",
    "sweep",
    "newcomers",
    "queues",
    "probe",
    "marks",
    "safe",
    "states",
    "beside",
    "between",
    "trees",
)
_RESUMED = (
    "The database has come back in an older state, in which a teardown still pauses this gateway that `netlimit apply` "
    "has ended since, as the copy tells: limits stay in force, and the pause is ended again. To take them out, run "
    "`netlimit teardown` anew."
)
_KEPT = (
    "A teardown has paused this gateway, as its copy tells, and the database knows nothing of that: it was away then, "
    "or has come back in another state. The gateway stays paused, and the database is told. To put limits in force, "
    "run `netlimit apply`."
)
_GOES_ON = "The pass goes on without that part."
_MOST_ASKED = 500
"""Rules are asked for so many at a time."""
_MOST_RETRIED = 100
_MOST_TOLD = 20
_MOST_LOST, _MOST_LOSSES = 1000, 3
"""So many rules that a database has lost are logged, and so many times that it has lost some are told."""
_FIRST_RETRY, _LAST_RETRY = 0.5, 30.0


def _say_renamed(before: str | None, now: str) -> Iterator[str]:
    """What is to be told of a gateway whose copy is of another name."""
    if before not in (None, now):
        yield (
            f"This gateway was called {before} when rules were copied here last, and is {now} now, for the database "
            f"another one: what names {before} (`hosts` of rules, a teardown's pause) does not concern it. If it is "
            f"still the same, set NETLIMIT_HOST={before}."
        )


def _spent() -> float:
    """Seconds of processor time that this process and the tools it has called took so far. Looks rest by it, and not by
    the clock: others that keep the processor busy do not put them off."""
    used = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


@dataclass(frozen=True)
class Setup:
    """What a controller is told: the name of its host and back end, the mark mask, the safe set, the size of sets, how
    long a host that has appeared may be idle before it loses its class, after how many seconds without a database rules
    with `on_failure: open` are taken out of force, the hosts of servers that must stay in reach (each with what it is),
    where it is managed besides sshd's, and the ids of the users whose servers those are."""

    host: str
    backend: str = "iptables"
    mark_mask: int | None = None
    safe: tuple[str, ...] = ()
    set_size: int = 2**20
    idle: timedelta = IDLE
    failure_seconds: float = 60.0
    servers: Mapping[str, str] = field(default_factory=dict)
    doors: tuple[Door, ...] = ()
    keepers: frozenset[int] = frozenset({0})
    place: str = ""
    """Where it runs, as `kernel.place` tells it."""
    spared: Spared | None = None
    """Whom no request may have blocked: blocks that the limiter has made of them are not enforced."""


class Controller:
    """Keeps one host's kernel as the rules say. One thread.

    With a `replica`, it goes on without the database: what it knows stays in force and is repaired, rules end in time,
    devices and hosts are followed; and a controller that starts then begins with what was applied last. `reopen` opens
    that copy anew where it cannot be used as it is, and raises StoreError. Without one, `held` tells what a copy holds:
    another database than that copy's, or an older file of it, is not gone by.
    """

    def __init__(
        self,
        store: Store,
        kernel: Kernel,
        setup: Setup,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        replica: Replica | None = None,
        reopen: Callable[[], Replica] | None = None,
        held: Callable[[], Held] = lambda: NOTHING,
    ) -> None:
        self._store = store
        self._read_held = held
        self._database = store
        self._copying = Copying(replica, reopen)
        self._watch: Watch | None = None
        self._quiet = False
        """Whether nobody has written to the database since it was last asked."""
        self._has_looked = False
        """Whether nobody has since it was asked for a window of confirmation."""
        self._outage: Outage | None = None
        self._ledger = Ledger()
        self._newer: dict[int, Rule | None] = {}
        """What the database has told of rules, and the copy may lack; None for those that are gone."""
        self._borrows = False
        """Whether what is known was loaded from the copy, which knows less than the database."""
        self._awaits_survey = False
        """Whether what gets in the way of limits is looked for once this pass is over."""
        self._clients: tuple[Mapping[str, float], float] | None = None
        """Those of the API with the seconds since each was seen, and when that was told (by a clock that nobody
        sets)."""
        self._returned = -math.inf
        self._slowness = 0.0
        self._undone: Window | None = None
        self._was_slow = False
        """Whether the database was lost last for it answered too slowly."""
        self._forgotten: str | None = None
        """Why a database that answers is not gone by all the same."""
        self._overdue = Overdue(setup.host, recall=self._recall_window)
        self._moving: int | None = None
        self._kernel = kernel
        self._setup = setup
        self._now = now
        self._compilation: Compilation | None = None
        self._status = HostStatus(host=setup.host, backend=setup.backend)
        self._revision = self._heard = -1
        self._has_taken_out = False
        self._stamp = 0
        self._roster = Roster(setup.host)
        self._clock_offset: float | None = None
        self._round = 0.0
        self._repairs = Repairs()
        self._telling = Telling(setup.host, now)
        self._left: set[str] = set()
        self._passes = Histogram()
        self._tally = Tally()
        self._rewritten: set[int] = set()
        self._news: set[int] = set()
        self._exceptional: dict[int, Exceptional] = {}
        self._untold: set[int] = set()
        """The rules of which the database may have forgotten how they stand: whoever removes one forgets that, too."""
        self._fallback = Fallback(setup.host)
        self._patience = TURN_SECONDS
        """How long another process that writes is waited for, all the time that nothing is looked at."""
        self._in_step = False
        self._paused = self._is_paused_there = False
        self._mishaps = Mishaps()
        self._disputes = Disputes()
        self._planned: Plan | None = None
        self._refused_step: SwitchTable | None = None
        self._unled: dict[str, str] = {}
        self._unreadable: dict[int, str] = {}
        self._led_to: dict[int, Rule] = {}
        """The blocks that requests have led to (the limiter's)."""
        self._around: Surroundings | None = None
        """By what those were judged last."""
        self._refused_drift: Drift = {}
        self._has_freed = False
        self._last_tried = 0
        self._blind_since: float | None = None
        self._crowded: dict[int, str] = {}
        self._uncounted: tuple[str, ...] = ()
        self._renamed = tuple(_say_renamed(replica.owner, setup.host)) if replica is not None else ()
        self._resumed: tuple[str, ...] = ()
        self._kept: tuple[str, ...] = ()
        self._ended: Pause | None = None
        """The pause that the copy may still tell of, but that is over."""
        self._losses: tuple[str, ...] = ()
        """What the database has lost since this process began."""
        self._trace: Trace | None = None
        self._numbered: dict[tuple[str, str], int] = {}
        self._premises = Premises(kernel, setup)
        self._inspection = Inspection(kernel)
        self._open = OpenConnections(kernel, setup.keepers)
        self._presence = Presence(setup.idle)
        self._endings = Endings(_spent)
        self._questions = Questions()
        self._errands = Errands()
        self._applied = self._applied_before = 0
        self._due = dict.fromkeys(_TASKS, 0.0)
        self._has_repaired = False

    # -- running

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve until `stopped`. Errors of store and kernel are logged, reported and tried again, ever more slowly.

        Only who runs reports by a word of its own: one pass, of a command or of the guard, is no other controller."""
        self._status, self._patience = replace(self._status, reporter=make_reporter(self._setup.place)), BLIND_SECONDS
        retry = _FIRST_RETRY
        while not stopped():
            began = time.monotonic()
            try:
                if self._watch is None and self._outage is None:
                    self._allow()
                    self._refuse_forgotten()
                    self._watch = self._database.watch()
                self.tick()
                retry = _FIRST_RETRY
                self._wait()
            except Exception as error:
                if isinstance(error, Occupied):  # who has waited for his turn has rested meanwhile
                    retry = _FIRST_RETRY
                if not self._recover(error, began, retry):
                    retry = self._back_off(retry, stopped)
        self._errands.stop()
        self._stop_watching()
        self._copy_at_last()
        self._database.break_off()  # what is asked beside would keep this process from ending
        self._copying.close()

    def _recover(self, error: Exception, began: float, retry: float) -> bool:
        """Log and report what has ended the pass that `began` then; whether the next may follow at once. An error on
        the way, such as one of reporting, ends nothing either."""
        try:
            if isinstance(error, StoreError):
                return self._lose_database(error, retry)
            if isinstance(error, KernelError):
                self._heed_refusal(error, began, retry)
            else:
                self._begin_anew(error, retry)
        except Exception as another:
            self._begin_anew(another, retry)
        return False

    def _lose_database(self, error: StoreError, retry: float) -> bool:
        """Whether the copy takes its place."""
        self._stop_watching()
        if self._go_on_without(error):
            return True
        log.error("%s What is in the kernel stays; trying again in %.1f s.", error, retry, extra=self._say())
        return False

    def _heed_refusal(self, error: KernelError, began: float, retry: float) -> None:
        log.error("%s Trying again in %.1f s.", error, retry, extra=self._say(self._news))
        self._in_step = False
        self._premises.forget()
        self._tell_refused(error, began)
        self._try_report(last_error=str(error))

    def _tell_refused(self, error: KernelError, began: float) -> None:
        """While the kernel refuses to have put right what somebody has changed, the rules concerned are in error; and
        where it cannot even be asked for a while, of none is said that it holds. The pass that it refused `began` then,
        and has seen nothing since of what others do."""
        plan, self._planned = self._planned, None
        self._blind_since = self._blind_since or began
        is_blind = time.monotonic() - self._blind_since >= BLIND_SECONDS
        if self._compilation is None or not (self._refused_drift or is_blind):
            return
        if is_blind:
            self._disputes.note_blindness(str(error), {*self._compiled.fragments, *self._compiled.shaping.classes()})
        for kind in self._refused_drift:
            self._disputes.note_refusal(kind, error.reason, find_concerned(kind, plan, self._compiled))
        try:
            self._exceptional = self._mark()
        except StoreError as lost:
            log.error("%s", lost)

    def _begin_anew(self, error: Exception, retry: float) -> None:
        """Nobody expected this error, and nobody knows what it has left half done: the next pass loads everything. What
        is in the kernel stays meanwhile."""
        follows = f"The pass was broken off; everything is loaded anew in {retry:.1f} s."
        said = self._mishaps.note(error, follows, self._say())
        self._compilation, self._in_step = None, False
        self._premises.forget()
        self._stop_watching()
        self._try_report(last_error=said)

    def tick(self) -> None:
        """Do what is due: changes, expiries, questions, drift, counters, heartbeat. Raises StoreError, KernelError."""
        self._look_between()
        if self._outage is not None:
            self._look_for_database(self._outage)
        elif self._telling.waits:
            self._tell()
            self._look_between()
        self._heed_clock()
        self._awaits_survey = self._begins and not self._premises.has_surveyed
        if not self._awaits_survey and self._is_due("survey", SURVEY_SECONDS):
            self._survey()
        self._has_looked = self._has_looked and self._quiet
        if self._is_due("window", WINDOW_SECONDS) or self._begins or self._is_forbidden():
            self._look_at_window()
            self._look_between()
        try:
            self._keep_up()
        except KernelError:
            self._answer_question()  # such as what is the matter
            raise
        finally:
            if self._awaits_survey and self._is_due("survey", SURVEY_SECONDS):
                self._survey()
            self._awaits_survey = False
        self._answer_question()
        if self._is_due("heartbeat", HEARTBEAT_SECONDS):
            self._look_between()
            self._protect()
            self._mishaps.survive(self._spare, _GOES_ON)
            self._follow_connections()
            self._mishaps.survive(self._count_peers, _GOES_ON)
            self._doubt_roots()
            self._doubt_states()
            self._look_back()
            self._report()
            self._tell_of_copy(self._copy, self._copy_safe)

    def _look_between(self) -> None:
        """See to the kernel before the database is waited for again."""
        if self._outage is not None:
            return
        if self._looks() and not self._premises.has_moved():  # what has moved is followed first
            self._check_drift()
        self._allow()

    def _looks(self) -> bool:
        """Whether it is time to look at the kernel, which is as it should be for all that is known."""
        if self._compilation is None or self._paused or not self._in_step:
            return False
        if time.monotonic() < min(self._due["structure"], self._due["sweep"]):
            return False
        return not self._compilation.changed and not self._is_forbidden()

    def _allow(self, seconds: float = WAIT_SECONDS) -> None:
        """Bound how long the database is waited for until the kernel is looked at again; not where there is nothing to
        look at, or nothing to go on with. Longer, and it counts as away, but for what it tells beside."""
        begins = self._begins
        idle = self._paused or self._setup.backend == "l7" or (self._compilation is None and not begins)
        goes_on = self._replica is not None and (not begins or self._holds_copy())
        self._database.allow(None if idle or not goes_on else LOAD_WAIT_SECONDS if begins else seconds)

    @property
    def _begins(self) -> bool:
        """Whether nothing was known yet since this process began."""
        return self._compilation is None and self._revision < 0

    def _holds_copy(self) -> bool:
        try:
            return self._replica is not None and self._replica.revision() > 0
        except StoreError:
            return False

    def _keep_up(self) -> None:
        """Changes and drift, and what both depend on, unless a teardown has paused this gateway."""
        is_put_off = self._kernel.is_put_off()
        if not self._quiet:
            is_paused = self._store.paused(self._setup.host)
            if is_paused and not self._is_paused_there:  # a teardown of another database means nothing here
                self._refuse_forgotten()
                is_paused = not self._resumes()
            elif not is_paused and (self._paused or self._begins):
                is_paused = self._stays_paused()
            self._is_paused_there = is_paused
        self._paused = is_put_off or self._is_paused_there
        if self._paused:
            self._pause()
            return
        self._kept = ()
        if self._leaves_it_to_guard():
            return
        self._mishaps.survive(self._probe_again, _GOES_ON)
        self._follow()
        self._mishaps.survive(self._greet, _GOES_ON)
        self._mishaps.survive(self._look_ahead, _GOES_ON)
        self.sync()
        self._check_drift()
        self._mishaps.survive(self._follow_marks, _GOES_ON)

    def _leaves_it_to_guard(self) -> bool:
        """What is known may be from a window that is over, and whose end the database does not know, or cannot take for
        want of room: the guard brings back what was before, and must not be undone. So nothing is written until
        something is known again that may hold."""
        if self._outage is not None and self._is_forbidden():
            self._load()
        if not self._is_forbidden():
            return False
        if self._outage is not None:
            self._in_step = False  # what is in the kernel is the guard's now
        return True

    def _is_forbidden(self) -> bool:
        return self._overdue.forbids(self._revision, is_told=self._outage is None)

    def _keeps_off(self) -> bool:
        """Whether nothing is to be written after all, asked once nobody else writes."""
        return self._is_forbidden() or self._is_to_keep_off()

    def sync(self) -> None:
        """One pass: bring the kernel to the newest revision. Raises StoreError, KernelError.

        What it cannot enforce the limiters of this host take over first, and give back last. Once all is as it should
        be, the bits of the packet mark are changed if others need them.
        """
        self._pass()
        if self._compilation is None or self._outage is not None or not self._in_step:
            return
        wanted, now = self._premises.wanted_mask, self._compilation.facts.mark_mask
        if wanted != now:
            log.warning("The bits of the packet mark that netlimit uses change from %#x to %#x.", now, wanted)
            self._move_mask(wanted)

    def _move_mask(self, wanted: int) -> None:
        """Everything under other bits: the sets of limits are made anew, and filled before chains lead to them."""
        if self._compilation is not None:
            self._count(self._compilation.fragments)  # the new sets begin at nothing
        self._moving = wanted
        try:
            self._load_all()
            self._pass()
        finally:
            self._moving = None

    def _pass(self) -> None:
        known = self._compilation
        revision = self._load()
        if self._is_forbidden():
            return
        # Else devices have just been looked at. Those that cannot be read keep no change waiting.
        unread = self._find_unread() if known is self._compilation else None
        self._expire()
        self._hand_over()
        compilation = self._compiled
        if revision != self._status.applied_revision:
            self._doubt_roots()  # the rule that needed a tree may be the one that has gone
        if self._in_step and not compilation.changed and not self._has_freed:
            self._news.clear()  # of other gateways, or of nothing that the kernel holds
            if unread is not None:
                raise unread
            if revision != self._status.applied_revision or self._find_exceptional() != self._exceptional:
                self._settle()
            self._status = replace(self._status, stamp=self._stamp)  # who has started from the copy knew none
            return
        with self._kernel.exclusive(self._patience):
            if self._keeps_off():
                return
            began = time.monotonic()
            devices = self._list_devices()
            plan = self._enforce()
            self._repairs.know(plan, devices)
            if self._has_freed:  # there may be room that was not there before
                self._try_refused()
                self._has_freed = False  # last: if the database has failed, the next pass comes here again
                if self._compiled.changed:
                    self._enforce()
        if unread is not None:
            raise unread  # of no rule is said that it is applied where a device or a route had come before it
        if self._refused_drift:
            self._disputes.end(kind for kind in self._refused_drift if not self._repairs.is_fight(kind))
            self._count_late(self._refused_drift, plan, began)
        self._settle()

    def plan(self) -> Plan:
        """The steps from what the kernel holds to what it shall hold; nothing is done. Raises as `sync`."""
        self._load()
        self._expire()
        return self._diff_all()

    def account(self) -> tuple[Plan, list[str]]:
        """The plan, and what it does in words. Raises as `sync`."""
        self._load()
        self._expire()
        return self._tell_plan()

    def _tell_plan(self) -> tuple[Plan, list[str]]:
        plan, found = self._compare()
        applied, former = find_former(self._store, self._setup.host) if plan else (None, [])
        words = tell(plan, self._compiled, found, partial(find_rules, self._store), former, applied)
        return plan, [*words, *self._fallback.tell(self._compiled.problems)]

    def relax(self) -> frozenset[int]:
        """One pass that takes rules with `on_failure: open` out of force, if there are any; returns which. Raises as
        `sync`."""
        self._load()
        self._lift("The controller")
        if self._roster.lifted:
            self.sync()
        return frozenset(self._roster.lifted or ())

    @property
    def has_written(self) -> bool:
        """Whether any step towards what the rules say may have been taken."""
        return bool(self._applied)

    def standing(self) -> tuple[int, int]:
        """How many rules are in force on this host, and how many it should enforce but cannot. After a pass."""
        failed = sum(not self._fallback.holds(rule_id) for rule_id in self._compiled.problems)
        missing = {rule_id for rule_id, miss in self._compiled.misses.items() if not miss.partly}
        disputed = self._disputes.judge().keys() - self._compiled.problems.keys()
        failed += len(missing | {rule_id for rule_id in disputed if rule_id in self._compiled})
        return len(self._compiled) - failed, failed + len(self._unreadable)

    # -- without the database

    def _go_on_without(self, error: StoreError) -> bool:
        """Go on with what is known, or was applied last; False if that is nothing."""
        if self._outage is not None or self._replica is None:
            return False
        try:
            if self._compilation is None and self._replica.revision() == 0:
                return False
        except StoreError as another:
            log.error("%s", another)
            return False
        log.error("%s Going on without it: what was applied last is kept in force.", error)
        self._undone, self._was_slow = self._replica.window(), isinstance(error, Slow)
        lifted = self._compilation is None and any(each.lifted for each in self._replica.hosts())
        # What a controller before this one has lifted must not come back with each that starts.
        lasted = self._setup.failure_seconds if lifted else 0.0
        self._ledger, self._clients = Ledger(numbers=dict(self._numbered)), None
        lasts = self._find_slowness() if isinstance(error, Slow) else 0.0
        self._outage = Outage(self._begin_exchange, self._end_exchange, self._try_database, lasted, lasts)
        self._store = self._replica
        # What is wrong in the kernel must not have waited for nothing.
        self._due["structure"] = self._due["trees"] = 0.0
        self._try_report(last_error=str(error), refused=self._forgotten)
        return True

    def _find_slowness(self) -> float:
        """For how long the database counts as slow at least."""
        again = time.monotonic() - self._returned < CALM_SECONDS
        self._slowness = min(max(SLOW_SECONDS, 2 * self._slowness), LONGEST_SLOW_SECONDS) if again else 0.0
        return self._slowness

    def _find_load_wait(self) -> float:
        """How long everything may take to be loaded: longer where the database was too slow for it just now."""
        return max(LOAD_WAIT_SECONDS, min(self._slowness, LONGEST_LOAD_SECONDS))

    def _begin_exchange(self) -> Exchange:
        """What is asked and told beside. Whoever knows nothing yet asks nothing; and what was counted from nothing, for
        it was loaded from the copy, is not told."""
        repairs, counts = self._telling.untold
        since = (self._revision, self._stamp) if self._compilation is not None else None
        return Exchange(
            self._database,
            self._status,
            since,
            self._overdue.watches,
            self._copying.lacks,
            self._is_due("beside", BESIDE_SECONDS),
            dict(self._exceptional),
            dict(self._numbered),
            repairs,
            {} if self._borrows else counts,
            self._ledger,
            self._find_held().origin.revision,
        )

    def _end_exchange(self, exchange: Exchange) -> None:
        self._telling.note_told(exchange.told_repairs, exchange.told_counts)
        if exchange.clients is not None:
            self._clients = exchange.clients, self._premises.elapsed()

    def _take_news(self, news: News) -> None:
        """Take in what a slow database has told, if it is gone by. What was read in a window of confirmation that is
        over since, or after another revision than that is known now, is asked for anew."""
        held = self._find_held()
        self._forgotten = None if news.origin is None else self._find_forgotten(news.origin, held)
        if self._forgotten is not None:
            return
        if news.end == -math.inf:
            return  # what nobody has confirmed: until more is told, the window is as it was
        self._overdue.hear(news.window, news.end)
        if read_clock() >= news.end or news.since != (self._revision, self._stamp):
            return
        if news.origin is not None and has_lost(news.origin, held):
            self._tell_loss(news.origin, held, news.changes.rules)
        changes = renumber(news.changes, self._list_known()) if news.whole else news.changes
        if news.window is None or news.window.outcome is not None:
            lacks = self._copying.lacks
            if lacks is None:
                self._copying.keep(self._revision, changes)
            elif news.missed is not None:
                self._copying.keep(lacks[0], news.missed)
        self._take(changes)

    def _list_known(self) -> set[int]:
        compiled = self._compiled
        ending = (rule.id for rule in self._roster.temporary)
        return {
            *compiled.fragments,
            *compiled.shaping.ids,
            *compiled.problems,
            *self._unreadable,
            *self._led_to,
            *ending,
        }

    def _try_database(self) -> bool:
        """See whether the database does its part, with what is told by now: a controller that has just begun knows of
        its host what the copy tells, and must not write less over it. The end of a window is part of it. False if it
        does, but is not to be gone by: then it is told how this gateway stands, for who asks there. In a thread of its
        own."""
        held = self._find_held()
        self._forgotten = self._find_forgotten(self._database.origin(held.origin.revision), held)
        error = self._forgotten or self._status.last_error
        self._database.try_host(replace(self._status, refused=self._forgotten, last_error=error))
        if self._forgotten is None:
            self._overdue.record(self._database)
        return self._forgotten is None

    def _find_held(self) -> Held:
        return self._replica.held() if self._replica is not None else self._read_held()

    def _find_forgotten(self, origin: Origin, held: Held) -> str | None:
        """Why the database that tells this of itself is not gone by, if it is not."""
        forgotten = find_forgotten(origin, held)
        if forgotten is not None and self._replica is not None:
            self._replica.doubt()
        return forgotten

    def _look_for_database(self, outage: Outage) -> None:
        """Return to the database once it answers; until then, heed what rules ask for meanwhile."""
        if outage.over():
            log.warning("The database answers again after %.1f s.", outage.seconds, extra=self._say())
            self._end_outage(outage)
            self._return(outage)
        elif self._forgotten is not None and self._status.last_error != self._forgotten:
            log.error("%s", self._forgotten)  # of a database that was away, and comes back as another
            self._try_report(last_error=self._forgotten, refused=self._forgotten)
        elif outage.is_slow and self._paused:
            self._end_outage(outage)  # nothing waits for it, and only the database tells when the pause is over
            self._roster.lifted = None
        elif self._is_forbidden():
            pass  # nothing that is known here is in force for sure, so nothing of it can be lifted
        elif self._compilation is not None and outage.unread >= self._setup.failure_seconds:
            self._lift("The database")

    def _end_outage(self, outage: Outage) -> None:
        self._outage, self._store = None, self._database
        self._status = replace(self._status, last_error=None, refused=None)
        self._returned = time.monotonic()
        outage.close()
        self._allow()

    def _return(self, outage: Outage) -> None:
        """Load everything from the database: what was marked and counted without it, it does not know. Unless it was
        slow, and was told beside."""
        self._numbered = dict(self._ledger.numbers or {})  # the database's, not the copy's: should it go again at once
        knows = self._compilation is not None and not self._borrows and not self._overdue.forbids(self._revision)
        try:
            # One that is over must not come into force again, not even until its guard has told the database.
            self._overdue.look(self._database, self._kernel, patience=0.0)
        except KernelError as error:
            log.error("%s", error)  # it is looked at again
        if outage.is_slow and knows and self._roster.lifted is None:
            ledger = self._ledger
            if ledger.marks is not None and ledger.numbers is not None:
                self._exceptional, self._numbered = ledger.marks, ledger.numbers
                if ledger.numbers != self._compiled.numbers.kept:
                    self._in_step = False  # the next pass keeps them, unless another process has given out its own
                elif self._in_step:
                    self._take_back()
                return
        self._telling.drop_counts()
        before = self._roster
        back, before.lifted = before.lifted, None
        try:
            if self._compilation is not None:
                self._load_all()
        except StoreError:  # it has gone again
            before.lifted = back
            raise
        if back is not None:
            log.warning("%d rules with on_failure=open come back into force.", len(back), extra=self._say(back))

    def _was_undone(self) -> bool:
        """Whether the guard has put the copy back, since the last look, to what was before a window that nobody has
        confirmed."""
        before, self._undone = self._undone, self._store.window()
        return self._undone != before

    def _look_at_window(self) -> None:
        """Undo what nobody has confirmed, if the guard has not. Where nothing was written since the last look, none has
        been opened.

        Whoever begins waits for no guard: he may have put back in the kernel what the database, which takes no writes,
        does not know to be back, and must not be undone meanwhile."""
        if self._outage is None:
            if self._overdue.watches or not self._has_looked:
                self._look_in_database()
        elif self._replica is not None and self._overdue.look_alone(self._replica, self._kernel, self._hear_of_window):
            self._load_all()

    def _recall_window(self, window: Window) -> Ending | None:
        """How a window has ended, as the copy knows."""
        return self._replica.find_ending(window) if self._replica is not None else None

    def _look_in_database(self) -> None:
        try:
            self._overdue.look(self._database, self._kernel, 0.0 if self._begins else OVERDUE_SECONDS)
        except StoreError:
            if self._is_forbidden():
                self._in_step = False  # the guard, which could not tell the database either, has put it right
            raise
        self._has_looked = True

    def _hear_of_window(self) -> Window | None:
        """What a slow database has told of the window since the last pass, if it has."""
        news = self._outage.news if self._outage is not None else None
        return news.window if news is not None else None

    def _lift(self, gone: str) -> None:
        """Take rules that would rather not limit than go on unattended out of force."""
        if self._roster.lifted is not None:
            return
        lifted = self._roster.lift(self._compiled.__contains__)
        shaped = self._find_shaped(lifted)
        for rule_id in lifted:
            self._note_leaving(rule_id)
            self._compiled.drop(rule_id)
        if shaped:
            self._endings.read(partial(self._count_classes, shaped))
        self._has_freed = self._has_freed or bool(lifted)
        if lifted:
            log.warning(
                "%s has been away for %.0f s: %d rules with on_failure=open are out of force until it is back.",
                gone,
                self._setup.failure_seconds,
                len(lifted),
                extra=self._say(lifted),
            )

    def _heed_clock(self) -> None:
        """A clock that was set moves every end: look at all of them again, and write them anew."""
        offset = self._now().timestamp() - time.monotonic()
        moved = 0.0 if self._clock_offset is None else offset - self._clock_offset
        if abs(moved) > CLOCK_SLACK and self._compilation is not None:  # whoever is paused begins anew anyway
            log.warning("The clock was set by %+.0f s: the ends of rules are looked at again.", moved)
            if self._in_step:
                self._count(rule.id for rule in self._roster.temporary)  # what is written anew counts from nothing
            for rule in self._roster.temporary:
                self._put_anew(rule)
            self._has_freed = True
            self._in_step = self._in_step and not self._roster.temporary
        self._clock_offset = offset

    # -- loading and compiling

    @property
    def _compiled(self) -> Compilation:
        assert self._compilation is not None, "_load comes first"
        return self._compilation

    def _load(self) -> int:
        """Take in what changed since the last pass; everything, the first time. Without the database nothing changes:
        what is known may be newer than the copy."""
        if self._compilation is not None and self._outage is not None:
            if self._was_undone():
                self._load_all()
            elif (news := self._outage.take_news()) is not None:
                self._take_news(news)
            return self._revision
        if self._compilation is not None:
            if self._quiet and self._in_step:
                return self._revision
            changes = self._store.changes(self._revision, self._setup.host, self._stamp)
            if changes is not None:
                if changes.revision != self._revision:
                    self._overdue.note(self._store)
                self._take(changes)
                return self._revision
        self._load_all()
        return self._revision

    @contextmanager
    def _wholly(self) -> Iterator[None]:
        """Rules that were taken in by half must not pass for all of them: after an error, all are loaded anew."""
        try:
            yield
        except Exception:
            self._compilation = None
            raise

    def _load_all(self) -> None:
        """Take in everything. If that cannot be had, what is known stays: the copy may be older."""
        known = self._compilation, self._roster, self._numbered, self._exceptional, self._tally, self._revision
        fallback, stamp, borrows = self._fallback, self._stamp, self._borrows
        if self._outage is None:
            self._allow(self._find_load_wait())
        try:
            with self._wholly():
                self._load_anew()
        except StoreError:
            self._compilation, self._roster, self._numbered, self._exceptional, self._tally, self._revision = known
            self._fallback, self._stamp, self._borrows = fallback, stamp, borrows
            self._premises.keep_mask(self._compilation.facts.mark_mask if self._compilation else None)
            raise

    def _load_anew(self) -> None:
        origin, held = self._refuse_forgotten()
        self._premises.probe(self._store.hosts())
        self._numbered = self._store.numbering(self._setup.host)
        self._premises.look(self._saved_roots(), find_translated(self._numbered))
        self._find_safe()
        self._premises.keep_mask(self._moving or find_mark_bits(self._numbered))
        self._premises.look_at_marks(FIRST_LOOK_SECONDS if self._compilation is None and self._revision < 0 else 0.0)
        self._compilation = Compilation(self._premises.facts, self._numbered)
        self._premises.keep_mask(self._compilation.facts.mark_mask)
        self._roster = Roster(self._setup.host, self._roster.lifted)
        self._exceptional = self._store.marked(self._setup.host)
        self._untold.clear()
        self._fallback = Fallback(self._setup.host, self._store.assigned(self._setup.host))
        self._tally = Tally(self._store.raw_counters(self._setup.host))
        self._in_step = False
        self._rewritten.clear()
        self._unreadable.clear()
        self._led_to.clear()
        self._newer.clear()
        self._borrows = self._outage is not None
        self._revision, self._stamp, loaded = self._store.load_stamped(self._setup.host)
        if self._outage is None:
            self._overdue.note(self._store)
        rules: Iterable[Rule] = loaded
        if origin is not None and has_lost(origin, held):
            rules = list(loaded)
            self._tell_loss(origin, held, rules)
        for rule in rules:
            self._put(rule)
        if self._compilation.complete():
            self._try_refused()
        self._adopt()

    def _refuse_forgotten(self) -> tuple[Origin | None, Held]:
        """Raise StoreError if what the database holds must not be taken for what is wanted. The copy itself may. Else
        which database it is, and what is held here."""
        if self._outage is not None or not self._database.tells_of_others:
            return None, NOTHING
        held = self._find_held()
        origin = self._database.origin(held.origin.revision)
        self._forgotten = self._find_forgotten(origin, held)
        if self._forgotten is not None:
            raise StoreError(self._forgotten)
        return origin, held

    def _tell_loss(self, origin: Origin, held: Held, rules: Iterable[Rule]) -> None:
        """Say what is out of force since a server has lost it, once: the copy knows until it follows."""
        before = None
        if self._replica is not None:
            with suppress(StoreError):
                before = list(self._replica.load(self._setup.host)[1])
        told = say_loss(origin, held, before, rules)
        if told is None or told in self._losses:
            return
        self._note_loss(told)
        self._trace = None  # what else is lost with them is told by that
        for rule in compare(before or (), rules)[0][:_MOST_LOST]:
            log.warning("The database has lost rule %d: %s", rule.id, rule)

    def _look_back(self) -> None:
        """Say, once, that a server has lost what was changed last, where that was told of no rules."""
        if self._outage is not None:
            return
        known, is_lost = self._trace, False
        with suppress(StoreError):  # an audit that cannot be read takes no limit away
            self._trace, is_lost = self._database.look_back(known)
        if known is not None and is_lost:
            self._note_loss(say_other_loss(known.line))

    def _note_loss(self, told: str) -> None:
        log.error("%s", told, extra=self._say())
        self._losses = (*self._losses, told)[-_MOST_LOSSES:]

    def _adopt(self) -> None:
        """Who has a class in the kernel keeps it."""
        lanes = self._compiled.shaping.lanes
        found = self._kernel.readings(lane.name for lane in lanes if not lane.incoming)
        found |= self._kernel.ingress_readings(lane.name for lane in lanes if lane.incoming)
        self._compiled.shaping.adopt({name: read_entries(held) for name, held in found.items()})

    def _take(self, changes: Changes) -> None:
        if (changes.revision, changes.stamp) == (self._revision, self._stamp):
            return
        if self._replica is not None:
            self._newer |= {rule.id: rule for rule in changes.rules} | dict.fromkeys(changes.removed)
        known = [rule.id for rule in changes.rules if rule.id in self._compiled]
        if known and self._in_step:
            self._count(known)
        for rule_id in changes.removed:
            self._news.add(rule_id)
            self._compiled.drop(rule_id)
            self._fallback.forget(rule_id)
            self._roster.forget(rule_id)
            self._tally.forget(rule_id)
            self._endings.forget(rule_id)
            self._unreadable.pop(rule_id, None)
            self._led_to.pop(rule_id, None)
        self._untold.update(rule.id for rule in changes.rules if rule.id in self._exceptional)
        for rule in changes.rules:
            before = self._compiled.fragments.get(rule.id)
            self._put(rule)
            if before != self._compiled.fragments.get(rule.id):
                self._rewritten.add(rule.id)
        self._try_refused()
        self._revision, self._stamp = changes.revision, changes.stamp

    def _try_refused(self) -> None:
        """See whether there is room now for what could not be enforced, or not on each of its devices; for some after
        others where they are many. Of those that are in each other's way, the oldest comes first."""
        refused = sorted({*self._compiled.problems, *self._compiled.shaping.find_growing()})
        begin = bisect_right(refused, self._last_tried) if len(refused) > _MOST_RETRIED else 0
        tried = [*refused[begin:], *refused[:begin]][:_MOST_RETRIED]
        self._look_again(sorted(tried))
        self._last_tried = tried[-1] if tried else 0

    def _put(self, rule: Rule) -> None:
        """Take in a rule. One that cannot be read, or that nobody can make anything of, must not keep the others from
        being enforced."""
        self._unreadable.pop(rule.id, None)
        self._led_to.pop(rule.id, None)
        if (obstacle := self._refuse(rule)) is not None:
            self._unreadable[rule.id] = obstacle
            self._news.add(rule.id)
            self._compiled.drop(rule.id)
            self._fallback.forget(rule.id)
            return
        try:
            self._put_in(rule)
        except NetlimitError:
            raise
        except Exception as error:
            self._unreadable[rule.id] = self._mishaps.note(error, f"Rule {rule.id} is not enforced.", self._say())
            self._compiled.drop(rule.id)
        if isinstance(rule, Malformed):
            self._unreadable[rule.id] = rule.reason

    def _refuse(self, rule: Rule) -> str | None:
        """Why a block that requests have led to is not to be in force: the host may have begun to talk to him since."""
        if self._setup.spared is None or LABEL not in rule.labels:
            return None
        self._led_to[rule.id] = rule
        around = self._setup.spared.look_around(self._premises.own, self._premises.edges)
        if around != self._around:
            self._around = None  # the others are judged by it, too, even if it is soon as it was
        return self._setup.spared.refuse(rule, around)

    def _spare(self) -> None:
        """Blocks that requests have led to go as soon as they would hit whom none may, and come back later."""
        spared = self._setup.spared
        if spared is None or not self._led_to:
            return
        around = spared.look_around(self._premises.own, self._premises.edges)
        if around == self._around:
            return
        for rule in list(self._led_to.values()):
            if self._unreadable.get(rule.id) != spared.refuse(rule, around):
                self._put_anew(rule)
        self._around = around

    def _put_in(self, rule: Rule) -> None:
        self._news.add(rule.id)
        admitted = self._roster.admit(rule, self._now())
        self._fallback.forget(rule.id)
        if admitted is None:
            self._compiled.drop(rule.id)
        elif self._compiled.put(admitted) is not None and rule.action is not Action.SHAPE:
            self._fallback.note(rule, self._compiled.facts)

    def _put_anew(self, rule: Rule) -> None:
        """Take in a rule that nobody has changed, and that may have another place now, or none: what the kernel has
        counted for it is read once more before it goes."""
        before = self._compiled.fragments.get(rule.id)
        self._note_leaving(rule.id)
        self._put(rule)
        if before == self._compiled.fragments.get(rule.id) and self._compiled.sets_of(rule.id):
            self._endings.forget(rule.id)

    def _note_leaving(self, rule_id: int) -> None:
        if self._in_step:
            self._endings.note(rule_id, self._compiled.fragments.get(rule_id), self._compiled.sets_of(rule_id))

    def _expire(self) -> None:
        due = list(self._roster.due(self._now()))
        if not due:
            return
        shaped = self._find_shaped({rule.id for rule in due})
        for rule in due:
            self._put_anew(rule)
        self._has_freed = True
        if shaped:
            self._endings.read(partial(self._count_classes, shaped))

    def _find_shaped(self, rule_ids: Collection[int]) -> dict[int, list[tuple[str, int]]]:
        """The classes of those rules that shape, as long as the kernel has them."""
        shaping = self._compiled.shaping
        if not self._in_step or not any(rule_id in shaping for rule_id in rule_ids):
            return {}
        return {rule_id: held for rule_id, held in shaping.classes().items() if rule_id in rule_ids}

    def _look_ahead(self) -> None:
        """Read what rules have counted that end in a moment."""
        if self._compilation is None or not self._in_step or self._endings.rest:
            return
        ending = list(self._roster.ending(self._now().timestamp() + self._endings.ahead))
        limited = [rule_id for rule_id in ending if self._compiled.sets_of(rule_id)]
        if limited:
            self._endings.read(partial(self._count_limited, limited, fresh=False))

    def _look_again(self, rule_ids: Sequence[int]) -> None:
        """Take in rules anew, of many some at a time: a database may be far, and each question takes its time."""
        for start in range(0, len(rule_ids), _MOST_ASKED):
            some = rule_ids[start : start + _MOST_ASKED]
            asked = [str(rule_id) for rule_id in some if not self._is_newer(rule_id)]
            found = self._store.find_some(asked) if asked else {}
            for rule_id in some:
                self._take_again(rule_id, found.get(str(rule_id)))

    def _is_newer(self, rule_id: int) -> bool:
        """Whether a rule is known that the copy, which stands for the database, does not have."""
        return self._outage is not None and rule_id in self._newer

    def _take_again(self, rule_id: int, kept: Kept | None) -> None:
        if self._is_newer(rule_id):
            newer = self._newer[rule_id]
            if newer is not None:
                self._put(newer)
        elif kept is not None:
            self._put_anew(kept.rule)
        elif self._outage is None:  # a rule may be newer than the copy
            self._compiled.drop(rule_id)

    # -- what the kernel cannot enforce

    def _hand_over(self) -> None:
        """Give the limiters what the kernel cannot enforce. Until those that run have loaded it, what is in the kernel
        stays; but not for long, if they do not answer."""
        if self._outage is not None:
            return
        host, new = self._setup.host, self._fallback.find_new(self._compiled.problems)
        if new:
            self._fallback.note_assigned(self._store.assign(host, new, ()), new, ())
        if self._fallback.assigned:
            end = time.monotonic() + (HANDOVER_SECONDS if new else 0.0)
            while not self._fallback.look(self._store.limiters(host), self._now()) and time.monotonic() < end:
                time.sleep(_HANDOVER_LOOK)

    def _take_back(self) -> None:
        """Take from the limiters what the kernel enforces now, and what nobody has to."""
        old = self._fallback.find_old(self._compiled.problems) if self._outage is None else set[int]()
        if old:
            self._fallback.note_assigned(self._store.assign(self._setup.host, {}, old), {}, old)

    def _find_leaving(self) -> Leaving:
        """The rules that the kernel can enforce no more, with the sets in which it may hold them still."""
        leaving: Leaving = {}
        for rule_id in self._compiled.problems:
            fragment, said = self._compiled.fragments.get(rule_id), self._exceptional.get(rule_id)
            held = said is None or (said.state is not State.ERROR and said.layer is None)
            if fragment is not None and held:
                leaving[rule_id] = fragment, tuple(each.name for each in self._sets_of(fragment))
        return leaving

    def _sets_of(self, fragment: Fragment) -> tuple[IpSet, ...]:
        return purpose_sets(fragment.purpose, self._compiled.facts)

    def _probe_again(self) -> None:
        """See whether the kernel can enforce now what it could not, or whether it tells now what it can."""
        if self._compilation is None or self._outage is not None:
            return
        # What the kernel refuses just now may be for something that came since it was probed.
        lacks = self._compiled.problems or self._premises.unanswered or self._premises.unled
        if self._in_step and not lacks:
            return
        if self._is_due("probe", PROBE_SECONDS):
            before = _spent()
            if self._premises.probe_again():
                log.info("What this host can do has changed: every rule is looked at again.", extra=self._say())
                self._load_all()
            self._due["probe"] += PROBE_SHARE * (_spent() - before)

    def _survey(self) -> None:
        """Look for what gets in the way of limits; a host with much to read is looked at less often. At a start that
        waits until what is missing has been put back: it may take seconds."""
        began = time.monotonic()
        self._premises.look_for_conflicts()
        self._due["survey"] += PROBE_SHARE * (time.monotonic() - began)

    def _follow_marks(self) -> None:
        """See whether others use packet marks that they did not use before."""
        if self._compilation is None or not self._is_due("marks", MARKS_SECONDS):
            return
        before = time.thread_time()
        changed = self._premises.look_at_marks()
        self._due["marks"] += PROBE_SHARE * (time.thread_time() - before)  # the tools rest by themselves
        if changed and self._outage is None:
            log.info("Who uses packet marks has changed: every rule is looked at again.", extra=self._say())
            self._load_all()

    # -- enforcing

    def _enforce(self) -> Plan:
        """Plan and apply. Numbers are kept before an entry carries them, and forgotten when none does any more."""
        began = time.monotonic()
        if self._outage is None and self._was_overtaken():
            self._load_all()
        else:
            # What `netlimit apply` has applied since this process looked must not be undone.
            self._load()
        taken: list[Step] = []
        left: set[int] = set()
        met: list[Drift] = []
        quick = self._in_step
        plan, known = self._begin_plan()
        while True:
            left |= self._read_last()
            self._planned = plan
            try:
                steps, drift = self._apply(plan, known)
            except KernelError as error:
                if isinstance(error, Occupied) or not self._leave_out_refused():
                    raise
                return self._enforce()
            taken += plan.steps[:steps]
            if steps == len(plan.steps):
                break
            met += [drift] if drift else []
            plan, known = self._plan_rest()
        self._planned, plan = None, Plan(tuple(taken))
        compilation = self._compiled
        # Who was about to connect when the rules began to hold is connected now.
        self._open.follow(compilation.facts, self._premises.doors)
        self._store_counts(self._tally.zero(left))
        while self._rewritten:
            self._tally.restart(self._rewritten.pop())
        self._has_freed = bool(compilation.settle()) or self._has_freed
        self._keep_numbers()
        self._in_step, self._blind_since = True, None
        self._disputes.see()
        took = time.monotonic() - began
        self._passes.observe(took)
        if plan:
            said = self._say(self._news) | {"seconds": took}
            # That guarantees follow who sends is no news.
            level = logging.DEBUG if quick and plan.resizes and not (self._news or met) else logging.INFO
            told = "Revision %d is applied: %d changes of the kernel."
            log.log(level, told, self._revision, len(plan.steps), extra=said)
        self._news.clear()
        for kind in {kind for drift in met for kind in drift}:
            self._tell_repair(Repair(kind, describe(plan), took, self._now()))
        if met:
            self._report(drift=self._status.drift + len(met), repairs=dict(self._repairs.counts))
        return plan

    def _begin_plan(self) -> tuple[Plan, Structure]:
        """The plan, and what there is of sets, chains and hooks to begin with."""
        self._prepare_plan()
        self._due["between"] = time.monotonic() + STRUCTURE_SECONDS
        compilation = self._compiled
        if self._in_step:
            desired, known = compilation.state, compilation.settled
            transition, touched = compilation.transition(known.structure), compilation.touched_classes
            plan = diff(desired, known, transition, compilation.touched, touched, self._saved_roots())
            self._in_step = False
            return plan, known.structure
        self._adopt()  # another process may have given out classes since this one looked
        plan, found = self._compare()
        return plan, found.structure

    def _plan_rest(self) -> tuple[Plan, Structure]:
        """The plan for what is left to do, or is to be done now, after one that was broken off."""
        began = time.monotonic()
        self._prepare_plan()
        plan, found = self._compare()
        self._due["between"] = time.monotonic() + max(STRUCTURE_SECONDS, time.monotonic() - began)
        return plan, found.structure

    def _prepare_plan(self) -> None:
        """What must be so before entries carry numbers, and chains let pass who manages the host."""
        self._hand_over()
        self._keep_numbers()
        compilation = self._compiled
        compilation.hold_open(self._open.follow(compilation.facts, self._premises.doors))
        compilation.hold_led(self._premises.led)
        self._inspection.forget()

    def _read_last(self) -> set[int]:
        """Read the last that rules have counted which leave now; their ids."""
        leaving, ended = self._find_leaving(), self._endings.take()
        if leaving:
            self._read_leaving(leaving)
        if ended:
            self._endings.read(partial(self._read_leaving, ended))
        return {*leaving, *ended}

    def _read_leaving(self, leaving: Leaving) -> None:
        """Read the last that rules have counted. What is told of it waits until they have left: it takes time."""
        held = self._kernel.readings({name for _, names in leaving.values() for name in names})
        self._telling.count(self._tally.read_leaving(leaving.values(), held, self._now()))

    def _was_overtaken(self) -> bool:
        """Whether `netlimit apply` gave out numbers beside this process, or has moved rules to the limiters or from
        them: no entry must be misread, and no rule forgotten by both layers."""
        host = self._setup.host
        return (
            self._store.numbering(host) != self._numbered or self._store.assigned_serial(host) != self._fallback.serial
        )

    def _keep_numbers(self) -> None:
        numbering = self._compiled.numbers.kept
        added, retired = find_changed(self._numbered, numbering)
        if added or retired:
            self._store.number(self._setup.host, added, retired)
            self._numbered = dict(numbering)

    def _diff_all(self) -> Plan:
        return self._compare()[0]

    def _compare(self) -> tuple[Plan, KernelState]:
        """The plan, and what the kernel was found to hold."""
        desired = self._compiled.state
        found = observe(self._kernel, (lane.name for lane in (desired.ingress.lanes if desired.ingress else ())))
        transition = self._compiled.transition(found.structure)
        return diff(desired, found, transition, put_back=self._saved_roots()), found

    def _apply(self, plan: Plan, held: Structure) -> tuple[int, Drift]:
        """Take the steps; how many, and what has drifted: between trees, which take long, it is looked whether the rest
        has to be planned anew. `held` is what there is of sets, chains and hooks.

        A device that refuses its queues must not keep what others have, and what polices, from what they shall be: that
        error is raised at the end. One that has gone meanwhile refuses nothing: devices are looked at anew."""
        refusal: KernelError | None = None
        gone = False
        self._refused_step, self._unled = None, {}
        for number, step in enumerate(plan.steps):
            if number and isinstance(plan.steps[number - 1], WriteTree) and self._is_due("between", STRUCTURE_SECONDS):
                drift = self._look_at(held)
                if drift or self._hears_more():
                    if gone:
                        self._premises.forget()
                    return number, drift
            self._applied += 1
            try:
                self._kernel.apply(step)
            except KernelError as error:
                if not isinstance(step, WriteTree | WriteIngress):
                    self._refused_step = step if isinstance(step, SwitchTable) else None
                    raise
                if self._is_there(step):
                    refusal = refusal or error
                    if isinstance(error, LeadMissing) and isinstance(step, WriteTree):
                        self._unled[step.device] = error.reason
                else:
                    gone = True
                continue
            held = follow(step, held)
            if isinstance(step, WriteTree):
                self._tally.leave(step)
                if step.drop and step.put_back is not None:
                    self._store.forget_root(self._setup.host, step.device)
        if gone:
            self._premises.forget()
        if refusal is not None:
            raise refusal
        return len(plan.steps), {}

    def _look_at(self, held: Structure) -> Drift:
        """What others have changed of sets, chains and hooks while a plan is carried out, unless it is to be left for a
        while, for they do it over and over."""
        began = time.monotonic()
        drift = self._inspection.look_at_structure(held)
        self._due["between"] += BETWEEN_SHARE * (time.monotonic() - began)
        if not drift or self._rests(drift):
            return {}
        log.warning("Drift: %s differed from what was applied; the rest is planned anew.", " and ".join(drift.values()))
        for kind in drift:
            fight = self._repairs.note(kind, time.monotonic())
            if fight is not None:
                self._disputes.note_fight(kind, find_concerned(kind, self._planned, self._compiled))
                log.error("%s", fight, extra={"kinds": [kind]})
        return drift

    def _hears_more(self) -> bool:
        """Take in what rules are others now, while a plan is carried out; whether any are. Raises StoreError: what was
        taken in by half must not pass for carried out, so the pass ends, and the next plans anew."""
        if self._outage is not None:
            return False
        known = self._compilation, self._revision, self._stamp
        self._allow()
        self._load()
        return (self._compilation, self._revision, self._stamp) != known

    def _leave_out_refused(self) -> bool:
        """Whether what was refused is by the rules of some devices, or of some buckets, alone. Then those are in error,
        and do not keep the others from being in force. Raises KernelError."""
        return self._leave_out_unled() or self._leave_out_buckets()

    def _leave_out_unled(self) -> bool:
        """Whether there were devices on which nobody could lead packets to classes."""
        if not self._unled.keys() - self._premises.unled.keys():
            return False
        self._premises.unled |= self._unled
        with self._wholly():
            self._compiled.protect(self._premises.facts)
        return True

    def _leave_out_buckets(self) -> bool:
        """Whether some of the buckets of the step that was refused are refused by themselves. Raises KernelError."""
        step, self._refused_step = self._refused_step, None
        if step is None:
            return False
        names, refused = self._compiled.name_buckets(), self._kernel.refused_buckets(step)
        found = {names[name]: reason for name, reason in refused.items() if name in names}
        if not found.keys() - self._premises.refused.keys():
            return False
        self._premises.refused |= found
        log.error("The kernel does not take %d kinds of buckets: %s.", len(found), next(iter(found.values())))
        self._load_all()
        return True

    def _is_there(self, step: WriteTree | WriteIngress) -> bool:
        """Whether the devices are there of which a step is."""
        there = self._kernel.topology().devices
        asked = (step.device,) if isinstance(step, WriteTree) else step.ingress.devices if step.ingress else ()
        return all(device in there or device == INGRESS_DEVICE for device in asked)

    def _settle(self) -> None:
        """Record what stands now: problems rule by rule, then the revision."""
        self._allow()  # the kernel was looked at just now
        exceptional = self._mark()
        self._take_back()
        self._exceptional = exceptional  # last: if the database has failed, the next pass comes here again
        self._report(applied_revision=self._revision, stamp=self._stamp, last_error=self._find_error())
        self._copying.note_change()
        self._tell_of_copy(self._copy)

    def _mark(self) -> dict[int, Exceptional]:
        """Tell of rules that are not simply applied. Raises StoreError."""
        exceptional = self._find_exceptional()
        known = self._exceptional | dict.fromkeys(self._untold & self._exceptional.keys())
        changed, cleared = find_changed(known, exceptional)
        if changed or cleared:
            self._store.mark(self._setup.host, [*changed.values()], cleared)
            self._tell_worse(changed.values())
        self._untold.clear()
        return exceptional

    def _tell_worse(self, changed: Iterable[Exceptional]) -> None:
        """Of rules that are not enforced as they say, one line for each reason."""
        reasons: dict[tuple[State, str], list[int]] = {}
        for each in changed:
            if each.state is not State.APPLIED:
                reasons.setdefault((each.state, each.message), []).append(each.rule_id)
        for (state, message), rules in list(reasons.items())[:_MOST_TOLD]:
            log.warning("Rules in state %s: %s", state, message, extra=self._say(rules))

    def _tell_of_copy(self, *renewals: Callable[[], None]) -> None:
        """Renew the copy, and report once more if it is another matter now whether that can be done."""
        told = self._copying.warnings
        for renew in renewals:
            renew()
        if self._copying.warnings != told:
            self._report()

    def _copy(self) -> None:
        if self._outage is None:
            if self._copying.is_behind:
                # It takes many answers.
                self._allow(2 * WAIT_SECONDS if self._copying.lacks is not None else self._find_load_wait())
            try:
                self._copying.follow(self._database)
            except Busy as error:  # telling that now would only wait once more
                self._telling.rest(error)
            if not self._copying.is_behind:
                self._newer.clear()

    def _copy_at_last(self) -> None:
        """Have the copy hold what is applied before this ends, for a boot begins with that. What took too long between
        two looks at the kernel may take longer now; a database that is away, or another, is not asked."""
        is_there = self._outage is None or self._outage.is_slow or self._was_slow
        if not self._copying.is_behind or not is_there or self._forgotten is not None:
            return
        try:
            self._database.allow(END_SECONDS)
            self._copying.follow(self._database)
        except Exception as error:  # it ends all the same
            log.warning("%s So the copy of the applied rules is of an earlier revision.", error, extra=self._say())

    def _copy_safe(self) -> None:
        if self._outage is None:
            self._copying.keep_safe(self._status, self._is_due("safe", SAFE_SECONDS))

    @property
    def _replica(self) -> Replica | None:
        """The copy, if there is one."""
        return self._copying.replica

    def _find_error(self) -> str | None:
        """What an operator must know: a database that is away, or a fight that goes on."""
        if self._outage is not None:
            return self._status.last_error
        return " ".join(map(str, self._repairs.fights)) or None

    def _recall_degraded(self) -> dict[int, Exceptional]:
        """What was told of rules that others keep from holding, before this process has looked for these."""
        known = self._exceptional.items()
        return {i: each for i, each in known if i in self._compiled and each.state is State.DEGRADED}

    def _find_exceptional(self) -> dict[int, Exceptional]:
        """What must be said of rules: why they cannot be enforced, or not for all; or what an operator should know."""
        notes = self._compiled.shaping.notes.items()
        said = self._recall_degraded() if self._awaits_survey else {}
        said |= {i: Exceptional(i, State.DEGRADED if n.degraded else State.APPLIED, n.text) for i, n in notes}
        said |= {i: Exceptional(i, State.DEGRADED, text) for i, text in self._compiled.leaks.items()}
        spoiled = self._compiled.find_spoiled(self._premises.spoiled)
        said |= {i: Exceptional(i, State.DEGRADED, text) for i, text in spoiled.items()}
        for i, note in self._compiled.find_published(self._premises.published, self._premises.given).items():
            if note.degraded or i not in said:
                said[i] = Exceptional(i, State.DEGRADED if note.degraded else State.APPLIED, note.text)
        said |= {i: Exceptional(i, State.DEGRADED, text) for i, text in self._crowded.items() if i in self._compiled}
        for i, miss in self._compiled.misses.items():
            said[i] = Exceptional(i, State.DEGRADED if miss.partly else State.ERROR, miss.text)
        for rule, ports in self._compiled.shut.items():
            text, known = tell_rule(rule, ports), said.get(rule.id)
            add = Exceptional(rule.id, State.APPLIED, text)
            said[rule.id] = replace(known, message=f"{known.message} {text}") if known else add
        disputed = {i: each for i, each in self._disputes.judge().items() if i in self._compiled}
        unreadable = {i: Exceptional(i, State.ERROR, reason) for i, reason in self._unreadable.items()}
        return said | disputed | self._fallback.judge(self._compiled.problems) | unreadable

    def _find_closed(self) -> str | None:
        """What is to be said of rules that close this gateway, though nobody has forced them."""
        told = tell_host(self._compiled.shut)
        if told is not None and told not in self._status.notes:
            log.warning("%s", told)
        return told

    def _doubt_roots(self) -> None:
        """`netlimit apply --take-over` may have put a tree in another's place, and the rule that needs it may have gone
        before this process saw either: whoever waits to get his place back has the next pass look at everything. Where
        the device is gone, he waits for ever, and there is nothing to look at."""
        waiting = self._saved_roots().keys() - self._compiled.settled.trees.keys() if self._in_step else set()
        if waiting and waiting & self._list_devices().keys():
            self._in_step = False

    def _doubt_states(self) -> None:
        """`netlimit apply` and the guard tell how rules stand without knowing all that this process knows, and whoever
        forgets this gateway forgets that, too: what is told of it otherwise than it is, is told anew."""
        if self._compilation is None or self._outage is not None or not self._is_due("states", HEARTBEAT_SECONDS):
            return
        before = _spent()
        told = self._store.marked(self._setup.host)
        self._due["states"] += LOOK_SHARE * (_spent() - before)
        if told != self._exceptional:
            log.warning("The database says of rules here otherwise than they stand; it hears anew how they do.")
            self._exceptional = told
            self._exceptional = self._mark()

    def _saved_roots(self) -> Mapping[str, SavedRoot]:
        """The root qdiscs of others that ours took the place of."""
        return self._store.saved_roots(self._setup.host)

    # -- drift

    def _check_drift(self) -> None:
        if self._is_due("structure", STRUCTURE_SECONDS):
            before, queued = _spent(), self._is_due("trees", 0.0)
            drift = self._inspection.look(self._compiled)
            looked = _spent()
            if queued:  # of many classes that takes long, and keeps no look at chains and sets waiting
                drift = {**drift, **self._find_queue_drift()}
            repairs = bool(drift) and not self._rests(drift)
            if not repairs and not self._has_repaired:
                self._due["structure"] += LOOK_SHARE * (looked - before)
                self._due["trees"] += LOOK_SHARE * (_spent() - looked) if queued else 0.0
            self._has_repaired = repairs
            self._repair(drift)
            self._make_peace()
            if self._inspection.doubt(self._compiled):
                self._due["sweep"] = 0.0
        if self._is_due("sweep", 0.0):
            before = _spent()
            drift = self._sweep_one()
            self._due["sweep"] = time.monotonic() + self._find_rest(_spent() - before)
            self._repair(drift)

    def _find_drift(self) -> Drift:
        """What of structure and trees is not as it was applied, by kind."""
        return {**self._inspection.look(self._compiled), **self._find_queue_drift()}

    def _find_queue_drift(self) -> Drift:
        if not len(self._compiled.shaping):
            return {}
        queues = self._kernel.queues()
        if self._premises.find_foreign(queues, self._saved_roots() if queues.foreign else {}):
            self._compiled.protect(self._premises.facts)
        return self._inspection.look_at_queues(self._compiled, queues, self._list_devices)

    def _sweep_one(self) -> Drift:
        """Read the sets of one kind of limit, and what they have counted; what of their entries is not as it was
        applied, by kind."""
        compilation = self._compiled
        names = self._inspection.next_turn(compilation)
        if names is None:
            self._round = 0.0
            return {}
        readings = self._inspection.read(compilation, names)
        if readings is not None:
            owners = set(compilation.owners.get(names, {}).values())
            self._store_counts(self._tally.read(compilation, owners, readings, self._now()))
        return self._inspection.compare(compilation, names, readings, self._now().timestamp())

    def _find_rest(self, spent: float) -> float:
        """Seconds from one look at entries, which took `spent` of processor time, to the next."""
        self._round += spent
        pace = SWEEP_SECONDS / (1 + self._inspection.turns)
        # The longer rest, as long as all of them can still be looked at in time.
        share = SWEEP_SHARE if self._round * CALM * SWEEP_SHARE > SWEEP_SECONDS else CALM * SWEEP_SHARE
        return max(min(STRUCTURE_SECONDS, pace), share * spent)

    def _repair(self, drift: Drift) -> None:
        """Somebody else has changed our objects, by kind: look at everything and put it right, unless there is a fight
        over all of it."""
        began = time.monotonic()
        if self._rests(drift):
            self._leave(drift)
            return
        self._in_step = False
        self._refused_drift = drift  # should the kernel refuse a step, the next pass repairs it
        with self._kernel.exclusive(self._patience):
            if self._keeps_off():
                self._refused_drift = {}
                return
            devices = self._list_devices()
            kept = self._repairs.find_kept(devices)
            plan = self._enforce()
            kept &= self._repairs.find_kept(self._list_devices())  # what has gone meanwhile had lost its queues by that
            self._repairs.know(plan, devices)
        self._refused_drift = {}
        now, kinds = time.monotonic(), sorted(find_kinds(plan) or drift)
        moved = kinds == [PLACES] and self._repairs.is_fight(PLACES)
        log.log(
            logging.DEBUG if moved else logging.WARNING,  # it happens every few seconds, and was told
            "Drift: %s differed from what was applied; repaired in %.3f s.",
            " and ".join(drift.values()),
            now - began,
            extra=self._say() | {"kinds": kinds, "seconds": now - began, "found": describe(plan)},
        )
        lost = find_lost(plan, kept)
        for kind in kinds:
            fight = self._repairs.note(kind, now, now - began, blames=kind not in lost)
            if fight is not None:
                self._disputes.note_fight(kind, find_concerned(kind, plan, self._compiled))
            if moved:
                continue  # nor are other repairs to be pushed out of sight by it
            if fight is not None:
                log.error("%s", fight, extra={"kinds": [kind]})
            self._tell_repair(Repair(kind, describe(plan), now - began, self._now()))
        self._left.clear()
        self._exceptional = self._mark()
        counts = dict(self._repairs.counts)
        self._report(drift=self._status.drift + 1, repairs=counts, drifted=0, last_error=self._find_error())

    def _rests(self, drift: Drift) -> bool:
        """Whether there is a fight over all of it, in which it is left for the moment."""
        return all(self._repairs.rest(kind, time.monotonic()) for kind in drift)

    def _list_devices(self) -> Mapping[str, int]:
        """The devices and their indices, asked before they are written to: one may be gone afterwards. They only tell
        what is no drift, and whom to blame: where they cannot be read, nobody is."""
        with suppress(KernelError):
            return {name: device.index for name, device in self._kernel.topology().devices.items()}
        return {}

    def _count_late(self, drift: Drift, plan: Plan, began: float) -> None:
        """What the kernel first refused to have put right is right now. That is no sign of a fight: steps are refused
        where things change while they are looked at."""
        self._refused_drift = {}
        took = time.monotonic() - began
        for kind in drift:
            self._repairs.counts[kind] += 1
            self._tell_repair(Repair(kind, describe(plan), took, self._now()))
        log.warning(
            "Drift: %s differed from what was applied; repaired at the second try.", " and ".join(drift.values())
        )
        self._report(drift=self._status.drift + 1, repairs=dict(self._repairs.counts))

    def _leave(self, drift: Drift) -> None:
        """Tell what is left as it is for a while."""
        self._left.update(drift)
        if self._status.drifted != len(self._left):
            self._report(drifted=len(self._left))

    def _make_peace(self) -> None:
        ended = self._repairs.calm(time.monotonic())
        if ended:
            self._left.difference_update(ended)
            self._disputes.end(ended)
            self._exceptional = self._mark()
            log.info("Nobody undoes the %s any more.", " and the ".join(ended))
            self._report(drifted=len(self._left), last_error=self._find_error())

    # -- the host

    def _follow(self) -> None:
        """Follow devices and routes: what is shaped moves to where it leaves now."""
        if self._compilation is None or not self._premises.has_moved():
            return
        before = self._premises.facts
        self._premises.look(self._saved_roots())
        with self._wholly():
            self._compiled.protect(self._premises.facts)
            self._look_again([*self._compiled.find_moved(before)])
        self._due |= dict.fromkeys(("structure", "trees", "heartbeat"), 0.0)  # a device that was away has lost its tree

    def _find_unread(self) -> KernelError | None:
        """Follow them; why that cannot be done now."""
        try:
            self._follow()
        except KernelError as error:
            return error
        return None

    def _greet(self) -> None:
        """Give classes to hosts that have appeared, and take them from those that are gone."""
        if self._compilation is None:
            return
        if self._in_step and self._is_due("queues", min(QUEUE_SECONDS, self._setup.idle.total_seconds())):
            began = time.monotonic()
            self._count_queues()
            share = FULL_SHARE if self._compiled.shaping.fills_up else SWEEP_SHARE
            self._due["queues"] += share * (time.monotonic() - began)
        if self._compiled.shaping.seen_sets and self._is_due("newcomers", NEWCOMER_SECONDS):
            began = time.monotonic()
            self._compiled.shaping.welcome(self._find_seen())
            self._due["newcomers"] += NEWCOMER_SHARE * (time.monotonic() - began)

    def _find_seen(self) -> dict[str, list[str]]:
        sets = self._compiled.shaping.seen_sets
        found = self._kernel.readings(name for name, lane in sets.items() if not lane.incoming)
        seen = {name: list(held) for name, held in found.items()}
        incoming = [name for name, lane in sets.items() if lane.incoming]
        if incoming:
            seen |= {name: list(held) for name, held in self._kernel.ingress_seen(incoming).items()}
        return seen

    def _find_safe(self) -> set[str] | None:
        now = self._now()
        if self._outage is not None and self._clients is not None:
            told, at = self._clients
            clients = {address: age + self._premises.elapsed() - at for address, age in told.items()}
        else:
            clients = self._store.clients(self._setup.host)
        hosts = self._store.hosts() if self._store.tells_of_others else None
        reached = self._database.reached()
        return self._premises.find_safe(clients, now.timestamp(), hosts, reached)

    def _protect(self) -> None:
        """Follow the host's own addresses and who is safe; rules that name one of them change their place."""
        changed = self._find_safe() if self._compilation is not None else None
        if changed is None:
            return
        compilation = self._compiled
        compilation.protect(self._premises.facts)
        named = [i for i, fragment in compilation.fragments.items() if not changed.isdisjoint(fragment.keys)]
        with self._wholly():
            self._look_again(named)

    def _count_peers(self) -> None:
        """Look whether there is room for new peers, before there is none; the rules concerned are told."""
        if self._compilation is None or not self._in_step:
            return
        names = self._compilation.peer_sets
        try:
            counts = self._kernel.counts(names) if names else {}
            self._uncounted = ()
        except KernelError as error:
            self._uncounted = (f"How many peers are remembered is unknown: {error.reason}.",)
            return
        crowded = self._compilation.find_crowded(counts)
        if crowded.keys() != self._crowded.keys():
            self._crowded = crowded
            self._exceptional = self._mark()

    def _follow_connections(self) -> None:
        """Spare the connections that have opened since, and those that are gone no more."""
        if self._compilation is not None and self._in_step:
            with self._kernel.exclusive(self._patience):
                if not self._keeps_off():
                    self._open.follow(self._compiled.facts, self._premises.doors)
                    self._follow_led()

    def _follow_led(self) -> None:
        """Follow where programs listen at what may lead to others."""
        here = self._compiled.structure.sets
        led = {name: keys for name, keys in self._premises.led.items() if name in here}
        if led:
            write_living(self._kernel, led, self._kernel.readings(led))

    # -- pause

    def _resumes(self) -> bool:
        """Whether the pause that is in the database is one that `netlimit apply` has ended here, which came back with
        an older state of it: it is ended once more. Whoever tears down anew has another word; and where the copy knows
        of a teardown, that may be one that the database has forgotten."""
        host, replica = self._setup.host, self._replica
        if self._outage is not None or replica is None or replica.paused(host):
            return False
        word = self._store.last_pause(host)
        if word is None or not replica.has_resumed(word):
            return False
        if not self._store.end_pause(host, word, Actor(f"controller of {host}")):
            return False
        log.warning("%s", _RESUMED)
        self._resumed = (_RESUMED,)
        return True

    def _stays_paused(self) -> bool:
        """Whether the copy knows of a teardown that the database has not heard of: then that is told. Where it has, and
        nobody is paused, the teardown was ended, and the copy could not be told."""
        host, replica = self._setup.host, self._replica
        pause = replica.known_pause() if self._outage is None and replica is not None else None
        if replica is None or pause is None or pause == self._ended:
            return False
        is_unheard = replica.find_unheard(self._store) == pause
        if not is_unheard or not self._store.keep_pause(host, pause, Actor(f"controller of {host}")):
            self._ended = pause
            return False
        log.warning("%s", _KEPT)
        self._kept = (_KEPT,)
        return True

    def _is_to_keep_off(self) -> bool:
        """Asked by who holds the kernel for himself: a teardown has it either before, and was heard, or afterwards.
        Whoever puts off ends that when the database is told, which is asked last."""
        return self._kernel.is_put_off() or self._store.paused(self._setup.host)

    def _pause(self) -> None:
        """Somebody tore down: keep hands off, also what he has left there, and begin anew afterwards."""
        self._compilation, self._in_step, self._paused = None, False, True
        if not self._status.paused:  # what is lost from now on is told all the same
            self._resumed = self._losses = ()
        if not self._status.paused or not {*self._kept, *self._losses} <= {*self._status.notes}:
            if not self._kept and not self._status.paused:
                log.info("Paused by teardown, until `netlimit apply`.")
            self._report(paused=True)
            self._copying.note_change()
            self._tell_of_copy(self._copy)
        self._take_out_what_came_back()

    def _take_out_what_came_back(self) -> None:
        """Who begins paused has written nothing of what is there. A boot has brought it back from a copy that was not
        told of the pause, or a teardown has left it that ended early: it would hold for good. While the database is
        away, the copy's word may be an old one. Raises StoreError, KernelError: the next pass tries again."""
        if self._has_taken_out or self._revision >= 0 or self._outage is not None or not self._is_paused_there:
            return
        restore_nothing(self._store, self._kernel, self._setup.host, self._is_to_keep_off)
        self._has_taken_out = True

    # -- questions

    def _answer_question(self) -> None:
        """Answer one question in each pass, after what enforces had its turn; where there is much to look through, plan
        and preview are worked out beside this process. Where nothing was written and nobody waits, there is none."""
        if self._quiet and self._questions.due is None and self._errands.due is None:
            return
        waiting = self._store.questions(self._setup.host)
        aside = [each for each in waiting if each.kind in _COSTLY] if self._holds_much() else []
        self._answer_aside(aside)
        self._answer_here([each for each in waiting if each not in aside])

    def _holds_much(self) -> bool:
        """Whether a plan or a preview would keep changes and repairs waiting."""
        compiled = self._compilation
        return compiled is not None and len(compiled) + sum(map(len, compiled.entries.values())) > MUCH

    def _answer_here(self, waiting: Sequence[Request]) -> None:
        began = time.monotonic()
        chosen = self._questions.choose(waiting, began)
        if chosen:
            self._give(chosen, self._attempt(partial(self._answer, chosen[0])))
            self._questions.rest(began, time.monotonic())

    def _answer_aside(self, waiting: Sequence[Request]) -> None:
        ended = self._errands.end(waiting)
        if ended is not None:
            asked, found = ended
            if found.get("steps") and asked[0].kind == "plan" and self._applied != self._applied_before:
                found["words"] = [*found["words"], _CHANGED_MEANWHILE]
            self._give(asked, found)
            waiting = [each for each in waiting if each not in asked]
        chosen = self._errands.choose(waiting)
        if not chosen:
            return
        refusal = self._attempt(partial(self._prepare_answer, chosen[0]))
        if refusal:
            self._give(chosen, refusal)
            return
        self._applied_before = self._applied
        self._close_databases()
        try:
            self._errands.start(chosen, partial(self._work_out_apart, chosen[0]))
        except OSError as error:
            self._give(chosen, {"error": f"No process could be started that works this out: {error.strerror}."})

    def _close_databases(self) -> None:
        """A copy of this process must not have what belongs to a connection of this one, not even the library's notes
        of it. They are opened again when they are needed."""
        self._stop_watching()
        self._database.close()
        self._copying.close()

    def _attempt(self, work: Callable[[], Mapping[str, object]]) -> Mapping[str, object]:
        """What it gives, or in a sentence why there is nothing. Raises StoreError."""
        try:
            return work()
        except KernelError as error:
            return {"error": str(error)}
        except NetlimitError:
            raise
        except Exception as error:
            return {"error": self._mishaps.note(error, "A question stays without an answer.")}

    def _give(self, asked: Iterable[Request], answer: Mapping[str, object]) -> None:
        try:
            for question in asked:
                self._store.answer(question.id, answer)
        except Busy as error:  # it stays open, and is looked at again
            log.warning("%s A question waits for its answer.", error)

    def _answer(self, question: Request) -> Mapping[str, object]:
        if question.kind in _COSTLY:
            return self._prepare_answer(question) or self._work_out(question)
        if question.kind == "offenders":
            return {"items": self._offenders()}
        if question.kind == "counters" and self._compilation is not None:
            asked = question.argument.get("rules")
            self._count(map(int, asked if isinstance(asked, list) else ()))
        return {}

    def _prepare_answer(self, question: Request) -> Mapping[str, object]:
        """Take in what the next pass would; a refusal, if there is nothing to work out."""
        if question.kind == "preview" and self._store.paused(self._setup.host):
            return {"error": "A teardown has paused the controller; `netlimit apply` goes on."}
        self._load()
        if question.kind == "plan":
            self._expire()
        return {}

    def _work_out_apart(self, question: Request) -> Mapping[str, object]:
        """In a copy of this process: it shares no socket with it, and writes nothing anywhere."""
        self._kernel = self._kernel.reopened()
        try:
            return self._attempt(partial(self._work_out, question))
        except NetlimitError as error:
            return {"error": str(error)}

    def _work_out(self, question: Request) -> Mapping[str, object]:
        if question.kind == "preview":
            return self._preview(question.argument)
        plan, words = self._tell_plan()
        return {"words": words, "text": str(plan), "steps": list(plan.lines())}

    def _preview(self, argument: Mapping[str, object]) -> dict[str, object]:
        """What a rule would do."""
        compiled, (_, rules) = self._compiled, self._store.load(self._setup.host)
        numbering, lanes = dict(compiled.numbers.kept), (lane.name for lane in compiled.shaping.lanes)
        held = {name: dict(compiled.entries.get(name, {})) for name in lanes}
        host, backend, saved = self._setup.host, self._setup.backend, self._saved_roots()
        limited = self._fallback.look(self._store.limiters(host), self._now()) and self._fallback.answers
        ground = Ground(host, backend, compiled.facts, tuple(rules), numbering, held, saved, limited)
        return answer(argument, ground, self._now())

    def _offenders(self) -> list[dict[str, object]]:
        found = self._kernel.readings([f"{OFFENDER_PREFIX}{family}" for family in (4, 6)])
        readings = [(key, reading) for held in found.values() for key, reading in held.items()]
        worst = heapq.nlargest(MOST_OFFENDERS, readings, key=lambda item: item[1].packets)
        return [{"address": key, "packets": r.packets, "bytes": r.bytes} for key, r in worst]

    def _count(self, rule_ids: Iterable[int]) -> None:
        """Read the counters of some rules now."""
        compilation = self._compiled
        rule_ids = list(rule_ids)
        if any(rule_id in compilation.shaping for rule_id in rule_ids):
            self._count_shaped({rule_id for rule_id in rule_ids if rule_id in compilation.shaping})
        self._count_limited([rule_id for rule_id in rule_ids if rule_id in compilation.fragments])

    def _count_limited(self, rule_ids: list[int], fresh: bool = True) -> None:
        compilation = self._compiled
        names = {name for rule_id in rule_ids for name in compilation.sets_of(rule_id)}
        readings = self._kernel.readings(names)
        self._store_counts(self._tally.read(compilation, rule_ids, readings, self._now(), fresh=fresh))

    def _count_shaped(self, rule_ids: set[int]) -> None:
        self._count_classes({i: held for i, held in self._compiled.shaping.classes().items() if i in rule_ids})

    def _count_classes(self, counted: Mapping[int, list[tuple[str, int]]]) -> None:
        devices = {device for held in counted.values() for device, _ in held}
        usages = {device: self._kernel.usages(device) for device in devices}
        self._store_counts(self._tally.read_usages(counted, usages, self._now(), fresh=True))

    def _count_queues(self) -> None:
        """Read what the classes of all devices have counted, see who sends, and take those of hosts that are idle."""
        shaping, now, at = self._compiled.shaping, self._now(), time.monotonic()
        usages = {device: self._kernel.usages(device) for device in shaping.trees}
        self._store_counts(self._tally.read_usages(shaping.classes(), usages, now))
        for device, found in usages.items():
            shaping.look(device, found, at)
            wanted = shaping.count_waiting(device)
            idle = self._presence.find_idle(device, found, shaping.passing(device), now, wanted)
            shaping.dismiss(device, idle, self._presence.line_up(device))

    def _store_counts(self, counts: list[RuleCounters]) -> None:
        if counts:
            self._telling.count(counts)
            self._tell()

    # -- reporting

    def _say(self, rule_ids: Iterable[int] = ()) -> dict[str, object]:
        """The fields of a line in the log: the revision, and the rules that it is about."""
        rules = sorted(rule_ids)
        return {"revision": self._revision, **({"rules": rules} if rules else {})}

    def _report(self, **changes: object) -> None:
        if not self._premises.recalls:  # what is there now would be written over
            self._premises.recall(self._store.hosts())
        changes |= self._premises.describe()
        if self._compilation is not None:
            enforced, failed = self.standing()
            lifted = len(self._roster.lifted or ())
            changes |= {"desired": enforced + failed + lifted, "enforced": enforced, "lifted": lifted}
            warnings, left = (self._compilation.left_out, self._compilation.kinds.warning), self._kernel.leftovers()
            over = self._overdue.warn(self._revision) if self._outage is not None else ()
            told = filter(None, (*warnings, *over, self._find_closed(), *self._telling.warnings))
            past = (*self._renamed, *self._resumed, *self._losses)
            changes["notes"] = (*self._premises.notes, *told, *self._uncounted, *left, *past)
            changes["degraded"] = sum(each.state is State.DEGRADED for each in self._exceptional.values())
        said = tuple(note for note in self._status.notes if not note.startswith(COPY) and note != _KEPT)
        changes.setdefault("notes", said)
        changes |= {"applying": self._passes.read(), "faults": self._mishaps.count}
        changes.setdefault("paused", self._paused)
        if changes["paused"]:  # and what comes back afterwards is told when it is there
            changes |= dict.fromkeys(("applied_revision", "enforced", "degraded", "lifted"), 0)
        elif not changes.get("applied_revision", self._status.applied_revision):
            changes |= dict.fromkeys(("enforced", "degraded"), 0)
        self._status = replace(self._status, **changes)  # type: ignore[arg-type]  # names are checked by replace
        lost = (loss for loss in self._losses if loss not in self._status.notes)
        self._status = replace(self._status, notes=(*self._status.notes, *self._kept, *lost, *self._copying.warnings))
        self._telling.report(self._status)
        self._tell()

    def _tell_repair(self, repair: Repair) -> None:
        """Note a repair, which the report of it tells; without the database, who asks on this gateway hears of it."""
        self._telling.repair(repair)
        if self._outage is not None:
            self._store.repaired(self._setup.host, repair.kind, repair.found, repair.took, repair.at)

    def _tell(self) -> None:
        tell = self._telling.tell if self._outage is None else self._telling.tell_copy
        self._mishaps.survive(partial(tell, self._store), "What was to be told is lost; limits are kept in force.")

    def _try_report(self, **changes: object) -> None:
        try:
            self._report(**changes)
        except StoreError as error:
            log.error("%s", error)
        except Exception as error:
            self._mishaps.note(error, "What was to be reported is not.")

    # -- time

    def _is_due(self, what: str, every: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every
        return True

    def _rest(self) -> float:
        """Seconds until something is due."""
        due = [each for each in (self._questions.due, self._errands.due) if each is not None]
        asked = min(due) - time.monotonic() if due else STRUCTURE_SECONDS
        if self._compilation is None or self._is_forbidden():  # paused: neither drift nor ends are looked at
            return max(0.0, min(asked, STRUCTURE_SECONDS))
        idle = {"trees", "between", "probe", "marks", "window", "safe", "states", "beside"} | (
            set() if self._compilation.shaping.seen_sets else {"newcomers"}
        )
        wake = min(due for what, due in self._due.items() if what not in idle) - time.monotonic()
        if self._roster.next_look is not None:
            wake = min(wake, self._roster.next_look - self._now().timestamp())
        if self._roster.next_end is not None and self._in_step:
            ahead = self._roster.next_end - self._endings.ahead - self._now().timestamp()
            wake = min(wake, max(ahead, self._endings.rest))
        return max(0.0, min(wake, asked, STRUCTURE_SECONDS))

    def _wait(self) -> None:
        """Wait until something is due, or the database tells of a change."""
        self._quiet = False
        if self._outage is not None:
            time.sleep(min(self._rest(), self._outage.wait))
        elif self._watch is not None:
            # With each heartbeat all is asked, should a watch hear nothing any more.
            self._quiet = not self._watch.wait(self._rest()) and time.monotonic() < self._due["heartbeat"]

    def _stop_watching(self) -> None:
        self._quiet = False  # what is written until the next watch begins, nobody hears
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _back_off(self, retry: float, stopped: Callable[[], bool]) -> float:
        """Rest before another attempt; not for long where rules are others now, which must not wait for it."""
        self._quiet = False
        began = time.monotonic()
        while (rested := time.monotonic() - began) < retry and not stopped():
            time.sleep(0.05)
            if rested >= _FIRST_RETRY and self._watch is not None and self._hears_of_rules(self._watch):
                break
        return min(2 * retry, _LAST_RETRY)

    def _hears_of_rules(self, watch: Watch) -> bool:
        """Whether the database has other rules than were loaded last; once for each revision, for an attempt that fails
        may load none."""
        try:
            revision = self._database.revision() if watch.changed() else self._revision
        except Exception:
            return True  # the next pass says so
        if revision in (self._revision, self._heard):
            return False
        self._heard = revision
        return True
