"""What `netlimit doctor` finds: what this host can do, and what gets in the way of limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from netlimit import copying, crowding, forgotten, namesakes, skew, unforced
from netlimit.cli.asking import PLAIN, ask
from netlimit.cli.database import find_file
from netlimit.cli.last_settings import load_settings_to_limit, recall_for_root
from netlimit.cli.listeners import StrangerError, watch
from netlimit.cli.parts import make_kernel, open_store
from netlimit.cli.printing import add_row, make_table, print_table, say
from netlimit.cli.privileges import USER, find_keepers, is_root
from netlimit.cli.readers import find_unit_users, find_unread, word_unusable
from netlimit.cli.tls import trust
from netlimit.conflicts import Finding, Severity, find_conflicts, is_serious
from netlimit.errors import NetlimitError, SettingsError, say_fault
from netlimit.faults import ServiceReport, find_faults
from netlimit.marks import choose
from netlimit.memory import Demand
from netlimit.numbers import find_mark_bits
from netlimit.plain import read_text
from netlimit.records import DISPENSABLE, HostStatus, State
from netlimit.safety import CLIENT, SESSION
from netlimit.settings import Backend, Settings
from netlimit.settings import find_file as find_settings_file
from netlimit.teardown import find_left
from netlimit.tunnels import follow_on

if TYPE_CHECKING:
    from netlimit.kernel.base import HostFacts, Kernel

MARKS_SECONDS = 60.0
"""How long a look for those who use packet marks may take: where nftables is large."""
API_SECONDS = 3.0
"""How long the API may take to say that it is there."""

MEMINFO = Path("/proc/meminfo")


def look_at_settings(context: typer.Context) -> tuple[Settings, list[Finding]]:
    """The settings, and what is wrong with their file for those who start next: for root, who is to mend it, with one
    that cannot be used the settings that were good last. Raises SettingsError where there are none."""
    config: Path | None = context.find_root().params.get("config")
    file = find_settings_file(config)
    found = [*find_unread(file, find_unit_users())] if is_root() else []
    try:
        return load_settings_to_limit(config), found
    except SettingsError as fault:
        if config is not None or fault.file is None or not is_root():
            raise
        return recall_for_root(fault), [*found, word_unusable(fault)]


def examine(settings: Settings, json: bool, found_before: Iterable[Finding] = ()) -> None:
    """Tell it, with what was found before. Raises typer.Exit if something is found that keeps rules from holding."""
    kernel = make_kernel(settings)
    facts = _tell_marks(kernel.probe(), kernel, settings)
    found = [
        *found_before,
        *(() if settings.backend is Backend.L7 else _find_missing(facts)),  # it is not to do anything
        *find_faults(_survey_service(settings, kernel)),
        *find_conflicts(kernel.survey()),
    ]
    found.sort(key=lambda finding: list(Severity).index(finding.severity))
    if json:
        document = {"capabilities": facts.capabilities, "hz": facts.hz, "notes": facts.notes}
        say(True, document | {"findings": [asdict(finding) for finding in found]}, "")
    else:
        _show_capabilities(facts)
        _show_findings(found)
    if any(map(is_serious, found)):
        raise typer.Exit(1)


def _tell_marks(facts: HostFacts, kernel: Kernel, settings: Settings) -> HostFacts:
    """With what the packet marks of others leave: those bits that are in force, if the database tells."""
    kept = None
    if (file := find_file(settings.database_url)) is None or file.exists():
        with suppress(NetlimitError), open_store(settings) as store:
            kept = find_mark_bits(store.numbering(settings.host))
    choice = choose(kernel.marks(MARKS_SECONDS), settings.mark_mask, kept)
    told = {"marks": choice.problem, "reject marks": next(iter(choice.reject.values()), None)}
    bits = f"Of the packet mark, netlimit uses the bits {choice.mask:#010x}."
    return facts._replace(capabilities={**facts.capabilities, **told}, notes=(*facts.notes, bits, *choice.notes))


_SELDOM_NEEDED = ("ifb", "reject marks")
"""Only shaping what ends on this host needs the first, which a controller with two capabilities cannot; the second only
limits that reject, in some hooks. Rules in error are a finding of their own."""


def _find_missing(facts: HostFacts) -> Iterable[Finding]:
    for name, reason in facts.capabilities.items():
        if reason and name not in DISPENSABLE:
            severity = Severity.WARNING if name in _SELDOM_NEEDED else Severity.SERIOUS
            yield Finding(f"missing {name}", severity, reason, "Rules that need it are not enforced.")


def _survey_service(settings: Settings, kernel: Kernel) -> ServiceReport:
    """What there is of netlimit on this host."""
    file = find_file(settings.database_url)
    unreached, stranger = _ask_api(settings)
    report = ServiceReport(
        settings.host,
        listen=settings.listen.host,
        encrypted=settings.tls_cert is not None,
        memory=_read_memory(),
        eviction=_ask_counters(settings.counters_url),
        unreached=unreached,
        stranger=stranger,
        controlled=kernel.controlled(),
        database=file,
        mode=file.stat().st_mode & 0o7777 if file and file.exists() else 0,
    )
    try:
        with open_store(settings) as store:
            status = next((each for each in store.hosts() if each.host == settings.host), None)
            marked = store.marked(settings.host)
            buckets = Demand(store.sample_meters(datetime.now(UTC)), settings.set_size).estimate(settings.host)
            divided, exposed = store.divided, store.exposure()
    except NetlimitError as error:
        return replace(report, lost=str(error))
    report = _follow_tunnels(report, kernel, status)
    paused = status is not None and status.paused
    return replace(
        report,
        divided=divided,
        exposed=exposed,
        paused=paused,
        held=_find_held(kernel),  # before what is left is counted: that is none of it
        left=_count_left(kernel) if paused else 0,
        silent=status.silence if status else None,
        errors=tuple((number, each.message) for number, each in marked.items() if each.state is State.ERROR),
        trouble=status.last_error if status else None,
        buckets=buckets,
        crowd=_find_note(status, crowding.PREFIX),
        namesake=_find_note(status, namesakes.PREFIX),
        skew=_find_note(status, skew.PREFIX),
        closed=_find_note(status, unforced.PREFIX),
        losses=_find_notes(status, forgotten.PREFIX),
        copy=_find_note(status, copying.PREFIX) or (None if report.controlled else _look_at_copy(settings, status)),
        ssh=_find_notes_on_ssh(status),
    )


def _ask_counters(url: str) -> str | None:
    """Why the limiter's counters may be forgotten, if its Redis says so."""
    if url == "memory://":
        return None
    try:
        from netlimit.l7.redis.policy import find_eviction
        from netlimit.l7.redis.url import read_url
    except ImportError:  # without the package there is no limiter here
        return None
    with suppress(NetlimitError):
        return asyncio.run(find_eviction(read_url(url)))
    return None


def _find_held(kernel: Kernel) -> tuple[str, ...]:
    """What only others still use. It advises: what cannot be read has a finding of its own."""
    with suppress(NetlimitError):
        return kernel.held()
    return ()


def _count_left(kernel: Kernel) -> int | None:
    """How many steps a teardown has left to take; None if the kernel does not tell."""
    try:
        return len(find_left(kernel).steps)
    except NetlimitError:
        return None


def _look_at_copy(settings: Settings, status: HostStatus | None) -> str | None:
    """What the copy lacks where no controller says so, but commands alone apply rules."""
    from netlimit.store import read_owner, read_revision

    owner = read_owner(settings.state)
    if owner not in (None, settings.host):
        return (
            f"{copying.PREFIX} is that of {owner}, and this gateway is called {settings.host} now: a boot brings back "
            f"what {owner} has applied, and whether {owner} is torn down is what counts for it. If it is still the "
            f"same, set NETLIMIT_HOST={owner}."
        )
    applied = status.applied_revision if status is not None else 0
    copied = read_revision(settings.state)
    if not applied or copied == applied:
        return None
    has = "is not there, or cannot be read" if copied is None else f"is of revision {copied}"
    return f"{copying.PREFIX} {has}, and revision {applied} is applied: a boot would bring back something else."


def _follow_tunnels(report: ServiceReport, kernel: Kernel, status: HostStatus | None) -> ServiceReport:
    """With the tunnels by which sessions and clients are reached, and of which too little is known."""
    known = status.safe_reasons if status else {}
    try:
        where = kernel.addresses()
        reached = [*where.peers, *(each for each, why in known.items() if why.text in (SESSION, CLIENT))]
        ports = {*(status.management if status else ()), *(door.port for door in where.doors)}
        found, problem = follow_on(kernel, dict.fromkeys(reached), ports, find_keepers(USER))
    except Exception as error:  # it only advises
        return replace(report, unfollowed=say_fault(error))
    return replace(report, hidden=found.hidden, unfollowed=problem)


def _find_notes_on_ssh(status: HostStatus | None) -> tuple[str, ...]:
    from netlimit.kernel.sessions import UNNAMED, UNPLACED

    return tuple(filter(None, (_find_note(status, start) for start in (UNPLACED, UNNAMED))))


def _find_note(status: HostStatus | None, prefix: str) -> str | None:
    return next(iter(_find_notes(status, prefix)), None)


def _find_notes(status: HostStatus | None, prefix: str) -> tuple[str, ...]:
    return tuple(note for note in (status.notes if status else ()) if note.startswith(prefix))


def _read_memory() -> int | None:
    """Bytes of memory that this host has; None if it does not say."""
    try:
        lines = read_text(MEMINFO).splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _ask_api(settings: Settings) -> tuple[str | None, str | None]:
    """Why the API does not answer, None if it does; and who else has taken its place. No token is needed for that."""
    import httpx

    try:
        with httpx.Client(headers=PLAIN, verify=trust(settings), trust_env=False) as client:
            ask(client, "GET", f"{settings.url}/healthz", API_SECONDS, extensions={**watch(settings)})
    except StrangerError as error:
        return None, str(error)
    except (httpx.HTTPError, httpx.InvalidURL, NetlimitError) as error:
        return f"No API answers at {settings.url} ({error}).", None
    return None, None


def _show_capabilities(facts: HostFacts) -> None:
    table = make_table("CAPABILITY", "HERE", "WHY NOT, AND WHAT WOULD HELP")
    for name, reason in facts.capabilities.items():
        add_row(table, name, _word(name, reason), reason)
    print_table(table)
    for note in facts.notes:
        typer.echo(f"\n{note}")
    missing = [name for name, reason in facts.capabilities.items() if reason and name not in DISPENSABLE]
    typer.echo(f"\nMissing: {', '.join(missing)}." if missing else "\nNothing is missing.")


def _show_findings(found: list[Finding]) -> None:
    shown = [finding for finding in found if not finding.name.startswith("missing ")]  # they stand in the table
    for finding in shown:
        typer.echo(f"\n{finding.severity.upper()}: {finding.name}. {finding}")
    if not any(map(is_serious, found)):
        typer.echo("\nNothing keeps rules from holding.")


def _word(name: str, reason: str | None) -> str:
    if reason is None:
        return "yes"
    return "not needed" if name in DISPENSABLE else "no"
