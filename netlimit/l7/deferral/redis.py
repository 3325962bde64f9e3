"""Deferred requests in a Redis stream, which the processes of several hosts may share.

The stream has the order of all requests, and a record for each has the rest. One worker at a time replays: it holds a
lock that ends by itself, and whoever gets it then takes over what its predecessor has not finished (XAUTOCLAIM). How
much is kept through a crash of Redis itself is up to its `appendfsync`.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from netlimit.l7.deferral.backlog import BacklogFull, BacklogUnavailable, Bounds, Claim
from netlimit.l7.deferral.clock import open_clock
from netlimit.l7.deferral.request import Deferred, Reply, Report, State, read_head, write_head

_GROUP = "replay"
_BATCH = 100
_TIMEOUT = 5.0
_AHEAD = 1000
"""So many entries are looked at beyond those that wait for their turn."""
_PUT = """
local size = #ARGV[8] + #ARGV[9]
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1])
    or tonumber(redis.call('HGET', KEYS[2], ARGV[4]) or 0) >= tonumber(ARGV[2])
    or tonumber(redis.call('GET', KEYS[3]) or 0) + size > tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[4], 'state', 'waiting', 'key', ARGV[4], 'accepted', ARGV[6], 'expires', ARGV[7], 'tries', 0,
    'size', size, 'head', ARGV[8], 'body', ARGV[9])
redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
redis.call('INCRBY', KEYS[3], size)
redis.call('XADD', KEYS[1], '*', 'id', ARGV[5], 'key', ARGV[4])
return 1
"""
_LOCK = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return owner and 1 or 2
"""
_FINISH = """
redis.call('XACK', KEYS[1], 'replay', ARGV[1])
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return end
if redis.call('HINCRBY', KEYS[2], ARGV[2], -1) <= 0 then redis.call('HDEL', KEYS[2], ARGV[2]) end
redis.call('DECRBY', KEYS[3], redis.call('HGET', KEYS[4], 'size'))
redis.call('HSET', KEYS[4], 'state', ARGV[3], 'reply', ARGV[4], 'body', ARGV[5], 'reason', ARGV[6])
redis.call('HDEL', KEYS[4], 'head')
redis.call('EXPIRE', KEYS[4], ARGV[7])
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


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
        self._redis: Any = Redis.from_url(url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT)
        self.now = open_clock()
        self._worker = secrets.token_hex(8)
        self._stream, self._keys, self._bytes, self._lock = (
            f"nl:{{deferred}}:{part}" for part in ("stream", "keys", "bytes", "lock")
        )
        self._owns = False
        """Whether the lock was ours when it was looked at last, and all that was left behind has been taken over."""
        self._lines: dict[str, deque[tuple[str, str]]] = {}
        """By key, what this worker has read: entries of the stream, and the ids of their requests."""
        self._due: dict[str, float] = {}
        """By id, when a request may be claimed again."""

    async def put(self, request: Deferred) -> None:
        """Keep a request for good. Raises BacklogFull."""
        with _asking():
            names = self._stream, self._keys, self._bytes, self._name(request.id)
            bounds = self._bounds.most, self._bounds.most_of_one, self._bounds.most_bytes
            told = request.key, request.id, request.accepted, request.expires, write_head(request), request.body
            kept = await self._redis.eval(_PUT, len(names), *names, *bounds, *told)
            if not kept:
                raise BacklogFull

    async def is_waiting(self, key: str) -> bool:
        """Whether requests of a key wait."""
        with _asking():
            waiting: bool = await self._redis.hexists(self._keys, key)
            return waiting

    async def claim(self, now: float) -> Claim | None:
        """A request whose turn it is, or None, also while another worker replays."""
        with _asking():
            held = await self._redis.eval(_LOCK, 1, self._lock, self._worker, int(self._bounds.lease * 1000))
            if not held:
                self._owns = False
                return None
            if held == 2 or not self._owns:  # the lock has not been ours, or what comes with it not yet
                self._owns = False
                await self._take_over()
                self._owns = True
            if sum(map(len, self._lines.values())) < _AHEAD:
                self._note(await self._read_new())
            for line in self._lines.values():
                _, identity = line[0]
                if self._due.get(identity, 0.0) <= now:
                    self._due[identity] = now + self._bounds.lease
                    return await self._claim(identity)
            return None

    async def postpone(self, request: Deferred, until: float, tried: bool) -> None:
        """Give a claim back."""
        with _asking():
            if not tried:
                await self._redis.hincrby(self._name(request.id), "tries", -1)
            self._due[request.id] = until

    async def finish(self, request: Deferred, state: State, now: float, reply: Reply | None, reason: str) -> None:
        """A request's end."""
        with _asking():
            line = self._lines.get(request.key)
            if line is None or line[0][1] != request.id:
                return  # the lock was lost meanwhile, and another worker has the request
            told = "" if reply is None else json.dumps([reply.status, reply.headers, reply.truncated])
            entry, _ = line[0]
            names = self._stream, self._keys, self._bytes, self._name(request.id)
            end = entry, request.key, state, told, reply.body if reply else b"", reason, int(self._bounds.keep)
            await self._redis.eval(_FINISH, len(names), *names, *end)
            line.popleft()  # had it failed, the request would be claimed again after the lease
            self._due.pop(request.id, None)
            if not line:
                self._lines.pop(request.key, None)

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
        """What has ended is forgotten by Redis itself."""

    async def aclose(self) -> None:
        """Leave the requests to other workers, and close the connections."""
        with suppress(RedisError, OSError):
            await self._redis.eval(_RELEASE, 1, self._lock, self._worker)
        await self._redis.aclose()

    def _name(self, identity: str) -> str:
        return f"nl:{{deferred}}:request:{identity}"

    async def _take_over(self) -> None:
        """Begin with all that was read before and has not been finished, by whomever."""
        self._lines.clear()
        self._due.clear()
        try:
            await self._redis.xgroup_create(self._stream, _GROUP, "0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        start = b"0-0"
        while True:
            start, entries, _ = await self._redis.xautoclaim(self._stream, _GROUP, self._worker, 0, start, _BATCH)
            self._note(entries)
            if start == b"0-0":
                return

    async def _read_new(self) -> list[Any]:
        read = await self._redis.xreadgroup(_GROUP, self._worker, {self._stream: ">"}, _BATCH)
        return read[0][1] if read else []

    def _note(self, entries: list[Any]) -> None:
        for entry, fields in entries:
            line = self._lines.setdefault(fields[b"key"].decode(), deque())
            line.append((entry.decode(), fields[b"id"].decode()))

    async def _claim(self, identity: str) -> Claim:
        name = self._name(identity)
        tries = await self._redis.hincrby(name, "tries", 1)
        head, body = await self._redis.hmget(name, ("head", "body"))
        return Claim(read_head(head.decode(), body), tries)
