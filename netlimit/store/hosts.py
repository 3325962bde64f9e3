"""What each gateway's controller reports of itself, and which of them are paused."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from netlimit.liveness import SILENCE
from netlimit.records import HostStatus, Reception, SafeReason
from netlimit.store import changes, moments
from netlimit.store.tables import hosts, pauses
from netlimit.store.unread import read_address, read_prefix
from netlimit.store.upsert import upsert

_NOTHING = {"applied_revision": 0, "enforced": 0, "degraded": 0, "lifted": 0}
"""What is in force on a gateway that a teardown has paused."""
_LAST_PORT, _ENDLESS = 65535, 2**63
_BOUND = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?|\+Inf")


def report(connection: Connection, status: HostStatus, at: datetime | None = None) -> Reception:
    """Keep what a gateway says of itself, now or `at` a time, all but `paused`, which is not the controller's to
    say: of one that is paused, and may not have heard of it, is kept that nothing is in force. Who does not go by this
    database (`refused`) is not paused by it."""
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
    is_paused = pausing is not None and status.refused is None
    connection.execute(upsert(connection, hosts), [row | (_NOTHING if is_paused else {})])
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
        paused=row.pause is not None and row.refused is None,
        hz=row.hz,
        capabilities=_read_map(row.capabilities, str | None),
        own=read_own(row.own, row.host),
        safe=read_prefixes(row.safe, row.host),
        notes=_read_list(row.notes, str),
        drift=row.drift,
        last_error=row.last_error,
        seen_at=row.seen_at,
        repairs=_read_numbers(row.repairs),
        applying=_read_histogram(row.applying),
        desired=row.desired,
        enforced=row.enforced,
        degraded=row.degraded,
        drifted=row.drifted,
        lifted=row.lifted,
        safe_reasons=_read_reasons(row.safe_reasons, row.host),
        management=tuple(each for each in _read_list(row.management, int) if 0 < each <= _LAST_PORT),
        faults=row.faults,
        networks=_read_networks(row.networks, row.host),
        reporter=row.reporter,
        peers=read_prefixes(row.peers, row.host),
        local=read_prefixes(row.local, row.host),
        refused=row.refused,
        silence=row.now - row.seen_at,
    )


def _read_list(value: Any, kind: Any) -> tuple[Any, ...]:
    return tuple(each for each in value if isinstance(each, kind)) if isinstance(value, list) else ()


def read_prefixes(value: Any, host: str) -> tuple[str, ...]:
    """The addresses and networks that a gateway's report names, as the kernel takes them."""
    found = (read_prefix(each, _name(host)) for each in _read_list(value, str))
    return tuple(each for each in found if each is not None)


def read_own(value: Any, host: str) -> tuple[str, ...]:
    """A gateway's own addresses: the same, and no networks."""
    found = (read_address(each, _name(host)) for each in _read_list(value, str))
    return tuple(each for each in found if each is not None)


def _name(host: str) -> str:
    return f"in the report of the gateway {host!r}"


def _read_map(value: Any, kind: Any) -> dict[str, Any]:
    return {key: each for key, each in value.items() if isinstance(each, kind)} if isinstance(value, dict) else {}


def _read_numbers(value: Any) -> dict[str, Any]:
    return {key: each for key, each in _read_map(value, int | float).items() if _is_number(each)}


def _read_histogram(value: Any) -> dict[str, Any]:
    """Counts by upper bound, and their sum: no other key means anything, and nothing was counted less than never."""
    counts = {key: each for key, each in _read_numbers(value).items() if each >= 0}
    return {key: each for key, each in counts.items() if key == "sum" or _BOUND.fullmatch(key)}


def _is_number(value: Any) -> bool:
    """Whether it is a number that can be reckoned with: JSON holds also NaN, and whole ones that no float can be."""
    return isinstance(value, int | float) and abs(value) < _ENDLESS


def _read_reasons(value: Any, host: str) -> dict[str, SafeReason]:
    found = {}
    for key, why in _read_map(value, list).items():
        match why:
            case [str() as text, seen] if _is_number(seen) and (network := read_prefix(key, _name(host))):
                found[network] = SafeReason(text, seen)
    return found


def _read_networks(value: Any, host: str) -> dict[str, tuple[str, ...]]:
    """Devices by prefix; of several texts for one prefix the devices of all."""
    found: dict[str, tuple[str, ...]] = {}
    for key, devices in _read_map(value, list).items():
        if (prefix := read_prefix(key, _name(host))) is not None:
            found[prefix] = (*found.get(prefix, ()), *_read_list(devices, str))
    return found


def pause(connection: Connection, host: str, paused: bool) -> bool:
    """Tell a gateway's controller to keep its hands off, or to go on; whether that is news. Either way nothing is in
    force there until it says so: what it said before the teardown must not be believed after the pause; nor that it
    does not go by this database."""
    before = bool(connection.execute(delete(pauses).where(pauses.c.host == host)).rowcount)
    if paused:
        connection.execute(insert(pauses).values(host=host))
        connection.execute(update(hosts).where(hosts.c.host == host).values(refused=None))
    if paused != before:
        connection.execute(update(hosts).where(hosts.c.host == host).values(_NOTHING))
    return paused != before


def paused(connection: Connection, host: str) -> bool:
    """Whether a gateway is paused."""
    return connection.execute(select(pauses.c.host).where(pauses.c.host == host)).first() is not None


def hold_pause(connection: Connection, host: str) -> bool:
    """Whether a gateway is paused; until this transaction ends, no teardown puts another pause in that one's place."""
    return connection.execute(select(pauses.c.host).where(pauses.c.host == host).with_for_update()).first() is not None
