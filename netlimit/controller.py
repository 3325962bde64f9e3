"""The loop: load, compile, observe, plan, apply, verify, record.

A pass costs what changed; a sweep looks at everything in time. Whatever happens to the kernel or to this process, one
more pass puts it right: nothing is remembered that the store or the kernel does not hold.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from netlimit.compile import Compilation
from netlimit.counting import Tally
from netlimit.errors import KernelError, StoreError
from netlimit.kernel.base import Addresses, HostFacts, Kernel, observe, read_entries
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.plan import Plan, WriteIngress, WriteTree, diff, drifted, same_place
from netlimit.presence import IDLE, Presence
from netlimit.records import DISPENSABLE, Changes, Exceptional, HostStatus, Request, RuleCounters, State
from netlimit.rules import Rule
from netlimit.state import LONGEST_TIMEOUT, OFFENDER_PREFIX, Structure
from netlimit.state import State as KernelState
from netlimit.tree import Queues, SavedRoot, Topology

if TYPE_CHECKING:  # for the types alone: a controller is given its store
    from netlimit.store import Kept, Store, Watch

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
STRUCTURE_SECONDS = 1.0
NEWCOMER_SECONDS = 0.2
"""How often hosts are looked for that have appeared; until they have a class they share one."""
NEWCOMER_SHARE = 10
"""Looking for them rests that many times as long as it took: there can be many that never get a class."""
QUEUE_SECONDS = 10.0
"""How often the counters of classes are read, and idle hosts are looked for."""
SWEEP_SHARE = 30
"""A sweep that took t seconds is followed by that many times t of rest."""
MOST_OFFENDERS = 100
_MOST_RETRIED = 100
_FIRST_RETRY, _LAST_RETRY = 0.5, 30.0


@dataclass(frozen=True)
class Setup:
    """What a controller is told: the name of its host and back end, the mark mask, the safe set, the size of sets, and
    how long a host that has appeared may be idle before it loses its class."""

    host: str
    backend: str = "iptables"
    mark_mask: int = 0xFF000000
    safe: tuple[str, ...] = ()
    set_size: int = 2**20
    idle: timedelta = IDLE


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
        self._numbered: dict[tuple[str, str], int] = {}
        self._host_facts: HostFacts | None = None
        self._where = Addresses((), ())
        self._topology = Topology()
        self._foreign: Mapping[str, str] = {}
        self._presence = Presence(setup.idle)
        self._sweep: Iterator[tuple[str, ...]] = iter(())
        self._due = dict.fromkeys(("heartbeat", "structure", "sweep", "trees", "newcomers", "queues"), 0.0)

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
                self._topology = Topology()  # devices and their qdiscs may be others than those that are known
                self._try_report(last_error=str(error))
                retry = self._back_off(retry, stopped)

    def tick(self) -> None:
        """Do what is due: changes, expiries, questions, drift, counters, heartbeat. Raises StoreError, KernelError."""
        self._answer_questions()
        if self._store.paused(self._setup.host):
            self._pause()
        else:
            self._follow()
            self._greet()
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
        if self._in_step and not compilation.changed:
            if revision != self._status.applied_revision or self._find_exceptional() != self._exceptional:
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
        return len(self._compiled) - failed, failed

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
        self._adopt()

    def _adopt(self) -> None:
        """Who has a class in the kernel keeps it."""
        lanes = self._compiled.shaping.lanes
        found = self._kernel.readings(lane.name for lane in lanes if not lane.incoming)
        found |= self._kernel.ingress_readings(lane.name for lane in lanes if lane.incoming)
        self._compiled.shaping.adopt({name: read_entries(held) for name, held in found.items()})

    def _take(self, changes: Changes) -> None:
        if changes.revision == self._revision:
            return
        known = [rule.id for rule in changes.rules if rule.id in self._compiled]
        if known and self._in_step:
            self._count(known)
        for rule_id in changes.removed:
            self._compiled.drop(rule_id)
            self._tally.forget(rule_id)
        for rule in changes.rules:
            before = self._compiled.fragments.get(rule.id)
            self._put(rule)
            if before != self._compiled.fragments.get(rule.id):
                self._rewritten.add(rule.id)
        # There may be room for it now. Of those that are in each other's way, the oldest comes first.
        for rule_id in sorted(list(self._compiled.problems)[:_MOST_RETRIED]):
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
            desired, known = compilation.state, compilation.settled
            transition, touched = compilation.transition(known.structure), compilation.touched_classes
            plan = diff(desired, known, transition, compilation.touched, touched, self._saved_roots())
        else:
            self._adopt()  # another process may have given out classes since this one looked
            plan = self._diff_all()
        self._in_step = False
        self._apply(plan)
        while self._rewritten:
            self._tally.restart(self._rewritten.pop())
        compilation.settle()
        self._keep_numbers()
        self._in_step = True

    def _keep_numbers(self) -> None:
        numbering = self._compiled.numbers.kept
        added = {key: number for key, number in numbering.items() if self._numbered.get(key) != number}
        retired = self._numbered.keys() - numbering.keys()
        if added or retired:
            self._store.number(self._setup.host, added, retired)
            self._numbered = dict(numbering)

    def _diff_all(self) -> Plan:
        desired = self._compiled.state
        found = observe(self._kernel, (lane.name for lane in (desired.ingress.lanes if desired.ingress else ())))
        transition = self._compiled.transition(found.structure)
        return diff(desired, found, transition, put_back=self._saved_roots())

    def _apply(self, plan: Plan) -> None:
        """Take the steps. A device that refuses its queues must not keep what others have, and what polices, from what
        they shall be: that error is raised at the end."""
        refusal: KernelError | None = None
        for step in plan.steps:
            try:
                self._kernel.apply(step)
            except KernelError as error:
                if not isinstance(step, WriteTree | WriteIngress):
                    raise
                refusal = refusal or error
                continue
            if isinstance(step, WriteTree) and step.drop and step.put_back is not None:
                self._store.forget_root(self._setup.host, step.device)
        if refusal is not None:
            raise refusal
        if plan:
            log.info("Revision %d is applied: %d changes of the kernel.", self._revision, len(plan.steps))

    def _settle(self) -> None:
        """Record what stands now: problems rule by rule, then the revision."""
        exceptional = self._find_exceptional()
        changed = [each for rule_id, each in exceptional.items() if self._exceptional.get(rule_id) != each]
        cleared = [rule_id for rule_id in self._exceptional if rule_id not in exceptional]
        if changed or cleared:
            self._store.mark(self._setup.host, changed, cleared)
            self._exceptional = exceptional
        self._report(applied_revision=self._revision, last_error=None)

    def _find_exceptional(self) -> dict[int, Exceptional]:
        """What must be said of rules: why they cannot be enforced, or not for all; or what an operator should know."""
        notes = self._compiled.shaping.notes.items()
        said = {i: Exceptional(i, State.DEGRADED if n.degraded else State.APPLIED, n.text) for i, n in notes}
        return said | {i: Exceptional(i, State.ERROR, problem) for i, problem in self._compiled.problems.items()}

    def _saved_roots(self) -> Mapping[str, SavedRoot]:
        """The root qdiscs of others that ours took the place of."""
        return self._store.saved_roots(self._setup.host)

    # -- drift

    def _check_drift(self) -> None:
        if self._is_due("structure", STRUCTURE_SECONDS):
            began = time.monotonic()
            what = self._find_drift()
            if what:
                self._repair(what)
            self._due["structure"] += SWEEP_SHARE * (time.monotonic() - began)
        if self._is_due("sweep", 0.0):
            began = time.monotonic()
            self._sweep_one()
            self._due["sweep"] = time.monotonic() + max(STRUCTURE_SECONDS, SWEEP_SHARE * (time.monotonic() - began))

    def _find_drift(self) -> str | None:
        """What of structure and trees is not as it was applied."""
        desired = self._compiled.state
        if self._kernel.structure() != desired.structure:
            return "the structure of chains and sets"
        if not len(self._compiled.shaping) or not self._is_due("trees", STRUCTURE_SECONDS):
            return None
        began = time.monotonic()
        queues = self._kernel.queues()
        foreign = self._find_foreign(queues)
        if foreign != self._foreign:
            self._foreign = foreign
            self._compiled.protect(self._facts())
        device = drifted(desired.trees, queues.trees)
        self._due["trees"] += SWEEP_SHARE * (time.monotonic() - began)
        if device is not None:
            return f"the queues of {device}"
        return None if self._kernel.ingress() == desired.programs else "the programs on the ingress"

    def _sweep_one(self) -> None:
        """Read the sets of one kind of limit: are their entries as they should be, and what have they counted?"""
        compilation = self._compiled
        names = next(self._sweep, None)
        if names is None:
            others = set(compilation.state.entries) - {name for owned in compilation.owners for name in owned}
            self._sweep = iter([*compilation.owners, *((name,) for name in sorted(others))])
            return
        if not compilation.structure.sets.keys() & set(names):
            self._sweep_ingress(names[0])
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

    def _sweep_ingress(self, name: str) -> None:
        wanted = self._compiled.state.entries.get(name)
        if wanted is None:  # it has gone since the sweep began
            return
        found = read_entries(self._kernel.ingress_readings([name]).get(name, {}))
        if found.keys() != wanted.keys() or not all(same_place(wanted[key], found[key]) for key in found):
            self._repair(f"entries of the lane {name}")

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
        self._topology, self._foreign = self._kernel.topology(), self._find_foreign(self._kernel.queues())
        missing = {name: reason for name, reason in self._host_facts.capabilities.items() if reason}
        for name, reason in missing.items():
            if name in DISPENSABLE:
                log.info("Not there, and not needed: %s. %s", name, reason)
            else:
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
            topology=self._topology,
            foreign=self._foreign,
            hz=self._host_facts.hz,
        )

    def _follow(self) -> None:
        """Follow devices and routes: what is shaped moves to where it leaves now."""
        topology = self._kernel.topology()
        if topology is self._topology or self._compilation is None:
            return
        self._topology, self._foreign = topology, self._find_foreign(self._kernel.queues())
        with self._wholly():
            self._compiled.protect(self._facts())
        self._due["structure"] = self._due["trees"] = 0.0  # a device that was away has lost its tree

    def _find_foreign(self, queues: Queues) -> Mapping[str, str]:
        """The devices with a root qdisc of somebody else, but for those that may be taken over as they are now."""
        saved = self._saved_roots() if queues.foreign else {}
        return {
            device: text
            for device, text in queues.foreign.items()
            if device not in saved or self._kernel.save_root(device) != saved[device]
        }

    def _greet(self) -> None:
        """Give classes to hosts that have appeared, and take them from those that are gone."""
        if self._compilation is None:
            return
        if self._in_step and self._is_due("queues", min(QUEUE_SECONDS, self._setup.idle.total_seconds())):
            began = time.monotonic()
            self._count_queues()
            self._due["queues"] += SWEEP_SHARE * (time.monotonic() - began)
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
            asked = question.argument["rules"]
            self._count(map(int, asked if isinstance(asked, list) else ()))
        return {}

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
        here = [rule_id for rule_id in rule_ids if rule_id in compilation.fragments]
        names = {name for rule_id in here for name in compilation.sets_of(rule_id)}
        readings = self._kernel.readings(names)
        self._store_counts(self._tally.read(compilation, here, readings, self._now(), fresh=True))

    def _count_shaped(self, rule_ids: set[int]) -> None:
        counted = {i: held for i, held in self._compiled.shaping.classes().items() if i in rule_ids}
        devices = {device for held in counted.values() for device, _ in held}
        usages = {device: self._kernel.usages(device) for device in devices}
        self._store_counts(self._tally.read_usages(counted, usages, self._now(), fresh=True))

    def _count_queues(self) -> None:
        """Read what the classes of all devices have counted, and take those of hosts that are idle."""
        shaping, now = self._compiled.shaping, self._now()
        usages = {device: self._kernel.usages(device) for device in shaping.trees}
        self._store_counts(self._tally.read_usages(shaping.classes(), usages, now))
        for device, found in usages.items():
            shaping.dismiss(device, self._presence.find_idle(device, found, shaping.passing(device), now))

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
        # Trees are looked at together with the structure: waiting for them alone would be no rest at all.
        idle = {"trees"} if self._compilation.shaping.seen_sets else {"trees", "newcomers"}
        wake = min(due for what, due in self._due.items() if what not in idle) - time.monotonic()
        if self._expiries:
            wake = min(wake, self._expiries[0][0] - self._now().timestamp())
        return max(0.0, min(wake, STRUCTURE_SECONDS))

    def _back_off(self, retry: float, stopped: Callable[[], bool]) -> float:
        end = time.monotonic() + retry
        while time.monotonic() < end and not stopped():
            time.sleep(0.05)
        return min(2 * retry, _LAST_RETRY)
