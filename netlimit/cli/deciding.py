"""The parts of `netlimit limiter`, put together. What they import is there before the process changes its user."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvloop

from netlimit.cli.errors import CommandError
from netlimit.contacts import Contacts
from netlimit.escalating import Blocks
from netlimit.l7.assignments import Assignments
from netlimit.l7.counters import open_counters, watch_eviction
from netlimit.l7.escalation import Askers, Escalator, Refusals
from netlimit.l7.gate import Gate
from netlimit.l7.headers import Family
from netlimit.l7.limiter import Limiter
from netlimit.l7.service.application import Service
from netlimit.l7.service.auth import LOOPBACK
from netlimit.l7.service.rpc import RpcServer
from netlimit.l7.service.server import serve
from netlimit.l7.sources import Sources
from netlimit.l7.store import Store as Counters
from netlimit.settings import Settings
from netlimit.store import Store

log = logging.getLogger(__name__)


def decide(settings: Settings, store: Store, listening: socket.socket) -> None:
    """Decide by the rules of files and of the database, both of which are followed."""
    sources = Sources(settings.limits, store)
    sources.refresh()
    for sentence in _tell_unheard(sources, settings):
        log.warning("%s", sentence)
    counters = open_counters(settings.counters_url, settings.limiter_memory * 2**20)
    assignments = Assignments(store, settings.host, settings.failure_seconds)
    token = settings.limiter_token.get_secret_value() if settings.limiter_token else ""
    refusals, askers = Refusals(), Askers(token)
    blocks = Blocks(store, settings.host, settings.trusted_proxies, askers=askers, contacts=Contacts())
    escalator = Escalator(refusals, blocks)
    gate = Gate(lambda: assignments.rules, counters)
    limiter = Limiter(lambda: sources.rules, counters, gate=gate, refusals=refusals)
    eviction = watch_eviction(settings.counters_url)

    def tell() -> Sequence[str]:
        return [*sources.troubles, *_tell_unheard(sources, settings), *(eviction.troubles if eviction else ())]

    with _following(sources):
        assignments.start()
        if eviction is not None:
            eviction.start()
        escalator.start()
        try:
            uvloop.run(_serve(settings, limiter, sources, counters, askers, listening, tell))
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
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"The limit {names[0]}{more} has `escalate`, and blocks nobody: set NETLIMIT_LIMITER_TOKEN, and have those who "
        f"ask show it in X-Netlimit-Token."
    ]


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
    troubles: Callable[[], Sequence[str]],
) -> None:
    families = [Family(word) for word in settings.limiter_headers]
    proxies = [str(network) for network in settings.trusted_proxies] or LOOPBACK
    service = Service(
        limiter,
        lambda: sources.rules,
        families,
        proxies,
        troubles,
        askers,
    )
    rpc = RpcServer(limiter, families, service.answers, askers)
    place = settings.limiter_grpc_listen
    try:
        await rpc.start(str(place))
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
