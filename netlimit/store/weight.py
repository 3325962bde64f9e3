"""How long it takes to exchange the rules of a revision for the present ones. It takes no body to ask for that, and
nobody else can change anything meanwhile: so who is no admin may have only so much exchanged at once."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Text, cast, func, select

from netlimit.records import Actor
from netlimit.store import history
from netlimit.store.errors import NoSuchRevision, TooMuchAtOnce
from netlimit.store.room import Leave, find_share
from netlimit.store.tables import revisions, rules, undo, windows

MOST_SECONDS = 3.0
"""What that may take by this reckoning, of one processor: 30,000 rules without labels. Where others keep processors or
disk busy it takes several times as long."""

_RULE, _LETTER, _WORD = 95e-6, 0.04e-6, 5.5e-6
"""Seconds that a rule takes, each letter of its labels, gateways and comment, as they are kept, and each label and
gateway, for which there is a row; measured on SQLite."""
_LOOK = 4e-6
"""Seconds that a rule takes that was not there then, and is not now."""
_LETTERS, _COMMAS = 450, 23
"""What a rule without any of that has as a change keeps it."""
_AT_ONCE = 500
_GRAIN = 50
"""After so many changes of single rules in a window it is looked again how much all of them are."""


def check(connection: Connection, revision: int, actor: Actor) -> None:
    """Raise TooMuchAtOnce where somebody who is no admin returns to a revision, and that takes too long. Raises
    NoSuchRevision."""
    if find_share(actor) is not Leave.ALL:
        return
    number, seconds = _reckon(connection, revision)
    if seconds > MOST_SECONDS:
        raise TooMuchAtOnce(
            f"To return to revision {revision} exchanges {number:,} rules, and nobody else could change anything for "
            f"about {seconds:.0f} seconds: nothing was changed. An operator may take {MOST_SECONDS:g} at once. Have an "
            "admin, or root, return there; or change the rules themselves, some at a time."
        )


def check_window(connection: Connection, actor: Actor) -> None:
    """Raise TooMuchAtOnce where it takes too long to undo what somebody who is no admin has changed since the base of
    an open window of confirmation: its end does that, whoever ends it."""
    base = connection.execute(select(windows.c.base).where(windows.c.outcome.is_(None))).scalar()
    if not isinstance(base, int) or not _is_due(connection, base, actor.name):
        return
    try:
        number, seconds = _reckon(connection, base, actor.name)
    except NoSuchRevision:  # nor can its end return there
        return
    if seconds > MOST_SECONDS:
        raise TooMuchAtOnce(
            f"A window of confirmation is open, whose end may undo what you have changed of {number:,} rules, and "
            f"nobody else could change anything for about {seconds:.0f} seconds: this change was not made. "
            f"An operator may take {MOST_SECONDS:g} at once. Confirm the window or await its end first, or have an "
            "admin make the change."
        )


def _is_due(connection: Connection, base: int, actor: str) -> bool:
    """Whether it is to be looked at: not for each of thousands of small changes. Who was refused has made none."""
    own = revisions.c.revision > base, revisions.c.actor == actor
    number, last = connection.execute(select(func.count(), func.max(revisions.c.revision)).where(*own)).one()
    size = connection.execute(select(revisions.c.rules).where(revisions.c.revision == last)).scalar() or 0
    return size > 1 or number % _GRAIN == 0


def _reckon(connection: Connection, revision: int, actor: str | None = None) -> tuple[int, float]:
    """How many rules are exchanged for those of a revision, those of then and of now together, and how many seconds
    that takes; with `actor`, of what he has changed."""
    changed = [rules.c.revision > revision]
    made = None if actor is None else select(revisions.c.revision).where(revisions.c.actor == actor)
    if made is not None:
        changed.append(rules.c.revision.in_(made))
    kept: dict[int, list[int]] = {}
    past = history.list_past(connection, revision, made)
    for rule_id, change in past.items():
        if change is not None:
            kept.setdefault(change, []).append(rule_id)
    come = sum(map(len, kept.values()))
    go = int(connection.execute(select(func.count()).select_from(rules).where(*changed)).scalar_one())
    seconds = _RULE * (come + go) + _LOOK * len(past)
    if seconds > MOST_SECONDS:
        return come + go, seconds  # and what they say need not be looked at
    words = rules.c.hosts.concat(rules.c.labels)
    letters, commas = _sum_up(connection, words.concat(rules.c.comment), words, changed)
    before = cast(undo.c.before, Text)
    for change, rule_ids in kept.items():
        for start in range(0, len(rule_ids), _AT_ONCE):
            some = [undo.c.revision == change, undo.c.first_rule.in_(rule_ids[start : start + _AT_ONCE])]
            more_letters, more_commas = _sum_up(connection, before, before, some)
            letters, commas = letters + more_letters, commas + more_commas
    letters, commas = letters - _LETTERS * come, commas - _COMMAS * come
    return come + go, seconds + _LETTER * max(0, letters) + _WORD * max(0, commas)


def _sum_up(
    connection: Connection, text: ColumnElement[str], words: ColumnElement[str], which: list[ColumnElement[bool]]
) -> tuple[int, int]:
    """How many letters all texts have, and how many commas all words, which stand between them."""
    commas = func.length(words) - func.length(func.replace(words, ",", ""))
    sums = [func.coalesce(func.sum(each), 0) for each in (func.length(text), commas)]
    letters, number = connection.execute(select(*sums).where(*which)).one()
    return int(letters), int(number)
