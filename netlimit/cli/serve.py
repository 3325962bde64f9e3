"""`netlimit serve`: controller, API and guard as three processes, watched by this one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess

import typer

from netlimit.cli.daemons import UMASK, check_parts, make_token, run_api, run_controller
from netlimit.cli.database import find_file, share
from netlimit.cli.errors import word
from netlimit.cli.guard import run_guard
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import open_store, read_settings
from netlimit.cli.privileges import USER, end_with_parent, find_user, is_root
from netlimit.errors import NetlimitError
from netlimit.settings import Settings

STOP_SECONDS = 8.0
"""How long the parts may take to end before they are killed; the controller may be, it remembers nothing."""
GUARD_SECONDS = 2.0
"""How long the guard is waited for: it ends at once, unless a window of confirmation is open."""
_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

log = logging.getLogger(__name__)


def serve(
    context: typer.Context,
    api_user: str = typer.Option(USER, "--api-user", help="Whom the API runs as when root starts this."),
) -> None:
    """Run the controller, the API and the guard, until SIGTERM. The rules stay in the kernel."""
    settings = read_settings(context)
    os.umask(UMASK)
    log_to_stderr("serve", settings)
    check_parts(settings, api_user)
    prepare_database(settings, api_user)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    parts = [
        _start("controller", lambda: run_controller(settings, api_user=api_user)),
        _start("api", lambda: run_api(settings, api_user)),
    ]
    guard = _start("guard", lambda: _run_guard(settings))
    ended = _watch([*parts, guard])
    _stop(parts, guard)
    if guard.exitcode is None:
        os._exit(1 if ended else 0)  # Python would wait for the guard
    raise typer.Exit(1 if ended else 0)


def prepare_database(settings: Settings, api_user: str) -> None:
    """Bring the database up to date, with an admin token, and let the API's user at it."""
    with open_store(settings) as store:
        store.upgrade()
        make_token(settings, store)
    path = find_file(settings.database_url)
    if path and is_root():
        share(path, find_user(api_user))


def _start(name: str, run: Callable[[], None]) -> ForkProcess:
    """Start a part that ends when this process does, however that ends."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(run, os.getpid()), name=name)
    process.start()
    return process


def _run(run: Callable[[], None], parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
    try:
        end_with_parent(parent)
        run()
    except (NetlimitError, OSError) as error:
        log.error("%s", word(error))
        sys.exit(1)
    except Exception:
        log.exception("This is a fault of netlimit's own.")
        sys.exit(1)


def _run_guard(settings: Settings) -> None:
    """In a session of its own: what ends all processes of a terminal must not end a guard that is needed."""
    os.setsid()
    run_guard(settings)


def _watch(parts: list[ForkProcess]) -> ForkProcess | None:
    """Wait until one of the parts has ended, which it should not, or this process is told to end."""
    while signal.sigwait(_HEARD) == signal.SIGCHLD:
        for part in parts:
            if part.exitcode is not None:
                log.error("The %s has ended with status %s; ending all.", part.name, part.exitcode)
                return part
    return None


def _stop(parts: list[ForkProcess], guard: ForkProcess) -> None:
    """End the parts. The guard ends when it may."""
    for part in (*parts, guard):
        part.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for part in parts:
        part.join(max(0.0, deadline - time.monotonic()))
        if part.exitcode is None:
            log.warning("The %s does not end; killing it.", part.name)
            part.kill()
            part.join()
    guard.join(max(0.0, min(GUARD_SECONDS, deadline - time.monotonic())))
    if guard.exitcode is None:
        log.warning("The guard goes on until the window of confirmation has ended.")
