"""The store: every transaction on the database that netlimit makes, by name."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import URL

from netlimit.clientele import Client
from netlimit.judgement import Change, Judge
from netlimit.origins import Origin, Trace
from netlimit.records import (
    LIMITER,
    Actor,
    Assigned,
    Changes,
    Comparison,
    Counts,
    Difference,
    Duties,
    Exceptional,
    HostStatus,
    LimiterReport,
    Pause,
    Reception,
    Repair,
    Request,
    Revision,
    RuleCounters,
    State,
    Window,
)
from netlimit.roles import Role
from netlimit.rules import Rule
from netlimit.store import (
    audit,
    changes,
    clients,
    clock,
    conflicts,
    counters,
    gateways,
    guards,
    history,
    homes,
    hosts,
    limiters,
    limits,
    migrate,
    moments,
    numbers,
    repairs,
    requests,
    rollback,
    roots,
    rules,
    standing,
    states,
    tokens,
    weight,
    windows,
)
from netlimit.store.audit import AuditEntry, AuditFilter, as_actor
from netlimit.store.backup import Label, open_backup, write_backup
from netlimit.store.census import Alike, sample_meters, sample_selectors, sort_out, take_census
from netlimit.store.engine import Database, again
from netlimit.store.faults import Damaged
from netlimit.store.limits import LimitDocument, LimitHead
from netlimit.store.restore import Restored, restore
from netlimit.store.room import Leave, check_room, find_share
from netlimit.store.rows import Kept
from netlimit.store.tokens import Token
from netlimit.store.watch import Watch, watch
from netlimit.tokens import hash_token, make_token
from netlimit.tree import SavedRoot

if TYPE_CHECKING:
    from sqlalchemy import Connection

AUDIT_LENGTH = 100_000
"""So many lines of the audit are kept, or a few more."""
_OF_CONTROLLERS = (
    "clock", "rules", "rule_hosts", "tombstones", "revisions", "undo", "hosts", "pauses", "rule_states", "counters",
    "request_counters", "assignments", "limiters", "numbers", "saved_roots", "requests", "windows", "repairs",
    "clients",
)  # fmt: skip
NETLIMIT = Actor("netlimit")
"""Who does what nobody has asked for."""


class Store:
    """The database behind a URL (`sqlite:////var/lib/…`, `postgresql+psycopg://…`). Opens nothing until it is used.

    Each method is one transaction. All of them raise StoreError when the database cannot do its part, and those that an
    actor changes something by TokenEnded when it is a token that is good no more. Threads may share a store; processes
    must each make their own.
    """

    tells_of_others = True
    """Whether it knows more gateways than one, and who has spoken to the API."""

    def __init__(
        self,
        url: str | URL,
        audit_length: int = AUDIT_LENGTH,
        revisions: int = history.KEPT_REVISIONS,
        wal: bool = True,
        patience: float | None = None,
        silence: float | None = None,
        crowded: bool = False,
    ) -> None:
        """With `patience`, in seconds, nothing that somebody else has locked is waited for longer; with `silence` no
        server that says nothing. `crowded`: many threads read, for whoever asks."""
        self._database = Database(url, wal, patience, silence, crowded)
        self._audit_length = audit_length
        self._revisions = revisions

    @property
    def path(self) -> Path | None:
        """Where the file is; None for a server, and in memory."""
        return self._database.path

    def __repr__(self) -> str:
        return f"Store({str(self._database)!r})"

    def close(self) -> None:
        """Close every connection."""
        self._database.close()

    def allow(self, seconds: float | None) -> None:
        """Let the calling thread wait for a server for so long in all, from now on, or have SQLite work for so long;
        then it hears Slow. None: for as long as it takes."""
        self._database.allow(seconds)

    @property
    def name(self) -> str:
        """What errors call it; without a password."""
        return str(self._database)

    def break_off(self) -> None:
        """Have end what SQLite works at now, in whatever thread: who asked hears Slow."""
        self._database.break_off()

    def reached(self) -> dict[str, str]:
        """The addresses of the hosts where it was found, whatever the URL calls them ("" without a network), each with
        the one that the server there says it has ("": none). Nothing before the first connection to a server."""
        return self._database.reached.servers()

    @property
    def divided(self) -> str | None:
        """A sentence, which names hosts, while several servers that the URL names take changes, as far as is known."""
        primaries = self._database.primaries
        return None if primaries is None else primaries.warning

    def exposure(self) -> homes.Exposure | None:
        """What keeps `upgrade` from changing tables on PostgreSQL: others could have something run there."""
        with self._database.reading() as connection:
            home = homes.find_home(connection)
            return None if home is None else homes.find_exposure(connection, home)

    def upgrade(self) -> None:
        """Make the database if it is not there, and bring it to the schema of this code. A SQLite file is looked
        through for damage first."""
        self._database.check_pages()
        with self._database.migrating() as connection:
            migrate.upgrade(connection)

    def back_up(self, path: Path, now: datetime) -> Label:
        """Write all that is kept at one moment to a new file. Raises OSError where that cannot be made."""
        return write_backup(self._database, path, now)

    def restore(self, path: Path, actor: Actor | str, now: datetime, force: bool = False) -> Restored:
        """Bring back what a backup holds: everything, if nothing is kept here yet, else its rules, as one change.

        With `force`, where there are rules, and a damaged SQLite file is put aside first. The limiter's documents that
        others take the place of are written to a folder beside the file. Raises NoBackup, InUse, Damaged, StoreError
        where that cannot be done, and OSError where a file cannot be read.
        """
        aside = None
        with open_backup(path) as (label, backup):
            try:
                restored = self._restore(backup, path, label, as_actor(actor), now, force)
            except Damaged:
                if not force:
                    raise
                aside = self._database.put_aside(now)
                restored = self._restore(backup, path, label, as_actor(actor), now, force)
        return replace(restored, aside=aside)

    def _restore(
        self, backup: Connection, path: Path, label: Label, actor: Actor, now: datetime, force: bool
    ) -> Restored:
        """Tables come with what is in them: a controller takes an empty database for what is wanted."""
        self._database.check_pages()
        with self._database.migrating() as connection:
            migrate.upgrade(connection)
            restored = restore(connection, backup, path, label, actor, now, force)
            self._prune(connection)
        return restored

    def watch(self) -> Watch:
        """Begin to hear of changes."""
        return watch(self._database)

    # Rules

    def revision(self) -> int:
        """The revision of the last change of rules; 0 before the first."""
        with self._database.reading() as connection:
            return clock.revision(connection)

    def origin(self, since: int | None = None) -> Origin:
        """Which database this is, what is in it, and which revision it has of the number `since`, or which is its
        newest."""
        with self._database.reading() as connection:
            return changes.origin(connection, since)

    def look_back(self, known: Trace | None) -> tuple[Trace, bool]:
        """The newest line of the audit; and whether the database has lost the one that is known, with whatever was
        changed then: it is in an older state, or has gone on from one, and nobody has restored that."""
        with self._database.reading() as connection:
            return audit.trace(connection), known is not None and audit.has_lost(connection, known)

    def identify(self, identity: str) -> str:
        """Name the database, unless it is named; how it is named then."""
        with self._database.writing(wake=False) as connection:
            return clock.identify(connection, identity)

    @again
    def add(self, batch: Sequence[Rule], actor: Actor | str, now: datetime, judge: Judge | None = None) -> list[Rule]:
        """Keep all rules of the batch as one change, or none; they come back with id and revision.

        Raises Conflict or NameTaken for a batch of one, ManyErrors with every wrong rule for a larger one, and what
        `judge` raises, who is asked before it.
        """
        with self._changing(actor) as connection:
            return rules.add(connection, batch, as_actor(actor), now, judge)

    def replace(
        self, rule_id: int, rule: Rule, actor: Actor | str, now: datetime, expected_revision: int | None = None
    ) -> Kept:
        """Put `rule` in the place of a kept one. The same rule again changes nothing, not even the revision.

        Raises NotKept, Conflict, NameTaken, and Stale if the kept one is not at `expected_revision`.
        """
        return self.change(rule_id, lambda before: rule, actor, now, expected_revision)

    @again
    def change(
        self,
        rule_id: int,
        alter: Callable[[Rule], Rule],
        actor: Actor | str,
        now: datetime,
        expected_revision: int | None = None,
        judge: Judge | None = None,
    ) -> Kept:
        """Put what `alter` makes of a kept rule in its place; nobody else can change it in between.

        Raises as `replace` does, and what `alter` and `judge` raise.
        """
        with self._changing(actor) as connection:
            return rules.change(connection, rule_id, alter, as_actor(actor), now, expected_revision, judge)

    @again
    def remove(
        self,
        rule_id: int,
        actor: Actor | str,
        now: datetime,
        expected_revision: int | None = None,
        judge: Judge | None = None,
    ) -> None:
        """Forget a rule with its states and counters. Raises NotKept, Stale as `replace` does, and what `judge`
        raises."""
        with self._changing(actor, Leave.HALF) as connection:
            rules.remove(connection, rule_id, as_actor(actor), now, expected_revision, judge)

    def check(self, rule: Rule, now: datetime) -> None:
        """Raise what `add` would, or, for a rule with an id, `replace` (Conflict, NameTaken). Nothing is written."""
        with self._database.reading() as connection:
            conflicts.check(connection, rule, now)

    def judge(self, changes: Sequence[Change], judge: Judge) -> list[Rule | None]:
        """What would be kept after each change. Raises what `judge` raises. Nothing is written."""
        with self._database.reading() as connection:
            return standing.judged(connection, judge, changes)

    def find(self, key: int | str) -> Kept | None:
        """The rule of this id, or of this name."""
        with self._database.reading() as connection:
            return rules.find(connection, key)

    def find_some(self, keys: Sequence[str]) -> dict[str, Kept]:
        """The rules of these ids or names, by that, in their order; those that are not there are left out."""
        with self._database.reading() as connection:
            return rules.find_some(connection, keys)

    def select(
        self,
        *,
        contains: str | None = None,
        target: str | None = None,
        labels: Mapping[str, str] | None = None,
        action: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> tuple[list[Kept], int]:
        """A page of the rules that match everything given, by id, and how many match in all.

        `contains` is an address (or network) that lies in the rule's target, `target` the very target; `after` the
        last id of the page before. Raises RuleError for what is no address.
        """
        wanted = rules.conditions(contains, target, labels or {}, action)
        with self._database.reading() as connection:
            return rules.search(connection, wanted, after, limit)

    def audit(self, limit: int = 100, after: int | None = None, which: AuditFilter | None = None) -> list[AuditEntry]:
        """Who changed what, the newest first; `after` is the id of the last entry already seen."""
        with self._database.reading() as connection:
            return audit.entries(connection, limit, after, which or AuditFilter())

    def note(
        self,
        action: str,
        actor: Actor | str,
        now: datetime,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        """Write something into the audit that changes nothing in the database."""
        with self._changing(actor) as connection:
            audit.note_other(connection, action, as_actor(actor), now, before, after)

    # The limiter's documents

    def limits_revision(self) -> int:
        """The revision of the last change of the limiter's documents; 0 before the first. The rules' is another."""
        with self._database.reading() as connection:
            return limits.revision(connection)

    def limits_identity(self) -> tuple[str | None, int, int]:
        """What no other state of the limiter's documents has, whatever server it comes from."""
        with self._database.reading() as connection:
            return limits.identity(connection)

    @again
    def put_limits(
        self,
        domain: str,
        text: str,
        content_type: str,
        actor: Actor | str,
        now: datetime,
        expected_revision: int | None = None,
    ) -> tuple[LimitDocument, bool]:
        """Keep the document of a domain, in the place of a former one; whether there was none. The same again changes
        nothing. Whether the text is a document is the caller's business.

        Raises DocumentChanged if `expected_revision` is given, and the former one is not at it.
        """
        with self._changing(actor) as connection:
            return limits.put(connection, domain, text, content_type, as_actor(actor), now, expected_revision)

    @again
    def remove_limits(
        self, domain: str, actor: Actor | str, now: datetime, expected_revision: int | None = None
    ) -> None:
        """Forget the document of a domain. Raises NoDocument, and DocumentChanged as `put_limits` does."""
        with self._changing(actor) as connection:
            limits.remove(connection, domain, as_actor(actor), now, expected_revision)

    def find_limits(self, domain: str) -> LimitDocument | None:
        """The document of a domain."""
        with self._database.reading() as connection:
            return limits.find(connection, domain)

    def limits(self) -> tuple[int, list[LimitDocument]]:
        """The revision of the documents, and all of them, by domain."""
        with self._database.reading() as connection:
            return limits.revision(connection), limits.every(connection)

    def list_limits(self) -> list[LimitHead]:
        """All documents without their texts, by domain."""
        with self._database.reading() as connection:
            return limits.heads(connection)

    # Undoing

    @again
    def rollback(self, revision: int, actor: Actor | str, now: datetime, judge: Judge | None = None) -> int:
        """Bring back the rules of a revision, under their ids, as one change; its revision, or the present one if there
        was nothing to change. Raises NoSuchRevision, TooMuchAtOnce, and what `judge` raises.
        """
        with self._changing(actor) as connection:
            return rollback.roll_back(connection, revision, as_actor(actor), now, judge)

    def revisions(self, limit: int = 100, before: int | None = None) -> list[Revision]:
        """The changes that can be undone, the newest first; `before` is the last one already seen."""
        with self._database.reading() as connection:
            return history.listed(connection, limit, before)

    def find_revision(self, revision: int) -> Revision:
        """Who made a revision, and what it was. Raises NoSuchRevision."""
        with self._database.reading() as connection:
            return history.find(connection, revision)

    def rules_at(self, revision: int) -> list[Kept]:
        """Every rule of a revision, by id. Raises NoSuchRevision."""
        with self._database.reading() as connection:
            return sorted(history.rules_at(connection, revision), key=lambda kept: kept.rule.id)

    def difference(self, one: int, other: int) -> list[Difference]:
        """The rules that two revisions do not have in common, by id: before is what `one` has.

        Raises NoSuchRevision.
        """
        with self._database.reading() as connection:
            return list(history.differences(connection, one, other))

    def compare(self, one: int, other: int, most: int, after: int = 0) -> Comparison:
        """How two revisions differ, with `most` of the rules that they do not have in common, those after an id.

        Raises NoSuchRevision.
        """
        with self._database.reading() as connection:
            return history.compare(connection, one, other, most, after)

    @again
    def open_window(
        self,
        seconds: int,
        actor: Actor | str,
        now: datetime,
        base: int | None = None,
        paused: Sequence[str] = (),
        forces: bool = False,
        holder: str | None = None,
    ) -> Window:
        """Open a window of confirmation: unless it is confirmed within `seconds`, revision `base` (by default the
        present one) comes back, and the gateways in `paused` are paused again. `forces`: the actor may force, so that
        what was forced comes back into force, too. `holder` is the gateway whose kernel holds an older `base`, if that
        must not take from another one what was there before.

        Raises WindowOpen, NoSuchRevision, ConcernsOthers.
        """
        with self._changing(actor) as connection:
            return windows.begin(connection, seconds, as_actor(actor), now, base, paused, forces, holder)

    def now(self) -> datetime:
        """What the database's clock shows: windows of confirmation are open by it, for those of gateways may differ."""
        with self._database.reading(little=True) as connection:
            return moments.read(connection)

    def window(self) -> Window | None:
        """The window of confirmation that was opened last, open or not."""
        with self._database.reading(little=True) as connection:
            return windows.last(connection)

    def window_left(self) -> tuple[Window | None, float]:
        """The same, and for how many seconds it is open yet, by the database's clock: 0 if it is over."""
        with self._database.reading(little=True) as connection:
            window = windows.last(connection)
            is_open = window is not None and window.outcome is None
            return window, window.left(moments.read(connection)) if window is not None and is_open else 0.0

    def warn_of_window(self, undone: str) -> list[str]:
        """What somebody should know whose doing (`undone`, in words) an open window of confirmation undoes."""
        window = self._open_window()
        return [window.warn(undone)] if window else []

    def warn_of_rest(self, left: str) -> list[str]:
        """The same of what it leaves as it is (`left`, in words): all but rules."""
        window = self._open_window()
        return [window.warn_of_rest(left)] if window else []

    def _open_window(self) -> Window | None:
        window = self.window()
        return window if window is not None and window.outcome is None else None

    @again
    def confirm(self, actor: Actor | str, now: datetime, opened_at: datetime | None = None) -> Window:
        """Keep what was changed in the open window; with `opened_at`, only in that of this time. Raises NoWindow."""
        with self._changing(actor, Leave.NOTHING) as connection:
            return windows.confirm(connection, as_actor(actor), now, opened_at)

    @again
    def confirm_anew(self, window: Window, revision: int, actor: Actor | str, now: datetime) -> Window | None:
        """Confirm a window that is open again, of which this revision was confirmed; where the rules have changed since
        then, its end is to undo that alone. The window as it is then; None where nothing was to be done."""
        with self._changing(actor, Leave.NOTHING) as connection:
            return windows.confirm_anew(connection, window, revision, as_actor(actor), now)

    @again
    def abandon(
        self,
        actor: Actor | str,
        now: datetime,
        judge: Judge | None = None,
        opened_at: datetime | None = None,
        base: int | None = None,
    ) -> Window:
        """Undo what was changed in the open window; with `opened_at`, only in that of this time, and with `base`, only
        what has changed since that revision. Raises NoWindow, TooMuchAtOnce, and what `judge` raises."""
        with self._changing(actor, Leave.NOTHING) as connection:
            return windows.abandon(connection, as_actor(actor), now, judge, opened_at, base)

    @again
    def resume_within(self, window: Window, host: str, actor: Actor | str, now: datetime) -> None:
        """End the pause of a gateway, which the end of this window begins again. Raises NoWindow if it has ended."""
        with self._changing(actor, Leave.NOTHING) as connection:
            windows.resume(connection, window.opened_at, host, as_actor(actor), now)

    @again
    def expire(self, window: Window, actor: Actor | str, now: datetime) -> Window | None:
        """Undo what was changed in a window that was not confirmed; None if it has ended already."""
        with self._changing(actor, Leave.NOTHING) as connection:
            return windows.expire(connection, window.opened_at, as_actor(actor), now)

    def guarded(self, host: str) -> None:
        """Keep that a gateway has a guard."""
        with self._database.writing(wake=False) as connection:
            guards.seen(connection, host)

    def unguarded(self, host: str) -> None:
        """A gateway's guard has ended."""
        with self._database.writing(wake=False) as connection:
            guards.gone(connection, host)

    def guards(self) -> list[str]:
        """The gateways that have a guard, by name."""
        with self._database.reading(little=True) as connection:
            return guards.alive(connection)

    # What the controller reads and keeps

    def load(self, host: str) -> tuple[int, Iterator[Rule]]:
        """The revision, and every rule of that revision that concerns a gateway, disabled and expired ones too.

        The rules are streamed from one snapshot; a connection is held until the iterator is exhausted or dropped.
        """
        revision, _, stream = self.load_stamped(host)
        return revision, stream

    def load_stamped(self, host: str) -> tuple[int, int, Generator[Rule]]:
        """As `load`, and the stamp that tells the revision from others of its number."""
        stream = self._stream(host)
        revision, stamp = next(stream)
        return revision, stamp, stream

    def changes(self, since: int, host: str, stamp: int | None = None) -> Changes | None:
        """The rules of a gateway that changed after a revision, and the ids of those that concern it no more.

        None when that is not known any more, or is another revision here than the one with `stamp`: then `load`.
        """
        with self._database.reading() as connection:
            return changes.changes(connection, since, host, stamp)

    def stamp_of(self, revision: int) -> int | None:
        """The stamp that tells a revision from others of its number; None where it is not kept any more."""
        with self._database.reading() as connection:
            return changes.stamp_of(connection, revision)

    def numbering(self, host: str) -> dict[tuple[str, str], int]:
        """The mark number of each (group, profile) on a gateway."""
        with self._database.reading() as connection:
            return numbers.numbering(connection, host)

    def number(self, host: str, added: Mapping[tuple[str, str], int], removed: Iterable[tuple[str, str]]) -> None:
        """Forget the mark numbers of `removed`, then keep those of `added`."""
        with self._database.writing(wake=False) as connection:
            numbers.number(connection, host, added, removed)

    def number_beside(
        self, host: str, added: Mapping[tuple[str, str], int], known: Mapping[tuple[str, str], int]
    ) -> bool:
        """Keep the mark numbers of `added` if there are just the `known` ones so far; whether that is so."""
        with self._database.writing(wake=False) as connection:
            if numbers.numbering(connection, host) != known:
                return False
            numbers.number(connection, host, added, ())
            return True

    @again
    def mark(self, host: str, exceptional: Sequence[Exceptional], cleared: Iterable[int]) -> None:
        """Keep the states of rules that are not simply applied on a gateway, and forget those of `cleared`."""
        with self._database.writing() as connection:
            states.mark(connection, host, exceptional, cleared)

    def mark_lifted(self, host: str, lifted: Sequence[Exceptional]) -> None:
        """Keep that rules of a gateway are out of force, for no controller runs there."""
        with self._database.writing() as connection:
            states.mark(connection, host, lifted, ())
            hosts.lift(connection, host, len(lifted))

    def exceptional(self, rule_ids: Sequence[int]) -> dict[int, dict[str, Exceptional]]:
        """The exceptional states of these rules, by rule and gateway; rules that have none are left out."""
        with self._database.reading() as connection:
            return states.exceptional(connection, rule_ids)

    def marked(self, host: str) -> dict[int, Exceptional]:
        """Every exceptional state on a gateway, by rule."""
        with self._database.reading() as connection:
            return states.marked(connection, host)

    def census(self, now: datetime, applied: Sequence[int]) -> list[Alike]:
        """Every rule, in groups of those that stand alike; `applied` are the revisions that gateways have applied."""
        with self._database.reading() as connection:
            return take_census(connection, now, applied)

    def sample_selectors(self) -> list[Rule]:
        """One rule of each selector with ports or an interface that rules in force have, by family, direction and
        hosts."""
        with self._database.reading() as connection:
            return sample_selectors(connection)

    def sample_meters(self, now: datetime) -> list[tuple[Rule, int]]:
        """One rule of those in force that have a rate, and may have many buckets, of each kind, rate and length of the
        target, with how many there are."""
        with self._database.reading() as connection:
            return sample_meters(connection, now)

    def look_at_meters(self, now: datetime) -> tuple[int, list[tuple[Rule, int]]]:
        """The same, with the revision at which they stand so."""
        with self._database.reading() as connection:
            return clock.revision(connection), sample_meters(connection, now)

    def sort_out(
        self, now: datetime, applied: Sequence[int], *, contains: str | None = None, target: str | None = None,
        labels: Mapping[str, str] | None = None, action: str | None = None,
    ) -> list[tuple[Alike, list[int]]]:  # fmt: skip
        """The rules that match everything given, as `select` has it, in groups as `census` has them, with their ids."""
        wanted = rules.conditions(contains, target, labels or {}, action)
        with self._database.reading() as connection:
            return sort_out(connection, now, applied, wanted)

    def exceptional_counts(self) -> dict[State, int]:
        """How many pairs of rule and gateway are in each exceptional state."""
        with self._database.reading() as connection:
            return states.count_states(connection)

    @again
    def count(self, host: str, counts: Sequence[RuleCounters]) -> None:
        """Keep counters of a gateway in place of the former ones of the same rules. Wakes nobody on PostgreSQL."""
        with self._database.writing(wake=False) as connection:
            counters.count(connection, host, counts)

    @again
    def count_requests(self, host: str, counts: Mapping[int, Counts], now: datetime) -> None:
        """Add what a limiter of a gateway has counted, by rule, to what is kept. Wakes nobody on PostgreSQL."""
        with self._database.writing(wake=False) as connection:
            counters.add_requests(connection, host, counts, now)

    def counters(self, rule_id: int) -> dict[str, RuleCounters]:
        """The counters of a rule, by gateway."""
        with self._database.reading() as connection:
            return counters.by_host(connection, rule_id)

    def counters_of(self, rule_ids: Sequence[int]) -> dict[int, dict[str, RuleCounters]]:
        """The counters of some rules, by rule and gateway."""
        with self._database.reading() as connection:
            return counters.of_rules(connection, rule_ids)

    def named_counters(self, most: int) -> list[tuple[str, str, RuleCounters]]:
        """The counters of rules that have a name, with name and gateway: at most so many, those of the oldest rules."""
        with self._database.reading() as connection:
            return counters.of_named(connection, most)

    def total_counters(self) -> dict[str, Counts]:
        """What all rules of each gateway have counted, those that are gone too."""
        with self._database.reading() as connection:
            return counters.totals(connection)

    def raw_counters(self, host: str) -> dict[int, RuleCounters]:
        """What the kernel of a gateway has counted, by rule."""
        with self._database.reading() as connection:
            return counters.by_rule(connection, host)

    # Gateways

    def report(self, status: HostStatus, at: datetime | None = None) -> Reception:
        """Keep what a gateway says of itself, seen now by the database's clock, or `at` another time. Its `paused` is
        left aside: `pause` alone decides that."""
        with self._database.writing() as connection:
            return hosts.report(connection, status, at)

    def try_host(self, status: HostStatus) -> None:
        """See whether the database does all that a controller asks of it, and keep what that says of itself."""
        self._database.try_tables(_OF_CONTROLLERS)
        self.report(status)

    def hosts(self) -> list[HostStatus]:
        """What every gateway said last, by name."""
        with self._database.reading(little=True) as connection:
            return hosts.statuses(connection)

    @again
    def forget_gateway(self, host: str, actor: Actor | str, now: datetime) -> None:
        """Forget a gateway that is gone. Raises NoGateway, and GatewayAlive where something of it still reports."""
        with self._changing(actor) as connection:
            gateways.forget(connection, host, as_actor(actor), now)

    def count_naming(self) -> dict[str, int]:
        """How many rules name each gateway; those that none names are left out."""
        with self._database.reading() as connection:
            return gateways.count_naming(connection)

    def find_naming(self, host: str, most: int = 10) -> list[int]:
        """The rules that name a gateway, by id: at most so many, the oldest ones."""
        with self._database.reading() as connection:
            return gateways.find_naming(connection, host, most)

    def note_repairs(self, host: str, made: Sequence[Repair]) -> None:
        """Keep several repairs of a gateway, in their order."""
        with self._database.writing(wake=False) as connection:
            repairs.note_all(connection, host, made)

    def repaired(self, host: str, kind: str, found: str, took: float, now: datetime) -> None:
        """Keep what a gateway's controller found changed and put right, in `took` seconds: its newest 200."""
        with self._database.writing(wake=False) as connection:
            repairs.note(connection, host, Repair(kind, found, took, now))

    def repairs(self, host: str, limit: int) -> list[Repair]:
        """The newest repairs of a gateway, the last one first."""
        with self._database.reading() as connection:
            return repairs.newest(connection, host, limit)

    @again
    def pause(
        self,
        host: str,
        paused: bool,
        actor: Actor | str = NETLIMIT,
        now: datetime | None = None,
        for_good: bool = False,
    ) -> None:
        """Tell a gateway's controller to keep its hands off, or to go on; `for_good`: whatever becomes of an open
        window of confirmation."""
        with self._changing(actor, Leave.NOTHING) as connection:
            if for_good:
                windows.release(connection, host)
            if hosts.pause(connection, host, paused) or paused:
                who, moment = as_actor(actor), now or datetime.now(UTC)
                if paused:
                    audit.note_pause(connection, host, who, audit.make_pause(moment))
                else:
                    audit.note_other(connection, audit.RESUME, who, moment, after={"host": host})

    def last_pause(self, host: str) -> Pause | None:
        """The last pause of a gateway, by a teardown or by the end of a window; None where nobody knows."""
        with self._database.reading() as connection:
            return audit.last_pause(connection, host)

    def list_pauses(self, host: str) -> list[Pause]:
        """The latest pauses of a gateway, a hundred at most, the last one first: those that it has, and that are
        over."""
        with self._database.reading() as connection:
            return audit.list_pauses(connection, host)

    def list_ended_pauses(self, host: str) -> list[Pause]:
        """Those that are over for good: none while it is paused, or the end of an open window pauses it again."""
        with self._database.reading() as connection:
            window = windows.last(connection)
            comes_back = window is not None and window.outcome is None and host in window.paused
            return [] if comes_back or hosts.paused(connection, host) else audit.list_pauses(connection, host)

    def may_have_heard(self, pause: Pause) -> bool:
        """Whether this database was told of a pause, though it may have ended since; or whether nobody knows, for what
        is as old is not kept."""
        with self._database.reading() as connection:
            return audit.may_have_heard(connection, pause)

    @again
    def keep_pause(self, host: str, pause: Pause, actor: Actor | str) -> bool:
        """Pause a gateway as it is paused already, if this database has not heard of that; whether it had not."""
        with self._changing(actor, Leave.NOTHING) as connection:
            if audit.may_have_heard(connection, pause):
                return False
            hosts.pause(connection, host, True)
            audit.note_pause(connection, host, as_actor(actor), pause)
        return True

    @again
    def end_pause(self, host: str, pause: Pause, actor: Actor | str) -> bool:
        """End the pause of a gateway, if it is this one by its word, and no later one; whether it was."""
        with self._changing(actor, Leave.NOTHING) as connection:
            last = audit.last_pause(connection, host) if hosts.hold_pause(connection, host) else None
            if last is None or last.word != pause.word:
                return False
            hosts.pause(connection, host, False)
            audit.note_other(connection, audit.RESUME, as_actor(actor), datetime.now(UTC), after={"host": host})
        return True

    def paused(self, host: str) -> bool:
        """Whether a gateway's controller is to keep its hands off."""
        with self._database.reading() as connection:
            return hosts.paused(connection, host)

    def saw_client(
        self, host: str, address: str, at: datetime | None = None, token: str | None = None, role: Role | None = None
    ) -> None:
        """Keep that an address has spoken to the API of a gateway, now or `at` a time, with a token (by its name) that
        is good: as many as count as safe. Now is what the database's clock shows: those of gateways may differ."""
        with self._database.writing(wake=False) as connection:
            seen = at or moments.read(connection)
            clients.saw(connection, host, Client(address, seen, seen, token, role))

    def clients(self, host: str, at: datetime | None = None) -> dict[str, float]:
        """The addresses that have spoken to the API of a gateway in the last half hour, or in the one before `at` a
        time, by the database's clock, each with the seconds since it did last, as many as count as safe: those of
        tokens that may do more first, then who came first."""
        with self._database.reading() as connection:
            return clients.find_lately(connection, host, at or moments.read(connection))

    def save_root(
        self, host: str, device: str, root: SavedRoot, actor: Actor | str = NETLIMIT, now: datetime | None = None
    ) -> None:
        """Keep a root qdisc of somebody else that is about to be taken over, so that it can be put back."""
        with self._changing(actor) as connection:
            roots.save(connection, host, device, root)
            said = {"host": host, "device": device, "qdisc": root.kind}
            audit.note_other(connection, "take-over", as_actor(actor), now or datetime.now(UTC), before=said)

    def saved_roots(self, host: str) -> dict[str, SavedRoot]:
        """The root qdiscs that are kept of a gateway, by device."""
        with self._database.reading() as connection:
            return roots.saved(connection, host)

    def forget_root(self, host: str, device: str) -> None:
        """Forget a root qdisc: it was put back. One that is not kept is no error."""
        with self._database.writing() as connection:
            roots.forget(connection, host, device)

    # What limiters enforce in the kernel's place

    @again
    def assign(self, host: str, given: Mapping[int, int], taken: Iterable[int]) -> int:
        """Give rules, with their revisions, to the limiters of a gateway, and take others from them; the serial of what
        they are to enforce now."""
        with self._database.writing() as connection:
            return limiters.assign(connection, host, given, taken)

    def assigned(self, host: str) -> Assigned:
        """What the limiters of a gateway are to enforce."""
        with self._database.reading() as connection:
            return limiters.assigned(connection, host)

    def assigned_serial(self, host: str) -> int:
        """The serial of that alone."""
        with self._database.reading() as connection:
            return limiters.serial(connection, host)

    def duties(self, host: str, since: int = -1, serial: int = 0, stamp: int | None = None) -> Duties:
        """What a limiter of a gateway enforces that knows its rules as they were at a revision (-1: none) with its
        stamp, and what was assigned with a serial."""
        with self._database.reading() as connection:
            return limiters.duties(connection, host, since, serial, stamp)

    @again
    def limiter_runs(self, report: LimiterReport, news: bool = False) -> None:
        """Keep that a limiter runs, and what it has loaded; `news` wakes the controller."""
        with self._database.writing(wake=news) as connection:
            limiters.report(connection, report)

    @again
    def limiter_ended(self, host: str, process: str) -> None:
        """A limiter has ended, and enforces nothing any more."""
        with self._database.writing() as connection:
            limiters.gone(connection, host, process)

    def limiters(self, host: str) -> list[LimiterReport]:
        """What the limiters of a gateway said last; those that were killed too."""
        with self._database.reading() as connection:
            return limiters.running(connection, host)

    # Questions from the API to a controller

    def ask(self, host: str, kind: str, argument: Mapping[str, object], leave: Leave = Leave.ALL) -> int:
        """Ask a gateway's controller; the id to look for the answer with. Questions live for a minute. Raises NoRoom
        unless so much of the disk is left: with its answer, a question may take a hundred kilobytes of the log."""
        with self._database.writing() as connection:
            number = requests.ask(connection, host, kind, argument)
            if self.path:
                check_room(connection, self.path, leave)
            return number

    def questions(self, host: str) -> list[Request]:
        """The open questions to a gateway, oldest first."""
        with self._database.reading() as connection:
            return requests.unanswered(connection, host)

    def answer(self, request_id: int, answer: Mapping[str, object]) -> None:
        """Answer a question; one that is gone already is no error."""
        with self._database.writing() as connection:
            requests.answer(connection, request_id, answer)

    def answered(self, request_id: int) -> dict[str, Any] | None:
        """The answer to a question, None as long as there is none."""
        with self._database.reading() as connection:
            return requests.answered(connection, request_id)

    def withdraw(self, request_ids: Iterable[int]) -> None:
        """Nobody waits for the answers to these questions any more; those that are gone already are no error."""
        with self._database.writing() as connection:
            requests.withdraw(connection, request_ids)

    # Tokens

    def tokens_exist(self) -> bool:
        """Whether there ever was a token."""
        with self._database.reading() as connection:
            return tokens.any_kept(connection)

    @again
    def add_token(
        self,
        name: str,
        token_hash: str,
        role: str,
        now: datetime,
        expires_at: datetime | None = None,
        handle: str | None = None,
        actor: Actor | str = NETLIMIT,
    ) -> Token:
        """Keep a new token. Raises TokenExists when the name is taken."""
        with self._changing(actor) as connection:
            return tokens.add(connection, name, token_hash, role, now, expires_at, handle, as_actor(actor))

    def issue_token(
        self, name: str, role: Role, now: datetime, expires_at: datetime | None, actor: Actor | str
    ) -> tuple[Token, str]:
        """Make a token: how it is kept, and its text, which is nowhere else. Raises TokenExists."""
        new = make_token()
        kept = self.add_token(name, hash_token(new.text), role.value, now, expires_at, new.handle, actor)
        return kept, new.text

    def token(self, key: int | str) -> Token | None:
        """The token of this id or name."""
        with self._database.reading(little=True) as connection:
            return tokens.find(connection, key)

    def tokens(self) -> list[Token]:
        """All tokens, revoked and expired ones too, by id."""
        with self._database.reading() as connection:
            return tokens.every(connection)

    def active_tokens(self, now: datetime) -> list[Token]:
        """The tokens that are good at `now`."""
        with self._database.reading(little=True) as connection:
            return tokens.active(connection, now)

    @again
    def revoke_token(self, token_id: int, now: datetime, actor: Actor | str = NETLIMIT) -> bool:
        """Revoke a token; False when there is none, or it was revoked before. One may revoke itself."""
        with self._changing(actor, Leave.NOTHING, ends_itself=as_actor(actor).token == token_id) as connection:
            return tokens.revoke(connection, token_id, now, as_actor(actor))

    @contextmanager
    def _changing(
        self, actor: Actor | str, leave: Leave = Leave.ALL, ends_itself: bool = False
    ) -> Iterator[Connection]:
        """A transaction that the audit tells of. Raises TokenEnded where the actor's token is good no more, and NoRoom
        unless so much of the disk is left, or as much as the actor has to leave, where that is less.

        The token is looked at before anything else, and again before it is kept: a large change takes a while, and
        whoever revokes a token must not wait for it. `ends_itself`: it is that token which this revokes. Who is no
        admin writes behind those who are.
        """
        known = as_actor(actor)
        share = find_share(known)
        is_operator = share is Leave.ALL and known != LIMITER
        with self._database.writing(behind=share is Leave.ALL) as connection:
            tokens.check(connection, known)
            newest = audit.find_newest(connection)
            yield connection
            if leave:  # what takes power away may find no room for more
                self._prune(connection, newest)
            if leave is Leave.ALL and is_operator:
                history.check_window(connection)
            if leave and is_operator:
                weight.check_window(connection, known)
            if self.path and leave:
                # What is changed in a window is undone by whoever ends it, and he leaves nothing.
                due = history.find_due(connection)
                check_room(connection, self.path, share if due else min(leave, share), due)
            if not ends_itself:
                tokens.check(connection, known, until_kept=True)

    def _prune(self, connection: Connection, former: int = 0) -> None:
        """`former` is the newest line of the audit before this change."""
        audit.prune(connection, self._audit_length)
        audit.prune_bytes(connection, former)
        history.prune(connection, self._revisions)

    def _stream(self, host: str) -> Generator[Any]:
        """First the revision with its stamp, then the rules: so the snapshot stands before `load` returns."""
        with self._database.reading() as connection:
            yield clock.revision(connection), clock.stamp(connection)
            yield from changes.stream(connection, host)
