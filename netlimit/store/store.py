"""The store: every transaction on the database that netlimit makes, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from netlimit.records import Actor, Changes, Exceptional, HostStatus, Repair, Request, RuleCounters, State
from netlimit.rules import Rule
from netlimit.store import (
    audit,
    changes,
    clients,
    clock,
    counters,
    hosts,
    migrate,
    numbers,
    repairs,
    requests,
    roots,
    rules,
    states,
    tokens,
)
from netlimit.store.audit import AuditEntry, as_actor
from netlimit.store.census import Alike, take_census
from netlimit.store.engine import Database
from netlimit.store.rows import Kept
from netlimit.store.tokens import Token
from netlimit.store.watch import Watch, watch
from netlimit.tree import SavedRoot


class Store:
    """The database behind a URL (`sqlite:////var/lib/…`, `postgresql+psycopg://…`). Opens nothing until it is used.

    Each method is one transaction. All of them raise StoreError when the database cannot do its part. Threads may
    share a store; processes must each make their own.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    def __repr__(self) -> str:
        return f"Store({str(self._database)!r})"

    def close(self) -> None:
        """Close every connection."""
        self._database.close()

    def upgrade(self) -> None:
        """Make the database if it is not there, and bring it to the schema of this code."""
        with self._database.migrating() as connection:
            migrate.upgrade(connection)

    def watch(self) -> Watch:
        """Begin to hear of changes."""
        return watch(self._database)

    # Rules

    def revision(self) -> int:
        """The revision of the last change of rules; 0 before the first."""
        with self._database.reading() as connection:
            return clock.revision(connection)

    def add(self, batch: Sequence[Rule], actor: Actor | str, now: datetime) -> list[Rule]:
        """Keep all rules of the batch as one change, or none; they come back with id and revision.

        Raises Conflict or NameTaken for a batch of one, ManyErrors with every wrong rule for a larger one.
        """
        with self._database.writing() as connection:
            return rules.add(connection, batch, as_actor(actor), now)

    def replace(
        self, rule_id: int, rule: Rule, actor: Actor | str, now: datetime, expected_revision: int | None = None
    ) -> Kept:
        """Put `rule` in the place of a kept one. The same rule again changes nothing, not even the revision.

        Raises NotKept, Conflict, NameTaken, and Stale if the kept one is not at `expected_revision`.
        """
        with self._database.writing() as connection:
            return rules.replace(connection, rule_id, rule, as_actor(actor), now, expected_revision)

    def remove(self, rule_id: int, actor: Actor | str, now: datetime, expected_revision: int | None = None) -> None:
        """Forget a rule with its states and counters. Raises NotKept, and Stale as `replace` does."""
        with self._database.writing() as connection:
            rules.remove(connection, rule_id, as_actor(actor), now, expected_revision)

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

    def audit(self, limit: int = 100, after: int | None = None) -> list[AuditEntry]:
        """Who changed what, the newest first; `after` is the id of the last entry already seen."""
        with self._database.reading() as connection:
            return audit.entries(connection, limit, after)

    # What the controller reads and keeps

    def load(self, host: str) -> tuple[int, Iterator[Rule]]:
        """The revision, and every rule of that revision that concerns a gateway, disabled and expired ones too.

        The rules are streamed from one snapshot; a connection is held until the iterator is exhausted or dropped.
        """
        stream = self._stream(host)
        revision = next(stream)
        return revision, stream

    def changes(self, since: int, host: str) -> Changes | None:
        """The rules of a gateway that changed after a revision, and the ids of those that concern it no more.

        None when that is not known any more: then `load`.
        """
        with self._database.reading() as connection:
            return changes.changes(connection, since, host)

    def numbering(self, host: str) -> dict[tuple[str, str], int]:
        """The mark number of each (group, profile) on a gateway."""
        with self._database.reading() as connection:
            return numbers.numbering(connection, host)

    def number(self, host: str, added: Mapping[tuple[str, str], int], removed: Iterable[tuple[str, str]]) -> None:
        """Forget the mark numbers of `removed`, then keep those of `added`."""
        with self._database.writing(wake=False) as connection:
            numbers.number(connection, host, added, removed)

    def mark(self, host: str, exceptional: Sequence[Exceptional], cleared: Iterable[int]) -> None:
        """Keep the states of rules that are not simply applied on a gateway, and forget those of `cleared`."""
        with self._database.writing() as connection:
            states.mark(connection, host, exceptional, cleared)

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

    def exceptional_counts(self) -> dict[State, int]:
        """How many pairs of rule and gateway are in each exceptional state."""
        with self._database.reading() as connection:
            return states.count_states(connection)

    def count(self, host: str, counts: Sequence[RuleCounters]) -> None:
        """Keep counters of a gateway in place of the former ones of the same rules. Wakes nobody on PostgreSQL."""
        with self._database.writing(wake=False) as connection:
            counters.count(connection, host, counts)

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

    def raw_counters(self, host: str) -> dict[int, RuleCounters]:
        """The counters of every rule on a gateway, by rule."""
        with self._database.reading() as connection:
            return counters.by_rule(connection, host)

    # Gateways

    def report(self, status: HostStatus, now: datetime | None = None) -> None:
        """Keep what a gateway says of itself, seen now. Its `paused` is left aside: `pause` alone decides that."""
        with self._database.writing() as connection:
            hosts.report(connection, status, now or datetime.now(UTC))

    def hosts(self) -> list[HostStatus]:
        """What every gateway said last, by name."""
        with self._database.reading() as connection:
            return hosts.statuses(connection)

    def repaired(self, host: str, kind: str, found: str, took: float, now: datetime) -> None:
        """Keep what a gateway's controller found changed and put right, in `took` seconds: its newest 200."""
        with self._database.writing(wake=False) as connection:
            repairs.note(connection, host, Repair(kind, found, took, now))

    def repairs(self, host: str, limit: int) -> list[Repair]:
        """The newest repairs of a gateway, the last one first."""
        with self._database.reading() as connection:
            return repairs.newest(connection, host, limit)

    def pause(self, host: str, paused: bool) -> None:
        """Tell a gateway's controller to keep its hands off, or to go on."""
        with self._database.writing() as connection:
            hosts.pause(connection, host, paused)

    def paused(self, host: str) -> bool:
        """Whether a gateway's controller is to keep its hands off."""
        with self._database.reading() as connection:
            return hosts.paused(connection, host)

    def saw_client(self, host: str, address: str, now: datetime) -> None:
        """Keep that an address has spoken to the API of a gateway, with a token that is good: the latest 256."""
        with self._database.writing(wake=False) as connection:
            clients.saw(connection, host, address, now)

    def clients(self, host: str, since: datetime) -> list[str]:
        """The addresses that have spoken to the API of a gateway since then, the latest first."""
        with self._database.reading() as connection:
            return clients.since(connection, host, since)

    def save_root(self, host: str, device: str, root: SavedRoot) -> None:
        """Keep a root qdisc of somebody else, so that it can be put back."""
        with self._database.writing() as connection:
            roots.save(connection, host, device, root)

    def saved_roots(self, host: str) -> dict[str, SavedRoot]:
        """The root qdiscs that are kept of a gateway, by device."""
        with self._database.reading() as connection:
            return roots.saved(connection, host)

    def forget_root(self, host: str, device: str) -> None:
        """Forget a root qdisc: it was put back. One that is not kept is no error."""
        with self._database.writing() as connection:
            roots.forget(connection, host, device)

    # Questions from the API to a controller

    def ask(self, host: str, kind: str, argument: Mapping[str, object]) -> int:
        """Ask a gateway's controller; the id to look for the answer with. Questions live for a minute."""
        with self._database.writing() as connection:
            return requests.ask(connection, host, kind, argument, datetime.now(UTC))

    def questions(self, host: str) -> list[Request]:
        """The open questions to a gateway, oldest first."""
        with self._database.reading() as connection:
            return requests.unanswered(connection, host, datetime.now(UTC))

    def answer(self, request_id: int, answer: Mapping[str, object]) -> None:
        """Answer a question; one that is gone already is no error."""
        with self._database.writing() as connection:
            requests.answer(connection, request_id, answer)

    def answered(self, request_id: int) -> dict[str, Any] | None:
        """The answer to a question, None as long as there is none."""
        with self._database.reading() as connection:
            return requests.answered(connection, request_id)

    # Tokens

    def tokens_exist(self) -> bool:
        """Whether there ever was a token."""
        with self._database.reading() as connection:
            return tokens.any_kept(connection)

    def add_token(
        self, name: str, token_hash: str, role: str, now: datetime, expires_at: datetime | None = None
    ) -> Token:
        """Keep a new token. Raises TokenExists when the name is taken."""
        with self._database.writing() as connection:
            return tokens.add(connection, name, token_hash, role, now, expires_at)

    def token(self, key: int | str) -> Token | None:
        """The token of this id or name."""
        with self._database.reading() as connection:
            return tokens.find(connection, key)

    def tokens(self) -> list[Token]:
        """All tokens, revoked and expired ones too, by id."""
        with self._database.reading() as connection:
            return tokens.every(connection)

    def active_tokens(self, now: datetime) -> list[Token]:
        """The tokens that are good at `now`."""
        with self._database.reading() as connection:
            return tokens.active(connection, now)

    def revoke_token(self, token_id: int, now: datetime) -> bool:
        """Revoke a token; False when there is none, or it was revoked before."""
        with self._database.writing() as connection:
            return tokens.revoke(connection, token_id, now)

    def _stream(self, host: str) -> Iterator[Any]:
        """First the revision, then the rules: so the snapshot stands before `load` returns."""
        with self._database.reading() as connection:
            yield clock.revision(connection)
            yield from changes.stream(connection, host)
