"""`netlimit serve`: controller, API and guard as three processes, watched by this one.

The place where the API listens is taken here, and kept: limits hold, and are kept, whoever else may listen there."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.context import ForkProcess
from pathlib import Path

import typer

from netlimit.cli.daemons import UMASK, TakenError, check_parts, listen, make_token, run_api, run_controller
from netlimit.cli.database import find_file, share
from netlimit.cli.errors import CommandError
from netlimit.cli.guard import run_guard
from netlimit.cli.last_settings import read_settings_to_limit
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import SILENCE, open_store
from netlimit.cli.privileges import USER, find_user, is_root
from netlimit.cli.processes import HEARD, PAUSE_SECONDS, Attempt, start
from netlimit.cli.tls import check_certificate
from netlimit.forgotten import Held, word_held
from netlimit.settings import Settings

STOP_SECONDS = 8.0
"""How long the parts may take to end before they are killed; the controller may be, it remembers nothing."""
GUARD_SECONDS = 2.0
"""How long the guard is waited for: it ends at once, unless a window of confirmation is open."""
KILL_SECONDS = 1.0
"""How long one that was killed is waited for."""
DATABASE_SECONDS = 10.0
"""How long a gateway that holds rules waits for its database before it begins without."""
_AGAIN = "Limits are kept meanwhile; it is tried again and again."
_AWAY = "This gateway goes by its copy of the rules meanwhile, without the API; it is tried again and again."

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
    held = _refuse_lost(settings)
    if not held.rules:
        prepare_database(settings, api_user)
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)  # `_watch` hears them, also those that come until then
    place = _Place(settings)
    prepare = _apart(place, lambda: prepare_database(settings, api_user))
    database = Attempt("database", lambda tell: prepare(), is_to_end=True)
    database.is_done = not held.rules
    _await_database(database)
    place.take()
    controller = start("controller", _apart(place, lambda: run_controller(settings, api_user=api_user)))
    guard = start("guard", _apart(place, lambda: _run_guard(settings)))
    api = Attempt("api", lambda tell: _run_api(settings, api_user, place, tell))
    ended = _watch([controller, guard], place, database, api)
    place.leave()
    stopped = [controller, *(each.process for each in (database, api) if each.process is not None)]
    _stop(stopped, guard)
    if any(each.exitcode is None for each in (*stopped, guard)):
        logging.shutdown()
        os._exit(1 if ended else 0)  # Python would wait for them
    raise typer.Exit(1 if ended else 0)


def prepare_database(settings: Settings, api_user: str) -> None:
    """Bring the database up to date, with an admin token, and let the API's user at it. Raises StoreError and
    CommandError."""
    with open_store(settings) as store:
        store.upgrade()
        make_token(settings, store)
    path = find_file(settings.database_url)
    if path and is_root():
        share(path, find_user(api_user))


def _await_database(database: Attempt) -> None:
    """Have the database made ready, where this gateway holds rules: they are to hold whether it answers or not. So it
    is waited for a few seconds, and what may pass is told and left to who watches. Raises CommandError for the rest."""
    deadline = time.monotonic() + DATABASE_SECONDS
    while not database.is_done and time.monotonic() < deadline:
        if database.go_on():
            break
        left = min(PAUSE_SECONDS, max(deadline - time.monotonic(), 0.0))
        heard = None if database.is_done else signal.sigtimedwait(HEARD, left)
        if heard is not None and heard.si_signo != signal.SIGCHLD:
            os.kill(os.getpid(), heard.si_signo)  # for who watches
            return
    if database.failure and not database.is_passing:
        raise CommandError(database.failure)
    if not database.is_done:
        said = database.failure or f"The database has not answered for {DATABASE_SECONDS:g} seconds."
        log.error("%s %s", said, _AWAY)


def _refuse_lost(settings: Settings) -> Held:
    """What this gateway holds. Where it holds rules, and the file that had them is gone or empty, nobody wants a new
    one without a word: it would take all of them out of force. Raises CommandError."""
    from netlimit.store import read_held

    held = read_held(settings.state, settings.host)
    path = find_file(settings.database_url)
    lack = path and _find_lack(path)
    if lack and held.rules:
        raise CommandError(
            f"{lack}, but {word_held(held)} in {settings.state}: a new database would take them out of "
            "force. What is in the kernel stays; after a boot, `netlimit apply --last` brings it back. Put the file "
            "back (is its disk mounted?), or run `netlimit restore FILE` with a backup; then start this again. To "
            "begin anew on purpose, run `netlimit teardown` first."
        )
    return held


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
        """Whether it is taken; if not, the log tells why, once. Raises CommandError at first if that can never be."""
        try:
            self.listening = self.listening or listen(self._settings.listen)
        except CommandError as error:
            if not (self._told or isinstance(error, TakenError)):
                raise
            if str(error) != self._told:
                log.error("%s %s", error, _AGAIN)
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


def _run_guard(settings: Settings) -> None:
    """In a session of its own: what ends all processes of a terminal must not end a guard that is needed."""
    os.setsid()
    run_guard(settings)


def _run_api(settings: Settings, api_user: str, place: _Place, tell_begun: Callable[[], None]) -> None:
    """First what it needs, which is tried again and again: its imports take a second of the processor."""
    check_certificate(settings, datetime.now(UTC))
    if find_file(settings.database_url) is None:
        with open_store(settings, silence=SILENCE) as store:
            store.revision()
    run_api(settings, api_user, place.listening, tell_begun)


def _watch(parts: list[ForkProcess], place: _Place, database: Attempt, api: Attempt) -> ForkProcess | None:
    """Start the API, which becomes one of the parts once it answers, when the database is ready and it can listen. Wait
    until one of them has ended, which it should not, or this process is told to end."""
    told = {database: database.failure, api: ""}
    while True:
        for each in (database, api):
            if not each.is_done and (each is database or (database.is_done and place.take())) and each.go_on():
                if each.failure != told[each]:
                    log.error("%s %s", each.failure, _AGAIN if each is api else _AWAY)
                told[each] = each.failure
        for part in (*parts, *([api.process] if api.is_done and api.process else [])):
            if part.exitcode is not None:
                log.error("The %s has ended with status %s; ending all.", part.name, part.exitcode)
                return part
        heard = signal.sigwaitinfo(HEARD) if api.is_done else signal.sigtimedwait(HEARD, PAUSE_SECONDS)
        if heard is not None and heard.si_signo != signal.SIGCHLD:
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
            part.join(KILL_SECONDS)  # a call to a disk that hangs keeps it
    guard.join(max(0.0, min(GUARD_SECONDS, deadline - time.monotonic())))
    if guard.exitcode is None:
        log.warning("The guard goes on until the window of confirmation has ended.")
