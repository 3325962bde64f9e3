"""The loop: load, compile, observe, plan, apply, verify, record.

A pass costs what changed; a sweep looks at everything in time. Whatever happens to the kernel or to this process, one
more pass puts it right: nothing is remembered that the store or the kernel does not hold.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from netlimit.compile import Compilation
from netlimit.counting import Tally
from netlimit.errors import KernelError, StoreError
from netlimit.kernel.base import Addresses, HostFacts, Kernel, observe
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.plan import Plan, diff
from netlimit.records import Changes, Exceptional, HostStatus, Request, RuleCounters, State
from netlimit.rules import Rule
from netlimit.state import LONGEST_TIMEOUT, OFFENDER_PREFIX, Structure
from netlimit.state import State as KernelState

if TYPE_CHECKING:  # for the types alone: a controller is given its store
    from netlimit.store import Kept, Store, Watch

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
STRUCTURE_SECONDS = 1.0
SWEEP_SHARE = 30
"""A sweep that took t seconds is followed by that many times t of rest."""
MOST_OFFENDERS = 100
_MOST_RETRIED = 100
_FIRST_RETRY, _LAST_RETRY = 0.5, 30.0


@dataclass(frozen=True)
class Setup:
    """What a controller is told: the name of its host and back end, the mark mask, the safe set, the size of sets."""

    host: str
    backend: str = "iptables"
    mark_mask: int = 0xFF000000
    safe: tuple[str, ...] = ()
    set_size: int = 2**20


class Controller:
    """Keeps one host's kernel as the rules say. One thread."""

    def __init__(
        self,
        store: Store,
        kernel: Kernel,
        setup: Setup,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._kernel = kernel
        self._setup = setup
        self._now = now
        self._compilation: Compilation | None = None
        self._status = HostStatus(host=setup.host, backend=setup.backend)
        self._revision = -1
        self._expiries: list[tuple[float, int]] = []
        self._tally = Tally()
        self._rewritten: set[int] = set()
        self._exceptional: dict[int, Exceptional] = {}
        self._in_step = False
        self._structure = Structure()
        self._numbered: dict[tuple[str, str], int] = {}
        self._host_facts: HostFacts | None = None
        self._where = Addresses((), ())
        self._sweep: Iterator[tuple[str, ...]] = iter(())
        self._due = dict.fromkeys(("heartbeat", "structure", "sweep"), 0.0)

    # -- running

    def run(self, watch: Watch, stopped: Callable[[], bool]) -> None:
        """Serve until `stopped`. Errors of store and kernel are logged, reported and tried again, ever more slowly."""
        retry = _FIRST_RETRY
        while not stopped():
            try:
                self.tick()
                retry = _FIRST_RETRY
                watch.wait(self._rest())
            except StoreError as error:
                log.error("%s What is in the kernel stays; trying again in %.1f s.", error, retry)
                retry = self._back_off(retry, stopped)
            except KernelError as error:
                log.error("%s Trying again in %.1f s.", error, retry)
                self._in_step = False
                self._try_report(last_error=str(error))
                retry = self._back_off(retry, stopped)

    def tick(self) -> None:
        """Do what is due: changes, expiries, questions, drift, counters, heartbeat. Raises StoreError, KernelError."""
        self._answer_questions()
        if self._store.paused(self._setup.host):
            self._pause()
        else:
            self.sync()
            self._check_drift()
        if self._is_due("heartbeat", HEARTBEAT_SECONDS):
            self._protect()
            self._report()

    def sync(self) -> None:
        """One pass: bring the kernel to the newest revision. Raises StoreError, KernelError."""
        revision = self._load()
        self._expire()
        compilation = self._compiled
        if self._in_step and not compilation.touched and not compilation.dirty:
            if revision != self._status.applied_revision or compilation.problems.keys() != self._exceptional.keys():
                self._settle()
            return
        with self._kernel.exclusive():
            if self._store.paused(self._setup.host):
                return
            self._enforce()
        self._settle()

    def plan(self) -> Plan:
        """The steps from what the kernel holds to what it shall hold; nothing is done. Raises as `sync`."""
        self._load()
        self._expire()
        return self._diff_all()

    def standing(self) -> tuple[int, int]:
        """How many rules are in force on this host, and how many it should enforce but cannot. After a pass."""
        failed = len(self._compiled.problems)
        return len(self._compiled.fragments) - failed, failed

    # -- loading and compiling

    @property
    def _compiled(self) -> Compilation:
        assert self._compilation is not None, "_load comes first"
        return self._compilation

    def _load(self) -> int:
        """Take in what changed since the last pass; everything, the first time."""
        if self._compilation is not None:
            changes = self._store.changes(self._revision, self._setup.host)
            if changes is not None:
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
        with self._wholly():
            self._load_anew()

    def _load_anew(self) -> None:
        self._probe()
        self._numbered = self._store.numbering(self._setup.host)
        self._compilation = Compilation(self._facts(), self._numbered)
        self._expiries = []
        self._exceptional = self._store.marked(self._setup.host)
        self._tally = Tally(self._store.raw_counters(self._setup.host))
        self._in_step = False
        self._rewritten.clear()
        self._revision, rules = self._store.load(self._setup.host)
        for rule in rules:
            self._put(rule)

    def _take(self, changes: Changes) -> None:
        if changes.revision == self._revision:
            return
        known = [rule.id for rule in changes.rules if rule.id in self._compiled.fragments]
        if known and self._in_step:
            self._count(known)
        for rule_id in changes.removed:
            self._compiled.drop(rule_id)
            self._tally.forget(rule_id)
        for rule in changes.rules:
            before = self._compiled.fragments.get(rule.id)
            self._put(rule)
            if before is not None and before != self._compiled.fragments.get(rule.id):
                self._rewritten.add(rule.id)
        for rule_id in list(self._compiled.problems)[:_MOST_RETRIED]:
            # There may be room for it now.
            self._look_again(rule_id)
        self._revision = changes.revision

    def _put(self, rule: Rule) -> None:
        now = self._now()
        if not rule.in_force(now, self._setup.host):
            self._compiled.drop(rule.id)
            return
        if rule.expires_at is not None:
            rule = self._schedule(rule, rule.expires_at, now)
        self._compiled.put(rule)

    def _schedule(self, rule: Rule, end: datetime, now: datetime) -> Rule:
        """Note when the rule must be looked at again. The kernel cannot hold an end that is too far away: until it
        is near, the entry has none."""
        far = (end - now).total_seconds() > LONGEST_TIMEOUT
        look = end - timedelta(seconds=LONGEST_TIMEOUT) if far else end
        heapq.heappush(self._expiries, (look.timestamp(), rule.id))
        return replace(rule, expires_at=None) if far else rule

    def _expire(self) -> None:
        now = self._now().timestamp()
        while self._expiries and self._expiries[0][0] <= now:
            rule_id = self._expiries[0][1]
            kept = self._store.find(rule_id)
            heapq.heappop(self._expiries)  # not before: a store that does not answer must be asked again
            self._take_in(rule_id, kept)

    def _look_again(self, rule_id: int) -> None:
        self._take_in(rule_id, self._store.find(rule_id))

    def _take_in(self, rule_id: int, kept: Kept | None) -> None:
        if kept is None:
            self._compiled.drop(rule_id)
        else:
            self._put(kept.rule)

    # -- enforcing

    def _enforce(self) -> None:
        """Plan and apply. Numbers are kept before any entry carries them, and forgotten when none does any more."""
        if self._store.numbering(self._setup.host) != self._numbered:
            # `netlimit apply` gave out numbers beside this process: an entry must not be misread.
            self._load_all()
        else:
            # What it has applied since this process looked must not be undone.
            self._load()
        self._keep_numbers()
        compilation = self._compiled
        if self._in_step:
            known, transition = KernelState(self._structure), compilation.transition(self._structure)
            plan = diff(compilation.state, known, transition, compilation.touched)
        else:
            plan = self._diff_all()
        self._in_step = False
        self._apply(plan)
        while self._rewritten:
            self._tally.restart(self._rewritten.pop())
        self._structure = compilation.structure
        compilation.settle()
        self._keep_numbers()
        self._in_step = True

    def _keep_numbers(self) -> None:
        numbering = self._compiled.numbering
        added = {key: number for key, number in numbering.items() if self._numbered.get(key) != number}
        retired = self._numbered.keys() - numbering.keys()
        if added or retired:
            self._store.number(self._setup.host, added, retired)
            self._numbered = dict(numbering)

    def _diff_all(self) -> Plan:
        found = observe(self._kernel)
        return diff(self._compiled.state, found, self._compiled.transition(found.structure))

    def _apply(self, plan: Plan) -> None:
        for step in plan.steps:
            self._kernel.apply(step)
        if plan:
            log.info("Revision %d is applied: %d changes of the kernel.", self._revision, len(plan.steps))

    def _settle(self) -> None:
        """Record what stands now: problems rule by rule, then the revision."""
        problems = {
            rule_id: Exceptional(rule_id, State.ERROR, problem) for rule_id, problem in self._compiled.problems.items()
        }
        changed = [problem for rule_id, problem in problems.items() if self._exceptional.get(rule_id) != problem]
        cleared = [rule_id for rule_id in self._exceptional if rule_id not in problems]
        if changed or cleared:
            self._store.mark(self._setup.host, changed, cleared)
            self._exceptional = problems
        self._report(applied_revision=self._revision, last_error=None)

    # -- drift

    def _check_drift(self) -> None:
        if self._is_due("structure", STRUCTURE_SECONDS):
            began = time.monotonic()
            found = self._kernel.structure()
            if found != self._compiled.structure:
                self._repair("the structure of chains and sets")
            self._due["structure"] += SWEEP_SHARE * (time.monotonic() - began)
        if self._is_due("sweep", 0.0):
            began = time.monotonic()
            self._sweep_one()
            self._due["sweep"] = time.monotonic() + max(STRUCTURE_SECONDS, SWEEP_SHARE * (time.monotonic() - began))

    def _sweep_one(self) -> None:
        """Read the sets of one kind of limit: are their entries as they should be, and what have they counted?"""
        compilation = self._compiled
        names = next(self._sweep, None)
        if names is None:
            others = set(compilation.structure.sets) - {name for owned in compilation.owners for name in owned}
            self._sweep = iter([*compilation.owners, *((name,) for name in sorted(others))])
            return
        sets = {name: ipset for name, ipset in compilation.structure.sets.items() if name in names}
        readings = self._kernel.readings(sets)
        part = Structure(sets)
        wanted = KernelState(part, {name: compilation.entries[name] for name in sets})
        found = {name: {key: reading.entry for key, reading in held.items()} for name, held in readings.items()}
        if diff(wanted, KernelState(part, found)):
            self._repair(f"entries of the set {names[0]}")
        owners = compilation.owners.get(names, {})
        self._store_counts(self._tally.read(compilation, set(owners.values()), readings, self._now()))

    def _repair(self, what: str) -> None:
        """Somebody else has changed our objects: look at everything and put it right."""
        log.warning("Drift: %s differ from what was applied; repairing.", what)
        self._in_step = False
        with self._kernel.exclusive():
            if self._store.paused(self._setup.host):
                return
            self._enforce()
        self._report(drift=self._status.drift + 1)

    # -- the host

    def _probe(self) -> None:
        if self._host_facts is None:
            self._host_facts = self._kernel.probe(self._setup.mark_mask)
            self._where = self._kernel.addresses()
        missing = {name: reason for name, reason in self._host_facts.capabilities.items() if reason}
        for name, reason in missing.items():
            log.warning("Missing: %s. %s", name, reason)

    def _facts(self) -> Facts:
        assert self._host_facts is not None
        return Facts(
            host=self._setup.host,
            mark_mask=self._setup.mark_mask,
            set_size=self._setup.set_size,
            own=own_addresses(self._where.own),
            safe=parse_safe((*self._setup.safe, *self._where.peers)),
            capabilities=self._host_facts.capabilities,
        )

    def _protect(self) -> None:
        """Follow the host's own addresses and who manages it; rules that name one of them change their place."""
        where = self._kernel.addresses()
        if where == self._where or self._compilation is None:
            return
        changed = {*where.own, *where.peers} ^ {*self._where.own, *self._where.peers}
        self._where = where
        compilation = self._compiled
        compilation.protect(self._facts())
        named = [i for i, fragment in compilation.fragments.items() if not changed.isdisjoint(fragment.keys)]
        with self._wholly():
            for rule_id in named:
                self._look_again(rule_id)

    # -- pause

    def _pause(self) -> None:
        """Somebody tore down: keep hands off, and begin anew afterwards."""
        self._compilation = None
        if not self._status.paused:
            log.info("Paused by teardown, until `netlimit apply`.")
            self._report(paused=True)

    # -- questions

    def _answer_questions(self) -> None:
        for question in self._store.questions(self._setup.host):
            try:
                answer = self._answer(question)
            except KernelError as error:
                answer = {"error": str(error)}
            self._store.answer(question.id, answer)

    def _answer(self, question: Request) -> dict[str, object]:
        if question.kind == "plan":
            plan = self.plan()
            return {"text": str(plan), "steps": list(plan.lines())}
        if question.kind == "offenders":
            return {"items": self._offenders()}
        if question.kind == "counters" and self._compilation is not None:
            self._count([int(str(question.argument["rule"]))])
        return {}

    def _offenders(self) -> list[dict[str, object]]:
        found = self._kernel.readings([f"{OFFENDER_PREFIX}{family}" for family in (4, 6)])
        readings = [(key, reading) for held in found.values() for key, reading in held.items()]
        worst = heapq.nlargest(MOST_OFFENDERS, readings, key=lambda item: item[1].packets)
        return [{"address": key, "packets": r.packets, "bytes": r.bytes} for key, r in worst]

    def _count(self, rule_ids: Iterable[int]) -> None:
        """Read the counters of some rules now."""
        compilation = self._compiled
        here = [rule_id for rule_id in rule_ids if rule_id in compilation.fragments]
        names = {name for rule_id in here for name in compilation.sets_of(rule_id)}
        readings = self._kernel.readings(names)
        self._store_counts(self._tally.read(compilation, here, readings, self._now(), fresh=True))

    def _store_counts(self, counts: list[RuleCounters]) -> None:
        if counts:
            self._store.count(self._setup.host, counts)

    # -- reporting

    def _report(self, **changes: object) -> None:
        facts = self._host_facts
        if facts is not None:
            changes |= {"capabilities": facts.capabilities, "hz": facts.hz, "notes": facts.notes}
            changes |= {"own": self._where.own, "safe": (*self._setup.safe, *self._where.peers)}
        changes.setdefault("paused", self._compilation is None)
        self._status = replace(self._status, **changes)  # type: ignore[arg-type]  # names are checked by replace
        self._store.report(self._status)

    def _try_report(self, **changes: object) -> None:
        try:
            self._report(**changes)
        except StoreError as error:
            log.error("%s", error)

    # -- time

    def _is_due(self, what: str, every: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every
        return True

    def _rest(self) -> float:
        """Seconds until something is due."""
        if self._compilation is None:  # paused: neither drift nor ends are looked at
            return STRUCTURE_SECONDS
        wake = min(self._due.values()) - time.monotonic()
        if self._expiries:
            wake = min(wake, self._expiries[0][0] - self._now().timestamp())
        return max(0.0, min(wake, STRUCTURE_SECONDS))

    def _back_off(self, retry: float, stopped: Callable[[], bool]) -> float:
        end = time.monotonic() + retry
        while time.monotonic() < end and not stopped():
            time.sleep(0.05)
        return min(2 * retry, _LAST_RETRY)
