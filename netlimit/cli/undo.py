"""Commands that undo, as root on a gateway: confirm, rollback, revisions, diff; and the window of `netlimit apply`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netlimit.cli.actor import local_actor
from netlimit.cli.errors import CommandError, complain, word
from netlimit.cli.guard import ensure_guard
from netlimit.cli.parts import (
    make_controller,
    make_kernel,
    open_store,
    pause_copy,
    read_settings,
    refuse_another,
    renew_copy,
    tell_pause,
)
from netlimit.cli.printing import JSON, add_row, count, make_table, print_as, print_table, say
from netlimit.cli.privileges import is_root
from netlimit.copying import refuse_window
from netlimit.errors import NetlimitError, StoreError
from netlimit.liveness import is_recent
from netlimit.lockout import Havens
from netlimit.records import Difference, Outcome, Revision, Window
from netlimit.settings import Backend, Settings

if TYPE_CHECKING:
    from netlimit.controller import Controller
    from netlimit.kernel.base import Kernel
    from netlimit.store import Store

APPLIED_SECONDS = 10.0
"""How long a controller is waited for."""
LIVE_SECONDS = 15.0
"""A controller reports every five seconds."""
_LENGTH = re.compile(r"(\d{1,6})(s|m|h|)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_LONGEST = 86400
_WITHOUT = "Run `netlimit apply` without --confirm, or start the controller; then open a window for what comes next."


def confirm(
    context: typer.Context,
    opened_at: Annotated[
        str | None,
        typer.Option(
            "--opened-at",
            metavar="TIME",
            help="Only the window that was opened then, as `netlimit apply --confirm --json` says it.",
        ),
    ] = None,
    json: bool = JSON,
) -> None:
    """Keep what was changed in the open window of confirmation."""
    settings = read_settings(context)
    meant = None if opened_at is None else _read_moment(opened_at)
    with open_store(settings) as store:
        window = store.confirm(local_actor(settings), store.now(), meant)
        opened = f"{window.actor} had opened the window at {window.opened_at:%H:%M:%S} UTC."
        said = f"Confirmed: the rules stay as they are, at revision {window.revision}. {opened}"
        say(json, describe_window(window), said)
        if is_root():
            _renew_copy(settings, store)


def _renew_copy(settings: Settings, store: Store) -> None:
    """It is confirmed whether this can be done or not."""
    try:
        renew_copy(settings, store, make_kernel(settings))
    except (NetlimitError, OSError) as error:
        complain(CommandError(f"{word(error)} The copy of the applied rules stays as it was."))


def rollback(
    context: typer.Context,
    revision: Annotated[
        int | None,
        typer.Argument(metavar="REVISION", help="Which; without it, what the open window of confirmation began with."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Even if it brings back rules that were forced, would hit who is safe, or close a gateway.",
        ),
    ] = False,
    json: bool = JSON,
) -> None:
    """Bring back the rules of a revision. Without one, end the open window of confirmation and undo what was
    changed in it: that brings back what was forced, too."""
    settings = read_settings(context)
    kernel = make_kernel(settings)
    with open_store(settings) as store:
        refuse_another(settings, store)
        before = store.revision()
        wanted, after = _go_back(store, settings, revision, force)
        warnings = store.warn_of_window("this change")
        applied = _bring_kernel(settings, store, kernel, after)
    changed = f"Revision {wanted} is back, as revision {after}" if after != before else f"Revision {wanted} is there"
    document = {"returned_to": wanted, "revision": after, "applied": applied, "warnings": warnings}
    say(json, document, " ".join([f"{changed}: {_word_applied(applied)}", *warnings]))


def revisions(
    context: typer.Context,
    most: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many to show.")] = 20,
    json: bool = JSON,
) -> None:
    """Show the latest changes of rules that can be undone."""
    with open_store(read_settings(context)) as store:
        listed = store.revisions(most)
    print_as(json, [describe_revision(each) for each in listed], _show_revisions)


def diff(
    context: typer.Context,
    one: Annotated[int, typer.Argument(metavar="REVISION", help="A revision.")],
    other: Annotated[
        int | None, typer.Argument(metavar="OTHER", help="Another one; the present one by default.")
    ] = None,
    json: bool = JSON,
) -> None:
    """Show how the rules of two revisions differ."""
    with open_store(read_settings(context)) as store:
        other = store.revision() if other is None else other
        found = store.difference(one, other)
    lines = [line for each in found for line in write_difference(each)] or ["The rules are the same."]
    say(json, [describe_difference(each) for each in found], "\n".join(lines))


def parse_length(text: str) -> int:
    """Seconds, of a text such as "60s" or "5m". Raises BadParameter."""
    match = _LENGTH.fullmatch(text.strip())
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= seconds <= _LONGEST:
        raise typer.BadParameter(
            f'{text!r} is no length of a window of confirmation; write "60s", "5m" or "1h", a day at most.'
        )
    return seconds


@contextmanager
def confirming(
    context: typer.Context, settings: Settings, store: Store, kernel: Kernel, controller: Controller, seconds: int
) -> Iterator[Window]:
    """Open a window of confirmation, with a guard on this host, for what the block does by this controller.

    Where no controller runs, what is in the kernel may be older than the rules: then that comes back. What was not in
    the kernel at all is taken out again. If the block fails before anything is written, nothing that was there when the
    window was opened is undone.
    """
    window = _open_window(settings, store, kernel, seconds)
    try:
        if settings.host in window.paused:
            _pause_copy(settings)
        ensure_guard(settings, context.find_root().params.get("config"))
        yield window
    except BaseException:
        _abandon(settings, store, window, controller.has_written)
        raise


def see_window(
    settings: Settings, store: Store, kernel: Kernel, controller: Controller, window: Window
) -> tuple[Window, float]:
    """The window after the pass that was made in it, and the seconds that it has left. One that has ended meanwhile has
    undone nothing of what the pass wrote later: that is done here. Raises CommandError then."""
    last, left = store.window_left()
    if last is not None and last.opened_at == window.opened_at and last.outcome in (None, Outcome.CONFIRMED):
        return last, left
    from netlimit.teardown import restore_nothing

    def is_torn_down() -> bool:  # asked again once nobody else writes: another `apply` may have ended the pause
        return kernel.is_put_off() or store.paused(settings.host)

    if is_torn_down():
        restore_nothing(store, kernel, settings.host, is_torn_down)
    else:
        controller.sync()
    raise CommandError(
        f"The window of confirmation, of {count(window.seconds, 'second')}, has ended before this was done: what was "
        "changed in it is undone, and the kernel holds what the rules are without it. Open a longer one."
    )


def describe_window(window: Window) -> dict[str, Any]:
    """A window as JSON has it."""
    return {
        "base": window.base,
        "opened_at": window.opened_at.isoformat(),
        "deadline": window.deadline.isoformat(),
        "seconds": window.seconds,
        "actor": window.actor,
        "outcome": window.outcome,
        "revision": window.revision,
    }


def describe_revision(revision: Revision) -> dict[str, Any]:
    """A revision as JSON has it."""
    return asdict(revision) | {"at": revision.at.isoformat()}


def describe_difference(difference: Difference) -> dict[str, Any]:
    """A rule that differs as JSON has it."""
    from netlimit.store import changed_fields

    return {
        "rule": difference.rule_id,
        "kind": difference.kind,
        "fields": {field: {"before": old, "after": new} for field, (old, new) in changed_fields(difference).items()},
    }


def write_difference(difference: Difference) -> Iterator[str]:
    """The same as lines to read."""
    from netlimit.store import changed_fields

    rule = difference.after or difference.before
    name = f" ({rule.name})" if rule is not None and rule.name else ""
    sign = {"added": "+", "removed": "-", "changed": "~"}[difference.kind]
    yield f"{sign} rule {difference.rule_id}{name}: {rule}"
    if difference.kind == "changed":
        for field, (old, new) in changed_fields(difference).items():
            yield f"    {field}: {_write_value(old)} -> {_write_value(new)}"


def _open_window(settings: Settings, store: Store, kernel: Kernel, seconds: int) -> Window:
    """Open a window that brings back what the kernel holds now. Raises CommandError where nobody knows what that is,
    or a copy may lack it, WindowOpen, ConcernsOthers."""
    from netlimit.store import NoSuchRevision

    refusal = refuse_window(store.hosts())
    if refusal is not None:
        raise CommandError(refusal)
    base, paused = _find_base(settings, store, kernel)
    holder = None if base is None else settings.host
    try:
        return store.open_window(seconds, local_actor(settings), store.now(), base, paused, forces=True, holder=holder)
    except NoSuchRevision as error:
        raise CommandError(f"What the kernel holds could not come back. {error} {_WITHOUT}") from None


def _find_base(settings: Settings, store: Store, kernel: Kernel) -> tuple[int | None, Sequence[str]]:
    """What comes back unless it is confirmed: a revision (None: the present one), and this host if it is torn down.
    Raises CommandError where nobody knows what the kernel holds."""
    from netlimit.kernel.base import observe

    paused = (settings.host,) if store.paused(settings.host) else ()
    if _is_controlled(settings, store, kernel):
        return None, paused
    structure = observe(kernel).structure
    if not structure.sets and not structure.chains:
        return None, (settings.host,)
    applied = next((each.applied_revision for each in store.hosts() if each.host == settings.host), None)
    if paused:  # what is there is half of a teardown, and nobody knows which half
        return None, paused
    revision = store.revision()
    if applied is None or applied > revision or (revision and not applied):
        raise CommandError(
            f"Of which revision the kernel holds the rules is not known, so they could not come back. {_WITHOUT}"
        )
    return None if applied == revision else applied, paused


def _pause_copy(settings: Settings) -> None:
    """A machine that starts anew begins with nothing, as it was, until the window is confirmed: so the copy is told
    before anything is in force, and whoever brings it up afterwards leaves it so. Raises CommandError."""
    fault = pause_copy(settings, None)
    if fault is not None:
        raise CommandError(
            f"{fault} So a boot (`netlimit apply --last`) would put in what nobody has confirmed. Make room on that "
            "disk, or run `netlimit apply` without --confirm."
        )


def _abandon(settings: Settings, store: Store, window: Window, written: bool) -> None:
    """What could not be done is not left half done; somebody else's window is left alone. The guard sees to the
    kernel, unless nothing was written there."""
    from netlimit.store import NoWindow

    try:
        base = None if written else window.newest
        store.abandon(local_actor(settings), store.now(), opened_at=window.opened_at, base=base)
    except NoWindow:  # it may have ended by itself
        return
    except StoreError as error:
        complain(error)
        return
    did = "What was written to the kernel is undone" if written else "Nothing was written to the kernel"
    paused = ", and this gateway is paused until `netlimit apply`" if settings.host in window.paused else ""
    complain(CommandError(f"{did}; the window of confirmation is given up{paused}."))


def _go_back(store: Store, settings: Settings, revision: int | None, forces: bool) -> tuple[int, int]:
    """Roll back; which revision was meant, and which it is now."""
    from netlimit import judgement
    from netlimit.store import NoWindow

    actor, now = local_actor(settings), store.now()
    if revision is not None:
        havens = Havens(store.hosts(), now)
        judge = judgement.force(havens, now, actor.name) if forces else judgement.refuse(havens, now)
        return revision, store.rollback(revision, actor, now, judge)
    try:
        window = store.abandon(actor, store.now())
    except NoWindow as error:
        raise typer.BadParameter(f"{error} Say which revision: `netlimit revisions` lists them.") from None
    assert window.revision is not None
    return window.base, window.revision


def _bring_kernel(settings: Settings, store: Store, kernel: Kernel, revision: int) -> str:
    """Have the kernel follow: by the controller, or here where none runs; what has become of it."""
    tell_pause(settings, store, local_actor(settings))
    if store.paused(settings.host):
        return "paused"
    if not _is_controlled(settings, store, kernel):
        make_controller(settings, store, kernel).sync()
        renew_copy(settings, store, kernel)
        return "applied"
    end = time.monotonic() + APPLIED_SECONDS
    while time.monotonic() < end:
        if any(each.host == settings.host and each.applied_revision >= revision for each in store.hosts()):
            return "applied"
        time.sleep(0.02)
    return "pending"


def _is_controlled(settings: Settings, store: Store, kernel: Kernel) -> bool:
    """Whether a controller runs here; of one with a kernel in memory only the database tells."""
    if settings.backend is not Backend.FAKE:
        return kernel.controlled()
    live = timedelta(seconds=LIVE_SECONDS)
    return any(each.host == settings.host and is_recent(each.silence, live) for each in store.hosts())


def _word_applied(applied: str) -> str:
    return {
        "applied": "the kernel holds it.",
        "paused": "this host is paused by teardown, until `netlimit apply`.",
        "pending": "the controller has not applied it yet; see `netlimit status`.",
    }[applied]


def _read_moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise typer.BadParameter(f"{text!r} is no time with its zone, such as 2030-05-06T07:08:09.123456+00:00.")
    return moment.astimezone(UTC)


def _show_revisions(listed: Sequence[dict[str, Any]]) -> None:
    table = make_table("REVISION", "AT", "ACTOR", "CHANGE", right=("REVISION",))
    for each in listed:
        at = datetime.fromisoformat(each["at"]).strftime("%Y-%m-%d %H:%M:%S")
        add_row(table, each["revision"], at, each["actor"], _word_change(each))
    print_table(table)


def _word_change(revision: dict[str, Any]) -> str:
    rules = count(revision["rules"], "rule")
    if revision["action"] == "rollback":
        return f"rollback to {revision['returned_to']}, {rules}"
    return f"{revision['action']} {rules}"


def _write_value(value: object) -> str:
    return "-" if value is None else str(value)
