"""What is wrong with netlimit's own parts on a host, and what to do about it: told from what was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

from netlimit.conflicts import Finding, Severity
from netlimit.liveness import SILENCE, is_recent, say_ahead
from netlimit.memory import MUCH_MEMORY, say_much, show_size
from netlimit.several import say_more
from netlimit.tunnels import Passage

_SHARE = 4
"""Where packets alone can take such a part of a host's memory, it is told."""

_WRITE_COPY = "Make room on the disk of NETLIMIT_STATE_DIRECTORY, and look whether the controller may write there."

_OPEN_MANAGEMENT = (
    "Remove such a rule, or give it a protocol or ports that leave management open. If it is meant, an admin can force "
    "it (`netlimit rule edit ID --enable --force`): then it hits who is safe, too."
)


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """What was found of netlimit itself.

    `listen` is where the API listens (host), `unreached` why it does not answer (None: it does), `stranger` who else
    listens in its place. `database` is the SQLite file with its `mode`, if it is one; `lost` why the database cannot be
    read, `divided` that several servers of it take changes, `exposed` what other users of its server could do, and what
    ends that. `left` are the steps that a teardown, which has `paused` this host, has left to take (None: unknown).
    `held` is what only others still use.
    `controlled` says whether a controller runs here, `silent` how long ago one has reported to this database for this
    `host` (None: never). `errors` are why rules cannot be enforced, by id; `trouble` is what the controller said last,
    `crowd` that there are many kinds of limits, `namesake` that another reports by this name, `skew` that its clock is
    not the database's, `copy` that its copy of the applied rules is behind, `losses` what the database has
    lost, `eviction` that the limiter's Redis throws counters away, `closed` that rules close ports of management and
    nobody has forced them, `ssh` what is not known of SSH here. `buckets` is how many bytes the buckets of limits can
    come to, `memory` how many this host has (None: unknown). `hidden` are the tunnels by which sessions of SSH and
    clients of the API are reached and whose far end is not known, `unfollowed` why they are not known.
    """

    host: str
    listen: str = "127.0.0.1"
    encrypted: bool = False
    unreached: str | None = None
    stranger: str | None = None
    database: Path | None = None
    mode: int = 0
    lost: str | None = None
    divided: str | None = None
    exposed: tuple[str, str] | None = None
    controlled: bool = True
    paused: bool = False
    left: int | None = 0
    held: tuple[str, ...] = ()
    silent: timedelta | None = timedelta(0)
    errors: tuple[tuple[int, str], ...] = ()
    trouble: str | None = None
    crowd: str | None = None
    namesake: str | None = None
    skew: str | None = None
    copy: str | None = None
    losses: tuple[str, ...] = ()
    eviction: str | None = None
    closed: str | None = None
    ssh: tuple[str, ...] = ()
    buckets: int = 0
    memory: int | None = None
    hidden: tuple[Passage, ...] = ()
    unfollowed: str | None = None


def find_faults(report: ServiceReport) -> list[Finding]:
    """Everything that there is to say, the worst first."""
    found = [*_find_controller(report), *_find_database(report), *_find_api(report), *_find_tunnels(report)]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def _find_controller(report: ServiceReport) -> Iterator[Finding]:
    if not report.controlled:
        yield Finding(
            "controller",
            Severity.SERIOUS,
            "No controller runs here: changes of rules do not reach the kernel, and what others break stays broken.",
            "Start it: `systemctl start netlimit-controller`, or `netlimit serve` where there are no units.",
        )
    elif report.lost is None and not is_recent(report.silent, SILENCE):
        yield Finding(
            "controller",
            Severity.SERIOUS,
            f"A controller runs here, but none has reported for {report.host} to this database lately: it may serve "
            f"another database or go by another name, or not reach the database.{_tell_last(report.silent)}",
            "Compare NETLIMIT_DATABASE_URL and NETLIMIT_HOST of both, and read what the controller logs.",
        )
    if report.paused:
        yield _tell_pause(report.left)
    if report.held:
        said, advice = " ".join(report.held), "What has been left then goes with the next change, or teardown."
        yield Finding("used by others", Severity.WARNING, said, advice)
    if report.trouble:
        yield Finding("last error", Severity.SERIOUS, report.trouble, "")
    if report.namesake:
        yield Finding("two of one name", Severity.SERIOUS, report.namesake, "")
    if report.skew:
        yield Finding("clocks apart", Severity.WARNING, report.skew, "")
    for loss in report.losses:
        yield Finding("changes lost by the database", Severity.SERIOUS, loss, "")
    if report.copy:
        yield Finding("copy of the rules", Severity.WARNING, report.copy, _WRITE_COPY)
    if report.eviction:
        yield Finding(
            "counters", Severity.WARNING, report.eviction, "`redis-cli config set maxmemory-policy noeviction`"
        )
    if report.closed:
        yield Finding("closed to management", Severity.WARNING, report.closed, _OPEN_MANAGEMENT)
    yield from (Finding("SSH", Severity.WARNING, note, "") for note in report.ssh)
    if report.crowd:
        yield Finding("kinds of limits", Severity.WARNING, report.crowd, "")
    if report.buckets >= (MUCH_MEMORY if report.memory is None else report.memory // _SHARE):
        has = "" if report.memory is None else f"This host has {show_size(report.memory)} in all. "
        yield Finding("memory for buckets", Severity.WARNING, f"{has}{say_much(report.buckets, 'here')}", "")
    if report.errors:
        number, reason = report.errors[0]
        count = "1 rule is" if len(report.errors) == 1 else f"{len(report.errors)} rules are"
        yield Finding(
            "rules in error",
            Severity.SERIOUS,
            f"{count} not enforced here. Rule {number}: {reason}",
            "See `netlimit rule list`.",
        )


def _tell_pause(left: int | None) -> Finding:
    said = "`netlimit teardown` has taken all limits out of the kernel."
    advice = "`netlimit apply` puts them back."
    if left is None:
        said = "`netlimit teardown` has paused this gateway; whether limits are left in its kernel is not known."
    elif left:
        said = (
            "`netlimit teardown` was ended before it was done: what it has left in the kernel goes on limiting "
            f"({left} steps would take it out)."
        )
        advice = "Run `netlimit teardown` again, or `netlimit apply`, which puts all limits back."
    return Finding("paused", Severity.SERIOUS, said, advice)


def _tell_last(silent: timedelta | None) -> str:
    ahead = say_ahead(silent)
    return f" The last report was at a time{ahead}." if ahead else ""


def _find_database(report: ServiceReport) -> Iterator[Finding]:
    if report.lost is not None:
        yield Finding("database", Severity.SERIOUS, report.lost, "What is in the kernel stays meanwhile.")
    if report.divided is not None:
        yield Finding("two databases", Severity.SERIOUS, report.divided, "")
    if report.exposed is not None:
        what, advice = report.exposed
        yield Finding("others in the database", Severity.WARNING, f"{what} A migration is refused.", advice)
    if report.database is not None and report.mode & 0o007:
        yield Finding(
            "file rights",
            Severity.WARNING,
            f"Everybody on this host may open the database {report.database} (mode {report.mode:04o}).",
            f"chmod o= {report.database}",
        )


def _find_api(report: ServiceReport) -> Iterator[Finding]:
    if report.stranger is not None:
        yield Finding("stranger in the API's place", Severity.SERIOUS, report.stranger, "")
    if report.unreached is not None:
        yield Finding(
            "api",
            Severity.WARNING,
            report.unreached,
            "Limits hold meanwhile. Start it: `systemctl start netlimit-api`, or `netlimit serve` where there are no "
            "units. NETLIMIT_URL says where it is looked for.",
        )
    if not report.encrypted and not _is_loopback(report.listen):
        yield Finding(
            "no encryption",
            Severity.WARNING,
            f"The API listens at {report.listen} without TLS: whoever is on the way can read tokens and use them.",
            "Set NETLIMIT_TLS_CERT and NETLIMIT_TLS_KEY, or listen on 127.0.0.1.",
        )


def _find_tunnels(report: ServiceReport) -> Iterator[Finding]:
    """One finding for each device, with the first that is reached by it."""
    for device in dict.fromkeys(each.device for each in report.hidden):
        reached = [each.reached for each in report.hidden if each.device == device]
        more = say_more(reached)
        yield Finding(
            "tunnel",
            Severity.WARNING,
            f"By {device}, a tunnel of which the outer address of the far end is not known, comes who is safe as an "
            f"SSH session or a client of the API ({reached[0]}{more}): a rule that hits that address cuts him off, and "
            "is not refused.",
            "Put the outer address into NETLIMIT_SAFE, if it is not there yet.",
        )
    if report.unfollowed is not None:
        yield Finding(
            "tunnel",
            Severity.WARNING,
            f"Whether somebody who is safe is reached by a tunnel is not known ({report.unfollowed}).",
            "If so, put the outer address of its far end into NETLIMIT_SAFE.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
