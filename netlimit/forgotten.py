"""A database that is not the one whose rules a gateway holds: a new one, or some other, is in its place. It is not
taken for what is wanted: that would take every limit out of force, and say nothing.

Whoever restores a backup brings back which database it was; whoever means another one says so
(`netlimit apply --take-database`), or tears the gateway down first, as its copy knows then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from netlimit.liveness import SILENCE, is_recent
from netlimit.origins import Origin, is_another
from netlimit.records import HostStatus

TAKE = "netlimit apply --take-database"


class Held(NamedTuple):
    """How many rules a gateway holds as its copy tells (none after a teardown), and of which database."""

    rules: int
    origin: Origin


NOTHING = Held(0, Origin(None, 0))


def find_forgotten(found: Origin, held: Held) -> str | None:
    """Why a database is not gone by, if it is not: the one judgement, of controllers, commands and guards."""
    if not held.rules or not is_another(held.origin.identity, found):
        return None
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


def find_told(reports: Iterable[HostStatus]) -> str | None:
    """What gateways say that report to a database and do not go by it, if none of those that report does."""
    refusals = [each.refused for each in reports if is_recent(each.silence, SILENCE)]
    return next(iter(refusals), None) if all(refusals) else None


def word_held(held: Held) -> str:
    """What the copy tells."""
    number = f"{held.rules} rule{'' if held.rules == 1 else 's'}"
    return f"this gateway holds {number} of revision {held.origin.revision}, as its copy tells"
