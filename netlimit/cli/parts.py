"""The parts, put together as the settings say.

Store, kernel and controller take a while to import, and most commands only speak to the API; so they are imported
where they are made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from netlimit.cli.disks import try_disk
from netlimit.cli.errors import CommandError
from netlimit.cli.privileges import USER, find_keepers, may_change_network
from netlimit.contacts import Contacts
from netlimit.errors import StoreError
from netlimit.forgotten import find_forgotten
from netlimit.records import Actor, Pause
from netlimit.settings import Backend, Listen, Settings, load_settings
from netlimit.spared import Spared
from netlimit.translation import know_translators

if TYPE_CHECKING:
    from netlimit.controller import Controller
    from netlimit.kernel.base import Door, Kernel
    from netlimit.store import Replica, Store
    from netlimit.tree import Topology


def read_settings(context: typer.Context) -> Settings:
    """The settings that this command goes by. Raises SettingsError."""
    config: Path | None = context.find_root().params.get("config")
    settings = load_settings(config)
    know_translators(settings.translators)
    return settings


log = logging.getLogger(__name__)

SILENCE = 25.0
"""Seconds that the server of a database may say nothing to what runs on and on: longer than locks are waited for."""
MOST_REVISIONS, MOST_AUDITED = 100_000, 10_000_000
"""So many changes, and lines of the audit, are left by all but the API, whose settings these are: else the process with
the smallest ones would forget what the API keeps."""
GUARD_LOCK = "guard.lock"
"""The name of the lock of this host's guard, in the controller's directory."""
PAUSE_SECONDS, COPY_SECONDS = 10.0, 30.0
"""How long the copy may work at a pause that a command tells it, and at all rules; 100,000 take some three seconds."""


@contextmanager
def open_store(
    settings: Settings, patience: float | None = None, silence: float | None = None, is_api: bool = False
) -> Iterator[Store]:
    """The database, until the block ends; with `patience`, in seconds, locks are waited for no longer, and with
    `silence` a server that says nothing. Without either, for a command, it is seen first that its disk does not hang.
    The API's settings say how many changes and lines of the audit are kept, and many read by it. Raises StoreError."""
    from netlimit.store import Store

    audited, revisions = settings.audit_length, settings.revisions
    if not is_api:
        audited, revisions = max(audited, MOST_AUDITED), max(revisions, MOST_REVISIONS)
    store = Store(settings.database_url, audited, revisions, patience=patience, silence=silence, crowded=is_api)
    if store.path is not None and patience is None and silence is None:
        try_disk(store.path)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def open_copy(settings: Settings, allowed: float | None = None) -> Iterator[Replica | None]:
    """The copy of what was applied last, until the block ends; None, with a line in the log, if it cannot be kept: a
    full disk must keep nobody from limiting. It works for so long as is `allowed`, in seconds, in all."""
    from netlimit.store import open_replica

    replica = None
    try:
        replica = open_replica(settings.state, settings.host, allowed)
    except StoreError as error:
        log.error("%s Without it, the controller cannot go on when the database is gone.", error)
    try:
        yield replica
    finally:
        if replica is not None:
            replica.close()


def reopen_copy(settings: Settings) -> Replica:
    """The copy of what was applied last, anew; the caller closes it. Raises StoreError."""
    from netlimit.store import open_replica

    return open_replica(settings.state, settings.host)


def renew_copy(settings: Settings, store: Store, kernel: Kernel) -> StoreError | None:
    """Bring the copy up to date where no controller does that: with the present rules, if they are in the kernel or
    nothing is to be there. What has kept it from being written, which is in the log, too."""
    if kernel.controlled():
        return None
    revision, host = store.revision(), settings.host
    applied = any(each.host == host and each.applied_revision == revision for each in store.hosts())
    if not applied and not store.paused(host):
        return None

    def follow(replica: Replica) -> None:
        if store.paused(host):  # told first: by what is torn down no other database is judged
            replica.follow_pause(True, store.last_pause(host))
        elif replica.find_unheard(store) is not None:
            return  # the database is told first, by `apply` or who controls
        replica.follow(store)

    fault = _write_copy(settings, COPY_SECONDS, follow)
    if fault is not None:
        log.error("%s The copy of the applied rules stays as it was.", fault)
    return fault


def pause_copy(settings: Settings, pause: Pause | None) -> StoreError | None:
    """Say in the copy that this gateway is paused, and by which teardown (None: by the end of a window that is open,
    maybe): a controller may go by it for half a minute after the database answers again. What has kept it from being
    written, which is in the log, too."""
    fault = _write_copy(settings, PAUSE_SECONDS, lambda replica: replica.follow_pause(True, pause))
    if fault is not None:
        log.error("%s A controller that goes by the copy of the applied rules does not hear of the pause.", fault)
    return fault


def note_resumed(settings: Settings, pauses: Iterable[Pause | None]) -> None:
    """Say in the copy that these teardowns were ended here, if there are any. A copy that cannot be written is told in
    the log: then such a teardown's pause is heeded if an older database brings it back."""
    ended = {each for each in pauses if each is not None}
    fault = _write_copy(settings, PAUSE_SECONDS, lambda replica: replica.note_resumed(*ended)) if ended else None
    if fault is not None:
        log.error("%s The copy of the applied rules does not know that the teardown was ended.", fault)


def tell_pause(settings: Settings, store: Store, actor: Actor) -> Pause | None:
    """Tell the database of the pause that the copy of this gateway knows, if it has not heard of that: so it is known
    to be ended, too, should that be what is asked. Returns that pause, if any. Raises StoreError."""
    from netlimit.store import read_pause

    pause, is_unheard = read_pause(settings.state, settings.host, store)
    if pause is not None and is_unheard:
        store.keep_pause(settings.host, pause, actor)
    return pause


def _write_copy(settings: Settings, allowed: float, write: Callable[[Replica], object]) -> StoreError | None:
    from netlimit.store import open_replica
    from netlimit.store.replica import FILE

    try:
        try_disk(settings.state / FILE)
        with closing(open_replica(settings.state, settings.host, allowed)) as replica:
            write(replica)
    except StoreError as error:
        return error
    return None


def make_kernel(settings: Settings) -> Kernel:
    """The kernel that the settings name. Raises CommandError when this process may not change it."""
    check_backend(settings)
    if settings.backend is Backend.FAKE:
        from netlimit.kernel.fake import FakeKernel

        return FakeKernel(routes=_imagine_routes())
    if settings.backend is Backend.L7:
        from netlimit.kernel.none import NoKernel

        return NoKernel(settings.state)
    from netlimit.kernel.linux import LinuxKernel

    return LinuxKernel()


def _imagine_routes() -> Topology:
    """A small gateway for the kernel in memory, so that there is somewhere to shape: 10.0.0.0/8 behind `lan`, the rest
    behind `wan`."""
    from netlimit.tree import Device, Route, Topology

    routes = (
        Route("10.0.0.0/8", ("lan",), connected=True),
        Route("fd00::/8", ("lan",), connected=True),
        *(Route(everything, ("wan",)) for everything in ("0.0.0.0/0", "::/0")),
    )
    return Topology({"lan": Device(2, True), "wan": Device(3, True)}, routes)


def check_backend(settings: Settings) -> None:
    """Raise CommandError unless this process can do what the backend needs."""
    if settings.backend not in (Backend.FAKE, Backend.L7) and not may_change_network():
        raise CommandError(
            "The kernel lets only root (CAP_NET_ADMIN and CAP_NET_RAW) see and set limits: run this as root. "
            "For a look round without root, set NETLIMIT_BACKEND=fake; to limit HTTP requests only, l7."
        )


def _find_door(listen: Listen) -> Door:
    """Where the API is reached; a name may be any address of this host."""
    from netlimit.addresses import read_network
    from netlimit.kernel.base import Door

    try:
        return Door(listen.port, str(read_network(listen.host).network_address))
    except ValueError:
        return Door(listen.port)


def make_controller(
    settings: Settings,
    store: Store,
    kernel: Kernel,
    replica: Replica | None = None,
    api_user: str = USER,
    reopen: Callable[[], Replica] | None = None,
) -> Controller:
    """The controller of this host; with `replica` it goes on while the database is gone, and `reopen` opens that anew.
    `api_user` is whom the API runs as."""
    from netlimit.controller import Controller, Setup
    from netlimit.kernel.place import find_place
    from netlimit.l7.redis import hosts
    from netlimit.safety import name_servers
    from netlimit.store import engine, read_held

    setup = Setup(
        host=settings.host,
        backend=settings.backend if settings.backend in (Backend.FAKE, Backend.L7) else "iptables",
        mark_mask=settings.mark_mask,
        safe=tuple(map(str, settings.safe)),
        set_size=settings.set_size,
        failure_seconds=settings.failure_seconds,
        servers=name_servers(engine.name_hosts(settings.database_url), hosts.name_hosts(settings.counters_url)),
        doors=(_find_door(settings.listen),) if settings.is_open else (),
        keepers=find_keepers(api_user),
        place=find_place(),
        spared=Spared(settings.host, settings.trusted_proxies, Contacts()),
    )
    held = partial(read_held, settings.state, settings.host)
    return Controller(store, kernel, setup, replica=replica, reopen=reopen, held=held)


def refuse_another(settings: Settings, store: Store) -> None:
    """Raise StoreError where the database is another one than that of which the copy of this gateway has rules, or an
    older state of it. A copy that cannot be read keeps nobody from anything."""
    from netlimit.store import read_held

    held = read_held(settings.state, settings.host)
    forgotten = find_forgotten(store.origin(held.origin.revision), held)
    if forgotten is not None:
        raise StoreError(forgotten)
