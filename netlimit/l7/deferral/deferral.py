"""Keeps requests over their limit for later, and says what has become of them.

In an application it is a part of the middleware, `RateLimit(…, deferral=Deferral("sqlite:///var/lib/app/deferred.db"))`.
Whoever may read what has become of a request is who knows its id, which is in the URL of the status alone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from netlimit.errors import SettingsError
from netlimit.l7.deferral.backlog import Backlog, BacklogUnavailable, BacklogUnwritten, Bounds, Unkept
from netlimit.l7.deferral.intake import Intake
from netlimit.l7.deferral.outage import Outage
from netlimit.l7.deferral.replay import TRIES, Replayer
from netlimit.l7.deferral.request import Deferred, Report, keep_headers, make_id
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.deferral.upstream import App, AppUpstream, Upstream
from netlimit.l7.headers import count_seconds
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.listening import ClientGone, Message, Receive
from netlimit.l7.problems import MEDIA_TYPE, write_complaint
from netlimit.l7.rules import Descriptor, Match, OnLimit, Rule, join_key, name_counter

if TYPE_CHECKING:
    from netlimit.l7.deferral.revision import Revision

Send = Callable[[Message], Awaitable[None]]
Arrive = Callable[[], Awaitable[Verdict]]
"""Counts that a request which is kept has come; the verdict tells whether it may."""
Refuse = Callable[[Verdict], Awaitable[None]]
"""Answers what a limit has refused."""

PATH = "/.netlimit/deferred"
LARGEST, _MOST = 2**20, 20 * 2**20
"""Bytes of a body that is kept, at most."""
EXPIRES = 86_400.0
"""Seconds for which a request waits for its turn, at most."""
_OF_REQUESTS = frozenset({"path", "host", "method"})
"""Keys that tell what is asked for, and not by whom."""
_JSON = b"application/json"
_LINGERING = 2.0
"""Seconds for which the rest of a body that is not kept is passed over."""
_DIGITS = 20  # of a length, at most: Python refuses to read thousands of them
_PASSING = (429, 503)
"""Answers to what may be kept later."""


def open_backlog(url: str, bounds: Bounds | None = None) -> Backlog:
    """The backlog of a URL: `sqlite:///path/to/file`, or `redis://host:port/0`.

    Raises SettingsError for another, and for a file in whose directory others may write, OSError where there can be no
    such file.
    """
    scheme, _, path = url.partition("://")
    if scheme == "sqlite" and path.startswith("/"):
        _check_directory(Path(path).parent)
        return SqliteBacklog(Path(path), bounds)
    if scheme in ("redis", "rediss", "unix"):
        from netlimit.l7.deferral.redis import RedisBacklog

        return RedisBacklog(url, bounds)
    raise SettingsError(
        "DEFERRED_URL", f"{url!r} is nothing to keep requests in; write sqlite:///path/to/file or redis://host:port/0."
    )


def _check_directory(path: Path) -> None:
    """Raises SettingsError where others could put files beside that of the backlog, and OSError."""
    found = path.stat()
    if found.st_mode & stat.S_IWOTH or found.st_uid not in (0, os.geteuid()):
        raise SettingsError(
            "DEFERRED_URL",
            f"In {path} others may write, and could keep the application from starting, or read what waits. Name a "
            "file in a directory of the application's own, such as sqlite:///var/lib/shop/deferred.db.",
        )


class Unwritten(Unkept):
    """A request is not kept, since nothing can be written where it was to be. Its body has been read."""

    status = BacklogUnwritten.status

    def __init__(self, error: BacklogUnwritten, body: bytes) -> None:
        super().__init__(str(error))
        self.body = body


class Deferral:
    """Keeps requests, and replays them once it has been started.

    `backlog` is where they are kept, or its URL. `upstream` is the URL of the server to which they are replayed, by
    default the application that the middleware wraps. `path` is where their status is read, below the application's
    root path. A request waits `expires` seconds at most, and is tried `tries` times. Its body has `largest` bytes at
    most; more than 20 MiB it cannot have, for of one client little more is kept. Raises SettingsError.
    """

    def __init__(
        self,
        backlog: Backlog | str,
        upstream: str | None = None,
        path: str = PATH,
        expires: float = EXPIRES,
        tries: int = TRIES,
        largest: int = LARGEST,
    ) -> None:
        if largest > _MOST:
            raise SettingsError("LARGEST", f"`largest` is {largest}; a body of {_MOST} bytes is the most that is kept.")
        self.path = path
        self._backlog = open_backlog(backlog) if isinstance(backlog, str) else backlog
        self._upstream = None if upstream is None else _open_upstream(upstream)
        self._expires = expires
        self._tries = tries
        self._intake = Intake(self._backlog, largest)
        self._outage = Outage()
        self._replayer: Replayer | None = None
        self._context = copy_context()
        """What is replayed knows of no client's context, though it may be the first request that has it begin."""

    def serve(self, domain: str) -> None:
        """Keep requests of this domain alone. Raises SettingsError where those of another are kept."""
        self._backlog.serve(domain)

    def start(
        self,
        limiter: Limiter,
        app: App | None = None,
        state: Message | None = None,
        revision: Revision | None = None,
    ) -> None:
        """Begin to replay, if it has not begun. `app` is where to, unless there is an upstream; `state` that of its
        lifespan, if it has one. `revision` has what waits come under the rules of the moment."""
        if self._replayer is None:
            upstream: Upstream
            if self._upstream is not None:
                upstream = self._upstream
            elif app is not None:
                upstream = AppUpstream(app, state)
            else:
                raise SettingsError("UPSTREAM", "There is nowhere to replay to: give the URL of an upstream.")
            self._replayer = Replayer(self._backlog, limiter, upstream, self._tries, revision, self._outage)
        self._context.copy().run(self._replayer.start)

    async def stop(self) -> None:
        """Replay no more, and let go of everything."""
        if self._replayer is not None:
            await self._replayer.stop()
        if self._upstream is not None:
            await self._upstream.aclose()
        await self._backlog.aclose()

    async def find_waiting(self, lines: Iterable[Line]) -> Line | None:
        """The first of these lines in which others wait before a request that comes: then it is to wait behind them,
        though it be within the limit, or what came later would be served earlier. None while nothing can be kept."""
        if self._outage.keeps_nothing:
            return None
        with suppress(BacklogUnavailable):  # then those within the limit are served all the same
            for line in lines:
                if await self._backlog.comes_behind(line.key, line.others):
                    return line
        return None

    async def accept(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        line: Line,
        domain: str,
        descriptors: Sequence[Descriptor],
        arrive: Arrive,
        refuse: Refuse,
        hits: int = 1,
        retry_after: float = 0.0,
        address: str | None = None,
        passes: bool = False,
    ) -> None:
        """Keep a request and answer 202, or 413 or 429 where it cannot be kept: unread, if that is known before. A
        client that goes before all of its request is here gets nothing, and nothing is kept. What `arrive` refuses is
        not kept, and answered by `refuse`. `address` is whom IP rules are asked about when it is replayed, where
        descriptors do not tell. One that `passes` where nothing can be kept is not answered then: raises Unwritten."""
        if not _find_raw(scope).startswith(b"/"):  # behind the upstream's name it could make another of it
            return await _decline(scope, receive, send, 400, "The request is for no path, and is not kept.")
        request = self._make_request(scope, line, domain, tuple(descriptors), hits, address)
        wait = [(b"retry-after", b"%d" % (count_seconds(retry_after) or 1))]
        try:
            refusal = await self._keep(request, scope, receive, arrive)
        except ClientGone:
            return None
        except Unwritten as error:
            if passes:
                raise
            status, sentence = error.status, str(error)
        except Unkept as error:
            status, sentence = error.status, str(error)
        else:
            if refusal is not None:
                return await refuse(refusal)
            return await self._tell(scope, send, request.id, wait)
        # Not while the error is at hand: it leads to the body, for which there is no room any more.
        return await _decline(scope, receive, send, status, sentence, wait if status in _PASSING else ())

    def is_asked(self, scope: Message) -> bool:
        """Whether it is asked what has become of a request."""
        return _find_route(scope).startswith(f"{self.path}/")

    async def report(self, scope: Message, send: Send) -> None:
        """Answer what has become of a request, by the id at the end of the path."""
        if scope["method"] not in ("GET", "HEAD"):
            return await complain(send, 405, "The status of a request is read by GET.", [(b"allow", b"GET, HEAD")])
        identity = _find_route(scope)[len(self.path) + 1 :]
        try:
            report = await self._backlog.find(identity)
        except BacklogUnavailable as error:
            return await complain(send, 503, str(error), [(b"retry-after", b"1")])
        if report is None:
            return await complain(send, 404, "There is no such request, or its end has been forgotten.")
        body = json.dumps(_describe(identity, report)).encode()
        await _answer(send, 200, _JSON, b"" if scope["method"] == "HEAD" else body)
        return None

    async def _keep(self, request: Deferred, scope: Message, receive: Receive, arrive: Arrive) -> Verdict | None:
        """Keep a request and count that it has come, or neither: what there is room for first, since what has been
        counted stays so. The verdict is that of a limit that others, who came at the same time, have used up."""
        try:
            await self._put(request, scope, receive)
            verdict = await arrive()
        except (Unkept, ClientGone):
            raise
        except BaseException:  # whoever ends the task of a client that goes, say, has not been there to be counted
            with suppress(BacklogUnavailable):
                await self._backlog.withdraw(request)
            raise
        return None if verdict.allowed or not await self._backlog.withdraw(request) else verdict

    async def _put(self, request: Deferred, scope: Message, receive: Receive) -> None:
        """Keep a request with its body, of which nothing is at hand any more afterwards."""
        async with self._intake.read(request, _find_length(scope), receive) as body:
            now = self._backlog.now()
            try:
                await self._backlog.put(replace(request, body=body, accepted=now, expires=now + self._expires))
            except BacklogUnwritten as error:
                if error.lasts:
                    self._outage.begin(error)
                raise Unwritten(error, body) from None

    async def _tell(self, scope: Message, send: Send, identity: str, wait: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer that a request is kept, and have it replayed."""
        if self._replayer is not None:
            self._replayer.stir()
        location = f"{quote(_find_root(scope))}{self.path}/{identity}"
        told = {"id": identity, "state": "waiting", "location": location}
        await _answer(send, 202, _JSON, json.dumps(told).encode(), [(b"location", location.encode()), *wait])

    def _make_request(
        self,
        scope: Message,
        line: Line,
        domain: str,
        descriptors: tuple[Descriptor, ...],
        hits: int,
        address: str | None,
    ) -> Deferred:
        """What there is of a request before its body is read."""
        identity, now = make_id(), self._backlog.now()
        raw = _find_raw(scope)
        query: bytes = scope.get("query_string", b"")
        client = scope.get("client")
        return Deferred(
            identity,
            line.key,
            domain,
            descriptors,
            hits,
            scope["method"],
            (raw + (b"?" + query if query else b"")).decode("latin-1"),
            keep_headers(scope["headers"], identity),
            b"",
            f"{client[0]} {client[1]}" if client else None,
            scope.get("scheme", "http"),
            now,
            now + self._expires,
            address,
            scope.get("root_path", ""),
            None if unquote(raw.decode("latin-1")) == scope["path"] else scope["path"],
            line.others,
            line.shared,
        )


def _open_upstream(url: str) -> Upstream:
    from netlimit.l7.deferral.server import HttpUpstream

    return HttpUpstream(url)


class Line(NamedTuple):
    """Those who are deferred for one counter, as one of them stands there."""

    key: str
    """The name of the counter."""
    others: str
    """The same for those who stand under the same other limits: they wait for each other."""
    shared: bool
    """Whether several clients have that counter, of whom none is to fill the line."""


def find_lines(matches: Sequence[Match | None]) -> list[Line]:
    """The lines in which a request may come to wait that finds these rules."""
    found = [match for match in matches if match is not None]
    return [_make_line(match, found) for match in found if match.rule.on_limit is OnLimit.DEFER]


def choose_line(lines: Sequence[Line], verdict: Verdict) -> Line:
    """That of the limit which refuses a request for longest; the first, if none does."""
    status = verdict.refusing
    key = name_counter(status.rule, status.key) if status is not None and status.rule is not None else ""
    return next((line for line in lines if line.key == key), lines[0])


def _make_line(match: Match, found: Sequence[Match]) -> Line:
    others = sorted({name_counter(*each) for each in found if each != match})
    digest = blake2b(join_key(["", *others]).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Line(name_counter(*match), digest if others else "", _is_shared(match.rule))


def _is_shared(rule: Rule) -> bool:
    """Whether none of a rule's keys tells who asks, only what for."""
    plain = rule.name.replace("\\\\", " ").replace("\\,", " ").replace("\\=", " ")  # signs of values, not of the name
    steps = [step.partition("=") for step in plain.split(",")]
    return not rule.is_of_clients and all(equals or key in _OF_REQUESTS for key, equals, _ in steps)


def _describe(identity: str, report: Report) -> dict[str, object]:
    document: dict[str, object] = {
        "id": identity,
        "state": report.state,
        "accepted": datetime.fromtimestamp(report.accepted, UTC).isoformat(),
        "expires": datetime.fromtimestamp(report.expires, UTC).isoformat(),
        "tries": report.tries,
    }
    if report.reason:
        document["reason"] = report.reason
    if report.reply is not None:
        status, headers, body, truncated = report.reply
        told: dict[str, object] = {"status": status, "headers": dict(headers), "truncated": truncated}
        try:
            told["body"] = body.decode()
        except UnicodeDecodeError:
            told["body_base64"] = base64.b64encode(body).decode()
        document["reply"] = told
    return document


async def complain(send: Send, status: int, sentence: str, fields: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Answer with a problem document (RFC 9457)."""
    await _answer(send, status, MEDIA_TYPE, write_complaint(status, sentence), fields)


async def _decline(
    scope: Message, receive: Receive, send: Send, status: int, sentence: str, fields: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Answer that a request is not kept, of whose body there may be more to come: in HTTP/1 it would have to be read
    before the next request. Who is still sending when a connection is closed may not get the answer, and a proxy would
    make 502 of it: so what he sends is passed over for a moment."""
    comes = _find_length(scope) > 0 or any(name == b"transfer-encoding" for name, _ in scope["headers"])
    if not comes or not scope["http_version"].startswith("1"):
        return await complain(send, status, sentence, fields)

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await complain(send_open, status, sentence, [*fields, (b"connection", b"close")])
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGERING):
            while (message := await receive()).get("more_body", False):
                pass
            if message["type"] == "http.disconnect":
                return None
    return await send({"type": "http.response.body", "body": b""})


async def _answer(
    send: Send, status: int, media_type: bytes, body: bytes, fields: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    head = [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *fields]})
    await send({"type": "http.response.body", "body": body})


def _find_root(scope: Message) -> str:
    root: str = scope.get("root_path", "")
    return root.rstrip("/")


def _find_route(scope: Message) -> str:
    """The path below the root path, which servers put before it, and proxies may have taken away."""
    path: str = scope["path"]
    root = _find_root(scope)
    return path[len(root) :] if path.startswith(f"{root}/") else path


def _find_raw(scope: Message) -> bytes:
    """The path as it was sent."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return raw


def _find_length(scope: Message) -> int:
    """How many bytes of body are announced; 0 where that is not told."""
    told = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(told[:_DIGITS]) if told.isdigit() else 0
