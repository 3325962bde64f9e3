"""Whether the controller of this host goes by the name and the database that a command goes by. One that does not takes
what the command does for drift, and puts all back."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from netlimit.cli.errors import CommandError, complain
from netlimit.errors import KernelError
from netlimit.kernel.place import find_place
from netlimit.liveness import SILENCE, is_recent
from netlimit.namesakes import reports_from
from netlimit.settings import Settings

if TYPE_CHECKING:
    from netlimit.kernel.base import Kernel
    from netlimit.records import HostStatus
    from netlimit.store import Store

TEARDOWN = "teardown"
REPORT_SECONDS = 8.0
"""How long the first report of a controller that has just started is waited for; it reports every five seconds."""
_LOOK_SECONDS = 0.1


class _Problem(NamedTuple):
    """How the controller differs, and what would help, as the beginning of a sentence; whether its own name is `known`,
    and how long ago it has reported by that (`heard`)."""

    text: str
    known: bool
    heard: timedelta | None = None


def refuse_stranger(command: str, settings: Settings, kernel: Kernel, store: Store) -> None:
    """Raise CommandError where a controller runs here that is known to go by another name than the settings, or that
    has never reported to this database by their name. How long ago it has reported does not matter: one that hangs must
    keep nobody from taking the limits away. Nor must one whose name nobody knows: of that a teardown only warns."""
    began = time.monotonic()
    while (problem := _find_problem(command, settings, kernel, store)) is not None:
        helps = f"{problem.text} or stop the controller first: `systemctl stop netlimit-controller`."
        waited = time.monotonic() - began
        reports_so = is_recent(problem.heard, timedelta(seconds=waited))  # it has not just begun by another name
        if reports_so or waited >= REPORT_SECONDS:
            if problem.known or command != TEARDOWN:
                raise CommandError(helps)
            complain(CommandError(f"{helps} Going on all the same."))
            return
        time.sleep(_LOOK_SECONDS)


def refuse_namesake(settings: Settings, store: Store) -> None:
    """Raise CommandError where a controller that does not run here reports by this name while it is looked: a teardown
    is kept by name, and would take its limits, too."""
    host, place, seen = settings.host, find_place(), None
    while True:
        report = next((each for each in store.hosts() if each.host == host), None)
        if report is None or report.reporter is None or reports_from(place, report.reporter):
            return
        if not is_recent(report.silence, timedelta(seconds=REPORT_SECONDS)):
            return
        seen = seen or report.seen_at
        if report.seen_at != seen:
            raise CommandError(
                f"A controller on another gateway reports by the name {host} to this database: a teardown by that name "
                "would pause it as well, and take its limits out of the kernel when it starts again. To take out those "
                f"of this gateway alone, give it a name of its own: `NETLIMIT_HOST={host}-2 netlimit {TEARDOWN}`, say."
            )
        time.sleep(_LOOK_SECONDS)


def _find_problem(command: str, settings: Settings, kernel: Kernel, store: Store) -> _Problem | None:
    from netlimit.store import read_owner

    if not _is_controlled(kernel):
        return None
    host, owner = settings.host, read_owner(settings.state)
    reports = {each.host: each for each in store.hosts()}
    if owner not in (None, host) and not _is_renamed(reports.get(host), reports.get(owner)):
        former = reports.get(owner)
        return _Problem(
            f"A controller runs here, but as {owner}, not as {host}: it would undo what `netlimit {command}` does. "
            f"{_advise(command, owner, reports.get(host))}",
            True,
            former.silence if former is not None else None,
        )
    if _has_reported(reports.get(host), owner):
        return None
    others = sorted(name for name, each in reports.items() if is_recent(each.silence, SILENCE))
    known = f"(those that report are: {', '.join(others)}) " if others else ""
    return _Problem(
        f"A controller runs here, but none called {host} has ever reported to the database at hand: it goes by another "
        f"name {known}or database, and would undo what `netlimit {command}` does. Set NETLIMIT_HOST and "
        "NETLIMIT_DATABASE_URL to those of the controller,",
        False,
    )


def _advise(command: str, owner: str, report: HostStatus | None) -> str:
    """What would help. Where both report, the copy may be that of a machine from which this one was cloned."""
    if report is not None and is_recent(report.silence, SILENCE):
        return f"If that is this gateway, run `NETLIMIT_HOST={owner} netlimit {command}`; if not,"
    return f"Run `NETLIMIT_HOST={owner} netlimit {command}`,"


def _is_controlled(kernel: Kernel) -> bool:
    """Whether a controller runs here. A kernel that does not tell keeps nobody from going on."""
    try:
        return kernel.controlled()
    except KernelError:
        return False


def _is_renamed(report: HostStatus | None, former: HostStatus | None) -> bool:
    """Whether a controller has reported by the present name since the one in the copy last did: then only the copy has
    not followed."""
    if report is None or report.reporter is None or report.silence is None:
        return False
    silence = former.silence if former is not None else None
    return silence is None or (silence > report.silence and not is_recent(silence, SILENCE))


def _has_reported(report: HostStatus | None, owner: str | None) -> bool:
    """Whether a controller has ever reported by a name, and not only a command in its place."""
    return report is not None and (report.reporter is not None or owner == report.host)
