"""Deferred requests in a Redis stream, which the processes of several hosts may share.

The stream has the order of all requests, and a record for each has the rest. One worker at a time replays: it holds a
lock that ends by itself, and whoever gets it then takes over what its predecessor has not finished (XAUTOCLAIM). How
much is kept through a crash of Redis itself is up to its `appendfsync`.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from netlimit.l7.deferral.backlog import NOBODY, BacklogFull, BacklogUnavailable, Bounds, Claim
from netlimit.l7.deferral.clock import open_clock
from netlimit.l7.deferral.request import Deferred, Reply, Report, State, read_head, write_head

_GROUP = "replay"
_BATCH = 100
_TIMEOUT = 5.0
_PUT = """
local function read(fields, name) return tonumber(redis.call('HGET', fields, name) or 0) end
local size = #ARGV[8] + #ARGV[9]
local free = tonumber(ARGV[1]) - redis.call('XLEN', KEYS[1])
local free_bytes = tonumber(ARGV[3]) - tonumber(redis.call('GET', KEYS[3]) or 0)
if read(KEYS[2], ARGV[4]) >= tonumber(ARGV[2])
    or read(KEYS[5], 'bytes of key ' .. ARGV[4]) + size > tonumber(ARGV[11])
    or read(KEYS[5], 'requests of network ' .. ARGV[10]) >= free
    or read(KEYS[5], 'bytes of network ' .. ARGV[10]) + size > free_bytes then return 0 end
redis.call('HSET', KEYS[4], 'state', 'waiting', 'key', ARGV[4], 'accepted', ARGV[6], 'expires', ARGV[7], 'tries', 0,
    'size', size, 'head', ARGV[8], 'body', ARGV[9], 'network', ARGV[10])
redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
redis.call('INCRBY', KEYS[3], size)
redis.call('HINCRBY', KEYS[5], 'bytes of key ' .. ARGV[4], size)
redis.call('HINCRBY', KEYS[5], 'requests of network ' .. ARGV[10], 1)
redis.call('HINCRBY', KEYS[5], 'bytes of network ' .. ARGV[10], size)
redis.call('XADD', KEYS[1], '*', 'id', ARGV[5], 'key', ARGV[4], 'network', ARGV[10], 'size', size)
return 1
"""
_LOCK = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return owner and 1 or 2
"""
_KEEP_LOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"
_CLAIM = """
local head, body = unpack(redis.call('HMGET', KEYS[1], 'head', 'body'))
return head and {redis.call('HINCRBY', KEYS[1], 'tries', 1), head, body}
"""
_FORGET_TRY = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'tries', -1) end"
_FINISH = """
local function give_back(fields, name, amount)
    if redis.call('HINCRBY', fields, name, -amount) <= 0 then redis.call('HDEL', fields, name) end
end
redis.call('XACK', KEYS[1], 'replay', ARGV[1])
local size, network, state = unpack(redis.call('HMGET', KEYS[4], 'size', 'network', 'state'))
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return state or '' end
give_back(KEYS[2], ARGV[2], 1)
if not state then size, network = ARGV[8], ARGV[9] ~= '' and ARGV[9] end -- the record is lost
redis.call('DECRBY', KEYS[3], size)
if network then -- else a former version has put it, and has not counted what shares it takes
    give_back(KEYS[5], 'bytes of key ' .. ARGV[2], size)
    give_back(KEYS[5], 'requests of network ' .. network, 1)
    give_back(KEYS[5], 'bytes of network ' .. network, size)
end
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[3], KEYS[5]) end -- such a version gives none back
if not state then return end
redis.call('HSET', KEYS[4], 'state', ARGV[3], 'reply', ARGV[4], 'body', ARGV[5], 'reason', ARGV[6])
redis.call('HDEL', KEYS[4], 'head')
redis.call('EXPIRE', KEYS[4], ARGV[7])
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"

log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """An entry of the stream."""

    entry: str
    id: str
    network: str
    """Empty where a former version has put the request."""
    size: int
    """0 where a former version has."""

    @property
    def number(self) -> tuple[int, ...]:
        """By order of arrival."""
        return tuple(map(int, self.entry.split("-")))


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise BacklogUnavailable(error) from error


class RedisBacklog:
    """A stream and what belongs to it, all under one hash tag. For one event loop; claims belong to one worker."""

    def __init__(self, url: str, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self.lease = self._bounds.lease
        self._redis: Any = Redis.from_url(url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT)
        self.now = open_clock()
        self._worker = secrets.token_hex(8)
        self._stream, self._keys, self._bytes, self._shares, self._lock = (
            f"nl:{{deferred}}:{part}" for part in ("stream", "keys", "bytes", "shares", "lock")
        )
        self._owns = False
        """Whether the lock was ours when it was looked at last, and `_lines` are what Redis has."""
        self._lines: dict[str, deque[_Waiting]] = {}
        """By key, what this worker has read: all, for those of one key may be as many as any part of it."""
        self._due: dict[str, float] = {}
        """By id, when a request may be claimed again."""

    async def put(self, request: Deferred) -> None:
        """Keep a request for good. Raises BacklogFull."""
        with _asking():
            names = self._stream, self._keys, self._bytes, self._name(request.id), self._shares
            bounds = self._bounds.most, self._bounds.most_of_one, self._bounds.most_bytes
            told = request.key, request.id, request.accepted, request.expires, write_head(request), request.body
            shares = request.network, self._bounds.most_bytes_of_one
            kept = await self._redis.eval(_PUT, len(names), *names, *bounds, *told, *shares)
            if not kept:
                raise BacklogFull

    async def is_waiting(self, key: str) -> bool:
        """Whether requests of a key wait."""
        with _asking():
            waiting: bool = await self._redis.hexists(self._keys, key)
            return waiting

    async def claim(self, now: float, places: Mapping[str, int] = NOBODY, most: int = 1) -> Claim | None:
        """A request whose turn it is, or None, also while another worker replays."""
        owned, self._owns = self._owns, False  # should anything fail, all is read anew: it may be another server's
        with _asking():
            held = await self._redis.eval(_LOCK, 1, self._lock, self._worker, int(self.lease * 1000))
            if not held:
                return None
            lost = 0
            if held == 2 or not owned:  # the lock has not been ours, or what comes with it not yet
                gone = await self._read_all()
                lost = gone if held == 1 else 0  # else another may have ended them, so long ago that it is forgotten
            while entries := await self._read_new():
                _note(self._lines, entries)
            self._owns = True
            claim = None
            while claim is None and (first := self._choose(now, places, most)) is not None:
                key, waiting = first
                self._due[waiting.id] = now + self.lease
                claim = await self._claim(waiting)
                if claim is None:
                    lost += await self._drop(key, waiting)
        if lost:
            log.warning(
                "Redis has lost deferred requests, by eviction or a failover: those (%d now) are dropped, and never "
                "replayed.",
                lost,
            )
        return claim

    async def renew(self, request: Deferred, now: float) -> None:
        """Let a claim last a whole lease from now, and the lock: nothing is claimed while all places are taken."""
        with _asking():
            if request.id in self._due:
                self._due[request.id] = now + self.lease
            await self._redis.eval(_KEEP_LOCK, 1, self._lock, self._worker, int(self.lease * 1000))

    async def postpone(self, request: Deferred, until: float, tried: bool) -> None:
        """Give a claim back."""
        with _asking():
            if not tried:
                await self._redis.eval(_FORGET_TRY, 1, self._name(request.id))
            self._due[request.id] = until

    async def finish(self, request: Deferred, state: State, now: float, reply: Reply | None, reason: str) -> None:
        """A request's end."""
        with _asking():
            line = self._lines.get(request.key)
            if line is None or line[0].id != request.id:
                return  # the lock was lost meanwhile, and another worker has the request
            told = "" if reply is None else json.dumps([reply.status, reply.headers, reply.truncated])
            await self._end(request.key, line[0], state, told, reply.body if reply else b"", reason)

    async def find(self, identity: str) -> Report | None:
        """What has become of a request."""
        with _asking():
            names = ("state", "accepted", "expires", "tries", "reply", "body", "reason")
            values = await self._redis.hmget(self._name(identity), names)
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
        """What has ended is forgotten by Redis itself. What waits is read anew with the next claim: a new master may
        not have heard that some of it has ended."""
        self._owns = False

    async def aclose(self) -> None:
        """Leave the requests to other workers, and close the connections."""
        with suppress(RedisError, OSError):
            await self._redis.eval(_RELEASE, 1, self._lock, self._worker)
        await self._redis.aclose()

    def _name(self, identity: str) -> str:
        return f"nl:{{deferred}}:request:{identity}"

    async def _read_all(self) -> int:
        """Begin with all that was read before and has not been finished, by whomever. What this worker has claimed or
        postponed stays so. Tells how many of those that it knew are gone without an end."""
        try:
            await self._redis.xgroup_create(self._stream, _GROUP, "0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        lines: dict[str, deque[_Waiting]] = {}
        start = b"0-0"
        while True:
            start, entries, _ = await self._redis.xautoclaim(self._stream, _GROUP, self._worker, 0, start, _BATCH)
            _note(lines, entries)
            if start == b"0-0":
                break
        waiting = {each.id for line in lines.values() for each in line}
        gone = {each.id for line in self._lines.values() for each in line} - waiting
        self._lines = lines
        self._due = {identity: due for identity, due in self._due.items() if identity in waiting}
        return len(gone) - (await self._redis.exists(*map(self._name, gone)) if gone else 0)

    async def _read_new(self) -> list[Any]:
        read = await self._redis.xreadgroup(_GROUP, self._worker, {self._stream: ">"}, _BATCH)
        return read[0][1] if read else []

    def _choose(self, now: float, places: Mapping[str, int], most: int) -> tuple[str, _Waiting] | None:
        """Whose turn it is, and the key of the line."""
        heads = ((key, line[0]) for key, line in self._lines.items() if self._due.get(line[0].id, 0.0) <= now)
        first = min(heads, key=lambda head: (places.get(head[1].network, 0), head[1].number), default=None)
        return None if first is None or places.get(first[1].network, 0) >= most else first

    async def _claim(self, waiting: _Waiting) -> Claim | None:
        """None if there is no such request any more."""
        record = await self._redis.eval(_CLAIM, 1, self._name(waiting.id))
        return record and Claim(read_head(record[1].decode(), record[2]), record[0])

    async def _drop(self, key: str, waiting: _Waiting) -> int:
        """Forget an entry without a request, and all others that Redis does not have if not even the stream has this
        one. Tells how many are lost."""
        state = await self._end(key, waiting, State.FAILED, "", b"", "")
        return (0 if state else 1) + (0 if state is None else await self._read_all())

    async def _end(
        self, key: str, waiting: _Waiting, state: State, told: str, body: bytes, reason: str
    ) -> bytes | None:
        """Take what waits first out of its line, and remember the end of the request unless it is lost. None if it has
        been in the stream; else what has become of it, if that is known."""
        names = self._stream, self._keys, self._bytes, self._name(waiting.id), self._shares
        end = waiting.entry, key, state, told, body, reason, int(self._bounds.keep), waiting.size, waiting.network
        known: bytes | None = await self._redis.eval(_FINISH, len(names), *names, *end)
        line = self._lines.get(key)  # had it failed, the request would be claimed again after the lease
        if line is not None and line[0] == waiting:  # it may have been read anew meanwhile
            line.popleft()
            self._due.pop(waiting.id, None)
            if not line:
                del self._lines[key]
        return known


def _note(lines: dict[str, deque[_Waiting]], entries: list[Any]) -> None:
    for entry, fields in entries:
        line = lines.setdefault(fields[b"key"].decode(), deque())
        network, size = fields.get(b"network", b"").decode(), int(fields.get(b"size", 0))
        line.append(_Waiting(entry.decode(), fields[b"id"].decode(), network, size))
