"""What each gateway's controller reports of itself, and which of them are paused."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, delete, insert, select

from netlimit.records import HostStatus, SafeReason
from netlimit.store.tables import hosts, pauses
from netlimit.store.upsert import upsert


def report(connection: Connection, status: HostStatus, now: datetime) -> None:
    """Keep what a gateway says of itself, all but `paused`, which is not the controller's to say."""
    row = {
        "host": status.host,
        "backend": status.backend,
        "applied_revision": status.applied_revision,
        "hz": status.hz,
        "capabilities": dict(status.capabilities),
        "own": list(status.own),
        "safe": list(status.safe),
        "notes": list(status.notes),
        "drift": status.drift,
        "last_error": status.last_error,
        "seen_at": now,
        "repairs": dict(status.repairs),
        "applying": dict(status.applying),
        "desired": status.desired,
        "enforced": status.enforced,
        "degraded": status.degraded,
        "drifted": status.drifted,
        "lifted": status.lifted,
        "safe_reasons": dict(status.safe_reasons),
        "management": list(status.management),
    }
    connection.execute(upsert(connection, hosts), [row])


def statuses(connection: Connection) -> list[HostStatus]:
    """What every gateway said last, by name."""
    rows = connection.execute(
        select(hosts, pauses.c.host.label("pause"))
        .join(pauses, pauses.c.host == hosts.c.host, isouter=True)
        .order_by(hosts.c.host)
    )
    return [
        HostStatus(
            host=row.host,
            backend=row.backend,
            applied_revision=row.applied_revision,
            paused=row.pause is not None,
            hz=row.hz,
            capabilities=row.capabilities,
            own=tuple(row.own),
            safe=tuple(row.safe),
            notes=tuple(row.notes),
            drift=row.drift,
            last_error=row.last_error,
            seen_at=row.seen_at,
            repairs=row.repairs or {},
            applying=row.applying or {},
            desired=row.desired,
            enforced=row.enforced,
            degraded=row.degraded,
            drifted=row.drifted,
            lifted=row.lifted,
            safe_reasons={network: SafeReason(*why) for network, why in (row.safe_reasons or {}).items()},
            management=tuple(row.management or ()),
        )
        for row in rows
    ]


def pause(connection: Connection, host: str, paused: bool) -> None:
    """Tell a gateway's controller to keep its hands off, or to go on."""
    connection.execute(delete(pauses).where(pauses.c.host == host))
    if paused:
        connection.execute(insert(pauses).values(host=host))


def paused(connection: Connection, host: str) -> bool:
    """Whether a gateway is paused."""
    return connection.execute(select(pauses.c.host).where(pauses.c.host == host)).first() is not None
