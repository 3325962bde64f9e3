"""`netlimit serve`: controller, API and guard as three processes, watched by this one.

The place where the API listens is taken here, and kept: limits hold, and are kept, whoever else may listen there."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.context import ForkProcess
from pathlib import Path

import typer

from netlimit.cli.daemons import UMASK, TakenError, check_parts, listen, make_token, run_api, run_controller
from netlimit.cli.database import find_file, share
from netlimit.cli.errors import CommandError, word
from netlimit.cli.guard import run_guard
from netlimit.cli.last_settings import read_settings_to_limit
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import open_store
from netlimit.cli.privileges import USER, end_with_parent, find_user, is_root
from netlimit.cli.tls import CertificateError, check_certificate
from netlimit.errors import NetlimitError, SettingsError
from netlimit.forgotten import word_held
from netlimit.settings import Settings

STOP_SECONDS = 8.0
"""How long the parts may take to end before they are killed; the controller may be, it remembers nothing."""
GUARD_SECONDS = 2.0
"""How long the guard is waited for: it ends at once, unless a window of confirmation is open."""
PAUSE_SECONDS = 2.0
"""So often the API's place and its certificate are tried while it cannot run."""
_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

log = logging.getLogger(__name__)


def serve(
    context: typer.Context,
    api_user: str = typer.Option(USER, "--api-user", help="Whom the API runs as when root starts this."),
) -> None:
    """Run the controller, the API and the guard, until SIGTERM. The rules stay in the kernel."""
    settings = read_settings_to_limit(context)
    os.umask(UMASK)
    log_to_stderr("serve", settings)
    check_parts(settings, api_user)
    prepare_database(settings, api_user)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # `_watch` hears them, also those that come until then
    place = _Place(settings)
    place.take()
    controller = _start("controller", _apart(place, lambda: run_controller(settings, api_user=api_user)))
    guard = _start("guard", _apart(place, lambda: _run_guard(settings)))
    parts = [controller, guard]
    ended = _watch(parts, place, lambda: _start("api", lambda: run_api(settings, api_user, place.listening)))
    place.leave()
    _stop([part for part in parts if part is not guard], guard)
    if guard.exitcode is None:
        logging.shutdown()
        os._exit(1 if ended else 0)  # Python would wait for the guard
    raise typer.Exit(1 if ended else 0)


def prepare_database(settings: Settings, api_user: str) -> None:
    """Bring the database up to date, with an admin token, and let the API's user at it. Raises CommandError where it is
    lost."""
    _refuse_lost(settings)
    with open_store(settings) as store:
        store.upgrade()
        make_token(settings, store)
    path = find_file(settings.database_url)
    if path and is_root():
        share(path, find_user(api_user))


def _refuse_lost(settings: Settings) -> None:
    """Where this gateway holds rules, and the file that had them is gone or empty, nobody wants a new one without a
    word: it would take all of them out of force. Raises CommandError."""
    from netlimit.store import read_held

    path = find_file(settings.database_url)
    lack = path and _find_lack(path)
    if not lack:
        return
    held = read_held(settings.state, settings.host)
    if held.rules:
        raise CommandError(
            f"{lack}, but {word_held(held)} in {settings.state}: a new database would take them out of "
            "force. What is in the kernel stays; after a boot, `netlimit apply --last` brings it back. Put the file "
            "back (is its disk mounted?), or run `netlimit restore FILE` with a backup; then start this again. To "
            "begin anew on purpose, run `netlimit teardown` first."
        )


def _find_lack(path: Path) -> str | None:
    """What is wrong with a file that has no database in it, nor any damage that could be seen."""
    try:
        return None if path.stat().st_size else f"The database {path} is empty (0 bytes)"
    except FileNotFoundError:
        return f"There is no database at {path}"
    except OSError:  # who opens it will be told
        return None


class _Place:
    """Where the API listens: taken once, and kept while it runs."""

    def __init__(self, settings: Settings) -> None:
        self.listening: socket.socket | None = None
        self._settings = settings
        self._told = ""

    def take(self) -> bool:
        """Whether it is taken, by who has a certificate and key that can be used; if not, the log tells why, once.
        Raises CommandError or SettingsError at first if that can never be."""
        try:
            check_certificate(self._settings, datetime.now(UTC))
            self.listening = self.listening or listen(self._settings.listen)
        except (CommandError, SettingsError) as error:
            if not (self._told or isinstance(error, TakenError | CertificateError)):
                raise
            if str(error) != self._told:
                log.error("%s Limits are kept meanwhile; it is tried again and again.", error)
            self._told = str(error)
            return False
        return True

    def leave(self) -> None:
        """Listen no more, as far as this process does."""
        if self.listening is not None:
            self.listening.close()


def _apart(place: _Place, run: Callable[[], None]) -> Callable[[], None]:
    """A part that does not listen there: it may outlive the API, and nobody would answer."""

    def run_apart() -> None:
        place.leave()
        run()

    return run_apart


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
    finally:
        logging.shutdown()  # Python leaves that out where a process is a fork


def _run_guard(settings: Settings) -> None:
    """In a session of its own: what ends all processes of a terminal must not end a guard that is needed."""
    os.setsid()
    run_guard(settings)


def _watch(parts: list[ForkProcess], place: _Place, start_api: Callable[[], ForkProcess]) -> ForkProcess | None:
    """Start the API, which becomes one of the parts, once it can listen. Wait until one of them has ended, which it
    should not, or this process is told to end."""
    waiting = True
    while True:
        if waiting and place.take():
            parts.append(start_api())
            waiting = False
        heard = signal.sigtimedwait(_HEARD, PAUSE_SECONDS) if waiting else signal.sigwaitinfo(_HEARD)
        if heard is not None and heard.si_signo != signal.SIGCHLD:
            return None
        for part in parts:
            if part.exitcode is not None:
                log.error("The %s has ended with status %s; ending all.", part.name, part.exitcode)
                return part


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
