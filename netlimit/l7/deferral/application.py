"""Deferring for proxies: they pass on what the limiter has refused, and get 202 for the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from netlimit.l7.deferral.deferral import Deferral, Send, choose_line, complain, find_lines
from netlimit.l7.deferral.revision import Revision, remember
from netlimit.l7.extraction import Extraction, choose_address
from netlimit.l7.identity import Extractor
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.listening import Message, Receive
from netlimit.l7.rules import RuleSet
from netlimit.l7.targets import take_path
from netlimit.l7.trailers import ignore_trailers

PREFIX = "/v1/defer"
_POLICY_VIOLATION = 1008  # RFC 6455, section 7.4.1

ignore_trailers()


class DeferralApp:
    """An ASGI application: what comes to `/v1/defer/…` is kept, and replayed to the path behind that at the upstream of
    `deferral`; and the status of what was kept is read. Between its start and its end (lifespan) it replays.

    The rules of `domain` say by their keys what is asked of a request, and one with `on_limit: defer` that it finds is
    the limit at whose rate it is replayed. Whom IP rules of `limiter` block is refused, and what is over another limit,
    which rejects. It is for proxies alone: it counts only that the request has come, and believes what they say.
    """

    def __init__(
        self,
        deferral: Deferral,
        limiter: Limiter,
        rules: Callable[[], RuleSet],
        domain: str,
        extractors: Mapping[str, Extractor],
    ) -> None:
        deferral.serve(domain)
        self._deferral = deferral
        self._limiter = limiter
        self._rules = rules
        self._domain = domain
        self._extraction = Extraction(rules, domain, remember(extractors))
        self._revision = Revision(rules, self._extraction)
        self._find_address = choose_address(extractors)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "Only requests are kept."})
        elif scope["path"].startswith(f"{PREFIX}/"):
            await self._defer(take_path(scope), receive, send)
        elif self._deferral.is_asked(scope):
            await self._deferral.report(scope, send)
        else:
            await complain(send, 404, f"There is {PREFIX}/… for requests to be kept, and {self._deferral.path}/….")

    async def _defer(self, scope: Message, receive: Receive, send: Send) -> None:
        raw: bytes | None = scope.get("raw_path")
        if raw and not raw.startswith(f"{PREFIX}/".encode()):  # `/v1/defer%2F…` has another path behind it
            return await complain(send, 400, f"The path begins otherwise than by {PREFIX}/ as it was sent.")
        wanted = {
            **scope,
            "headers": [*scope["headers"]],  # the server may still write into its own list
            "path": scope["path"].removeprefix(PREFIX),
            "raw_path": raw.removeprefix(PREFIX.encode()) if raw else None,
        }
        if (doubt := self._extraction.find_doubt(wanted)) is not None:
            return await complain(send, 400, str(doubt))
        address = self._find_address(scope)
        descriptors = self._extraction(wanted)
        lines = find_lines(self._rules().find_counting(self._domain, descriptors))
        if not lines:
            return await complain(send, 429, "The request is over a limit, and no rule says that it is to be kept.")
        look = await self._limiter.keep(self._domain, descriptors, client=address)
        if not look.allowed:
            return await _refuse(send, look)
        line = await self._deferral.find_waiting(lines) or choose_line(lines, look)
        arrive = partial(self._limiter.keep, self._domain, descriptors, client=address, counts=True)
        told, wait = (self._domain, descriptors, arrive, partial(_refuse, send)), look.retry_after
        return await self._deferral.accept(wanted, receive, send, line, *told, retry_after=wait, address=address)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._deferral.start(self._limiter, revision=self._revision)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._deferral.stop()
        await send({"type": "lifespan.shutdown.complete"})


async def _refuse(send: Send, verdict: Verdict) -> None:
    if verdict.blocked:
        return await complain(send, 403, "The client is blocked: nothing of it is kept.")
    return await complain(send, 429, "The request is over a limit that keeps nothing.")
