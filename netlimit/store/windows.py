"""The window of confirmation: changes made in it are undone unless somebody confirms them in time.

There is one at a time, for all rules. The row stays when the window has ended, and says how.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from netlimit.judgement import Judge
from netlimit.records import Actor, Outcome, Window
from netlimit.store import audit, clock, history, hosts, weight
from netlimit.store.bulk import check_kept
from netlimit.store.columns import EPOCH
from netlimit.store.errors import ConcernsOthers, NoWindow, WindowOpen
from netlimit.store.rollback import bring_back, hold_forced, withhold_forced
from netlimit.store.tables import windows

OPENED, NARROWED = "open-window", "narrow-window"
ENDED = {Outcome.CONFIRMED: "confirm-window", Outcome.EXPIRED: audit.EXPIRED, Outcome.ABANDONED: audit.ABANDONED}
"""What the audit calls the beginning of a window, that its end undoes less than before, and its ends."""

_ONLY = 1
_FORCES = "forces"
"""Whether who has opened the window may force: `{"forces": true}` or `false` stands among the names of the gateways
that are paused again. Where there is none, a version has opened it that brought everything back."""
_LONGEST, _LAST_YEAR = 86_400, 9999
"""No window is longer, in seconds, and none is opened in the year after which there is no time."""
log = logging.getLogger(__name__)


def begin(
    connection: Connection,
    seconds: int,
    actor: Actor,
    now: datetime,
    base: int | None,
    paused: Collection[str],
    forces: bool,
    holder: str | None,
) -> Window:
    """Open a window. `base` is what comes back, the present revision by default; `paused` are the gateways whose pause
    is ended in it, and will be there again. `forces`: the actor may force. `holder` is the gateway whose kernel holds
    an older `base`: no other one loses by it. Raises WindowOpen, NoSuchRevision, ConcernsOthers."""
    clock.lock(connection)
    other = last(connection)
    if other is not None and other.outcome is None:
        raise WindowOpen(
            f"{other.actor} has opened a window of confirmation already, at {_clock_time(other.opened_at)} for "
            f"{other.seconds} seconds: confirm that one first, or abandon it (`netlimit confirm`, `netlimit rollback`)."
        )
    newest = clock.revision(connection)
    base = newest if base is None else base
    history.check(connection, base)
    if holder is not None:
        _spare_others(connection, base, newest, holder)
    window = Window(base, now, seconds, actor.name, tuple(sorted(set(paused))), forces=forces, newest=newest)
    write(connection, window)
    audit.note_other(connection, OPENED, actor, now, after=_describe(window))
    return window


def last(connection: Connection) -> Window | None:
    """The window that was opened last, whether it is open or has ended."""
    row = connection.execute(select(windows).order_by(windows.c.id).limit(1)).one_or_none()
    if row is None:
        return None
    try:
        outcome = Outcome(row.outcome) if row.outcome else None
    except ValueError:
        outcome = Outcome.ABANDONED
    listed = row.paused if isinstance(row.paused, list) else []
    paused = tuple(each for each in listed if isinstance(each, str))
    opened_at = EPOCH if row.opened_at.year >= _LAST_YEAR else row.opened_at
    if not isinstance(row.base, int) or opened_at == EPOCH:
        base, outcome = 0, outcome or Outcome.ABANDONED  # nobody can say what it would bring back, or when
    else:
        base = row.base
    marks = [each for each in listed if not isinstance(each, str)]
    forces = isinstance(row.paused, list) and all(each == {_FORCES: True} for each in marks)
    seconds = min(max(row.seconds, 0), _LONGEST)
    return Window(base, opened_at, seconds, row.actor, paused, outcome, row.ended_at, row.revision, forces)


def release(connection: Connection, host: str) -> None:
    """A gateway goes on for good: an open window does not pause it again."""
    clock.lock(connection)
    window = last(connection)
    if window is not None and window.outcome is None and host in window.paused:
        write(connection, replace(window, paused=tuple(each for each in window.paused if each != host)))


def resume(connection: Connection, opened_at: datetime, host: str, actor: Actor, now: datetime) -> None:
    """End the pause of a gateway, while the window of that time is open. Raises NoWindow."""
    clock.lock(connection)
    get_open(connection, opened_at)
    if hosts.paused(connection, host):
        hosts.pause(connection, host, False)
        audit.note_other(connection, audit.RESUME, actor, now, after={"host": host})


def get_open(connection: Connection, opened_at: datetime | None = None) -> Window:
    """The window that is open; with `opened_at`, that of this time. Raises NoWindow."""
    window = last(connection)
    if window is None:
        raise NoWindow("No window of confirmation is open, and none has been.")
    if opened_at is not None and opened_at > window.opened_at:
        raise NoWindow(
            "The database knows nothing of the window of confirmation that is meant, nor of what was changed in it: it "
            "was restored, or a standby that lagged has taken its place. The last one that it knows was opened by "
            f"{window.actor} at {_clock_time(window.opened_at)}, and stays as it is."
        )
    if opened_at is not None and opened_at != window.opened_at:
        raise NoWindow(
            f"The window of confirmation that is meant has ended. {window.actor} has opened another one since, at "
            f"{_clock_time(window.opened_at)}, which stays as it is."
        )
    if window.outcome is None:
        return window
    ended = f"ended at {_clock_time(window.ended_at)}" if window.ended_at is not None else "has ended"
    became = {
        Outcome.CONFIRMED: "was confirmed",
        Outcome.EXPIRED: f"was not confirmed in time, so that revision {window.base} came back",
        Outcome.ABANDONED: f"was abandoned, so that revision {window.base} came back",
    }
    raise NoWindow(f"No window of confirmation is open. The last one {ended}: it {became[window.outcome]}.")


def confirm(connection: Connection, actor: Actor, now: datetime, opened_at: datetime | None = None) -> Window:
    """End the window (with `opened_at`: that of this time, which may have been confirmed already: whoever has not heard
    the answer asks again), and keep what was changed in it. Raises NoWindow."""
    clock.lock(connection)
    ended = last(connection)
    if ended is not None and ended.opened_at == opened_at and ended.outcome is Outcome.CONFIRMED:
        return ended
    window = get_open(connection, opened_at)
    return _end(connection, window, Outcome.CONFIRMED, clock.revision(connection), actor, now)


def confirm_anew(connection: Connection, known: Window, revision: int, actor: Actor, now: datetime) -> Window | None:
    """Confirm a window that is open again, of which this revision was confirmed. What has changed since then nobody has
    confirmed: where anything has, it stays open, and its end brings that revision back. The window as it is then; None
    where nothing is to be done, for it is so already, has ended otherwise, or another one was opened."""
    clock.lock(connection)
    window = last(connection)
    if window is None or window.opened_at != known.opened_at or window.outcome not in (None, Outcome.CONFIRMED):
        return None
    if window.outcome is not None:
        return window
    if clock.revision(connection) == revision:
        return _end(connection, window, Outcome.CONFIRMED, revision, actor, now)
    narrowed = replace(window, base=revision, paused=())
    if narrowed == window:
        return None
    write(connection, narrowed)
    audit.note_other(connection, NARROWED, actor, now, after=_describe(narrowed))
    return narrowed


def abandon(
    connection: Connection,
    actor: Actor,
    now: datetime,
    judge: Judge | None = None,
    opened_at: datetime | None = None,
    base: int | None = None,
) -> Window:
    """End the window (with `opened_at`: that of this time), and undo what was changed in it; with `base`, no more than
    what has changed since that revision. For who is judged, what was forced and is in force otherwise stays so. Raises
    NoWindow, TooMuchAtOnce, and what `judge` raises."""
    clock.lock(connection)
    window = get_open(connection, opened_at)
    window = window if base is None else replace(window, base=base)
    weight.check(connection, window.base, actor)
    then = history.past(connection, window.base)
    held = hold_forced(connection, then, now) if judge else {}
    revision = bring_back(connection, window.base, then | held, actor, now, judge)
    return _end(connection, window, Outcome.ABANDONED, revision, actor, now, sorted(held))


def expire(connection: Connection, opened_at: datetime, actor: Actor, now: datetime) -> Window | None:
    """End the window of that time and undo what was changed in it, unless it has ended already: then None.

    Nobody decides that, so of rules that were forced none comes back into force for who could not force it; one that
    is forced and in force otherwise stays so. Of several guards that come at once, one does it.
    """
    clock.lock(connection)
    window = last(connection)
    if window is None or window.outcome is not None or window.opened_at != opened_at:
        return None
    then = history.past(connection, window.base)
    withheld = {} if window.forces else withhold_forced(connection, then, now)
    revision = bring_back(connection, window.base, then | withheld, actor, now)
    if withheld:
        log.warning("%s, who has opened the window of confirmation, may not force; so what was forced, and has changed "
                    "in it, does not come back as it was: %s.",
                    window.actor, ", ".join(f"rule {rule_id}" for rule_id in withheld))  # fmt: skip
    return _end(connection, window, Outcome.EXPIRED, revision, actor, now, sorted(withheld))


def write(connection: Connection, window: Window) -> None:
    """Keep a window, in place of the one before."""
    row = {
        "id": _ONLY,
        "base": window.base,
        "opened_at": window.opened_at,
        "seconds": window.seconds,
        "actor": window.actor,
        "paused": [*window.paused, {_FORCES: window.forces}],
        "outcome": window.outcome and window.outcome.value,
        "ended_at": window.ended_at,
        "revision": window.revision,
    }
    connection.execute(delete(windows))
    written = connection.execute(insert(windows).values(row).returning(windows.c.id)).all()
    check_kept(windows.name, 1, len(written))


def _spare_others(connection: Connection, base: int, newest: int, holder: str) -> None:
    """Raise ConcernsOthers if going back to a revision takes anything from another gateway than the holder."""
    known = {each.host for each in hosts.statuses(connection)}
    found: set[str] = set()
    for each in history.differences(connection, base, newest):
        for rule in filter(None, (each.before, each.after)):
            found |= {*rule.hosts} or known
    others = sorted(found - {holder})
    if others:
        raise ConcernsOthers(
            f"The kernel here holds revision {base}, which would come back unless it is confirmed; but what has "
            f"changed since concerns {', '.join(others)}, too, and would be undone there as well. Run `netlimit apply` "
            "without --confirm, or start the controller, so that the kernel holds what is wanted now (`netlimit plan` "
            "shows what that changes); then open a window for what comes next."
        )


def _end(
    connection: Connection,
    window: Window,
    outcome: Outcome,
    revision: int,
    actor: Actor,
    now: datetime,
    withheld: Sequence[int] = (),
) -> Window:
    ended = replace(window, outcome=outcome, ended_at=now, revision=revision)
    write(connection, ended)
    told = {"withheld": list(withheld)} if withheld else {}
    audit.note_other(connection, ENDED[outcome], actor, now, after={**_describe(window), **told})
    if outcome is not Outcome.CONFIRMED:
        _pause(connection, window, actor, now)
    return ended


def _pause(connection: Connection, window: Window, actor: Actor, now: datetime) -> None:
    """Pause the gateways again whose pause it has ended. That is none of any teardown before: nobody is to take it for
    one that has ended."""
    for host in window.paused:
        hosts.pause(connection, host, True)
        audit.note_pause(connection, host, actor, audit.make_pause(now))


def _describe(window: Window) -> Mapping[str, Any]:
    return {"base": window.base, "seconds": window.seconds, "opened_by": window.actor, "paused": list(window.paused)}


def _clock_time(moment: datetime) -> str:
    return f"{moment:%H:%M:%S} UTC"
