"""The HTTP service: what is answered, without a framework, which would take longer than a decision does."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from netlimit.errors import CountersUnavailable
from netlimit.l7.escalation import Askers
from netlimit.l7.headers import USUAL, Family
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.listening import Message, Receive
from netlimit.l7.queueing import Queues
from netlimit.l7.report import Finding
from netlimit.l7.rules import RuleSet
from netlimit.l7.service.answers import JSON, Answer, Problem
from netlimit.l7.service.auth import LOOPBACK, Authorizer
from netlimit.l7.service.decisions import decide
from netlimit.l7.service.envoy import answer_json
from netlimit.l7.service.leases import Leases
from netlimit.l7.service.metrics import Answers, LimiterMetrics
from netlimit.l7.service.questions import parse_object, read_body
from netlimit.l7.service.reporting import find_all, write_report
from netlimit.l7.service.turns import Turns
from netlimit.shared import Shared

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Respond = Callable[[Scope, Receive], Awaitable[Answer]]

_METRICS = (b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode())
_WELL = b'{"status":"ok"}'
log = logging.getLogger(__name__)

_OVER = "A lease is over, and what it held may be another's: ask again. The others last on."


class Service:
    """Answers questions about limits over HTTP."""

    def __init__(
        self,
        limiter: Limiter,
        rules: Callable[[], RuleSet],
        families: Collection[Family] = USUAL,
        proxies: Collection[str] = LOOPBACK,
        troubles: Callable[[], Sequence[str]] = tuple,
        askers: Askers | None = None,
        count_lost: Callable[[], int] = int,
    ) -> None:
        """`troubles` are what is wrong with documents of rules, as sentences; `askers` is told who asks; `count_lost`
        says how often counters were lost."""
        self.answers = Answers()
        self.askers = askers or Askers()
        self.ending = False
        """Whether it is about to end: then it is ready for nothing new."""
        self._limiter = limiter
        self._rules = rules
        self._troubles = troubles
        self._families = families
        self._queues = Queues(limiter, rules)
        self._turns = Turns()
        authorizer = Authorizer(self._queues, families, proxies, self.askers)
        self._leases = Leases(rules, limiter.find_flight)
        metrics = LimiterMetrics(limiter.usage, self.answers, self._find, lambda: limiter.counts_well, count_lost)
        self._metrics = Shared(metrics.write)
        self._told = Shared(self._write_report)
        self._ways: dict[str, tuple[str, str, Respond]] = {
            "/v1/decide": ("decide", "POST", partial(decide, limiter, families, self._turn)),
            "/v1/auth": ("auth", "GET", authorizer.answer),
            "/json": ("json", "POST", self._answer_json),
            "/v1/release": ("release", "POST", self._release),
            "/v1/renew": ("renew", "POST", self._renew),
            "/healthz": ("healthz", "GET", self._check_health),
            "/readyz": ("readyz", "GET", self._check_readiness),
            "/metrics": ("metrics", "GET", self._read_metrics),
            "/v1/report": ("report", "GET", self._report),
        }

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return self._queues.waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, in a server of somebody else's (ASGI)."""
        status, headers, body = await self.answer(scope, receive)
        if status != 204:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def answer(self, scope: Scope, receive: Receive) -> Answer:
        """The answer to a request: its scope, and what is received of its body, are ASGI's."""
        peer = scope.get("client")
        if peer:
            self.askers.note(peer[0])
        name, method, respond = self._ways.get(scope["path"]) or ("other", scope["method"], self._miss)
        try:
            if scope["method"] != method and (method != "GET" or scope["method"] != "HEAD"):
                raise Problem(405, f"{scope['path']} knows {method} alone.", headers={"Allow": method})
            answer = await respond(scope, receive)
        except Problem as problem:
            answer = problem.answer()
        except CountersUnavailable as error:
            answer = Problem(503, str(error), headers={"Retry-After": "1"}).answer()
        except Exception:
            log.exception("A request could not be answered; this is a fault of netlimit's own.")
            answer = Problem(500, "This is a fault of netlimit's own; its log says more.").answer()
        self.answers[name, answer.status] += 1
        return answer

    async def _answer_json(self, scope: Scope, receive: Receive) -> Answer:
        body = await read_body(receive)
        return await answer_json(self._limiter, self._families, body, await self._turn(scope))

    async def _turn(self, scope: Scope) -> bool:
        """Wait for the turn of a question that may be dear, unlike a proxy's; whether who asks has shown the token."""
        known = self.askers.vouch(scope["headers"])
        await self._turns.take(scope.get("client"), known)
        return known

    async def _release(self, scope: Scope, receive: Receive) -> Answer:
        await self._queues.release(await self._read_leases(scope, receive))
        return Answer(204, [])

    async def _renew(self, scope: Scope, receive: Receive) -> Answer:
        if not await self._limiter.renew(await self._read_leases(scope, receive)):
            raise Problem(404, _OVER)
        return Answer(204, [])

    async def _check_health(self, scope: Scope, receive: Receive) -> Answer:
        troubles = [*self._troubles(), *self._limiter.usage.troubles]
        return Answer(200, [JSON], json.dumps({"status": "ok", "troubles": troubles}).encode() if troubles else _WELL)

    async def _check_readiness(self, scope: Scope, receive: Receive) -> Answer:
        if self.ending:
            raise Problem(503, "The limiter is about to end.")
        return Answer(200, [JSON], _WELL)

    async def _read_metrics(self, scope: Scope, receive: Receive) -> Answer:
        await self._turn(scope)
        return Answer(200, [_METRICS], await self._metrics.find())

    async def _report(self, scope: Scope, receive: Receive) -> Answer:
        await self._turn(scope)
        return Answer(200, [JSON], await self._told.find())

    async def _write_report(self) -> bytes:
        return await write_report(await self._find())

    async def _find(self) -> Iterator[Finding]:
        return await find_all(self._rules(), self._limiter.usage, time.time())

    async def _miss(self, scope: Scope, receive: Receive) -> Answer:
        known = ", ".join(self._ways)
        raise Problem(404, f"There is nothing here; there are {known}.")

    async def _read_leases(self, scope: Scope, receive: Receive) -> Verdict:
        """The verdicts of earlier requests, as far as their leases go."""
        body = await read_body(receive)
        await self._turn(scope)
        told = parse_object(body)
        return Verdict(True, (), 0.0, 0.0, tuple(self._leases.read(told.get("leases"))))
