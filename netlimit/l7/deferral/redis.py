"""Deferred requests in a Redis stream, which the processes of several hosts may share.

The stream has the order of all requests, and a record for each has the rest. One worker at a time replays: it holds a
lock that ends by itself, and whoever gets it then takes over what its predecessor has not finished (XAUTOCLAIM). How
much is kept through a crash of Redis itself is up to its `appendfsync`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import quote
from weakref import WeakSet

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, MasterDownError, ReadOnlyError, RedisError

from netlimit.l7.deferral import scripts
from netlimit.l7.deferral.backlog import NOBODY, BacklogFull, BacklogUnavailable, Bounds, Claim, Load, check_domain
from netlimit.l7.deferral.clock import open_clock
from netlimit.l7.deferral.request import Deferred, Reply, Report, State, UnreadableRequest, read_head, write_head
from netlimit.l7.redis.bounds import BoundedParser

_GROUP = "replay"
_BATCH, _SCAN = 100, 1000
_TIMEOUT = 5.0
_PATIENCE = 3.0
"""Seconds for which a connection is waited for while all are in use."""
_WITHDRAWN, _KNOWN = "It has not been kept.", 600
"""What is said of a request that has been taken back, and for how many seconds."""
_REPLAYING, _COMING, _POLLING = 8, 24, 8
"""Connections. Clients can have any number of requests under way: they are to use up none that the replayer needs, nor
those who only ask what has become of a request any that new ones need."""
_RESTORED = (
    "Redis has lost the order of deferred requests, by eviction or a failover: those that it still has (%d) are "
    "replayed in the order in which they came."
)
_RECOUNTED = (
    "Redis has lost how many deferred requests wait of whom, by eviction or a failover. They are counted anew; "
    "meanwhile a request may have been served before those that wait."
)

log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """An entry of the stream."""

    entry: str
    id: str
    network: str
    """Empty where a former version has put the request."""
    size: int
    """0 where a former version has."""
    others: str
    """Empty where a former version has."""

    @property
    def number(self) -> tuple[int, ...]:
        """By order of arrival."""
        return tuple(map(int, self.entry.split("-")))


class _Pool(BlockingConnectionPool):
    """Connections to whoever is master, as far as the name in the URL leads there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._made: WeakSet[AbstractConnection] = WeakSet()
        self._past: WeakSet[AbstractConnection] = WeakSet()
        """Those in use that are to be closed."""

    def make_connection(self) -> AbstractConnection:
        """As for every pool."""
        connection: AbstractConnection = super().make_connection()  # type: ignore[no-untyped-call]
        self._made.add(connection)
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        """As for every pool."""
        if connection in self._past:
            self._past.discard(connection)
            await connection.disconnect()
        await super().release(connection)

    async def renew(self) -> None:
        """Close all connections, those in use as soon as they are not."""
        await self.disconnect(inuse_connections=False)
        self._past.update(connection for connection in self._made if connection.is_connected)


def _connect(url: str, most: int, tries: int = 1) -> Any:
    """A client with so many connections, which waits for one of them while all are in use. With more `tries` than one
    what it asks must do no harm twice: then a connection that has broken meanwhile is opened anew."""
    pool = _Pool.from_url(
        url,
        max_connections=most,
        timeout=_PATIENCE,
        socket_timeout=_TIMEOUT,
        socket_connect_timeout=_TIMEOUT,
        parser_class=BoundedParser,
        retry=Retry(NoBackoff(), tries - 1, supported_errors=(ConnectionError,)),
    )
    return Redis.from_pool(pool)


def _is_no_master(error: Exception) -> bool:
    """Whether this is said by a server that others have taken the place of, or will."""
    known = isinstance(error, ReadOnlyError | MasterDownError | BusyLoadingError)
    return known or str(error).startswith("NOREPLICAS")


class RedisBacklog:
    """A stream and what belongs to it, all under one hash tag. For one event loop; claims belong to one worker."""

    def __init__(self, url: str, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.lease = self.bounds.lease
        self._redis = _connect(url, _REPLAYING)
        self._coming, self._polling = _connect(url, _COMING, tries=2), _connect(url, _POLLING, tries=2)
        self._clients = self._redis, self._coming, self._polling
        self.now = open_clock()
        self._worker = secrets.token_hex(8)
        self._domain: str | None = None
        self._name_parts("")
        self._owns = False
        """Whether the lock was ours when it was looked at last, and `_lines` are what Redis has."""
        self._reading = asyncio.Lock()
        """Of whoever reads the stream: what is moved in it meanwhile would be read twice."""
        self._looked = 0.0
        """When they were that at last."""
        self._lines: dict[str, deque[_Waiting]] = {}
        """By key, what this worker has read: all, for those of one key may be as many as any part of it."""
        self._due: dict[str, float] = {}
        """By id, when a request may be claimed again."""
        self._aside = set[str]()
        """Ids of those whom others of their line pass until then."""
        self._tried: dict[str, str] = {}
        """By key, the id of the one for whom the others of its line wait until then."""

    def serve(self, domain: str) -> None:
        """Keep those of one domain alone."""
        check_domain(self._domain, domain)
        self._domain = domain
        self._name_parts(f":{quote(domain, safe='')}")  # in which no brace ends the tag

    async def weigh(self, key: str, network: str) -> Load:
        """How much waits when a request of this key and network comes."""
        async with self._asking():
            names = self._stream, self._keys, self._bytes, self._shares
            return Load(*await self._coming.eval(scripts.WEIGH, len(names), *names, key, network))

    async def put(self, request: Deferred) -> None:
        """Keep a request for good. Raises BacklogFull."""
        async with self._asking():
            names = self._stream, self._keys, self._bytes, self._name(request.id), self._shares
            bounds = self.bounds.most, self.bounds.most_of_one, self.bounds.most_bytes
            told = request.key, request.id, request.accepted, request.expires, write_head(request), request.body
            shares = request.network, self.bounds.most_bytes_of_one, request.others, int(request.shared)
            kept = await self._coming.eval(scripts.PUT, len(names), *names, *bounds, *told, *shares)
            if not kept:
                raise BacklogFull

    async def withdraw(self, request: Deferred) -> bool:
        """Take back a request that has just been put; whether it is kept no more."""
        async with self._asking():
            names = self._stream, self._keys, self._bytes, self._name(request.id), self._shares
            return bool(await self._coming.eval(scripts.WITHDRAW, len(names), *names, _WITHDRAWN, _KNOWN))

    async def check(self) -> None:
        """What is claimed is written in the same place: there is nothing else to be known."""

    async def is_waiting(self, key: str) -> bool:
        """Whether requests of a key wait."""
        async with self._asking():
            waiting: bool = await self._coming.hexists(self._keys, key)
            return waiting

    async def comes_behind(self, key: str, others: str) -> bool:
        """Whether one that comes now is to wait behind others of its line."""
        async with self._asking():
            names = self._keys, self._shares, self._name_aside(key)
            behind: int = await self._coming.eval(scripts.BEHIND, len(names), *names, key, others, self.now())
            return bool(behind)

    async def claim(self, now: float, places: Mapping[str, int] = NOBODY, most: int = 1) -> Claim | None:
        """A request whose turn it is, or None, also while another worker replays."""
        async with self._reading, self._asking():
            owned, self._owns = self._owns, False  # should anything fail, all is read anew: it may be another server's
            held = await self._redis.eval(scripts.LOCK, 1, self._lock, self._worker, int(self.lease * 1000))
            if not held:
                return None
            lost = 0
            if held == 2 or not owned:  # the lock has not been ours, or what comes with it not yet
                gone = await self._read_all()
                # else another may have ended them, so long ago that it is forgotten
                lost = gone if held == 1 or now - self._looked < self.bounds.keep else 0
            else:
                await self._read_new(self._lines)
            self._owns, self._looked = True, now
            claim = None
            while claim is None and (first := self._choose(now, places, most)) is not None:
                key, waiting = first
                self._due[waiting.id] = now + self.lease
                self._aside.discard(waiting.id)
                self._tried[key] = waiting.id
                try:
                    claim = await self._claim(key, waiting)
                    lost += await self._drop(key, waiting) if claim is None else 0
                except UnreadableRequest as error:
                    log.error("%s", error)
                    await self._end(key, waiting, State.FAILED, "", b"", str(error))
        if lost:
            log.warning(
                "Redis has lost deferred requests, by eviction or a failover: those (%d now) are dropped, and never "
                "replayed.",
                lost,
            )
        return claim

    async def renew(self, request: Deferred, now: float) -> None:
        """Let a claim last a whole lease from now, and the lock: nothing is claimed while all places are taken."""
        async with self._asking():
            if request.id in self._due:
                self._due[request.id] = now + self.lease
            await self._redis.eval(scripts.KEEP_LOCK, 1, self._lock, self._worker, int(self.lease * 1000))

    async def postpone(self, request: Deferred, until: float, tried: bool, aside: bool = False) -> None:
        """Give a claim back."""
        async with self._asking():
            if not tried:
                await self._redis.eval(scripts.FORGET_TRY, 1, self._name(request.id))
            self._due[request.id] = until
            if aside:
                self._aside.add(request.id)
                self._tried.pop(request.key, None)
                waiting = self._find(request)
                if waiting is not None:
                    name = self._name_aside(request.key)
                    await self._redis.eval(scripts.STAND_ASIDE, 1, name, waiting.others, until, int(self.bounds.keep))

    async def move(self, request: Deferred, moved: Deferred) -> bool:
        """Put a request into another line, behind those that wait there."""
        async with self._reading, self._asking():
            waiting = self._find(request)
            if waiting is None:
                return False
            head = write_head(moved)
            size = len(head) + len(moved.body)
            names = self._stream, self._keys, self._bytes, self._name(moved.id), self._shares, self._lock
            told = self._worker, waiting.entry, moved.id, moved.key, moved.network, size, moved.others, head
            owned, self._owns = self._owns, False
            if not await self._redis.eval(scripts.MOVE, len(names), *names, *told):
                self._owns = owned
                return False
            self._leave(request.key, waiting)
            if self._due.get(self._tried.get(moved.key, ""), 0.0) <= self.now():
                self._tried[moved.key] = moved.id
            await self._read_new(self._lines)
            self._owns = owned
            return True

    async def finish(self, request: Deferred, state: State, now: float, reply: Reply | None, reason: str) -> None:
        """A request's end."""
        async with self._asking():
            waiting = self._find(request)
            if waiting is None:
                return  # the lock was lost meanwhile, and another worker has ended the request
            told = "" if reply is None else json.dumps([reply.status, reply.headers, reply.truncated])
            await self._end(request.key, waiting, state, told, reply.body if reply else b"", reason)

    async def find(self, identity: str) -> Report | None:
        """What has become of a request."""
        async with self._asking():
            names = ("state", "accepted", "expires", "tries", "reply", "body", "reason")
            values = await self._polling.hmget(self._name(identity), names)
            if values[0] is None:
                return None
            state, accepted, expires, tries, told, body, reason = values
            reply = None
            if told:
                status, headers, truncated = json.loads(told)
                reply = Reply(status, tuple((name, value) for name, value in headers), body, truncated)
            said = (reason or b"").decode()
            return Report(State(state.decode()), float(accepted), float(expires), int(tries), reply, said)

    async def sweep(self, now: float) -> None:
        """What has ended is forgotten by Redis itself, or as more ends. What waits is read anew with the next claim: a
        new master may not have heard that some of it has ended."""
        self._owns = False

    async def aclose(self) -> None:
        """Leave the requests to other workers, and close the connections."""
        with suppress(RedisError, OSError):
            await self._redis.eval(scripts.RELEASE, 1, self._lock, self._worker)
        for client in self._clients:
            await client.aclose()

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            if _is_no_master(error):  # it would say so for ever: the next connection may reach another server
                for client in self._clients:
                    await client.connection_pool.renew()
            raise BacklogUnavailable(error) from error

    def _name_parts(self, whose: str) -> None:
        self._beginning = f"nl:{{deferred{whose}}}"
        self._stream, self._keys, self._bytes, self._shares, self._lock, self._ended = (
            f"{self._beginning}:{part}" for part in ("stream", "keys", "bytes", "shares", "lock", "ended")
        )

    def _find(self, request: Deferred) -> _Waiting | None:
        """Not the first of its line only: a new master may have brought back what had ended before."""
        return next((each for each in self._lines.get(request.key, ()) if each.id == request.id), None)

    def _name_aside(self, key: str) -> str:
        return f"{self._beginning}:aside:{key}"

    def _name(self, identity: str) -> str:
        return f"{self._beginning}:request:{identity}"

    async def _read_all(self) -> int:
        """Begin with all that was read before and has not been finished, by whomever. What this worker has claimed or
        postponed stays so. Tells how many of those that it knew are gone without an end."""
        await self._restore()
        lines: dict[str, deque[_Waiting]] = {}
        start = b"0-0"
        while True:
            start, entries, _ = await self._redis.xautoclaim(self._stream, _GROUP, self._worker, 0, start, _BATCH)
            await self._note(lines, entries)
            if start == b"0-0":
                break
        await self._read_new(lines)
        if await self._redis.eval(scripts.RECOUNT, 4, self._stream, self._keys, self._bytes, self._shares):
            log.warning(_RECOUNTED)
        waiting = {each.id for line in lines.values() for each in line}
        gone = {each.id for line in self._lines.values() for each in line} - waiting
        self._lines = lines
        self._due = {identity: due for identity, due in self._due.items() if identity in waiting}
        self._aside &= waiting
        self._tried = {key: identity for key, identity in self._tried.items() if key in lines}
        return len(gone) - (await self._redis.exists(*map(self._name, gone)) if gone else 0)

    async def _restore(self) -> None:
        """Have the stream hold all that waits. It does as long as the group is there, which is lost with it."""
        if await self._redis.exists(self._stream):
            groups = await self._redis.xinfo_groups(self._stream)
            if any(group["name"] == _GROUP.encode() for group in groups):
                return
        restored = await self._redis.eval(scripts.RESTORE, 1, self._stream, self._name(""), *await self._find_waiting())
        if restored:
            log.warning(_RESTORED, restored)

    async def _find_waiting(self) -> list[str]:
        """The ids of all records of requests that wait, in the order in which these came."""
        arrivals: dict[str, float] = {}
        cursor, prefix = -1, self._name("")
        while cursor != 0:
            cursor, names = await self._redis.scan(max(cursor, 0), f"{prefix}*", _SCAN, "hash")
            async with self._redis.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hmget(name, "state", "accepted")
                records = await pipeline.execute()
            for name, (state, accepted) in zip(names, records, strict=True):
                with suppress(ValueError):  # no such request was ever put here
                    if state == b"waiting":
                        arrivals[name.decode().removeprefix(prefix)] = float(accepted or 0)
        return sorted(arrivals, key=arrivals.__getitem__)

    async def _read_new(self, lines: dict[str, deque[_Waiting]]) -> None:
        while read := await self._redis.xreadgroup(_GROUP, self._worker, {self._stream: ">"}, _BATCH):
            await self._note(lines, read[0][1])

    async def _note(self, lines: dict[str, deque[_Waiting]], entries: list[Any]) -> None:
        for entry, fields in entries:
            try:
                key, waiting = _read_entry(entry, fields)
            except (KeyError, ValueError):
                log.error("An entry of the stream that cannot be read is dropped: %s", entry.decode())
                await self._redis.xack(self._stream, _GROUP, entry)
                await self._redis.xdel(self._stream, entry)
            else:
                lines.setdefault(key, deque()).append(waiting)

    def _choose(self, now: float, places: Mapping[str, int], most: int) -> tuple[str, _Waiting] | None:
        """Whose turn it is, and the key of the line."""
        firsts = ((key, self._find_head(key, now)) for key in self._lines)
        heads = ((key, head) for key, head in firsts if head is not None)
        first = min(heads, key=lambda head: (places.get(head[1].network, 0), head[1].number), default=None)
        return None if first is None or places.get(first[1].network, 0) >= most else first

    def _find_head(self, key: str, now: float) -> _Waiting | None:
        """The first of a line who does not stand aside, nor waits for one who does; None while it is nobody's turn."""
        if self._due.get(self._tried.get(key, ""), 0.0) > now:
            return None
        aside = set[str]()
        for waiting in self._lines[key]:
            if waiting.id in self._aside and self._due.get(waiting.id, 0.0) > now:
                aside.add(waiting.others)
            elif waiting.others not in aside:
                return waiting
        return None

    async def _claim(self, key: str, waiting: _Waiting) -> Claim | None:
        """None if there is no such request any more. Raises UnreadableRequest."""
        names = self._name(waiting.id), self._name_aside(key)
        record = await self._redis.eval(scripts.CLAIM, len(names), *names, waiting.others)
        return record and Claim(read_head(waiting.id, record[1], record[2]), record[0])

    async def _drop(self, key: str, waiting: _Waiting) -> int:
        """Forget an entry without a request, and all others that Redis does not have if not even the stream has this
        one. Tells how many are lost."""
        present, state = await self._end(key, waiting, State.FAILED, "", b"", "Redis has lost it.")
        return (1 if state in (None, b"waiting") else 0) + (0 if present else await self._read_all())

    async def _end(
        self, key: str, waiting: _Waiting, state: State, told: str, body: bytes, reason: str
    ) -> tuple[int, bytes | None]:
        """Take a request out of its line, and remember its end. Tells whether it has been in the stream, and what was
        known of it: None if it is lost."""
        names = self._stream, self._keys, self._bytes, self._name(waiting.id), self._shares, self._ended
        end = waiting.entry, key, state, told, body, reason, int(self.bounds.keep), waiting.size, waiting.network
        room = self._name(""), waiting.id, self.bounds.most, self.bounds.most_bytes, waiting.others
        present, known = await self._redis.eval(scripts.FINISH, len(names), *names, *end, *room)
        if self._leave(key, waiting):  # had it failed, the request would be claimed again after the lease
            self._due.pop(waiting.id, None)
            self._aside.discard(waiting.id)
        return present, known

    def _leave(self, key: str, waiting: _Waiting) -> bool:
        """Take a request out of its line here; whether it was there: it may have been read anew meanwhile."""
        line = self._lines.get(key)
        if line is None or waiting not in line:
            return False
        line.remove(waiting)
        if not line:
            del self._lines[key]
            self._tried.pop(key, None)
        elif self._tried.get(key) == waiting.id:
            del self._tried[key]
        return True


def _read_entry(entry: bytes, fields: dict[bytes, bytes]) -> tuple[str, _Waiting]:
    """The key of the line, and what is to be put there. Raises KeyError, ValueError."""
    network, size = fields.get(b"network", b"").decode(), int(fields.get(b"size", 0))
    others = fields.get(b"others", b"").decode()
    return fields[b"key"].decode(), _Waiting(entry.decode(), fields[b"id"].decode(), network, size, others)
