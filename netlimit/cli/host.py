"""Commands that act on this host's kernel, as root: plan, apply, teardown."""

from __future__ import annotations

import typer

from netlimit.cli.errors import CommandError, complain
from netlimit.cli.parts import make_controller, make_kernel, open_store, read_settings
from netlimit.cli.printing import JSON, count, say
from netlimit.errors import StoreError
from netlimit.settings import Settings


def plan(context: typer.Context, json: bool = JSON) -> None:
    """Show the steps from what the kernel holds to what it should hold. Nothing is changed."""
    settings = read_settings(context)
    kernel = make_kernel(settings)
    with open_store(settings) as store:
        steps = make_controller(settings, store, kernel).plan()
    say(json, {"text": str(steps), "steps": list(steps.lines())}, str(steps))


def apply(context: typer.Context, json: bool = JSON) -> None:
    """Bring the kernel to what the rules say, once, and end the pause of a teardown."""
    settings = read_settings(context)
    kernel = make_kernel(settings)
    with open_store(settings) as store:
        controller = make_controller(settings, store, kernel)
        steps = controller.plan()
        store.pause(settings.host, False)
        controller.sync()
        enforced, failed = controller.standing()
    summary = f"{count(enforced, 'rule')} in force here" + (f", {failed} in error." if failed else ".")
    document = {"steps": list(steps.lines()), "in_force": enforced, "errors": failed}
    say(json, document, f"{steps}\n{summary}" if steps else summary)


def teardown(context: typer.Context, json: bool = JSON) -> None:
    """Take everything of netlimit's out of the kernel, and keep the controller off until `netlimit apply`."""
    from netlimit.kernel.base import observe
    from netlimit.plan import diff
    from netlimit.state import State

    settings = read_settings(context)
    kernel = make_kernel(settings)
    _pause(settings)
    with kernel.exclusive():
        steps = diff(State(), observe(kernel))
        for step in steps.steps:
            kernel.apply(step)
        left = diff(State(), observe(kernel))
    if left:
        raise CommandError(f"The kernel still holds some of netlimit's objects; removing them would be:\n{left}")
    text = f"{steps}\nThe kernel holds nothing of netlimit's any more." if steps else "There was nothing to remove."
    say(json, {"steps": list(steps.lines())}, text)


def _pause(settings: Settings) -> None:
    """A database that is lost must not keep anybody from taking the limits away."""
    try:
        with open_store(settings) as store:
            store.pause(settings.host, True)
    except StoreError as error:
        complain(error)
        complain(CommandError("Going on; but a controller that runs will not hear of it, so stop it first."))
