"""`netlimit`, the command."""

from __future__ import annotations

import atexit
import gc
import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from netlimit.cli import (
    backup,
    checkup,
    daemons,
    database,
    explaining,
    gateways,
    host,
    limiter,
    limits,
    preparing,
    rules,
    serve,
    standing,
    tokens,
    top,
    undo,
)
from netlimit.cli.errors import Sentences
from netlimit.cli.guard import guard
from netlimit.kernel.tools import find_in_system_directories

app = typer.Typer(
    cls=Sentences,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    # Escapes in what others have written are shown, not left out unseen, as click does without `color`.
    context_settings={"help_option_names": ["-h", "--help"], "color": True},
)


# At its end Python looks for garbage in all that was imported: a fourth of a short command's time (measured).
atexit.register(gc.freeze)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"netlimit {version('netlimit')}")
        except PackageNotFoundError:
            typer.echo("netlimit, not installed")
        raise typer.Exit


@app.callback()
def netlimit(
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings, as TOML.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Limit who may send or receive how much, by the kernel of a Linux gateway."""
    find_in_system_directories()
    # Commands answer in their own words. What runs for long replaces this by a log (`log_to_stderr`).
    logging.basicConfig(handlers=[logging.NullHandler()])


app.command()(serve.serve)
app.command()(daemons.controller)
app.command()(daemons.api)
app.command()(limiter.limiter)
app.command()(guard)
app.command()(preparing.prepare)
app.add_typer(rules.app, name="rule")
app.add_typer(limits.app, name="limits")
app.command()(host.plan)
app.command()(host.apply)
app.command()(undo.confirm)
app.command()(undo.rollback)
app.command()(host.teardown)
app.command()(undo.revisions)
app.command()(undo.diff)
app.command()(standing.status)
app.command()(standing.counters)
app.command()(top.top)
app.command()(explaining.explain)
app.command()(checkup.doctor)
app.add_typer(gateways.app, name="gateway")
app.add_typer(tokens.app, name="token")
app.command()(backup.backup)
app.command()(backup.restore)
app.add_typer(database.app, name="db")

if __name__ == "__main__":
    app()
