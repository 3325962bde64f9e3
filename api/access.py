"""What is told of each request: a line in the log, and its time in the metrics. Never a token, a query or a body."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .meter import OTHER, Meter

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Asked every few seconds by machines: unless they fail, only `log_level = "debug"` tells of them."""

log = logging.getLogger(__name__)


class Access:
    """ASGI middleware around all others, so that it sees what they refuse, too."""

    def __init__(self, app: ASGIApp, meter: Meter, prefix: str) -> None:
        self._app, self._meter, self._prefix = app, meter, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope.setdefault("state", {})
        began, status = time.perf_counter(), 500

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._meter.in_flight.track_inprogress():
            try:
                return await self._app(scope, receive, send_noting)
            finally:
                self._tell(scope, status, time.perf_counter() - began)

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        method, route = scope["method"], self._find_route(scope)
        self._meter.observe(method, route, status, seconds)
        origin, caller = scope["state"].get("origin"), scope["state"].get("caller")
        said = {
            "method": method,
            "route": route,
            "status": status,
            "milliseconds": round(1000 * seconds, 3),
            "request": origin.request if origin else None,
            "address": origin.address if origin else None,
            "actor": caller.actor.name if caller else None,
        }
        fault = scope["state"].get("fault")
        probed = route in PROBES and status < 400
        level = logging.DEBUG if probed else logging.WARNING if status >= 500 else logging.INFO
        log.log(level, "%s %s: %d%s", method, route, status, f" {fault}" if fault else "", extra=said)

    def _find_route(self, scope: Scope) -> str:
        """The template of the path, `/api/v1/rules/{key}`: paths themselves would be endlessly many."""
        path: str = getattr(scope.get("route"), "path", OTHER)
        return self._prefix + path if path != OTHER and scope["path"].startswith(self._prefix + "/") else path
