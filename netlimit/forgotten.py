"""A database that is not the one whose rules a gateway holds: a new one, or some other, is in its place, or an older
state of it. It is not taken for what is wanted: that would take limits out of force, or put those in force again that
were removed, and say nothing.

Whoever restores a backup brings back which database it was, and marks that it was restored; whoever means another one,
or an older state, says so (`netlimit apply --take-database`), or tears the gateway down first, as its copy knows then.

A server whose standby has lagged is another matter: what that lacks is lost for good, and nothing could be changed any
more until somebody had come to each gateway. It is gone by, and what is out of force since is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from netlimit.liveness import SILENCE, is_recent
from netlimit.origins import TOKENS, Origin, is_another, is_older
from netlimit.records import HostStatus
from netlimit.rules import Rule
from netlimit.several import name_some

TAKE = "netlimit apply --take-database"
PREFIX = "The database lacks what this gateway"
_UNTIL = "This is told until the controller is started anew."
_MOST_TOLD = 5


class Held(NamedTuple):
    """How many rules a gateway holds as its copy tells (none after a teardown), and of which state of which database;
    whether one was found since that is not gone by: what is there must prove itself then; and whether it is torn down,
    so that whatever comes is begun anew."""

    rules: int
    origin: Origin
    is_doubted: bool = False
    is_torn_down: bool = False

    @property
    def tells_state(self) -> bool:
        """Whether a database may be in an older state than this: of no rules either, for an older one may have some
        that were removed."""
        return not self.is_torn_down and bool(self.rules or (self.origin.identity and self.origin.past[1]))


NOTHING = Held(0, Origin(None, 0))


def find_forgotten(found: Origin, held: Held) -> str | None:
    """Why a database is not gone by, if it is not: the one judgement, of controllers, commands and guards."""
    if not held.tells_state:
        return None
    if not is_another(held.origin.identity, found):
        is_refused = not found.is_server and is_older(held.origin, found, held.is_doubted)
        return _say_older(found, held) if is_refused else None
    if not held.rules:
        return None  # it takes nothing out of force
    if found.revision:
        says = (
            f"This is another database than the one of which {word_held(held)}, so this gateway does not go by it "
            f"(revision {found.revision} here). "
        )
        takes = f"To go by this one instead, run `{TAKE}`; to"
    else:
        says = (
            f"Nothing was ever changed in this database, though {word_held(held)}: it is a new one in the place of the "
            "one that had them. "
        )
        takes = f"To go by this one instead, make its rules first, then run `{TAKE}`; to"
    return (
        f"{says}What the kernel holds stays in force: put the database back, or restore a backup of it (`netlimit "
        f"restore FILE`). {takes} begin anew, `netlimit teardown`, then `netlimit apply`."
    )


def has_lost(found: Origin, held: Held) -> bool:
    """Whether a database that is gone by lacks the revision that a gateway holds: its server has lost that."""
    is_same = held.tells_state and not is_another(held.origin.identity, found)
    return is_same and found.is_server and is_older(held.origin, found)


def say_loss(found: Origin, held: Held, before: Iterable[Rule] | None, now: Iterable[Rule]) -> str | None:
    """What is out of force on a gateway since, and what is in force again; None where the rules are the same. `before`
    are those that its copy has (None: unknown)."""
    start = (
        f"{PREFIX} held: revision {held.origin.revision} is lost there (it is at {found.revision}). A standby that "
        "lagged has taken the server's place, or an older state of it was put back."
    )
    if before is None:
        return f"{start} {TOKENS}"
    gone, back = compare(before, now)
    if not (gone or back):
        return None
    said = [f"Out of force are: {_name_rules(gone)}."] if gone else []
    said += [f"In force are instead, or again: {_name_rules(back)}."] if back else []
    return f"{start} {' '.join(said)} Make anew what is missing. {TOKENS} {_UNTIL}"


def say_other_loss(line: int) -> str:
    """What is told where a database has lost a line of the audit, and of no rule of the gateway that it is lost."""
    return (
        f"{PREFIX} has seen in its audit: line {line} is lost there. A standby that lagged has taken the server's "
        "place, or an older state of it was put back. Whatever was changed last is lost: put limits of requests anew "
        f"(each limiter says which), and make rules anew that are missing. {TOKENS} {_UNTIL}"
    )


def compare(before: Iterable[Rule], now: Iterable[Rule]) -> tuple[list[Rule], list[Rule]]:
    """Rules that are not there any more, or not so; and those that were not, or not so."""
    known = {rule.id: rule for rule in before}
    back = []
    for rule in now:
        was = known.get(rule.id)
        if was is not None and replace(was, revision=rule.revision) == rule:
            del known[rule.id]
        else:
            back.append(rule)
    return list(known.values()), back


def _name_rules(rules: Sequence[Rule]) -> str:
    return name_some([f"rule {rule.id}{f' ({rule.name})' if rule.name else ''}: {rule}" for rule in rules], _MOST_TOLD)


def _say_older(found: Origin, held: Held) -> str:
    state = "is in" if found.revision < held.origin.revision else "has gone on from"
    return (
        f"This database {state} an older state than the one of which {word_held(held)}: it lacks that revision (it is "
        f"at {found.revision}), so this gateway does not go by it. Is a disk not mounted, or was an older file put in "
        "the place of the newer? What the kernel holds stays in force, and what is changed here is not: put the newer "
        f"file back, or restore a backup (`netlimit restore FILE`). To go by this one instead, run `{TAKE}`: what it "
        f"lacks is out of force then. {TOKENS}"
    )


def find_told(reports: Iterable[HostStatus]) -> str | None:
    """What gateways say that report to a database and do not go by it, if none of those that report does."""
    refusals = [each.refused for each in reports if is_recent(each.silence, SILENCE)]
    return next(iter(refusals), None) if all(refusals) else None


def word_held(held: Held) -> str:
    """What the copy tells."""
    number = f"{held.rules} rule{'' if held.rules == 1 else 's'}"
    return f"this gateway holds {number} of revision {held.origin.revision}, as its copy tells"
