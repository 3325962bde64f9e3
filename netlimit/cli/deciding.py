"""The parts of `netlimit limiter`, put together. What they import is there before the process changes its user."""

from __future__ import annotations

import gc
import logging
import os
import pwd
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvloop

from netlimit.cli.database import find_file
from netlimit.cli.errors import CommandError
from netlimit.cli.privileges import USER
from netlimit.contacts import Contacts
from netlimit.errors import LimitError, StoreError
from netlimit.escalating import Blocks
from netlimit.l7.assignments import Assignments
from netlimit.l7.counters import open_counters, watch_eviction
from netlimit.l7.domains import UnknownDomains
from netlimit.l7.escalation import Askers, Escalator, Refusals
from netlimit.l7.failover import Failover
from netlimit.l7.gate import Gate
from netlimit.l7.headers import Family
from netlimit.l7.identity import UNIX
from netlimit.l7.limiter import Limiter
from netlimit.l7.service.application import Service
from netlimit.l7.service.auth import LOOPBACK
from netlimit.l7.service.rpc import RpcServer
from netlimit.l7.service.server import serve
from netlimit.l7.sources import Sources
from netlimit.l7.store import Store as Counters
from netlimit.settings import LocalListen, Settings
from netlimit.several import say_more
from netlimit.store import Store

log = logging.getLogger(__name__)


def decide(settings: Settings, store: Store, listening: socket.socket, grpc_place: str) -> None:
    """Decide by the rules of files and of the database, both of which are followed; for gRPC at "address:port" or
    "unix:/path"."""
    counters = open_counters(settings.counters_url, settings.limiter_memory * 2**20)
    is_absent = _Absence(settings)
    sources = Sources(settings.limits, store, is_absent=is_absent)
    with _naming_user():
        sources.start()
    for sentence in _tell_unheard(sources, settings):
        log.warning("%s", sentence)
    assignments = Assignments(store, settings.host, settings.failure_seconds, is_absent=is_absent)
    if not is_absent():
        with _naming_user():
            assignments.load()
    token = settings.limiter_token.get_secret_value() if settings.limiter_token else ""
    refusals, askers = Refusals(), Askers(token)
    blocks = Blocks(store, settings.host, settings.trusted_proxies, askers=askers, contacts=Contacts())
    escalator = Escalator(refusals, blocks, is_absent)
    gate = Gate(lambda: assignments.rules, counters)
    unknown = UnknownDomains()
    limiter = Limiter(lambda: sources.rules, counters, gate=gate, refusals=refusals, unknown=unknown)
    eviction = watch_eviction(settings.counters_url)

    def tell() -> Sequence[str]:
        away = counters.troubles if isinstance(counters, Failover) else ()
        astray = unknown.list_troubles(sources.rules.domains)
        lost = eviction.troubles if eviction else ()
        return [*sources.troubles, *astray, *_tell_unheard(sources, settings), *lost, *away]

    def count_lost() -> int:
        return eviction.lost if eviction else 0

    with _following(sources):
        assignments.start()
        if eviction is not None:
            eviction.start()
        escalator.start()
        try:
            uvloop.run(_serve(settings, limiter, sources, counters, askers, listening, grpc_place, tell, count_lost))
        finally:
            if eviction is not None:
                eviction.stop()
            escalator.stop()
            assignments.stop()


def _tell_unheard(sources: Sources, settings: Settings) -> list[str]:
    """What is to be said of limits that escalate while nobody can show that he tells the truth about clients."""
    if settings.limiter_token is not None:
        return []
    names = [f"{rule.name} ({rule.domain})" for rule in sources.rules if rule.escalate is not None]
    if not names:
        return []
    more = say_more(names)
    return [
        f"The limit {names[0]}{more} has `escalate`, and blocks nobody: set NETLIMIT_LIMITER_TOKEN, and have those who "
        f"ask show it in X-Netlimit-Token."
    ]


class _Absence:
    """Whether files count alone still: there has been no database since the start, and none is expected."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lasts = True

    def __call__(self) -> bool:
        self._lasts = self._lasts and _is_alone(self._settings)
        return self._lasts


def _is_alone(settings: Settings) -> bool:
    """Whether files alone are to count: no database was named, and there is none at the usual place."""
    path = find_file(settings.database_url)
    if settings.limits is None or path is None or "database_url" in settings.model_fields_set:
        return False
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # who may not see whether there is one does not know that there is none
        return False
    return False


@contextmanager
def _naming_user() -> Iterator[None]:
    """End with a sentence where something that is to be enforced cannot be read."""
    try:
        yield
    except (LimitError, StoreError) as error:
        raise CommandError(
            f"The limiter does not start, for as the user {_name_user()} it cannot read all that it is to enforce: "
            f"{error} Correct that (`netlimit limits check` names what is wrong in a file of limits), or let it run as "
            f"a user who may read it: `--user {USER}` is whose the database is where netlimit was installed."
        ) from None


def _name_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


@contextmanager
def _following(sources: Sources) -> Iterator[None]:
    """Follow the rules until the block ends."""
    ending = threading.Event()
    thread = threading.Thread(target=sources.run, args=(ending,), name="sources", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


async def _serve(
    settings: Settings,
    limiter: Limiter,
    sources: Sources,
    counters: Counters,
    askers: Askers,
    listening: socket.socket,
    grpc_place: str,
    troubles: Callable[[], Sequence[str]],
    count_lost: Callable[[], int],
) -> None:
    families = frozenset(map(Family, settings.limiter_headers))
    proxies = [str(network) for network in settings.trusted_proxies] or [*LOOPBACK]
    if isinstance(settings.limiter_listen, LocalListen):
        proxies.append(UNIX)  # who may come by a Unix socket is one: it has no address by which he could be named
    service = Service(
        limiter,
        lambda: sources.rules,
        families,
        proxies,
        lambda: [*troubles(), *rpc.troubles],
        askers,
        count_lost,
    )
    rpc = RpcServer(limiter, families, service.answers, askers)
    place = settings.limiter_grpc_listen
    try:
        await rpc.start(grpc_place)
    except RuntimeError:
        raise CommandError(
            f"The limiter cannot listen at {place}. Set NETLIMIT_LIMITER_GRPC_LISTEN to another place."
        ) from None
    log.info("Deciding at %s, and for gRPC at %s.", settings.limiter_listen, place)
    gc.freeze()  # what is there now stays
    try:
        await serve(service, rpc, listening)
    finally:
        await counters.aclose()
