"""What each gateway's controller reports of itself, and which of them are paused."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from netlimit.liveness import SILENCE
from netlimit.records import HostStatus, Reception, SafeReason
from netlimit.rules import is_network
from netlimit.store import changes, moments
from netlimit.store.tables import hosts, pauses
from netlimit.store.upsert import upsert

_NOTHING = {"applied_revision": 0, "enforced": 0, "degraded": 0, "lifted": 0}
"""What is in force on a gateway that a teardown has paused."""


def report(connection: Connection, status: HostStatus, at: datetime | None = None) -> Reception:
    """Keep what a gateway says of itself, now or `at` a time, all but `paused`, which is not the controller's to
    say: of one that is paused, and may not have heard of it, is kept that nothing is in force."""
    reporter = select(hosts.c.reporter).where(hosts.c.host == status.host).scalar_subquery()
    pause = select(pauses.c.host).where(pauses.c.host == status.host).scalar_subquery()
    moment, before, pausing = connection.execute(select(moments.now(), reporter, pause)).one()
    received = Reception(at or moment, before if isinstance(before, str) else None)
    row = {
        "host": status.host,
        "backend": status.backend,
        "applied_revision": _find_applied(connection, status),
        "hz": status.hz,
        "capabilities": dict(status.capabilities),
        "own": list(status.own),
        "safe": list(status.safe),
        "notes": list(status.notes),
        "drift": status.drift,
        "last_error": status.last_error,
        "seen_at": received.at,
        "repairs": dict(status.repairs),
        "applying": dict(status.applying),
        "desired": status.desired,
        "enforced": status.enforced,
        "degraded": status.degraded,
        "drifted": status.drifted,
        "lifted": status.lifted,
        "safe_reasons": dict(status.safe_reasons),
        "management": list(status.management),
        "faults": status.faults,
        "networks": {prefix: list(devices) for prefix, devices in status.networks.items()},
        "reporter": status.reporter or received.before,  # a command that reports is no controller
        "peers": list(status.peers),
        "local": list(status.local),
        "refused": status.refused,
    }
    connection.execute(upsert(connection, hosts), [row | (_NOTHING if pausing is not None else {})])
    return received


def _find_applied(connection: Connection, status: HostStatus) -> int:
    """The revision that a gateway has applied; 0 for one that this database does not know, or that is another's."""
    if status.refused is not None:
        return 0
    is_here = status.stamp is None or changes.is_known(connection, status.applied_revision, status.stamp)
    return status.applied_revision if is_here else 0


def statuses(connection: Connection) -> list[HostStatus]:
    """What every gateway said last, by name."""
    rows = connection.execute(
        select(hosts, pauses.c.host.label("pause"), moments.now().label("now"))
        .join(pauses, pauses.c.host == hosts.c.host, isouter=True)
        .order_by(hosts.c.host)
    )
    return [_read(row) for row in rows]


def goes_by(connection: Connection, host: str) -> bool:
    """Whether a gateway's controller has said lately that it goes by this database."""
    is_heard = moments.is_recent(hosts.c.seen_at, SILENCE)
    wanted = select(hosts.c.host).where(hosts.c.host == host, hosts.c.refused.is_(None), is_heard)
    return connection.execute(wanted).first() is not None


def lift(connection: Connection, host: str, number: int) -> None:
    """Keep that so many rules of a gateway, of those that its controller enforced, are out of force without it."""
    found = connection.execute(select(hosts.c.enforced, hosts.c.lifted).where(hosts.c.host == host)).first()
    if found is not None:
        values = {"enforced": max(0, found.enforced + found.lifted - number), "lifted": number}
        connection.execute(update(hosts).where(hosts.c.host == host).values(values))


def _read(row: Row[Any]) -> HostStatus:
    """A gateway's report; what of it cannot be read is as if it had not been said. Whoever is paused holds nothing,
    whatever a controller, of another version maybe, has said since."""
    status = _read_report(row)
    return replace(status, **_NOTHING) if status.paused else status  # type: ignore[arg-type]  # these are numbers


def _read_report(row: Row[Any]) -> HostStatus:
    return HostStatus(
        host=row.host,
        backend=row.backend,
        applied_revision=row.applied_revision,
        paused=row.pause is not None,
        hz=row.hz,
        capabilities=_read_map(row.capabilities, str | None),
        own=tuple(each for each in _read_prefixes(row.own) if "/" not in each),
        safe=_read_prefixes(row.safe),
        notes=_read_list(row.notes, str),
        drift=row.drift,
        last_error=row.last_error,
        seen_at=row.seen_at,
        repairs=_read_map(row.repairs, int),
        applying=_read_map(row.applying, int | float),
        desired=row.desired,
        enforced=row.enforced,
        degraded=row.degraded,
        drifted=row.drifted,
        lifted=row.lifted,
        safe_reasons=_read_reasons(row.safe_reasons),
        management=_read_list(row.management, int),
        faults=row.faults,
        networks=_read_networks(row.networks),
        reporter=row.reporter,
        peers=_read_prefixes(row.peers),
        local=_read_prefixes(row.local),
        refused=row.refused,
        silence=row.now - row.seen_at,
    )


def _read_list(value: Any, kind: Any) -> tuple[Any, ...]:
    return tuple(each for each in value if isinstance(each, kind)) if isinstance(value, list) else ()


def _read_prefixes(value: Any) -> tuple[str, ...]:
    return tuple(each for each in _read_list(value, str) if is_network(each))


def _read_map(value: Any, kind: Any) -> dict[str, Any]:
    return {key: each for key, each in value.items() if isinstance(each, kind)} if isinstance(value, dict) else {}


def _read_reasons(value: Any) -> dict[str, SafeReason]:
    found = {}
    for network, why in _read_map(value, list).items():
        match why:
            case [str() as text, int() | float() as seen] if is_network(network):
                found[network] = SafeReason(text, seen)
    return found


def _read_networks(value: Any) -> dict[str, tuple[str, ...]]:
    return {
        prefix: _read_list(devices, str) for prefix, devices in _read_map(value, list).items() if is_network(prefix)
    }


def pause(connection: Connection, host: str, paused: bool) -> bool:
    """Tell a gateway's controller to keep its hands off, or to go on; whether that is news. Either way nothing is in
    force there until it says so: what it said before the teardown must not be believed after the pause."""
    before = bool(connection.execute(delete(pauses).where(pauses.c.host == host)).rowcount)
    if paused:
        connection.execute(insert(pauses).values(host=host))
    if paused != before:
        connection.execute(update(hosts).where(hosts.c.host == host).values(_NOTHING))
    return paused != before


def paused(connection: Connection, host: str) -> bool:
    """Whether a gateway is paused."""
    return connection.execute(select(pauses.c.host).where(pauses.c.host == host)).first() is not None
