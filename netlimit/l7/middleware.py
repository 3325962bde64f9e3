"""ASGI middleware: limits inside an application.

app.add_middleware(RateLimit, limit="100/minute")
app.add_middleware(RateLimit, limits="limits.yaml", domain="api")
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from threading import Event
from typing import Any

from netlimit.errors import LimitError
from netlimit.l7.counters import open_counters
from netlimit.l7.deferral.deferral import Deferral, Line, Unwritten, choose_line, find_lines
from netlimit.l7.deferral.revision import Revision, remember
from netlimit.l7.extraction import Extraction, choose_address
from netlimit.l7.headers import USUAL, Family, Fields, add_headers, make_headers
from netlimit.l7.holding import Holding
from netlimit.l7.identity import EXTRACTORS, Extractor, take_fields
from netlimit.l7.limit import Limit, parse_limit
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.listening import ClientGone, Listener, Message, Receive
from netlimit.l7.mounts import Mounts
from netlimit.l7.pressure import Pressure
from netlimit.l7.problems import MEDIA_TYPE, describe_refusal, write_complaint, write_problem
from netlimit.l7.queueing import Queues
from netlimit.l7.roots import find_strays
from netlimit.l7.rules import Descriptor, Node, OnLimit, Rule, RuleSet
from netlimit.l7.sources import Sources
from netlimit.l7.store import Store
from netlimit.l7.targets import Ambiguous, find_doubt, find_meanings, find_sent, is_plain, take_path
from netlimit.l7.trailers import ignore_trailers
from netlimit.l7.weights import Weigh, find_weight

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DOMAIN = "app"
"""The domain of a limit that comes without one."""
_BEGINNINGS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_POLICY_VIOLATION, _TRY_AGAIN_LATER = 1008, 1013
_LONGEST_REASON = 123  # bytes, RFC 6455, 5.5: a control frame has 125, and the code takes two

ignore_trailers()


class RateLimit:
    """Limits the requests and websockets of an application; what is refused never reaches it.

    Either one `limit`, "100/minute" or a Limit or a whole Rule, which each `key` has for itself (the client's address;
    the name of another extractor, or one of your own). Or `limits`, a file or folder that is followed as it changes, or
    a callable that gives the rules of the moment, and the `domain` whose rules count here: their keys say what is asked
    of a request. A `limit` is counted under the `domain` too: applications that share their counters and not their
    limits need one each (a Rule has its own).

    `extract` adds extractors to `EXTRACTORS`, or replaces them: `{"remote_address": ClientAddress(["10.0.0.0/8"])}`
    trusts proxies. `exempt` are paths that are not limited, with a `*` at the end all that begin so. `hits` gives the
    weight of a request: it is called for each path that the request may be for, and for HEAD with GET as well, and the
    largest counts. `counters` is where is counted, a store or its URL (`redis://…` is shared by processes). `pressure`
    is how busy the application is, for elastic limits. `families` are the header fields that responses get. `deferral`
    keeps what rules with `on_limit: defer` refuse; without one it is refused indeed.

    Raises LimitError for limits that cannot be kept, SettingsError for counters that there are not, or a deferral that
    keeps requests of another domain.
    """

    def __init__(
        self,
        app: App,
        limit: str | Limit | Rule | None = None,
        *,
        key: str | Extractor = "remote_address",
        limits: str | PathLike[str] | Callable[[], RuleSet] | None = None,
        domain: str = DOMAIN,
        extract: Mapping[str, Extractor] | None = None,
        exempt: Collection[str] = (),
        hits: Weigh | None = None,
        counters: str | Store = "memory://",
        pressure: Pressure | None = None,
        families: Collection[Family] = USUAL,
        deferral: Deferral | None = None,
    ) -> None:
        extractors = {**EXTRACTORS, **(extract or {})}
        self._ending = Event()
        if limits is None and limit is not None:
            name = key if isinstance(key, str) else "key"
            if not isinstance(key, str):
                extractors[name] = key
            rules, self._domain = _make_rules(limit, name, domain)
        elif limits is not None and limit is None:
            rules, self._domain = self._follow(limits), domain
        else:
            raise LimitError("limit", 'Give either `limit`, such as "100/minute", or `limits`, a file of them.')
        self._app = app
        self._store = open_counters(counters) if isinstance(counters, str) else counters
        told = extractors if deferral is None else remember(extractors)
        self._mounts = Mounts(app)
        self._extraction = Extraction(rules, self._domain, told, self._mounts)
        self._revision = Revision(rules, self._extraction)
        self._find_address = choose_address(extractors)
        self._rules = rules
        self._limiter = Limiter(rules, self._store, pressure)
        self._queues = Queues(self._limiter, rules)
        self._exempt = frozenset(path for path in exempt if not path.endswith("*"))
        self._exempt_beginnings = tuple(path[:-1] for path in exempt if path.endswith("*"))
        self._hits = hits
        self._families = families
        self._deferral = deferral
        if deferral is not None:
            deferral.serve(self._domain)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        kind, deferral = scope["type"], self._deferral
        if kind in ("http", "websocket"):
            # The server may still write into its own list. In place, for who is around this reads the scope, too.
            scope["headers"] = [*scope["headers"]]
            scope = take_fields(take_path(scope))
        if kind == "http" and deferral is not None:
            # One that is mounted in another is not told when that starts.
            deferral.start(self._limiter, self._app, None, self._revision)
        if kind == "lifespan":
            await self._live(scope, receive, send)
        elif kind not in ("http", "websocket") or self._is_exempt(scope):
            await self._app(scope, receive, send)
        elif kind == "http" and deferral is not None and deferral.is_asked(self._mounts.take_roots(scope)):
            await deferral.report(self._mounts.take_roots(scope), send)
        else:
            listener = Listener(receive)
            try:
                await self._limit(scope, listener, send)
            except ClientGone:
                return
            finally:
                listener.close()

    async def _limit(self, scope: Scope, listener: Listener, send: Send) -> None:
        doubt = self._find_doubt(scope)
        if doubt is not None:
            reason = str(doubt)
            return await _answer(scope, listener.receive, send, 400, write_complaint(400, reason), reason, [])
        descriptors = self._extraction(scope)
        hits = 1 if self._hits is None else find_weight(self._hits, self._mounts.take_roots(scope))
        deferral = self._deferral if scope["type"] == "http" else None
        lines: list[Line] = []
        if deferral is not None:
            lines = find_lines(self._rules().find_counting(self._domain, descriptors))
            line = await deferral.find_waiting(lines)
            if line is not None:
                try:
                    return await self._keep(deferral, scope, listener, send, line, descriptors, hits, passes=True)
                except Unwritten as error:  # who is within the limit does not wait for others then
                    listener.hear_again(error.body)
        client = self._find_address(scope)  # of whose network the places to wait are
        tell = partial(self._extraction, scope)
        verdict = await self._queues.decide(self._domain, descriptors, hits, listener.wait, client, tell=tell)
        if verdict.leases:
            return await self._hold(scope, listener, send, verdict)
        if verdict.allowed:
            return await self._pass(scope, listener, send, verdict)
        if deferral is not None and lines and verdict.on_limit is OnLimit.DEFER and verdict.retry_after < inf:
            self._limiter.count_deferred(verdict)
            line = choose_line(lines, verdict)
            return await self._keep(deferral, scope, listener, send, line, descriptors, hits)
        return await refuse(scope, listener.receive, send, verdict, make_headers(verdict, self._families))

    async def _keep(
        self,
        deferral: Deferral,
        scope: Scope,
        listener: Listener,
        send: Send,
        line: Line,
        descriptors: Sequence[Descriptor],
        hits: int,
        passes: bool = False,
    ) -> None:
        """Keep a request for later, unless a limit refuses it that rejects. Raises Unwritten where it `passes` if it
        cannot be kept."""
        address = self._find_address(scope)
        keep = partial(self._limiter.keep, self._domain, descriptors, hits, address)

        async def answer(refusal: Verdict) -> None:
            await refuse(scope, listener.receive, send, refusal, make_headers(refusal, self._families))

        verdict = await keep()
        if not verdict.allowed:
            return await answer(verdict)
        told, wait = (self._domain, descriptors, partial(keep, counts=True), answer, hits), verdict.retry_after
        scope = self._mounts.take_roots(scope)
        return await deferral.accept(scope, listener.receive, send, line, *told, wait, address, passes)

    async def _pass(self, scope: Scope, listener: Listener, send: Send, verdict: Verdict) -> None:
        fields = make_headers(verdict, self._families)

        async def send_with_fields(message: Message) -> None:
            if message["type"] in _BEGINNINGS:
                message = {**message, "headers": add_headers(message.get("headers", ()), fields)}
            await send(message)

        await self._app(scope, listener.receive, send_with_fields)

    async def _hold(self, scope: Scope, listener: Listener, send: Send, verdict: Verdict) -> None:
        holding = Holding(self._limiter, verdict)
        try:
            await self._pass(scope, listener, send, verdict)
        finally:
            holding.end()
            await self._queues.release(verdict)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application's whole life: deferred requests are replayed between its start and its end, and then nothing
        is left behind. One that knows of no life, or soon has done with it, is served on without."""
        ended = False

        async def receive_end() -> Message:
            nonlocal ended
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                ended = True
                if self._deferral is not None:
                    await self._deferral.stop()
            return message

        async def send_start(message: Message) -> None:
            nonlocal ended
            if message["type"] == "lifespan.startup.complete" and self._deferral is not None:
                self._deferral.start(self._limiter, self._app, scope.get("state"), self._revision)
            ended = ended or message["type"] == "lifespan.startup.failed"
            await send(message)

        try:
            await self._app(scope, receive_end, send_start)
        except CancelledError:
            ended = True
            raise
        finally:
            if ended:
                self._ending.set()
                await self._store.aclose()

    def _find_doubt(self, scope: Scope) -> Ambiguous | None:
        """Why it cannot be told what the path means, where limits or weights look at it."""
        return self._extraction.find_doubt(scope) if self._hits is None else find_doubt(scope)

    def _is_exempt(self, scope: Scope) -> bool:
        """Whether a path is exempt whatever it means: `/static/../login` and `/static/..;/login` are not; nor is
        `/static/api/login` where the root path is `/api`, which some applications look for anywhere."""
        path = scope["path"]
        if not self._exempts(path) or not all(map(self._exempts, find_strays(self._mounts.take_roots(scope)))):
            return False
        if path in self._exempt:
            return True
        return find_doubt(scope) is None and (
            is_plain(path) or all(map(self._exempts, find_meanings(path, find_sent(scope))))
        )

    def _exempts(self, path: str) -> bool:
        return path in self._exempt or (bool(self._exempt_beginnings) and path.startswith(self._exempt_beginnings))

    def _follow(self, limits: str | PathLike[str] | Callable[[], RuleSet]) -> Callable[[], RuleSet]:
        if callable(limits):
            return limits
        sources = Sources(Path(limits).absolute())
        sources.follow(self._ending)
        return lambda: sources.rules


def _make_rules(limit: str | Limit | Rule, key: str, domain: str) -> tuple[Callable[[], RuleSet], str]:
    """A rule by itself, and its domain."""
    if isinstance(limit, Rule) and domain not in (DOMAIN, limit.domain):
        raise LimitError("domain", f"The rule is of the domain {limit.domain!r}, not of {domain!r}.")
    if not isinstance(limit, Rule):
        limit = Rule(domain, key, limit if isinstance(limit, Limit) else parse_limit(str(limit)))
    rules = RuleSet({limit.domain: Node(default={key: Node(limit)})})
    return lambda: rules, limit.domain


async def refuse(scope: Scope, receive: Receive, send: Send, verdict: Verdict, fields: Fields) -> None:
    """Answer 429, or 403 if the client is blocked."""
    status = 403 if verdict.blocked else 429
    await _answer(scope, receive, send, status, write_problem(verdict), describe_refusal(verdict), fields)


async def _answer(
    scope: Scope, receive: Receive, send: Send, status: int, body: bytes, reason: str, fields: Fields
) -> None:
    """Answer with a problem document. Where a websocket cannot be answered so, it is closed before it is open, for that
    reason (the client sees 403)."""
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            code = _POLICY_VIOLATION if status == 400 else _TRY_AGAIN_LATER
            await send({"type": "websocket.close", "code": code, "reason": reason[:_LONGEST_REASON]})
            return
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    head = [(b"content-type", MEDIA_TYPE), (b"content-length", b"%d" % len(body)), *fields]
    await send({"type": f"{kind}.start", "status": status, "headers": head})
    await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else body})
