"""Commands that act on this host's kernel, as root: plan, apply, teardown."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from netlimit import namesakes
from netlimit.cli.actor import local_actor
from netlimit.cli.controllers import TEARDOWN, refuse_namesake, refuse_stranger
from netlimit.cli.disks import Hanging, try_disk
from netlimit.cli.errors import CommandError, complain
from netlimit.cli.last_settings import keep_settings, read_settings_or_last, read_settings_to_limit, word_recalled
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import (
    make_controller,
    make_kernel,
    note_resumed,
    open_store,
    pause_copy,
    read_settings,
    refuse_another,
    renew_copy,
    tell_pause,
)
from netlimit.cli.pausing import put_off, wait_until_told
from netlimit.cli.printing import JSON, count, say
from netlimit.cli.roots import taking_over
from netlimit.cli.taking import take_database
from netlimit.cli.undo import confirming, parse_length, see_window
from netlimit.errors import KernelError, SettingsError, Slow, StoreError
from netlimit.records import State, Window
from netlimit.settings import Backend, Settings

if TYPE_CHECKING:
    from netlimit.kernel.base import Kernel
    from netlimit.plan import Plan
    from netlimit.store import Store
    from netlimit.tree import SavedRoot

log = logging.getLogger(__name__)

MOST_TOLD = 10
"""Of so many rules in error `apply` tells the reason."""
CHANGES = "every change of rules in it"
"""What a window undoes that was opened by somebody else."""
LEFT = "Limits that are left in the kernel go on limiting: run `netlimit teardown` again."
"""What is said of a teardown that the kernel refuses."""
LEFT_OVER = 3
"""The exit status of a teardown that has taken the limits out, but not all that it should.
scripts/uninstall goes by it."""
DATABASE_SECONDS = 10.0
"""How long a teardown has a database work, before it goes on without."""
WAITS = (
    "Going on; the controller that runs keeps its hands off, and the database is told once it answers. Where the copy "
    "of the applied rules cannot be told now, who starts this machine, or a controller, before brings the limits back."
)
DEAF = "Going on; but a controller that runs may not hear of it, so stop it first."
TakeOver = Annotated[
    list[str] | None,
    typer.Option(
        "--take-over",
        metavar="DEVICE",
        help="Shape on this device though somebody else has put a qdisc there; teardown puts it back. May be repeated.",
    ),
]


def plan(context: typer.Context, json: bool = JSON) -> None:
    """Show what would change, in words and as steps of the kernel. Nothing is changed."""
    settings = read_settings_to_limit(context)
    kernel = make_kernel(settings)
    with open_store(settings) as store:
        steps, words = make_controller(settings, store, kernel).account()
    document = {"words": words, "text": str(steps), "steps": list(steps.lines())}
    say(json, document, "\n".join([*words, *([""] if words else []), str(steps)]))


Last = Annotated[
    bool,
    typer.Option("--last", help="What was applied last, from this host's own copy: at boot, without the database."),
]


Confirm = Annotated[
    str | None,
    typer.Option(
        "--confirm",
        metavar="60s",
        help="Undo this, and every change of rules until then, unless `netlimit confirm` comes in time.",
    ),
]


Database = Annotated[
    bool,
    typer.Option(
        "--take-database",
        help="Go by this database from now on, though it is another than the one whose rules are in force here, or an "
        "older state of it.",
    ),
]


def apply(
    context: typer.Context,
    take_over: TakeOver = None,
    last: Last = False,
    database: Database = False,
    confirm: Confirm = None,
    json: bool = JSON,
) -> None:
    """Bring the kernel to what the rules say, once. This ends the pause of a teardown."""
    if last:
        if take_over or confirm or database:
            raise typer.BadParameter("What was applied last is only put back; leave out the other options, or --last.")
        return apply_last(*read_settings_or_last(context), json)
    settings = read_settings_to_limit(context)
    kernel = make_kernel(settings)
    if take_over and confirm:
        raise typer.BadParameter(
            "The end of a window of confirmation puts no qdisc back. Take over without --confirm; `netlimit teardown` "
            "puts it back."
        )
    if database and confirm:
        raise typer.BadParameter(
            "A window of confirmation brings no other database back. Take the database without --confirm."
        )
    with open_store(settings) as store, ExitStack() as window:
        wait_until_told(kernel)
        refuse_stranger("apply", settings, kernel, store)
        seconds = parse_length(confirm) if confirm else None
        if database:
            take_database(settings, store, kernel)
        refuse_another(settings, store)
        actor = local_actor(settings)
        known = tell_pause(settings, store, actor)
        controller = make_controller(settings, store, kernel)
        confirming_it = confirming(context, settings, store, kernel, controller, seconds) if seconds else nullcontext()
        opened = window.enter_context(confirming_it)
        with taking_over(take_over or (), kernel, store, settings.host, actor):
            steps = controller.plan()
            if opened is None:
                ended = store.last_pause(settings.host)
                store.pause(settings.host, False, actor, for_good=True)
                note_resumed(settings, (known, ended))
            else:
                store.resume_within(opened, settings.host, actor, store.now())
            controller.sync()
        seen = see_window(settings, store, kernel, controller, opened) if opened else None
        done = {"host": settings.host, "steps": len(steps.steps)}
        store.note("apply", actor, datetime.now(UTC), after=done)
        enforced, failed = controller.standing()
        reasons = _find_reasons(store, settings.host)
        warnings = store.warn_of_window(CHANGES) if seconds is None else []
        renew_copy(settings, store, kernel)
        # Else the controller goes by its own; and who only has a look round has written nothing that a boot would miss.
        if not kernel.controlled() and settings.backend is not Backend.FAKE:
            keep_settings(settings)
    summary = f"{count(enforced, 'rule')} in force here" + (f", {failed} in error." if failed else ".")
    if seen is not None:
        summary += f"\n{_word_window(*seen)}"
    document = {"steps": list(steps.lines()), "in_force": enforced, "errors": failed, "confirm_within": seconds}
    document |= {"warnings": warnings, **({"opened_at": opened.opened_at.isoformat()} if opened else {})}
    say(json, document, "\n".join([*([str(steps)] if steps else []), *reasons, summary, *warnings]))
    return None


def _word_window(window: Window, left: float) -> str:
    if window.outcome is not None:
        return "The window of confirmation was confirmed meanwhile."
    said = f"Unless `netlimit confirm` comes within {count(window.seconds, 'second')}, all of it is undone."
    return said if left > window.seconds / 2 else f"{said} Of these {left:.0f} are left."


def _find_reasons(store: Store, host: str) -> list[str]:
    """Why rules cannot be enforced here, a line for each of the first."""
    errors = [each for _, each in sorted(store.marked(host).items()) if each.state is State.ERROR]
    return [f"Rule {each.rule_id} is in error: {each.message}" for each in errors[:MOST_TOLD]]


def apply_last(settings: Settings, fault: SettingsError | None, json: bool) -> None:
    """Bring the kernel to what was applied last, by settings that may be the last good ones, because of a `fault`.
    Where a controller runs, it does that by itself. It logs, as all that systemd starts does. Raises StoreError where
    the copy cannot be opened."""
    from netlimit.store import open_replica

    kernel = make_kernel(settings)
    log_to_stderr("apply", settings)
    if fault is not None:
        log.error("%s", word_recalled(fault, settings))
    if kernel.controlled():
        return say(json, {"steps": [], "revision": None}, "A controller runs here, and keeps the rules by itself.")
    with closing(open_replica(settings.state, settings.host)) as replica:
        revision = replica.revision()
        if not revision:
            return say(json, {"steps": [], "revision": None}, "Nothing was applied here yet that could come back.")
        # At boot the machine may not have its name yet, by which rules and the pause are kept.
        settings = settings.model_copy(update={"host": replica.owner or settings.host})
        if kernel.is_put_off() or replica.paused(settings.host):
            return say(json, {"steps": [], "revision": revision}, "Paused by teardown, until `netlimit apply`.")
        controller = make_controller(settings, replica, kernel)
        steps = controller.plan()
        controller.sync()
        enforced, failed = controller.standing()
    summary = f"Revision {revision} is back: {count(enforced, 'rule')} in force here"
    summary += f", {failed} in error." if failed else "."
    say(json, {"steps": list(steps.lines()), "revision": revision}, f"{steps}\n{summary}" if steps else summary)
    return None


def teardown(context: typer.Context, json: bool = JSON) -> None:
    """Take everything of netlimit's out of the kernel. The controller keeps off until `netlimit apply`. Ends with
    status 3 where the limits are out, but something is left to do; with 1 where they are not."""
    from netlimit.kernel.base import observe
    from netlimit.teardown import tear_down

    settings = read_settings(context)
    kernel = make_kernel(settings)
    saved, warnings, is_told = _pause(settings, kernel)
    if saved is None:
        _warn_of_loss(observe(kernel).trees)
    try:
        steps, left = tear_down(kernel, saved)
    except KernelError as error:
        raise CommandError(f"{str(error).rstrip('.')}. {LEFT}") from None
    if left:
        raise CommandError(f"The kernel still holds some of netlimit's objects; removing them would be:\n{left}")
    if saved:
        _forget(settings, saved)
    held, copied = _find_held(kernel), _find_copied_chains(kernel)
    text = _word_teardown(steps, held)
    document = {"steps": list(steps.lines()), "left": held, "warnings": [*warnings, *copied]}
    say(json, document, "\n".join([text, *warnings, *copied]))
    if not is_told or held or copied:
        raise typer.Exit(LEFT_OVER)


def _word_teardown(steps: Plan, held: list[str]) -> str:
    if held:
        done = [str(steps)] if steps else []
        return "\n".join([*done, "Not all is gone, for others use it:", *held, "Then run `netlimit teardown` again."])
    return f"{steps}\nThe kernel holds nothing of netlimit's any more." if steps else "There was nothing to remove."


def _find_held(kernel: Kernel) -> list[str]:
    """What had to stay. Where nobody can tell by whom it is used, that is told all the same."""
    try:
        return list(kernel.held())
    except KernelError as error:
        return [*kernel.leftovers(), f"By whom it is used is not known: {error}"]


def _pause(settings: Settings, kernel: Kernel) -> tuple[Mapping[str, SavedRoot] | None, list[str], bool]:
    """Stop the controller; returns the qdiscs to put back, None if nobody knows, what to tell, and whether all who
    could bring the limits back know, or will. A database that is lost must not keep anybody from taking the limits
    away."""
    from netlimit.store import make_pause

    try:
        with _open_briefly(settings) as store:
            refuse_stranger(TEARDOWN, settings, kernel, store)
            _warn_of_former_name(settings)
            refuse_namesake(settings, store)
            store.pause(settings.host, True, local_actor(settings))
            pause = store.last_pause(settings.host)
            fault = pause_copy(settings, pause) if kernel.controlled() else renew_copy(settings, store, kernel)
            is_told = fault is None or not _complain_of_copy(settings, fault)
            warnings = [*store.warn_of_window(CHANGES), *_find_namesakes(settings, store)]
            return store.saved_roots(settings.host), warnings, is_told
    except StoreError as error:
        complain(error)
        waits = put_off(settings)
        complain(CommandError(WAITS if waits else DEAF))
        # Else the guard, or who starts (the machine, a controller), puts back what is in it.
        fault = pause_copy(settings, make_pause(datetime.now(UTC)))
        is_told = fault is None or _hangs(fault) or not _complain_of_copy(settings, fault)
        return None, [], is_told


def _find_copied_chains(kernel: Kernel) -> list[str]:
    """Limits that somebody else has loaded, which go on after a teardown. It only advises: whatever hinders the look,
    that is left to `netlimit doctor`."""
    from netlimit.conflicts import COPIED_CHAINS, find_conflicts

    with suppress(Exception):
        found = find_conflicts(kernel.survey(thorough=False))
        return [
            f"{each} Then run `netlimit teardown` again: it removes sets that the copy has kept."
            for each in found
            if each.name == COPIED_CHAINS
        ]
    return []


def _find_namesakes(settings: Settings, store: Store) -> list[str]:
    """What the controller says of another gateway of its name, from which this teardown takes nothing out."""
    reports = (each for each in store.hosts() if each.host == settings.host)
    return [note for each in reports for note in each.notes if note.startswith(namesakes.PREFIX)]


def _hangs(fault: StoreError) -> bool:
    """Whether the disk may yet do what it was asked: nobody knows what is on it then."""
    return isinstance(fault, Slow | Hanging)


def _warn_of_former_name(settings: Settings) -> None:
    """A teardown is kept by name, and the gateway may have had another one when the limits were applied."""
    from netlimit.store import read_owner

    owner = read_owner(settings.state)
    if owner not in (None, settings.host):
        complain(
            CommandError(
                f"The limits here were applied by the name {owner}, as the copy of the applied rules tells, and this "
                f"teardown is of {settings.host}. Who starts a controller as {owner} brings them back: if that is "
                f"this gateway, too, run `NETLIMIT_HOST={owner} netlimit teardown`."
            )
        )


def _complain_of_copy(settings: Settings, fault: StoreError) -> bool:
    """Say what a copy that is not told of the pause does; False where there is none."""
    from netlimit.store.replica import FILE

    file = settings.state / FILE
    if not file.is_file():
        return False
    complain(
        CommandError(
            f"{fault} So the copy of the applied rules does not know of the teardown. A boot (`netlimit apply --last`) "
            "brings the limits back, until a controller starts that reaches the database. Once the copy can be "
            f"written, run `netlimit teardown` again, or remove {file}."
        )
    )
    return True


def _warn_of_loss(devices: Iterable[str]) -> None:
    from netlimit.tree import INGRESS_DEVICE

    names = " and ".join(sorted(device for device in devices if device != INGRESS_DEVICE))
    if names:
        complain(
            CommandError(
                f"What others had on {names} before `netlimit apply --take-over` is in the database alone, and cannot "
                "be put back: there will be what the kernel itself puts there."
            )
        )


def _forget(settings: Settings, devices: Iterable[str]) -> None:
    """What others had is there again."""
    with _open_briefly(settings) as store:
        for device in devices:
            store.forget_root(settings.host, device)


@contextmanager
def _open_briefly(settings: Settings) -> Iterator[Store]:
    """The database, for as long as a teardown waits for it. Raises StoreError."""
    with open_store(settings, silence=DATABASE_SECONDS) as store:
        if store.path is not None:
            try_disk(store.path)
        store.allow(DATABASE_SECONDS)
        yield store
