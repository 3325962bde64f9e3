"""The middleware: what it adds to each request of an application."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from netlimit.l7.middleware import RateLimit
from scripts.benchmarks.figures import Figure
from scripts.benchmarks.limiter.bare import hello
from scripts.benchmarks.limiter.memory import time_each

MOST = 30.0
CLIENTS = 500


def measure() -> list[Figure]:
    """An application that says hello, bare and limited, called as a server calls it."""
    with asyncio.Runner() as runner:
        works = {
            "bare": hello,
            "ample": RateLimit(hello, "1000000/minute"),
            "scarce": RateLimit(hello, "1/day"),
        }
        taken = time_each(
            {name: partial(_run, runner, application) for name, application in works.items()}, _make_clients
        )
    bare, ample, scarce = (taken[name] / 1000 for name in works)
    return [
        Figure("added to a request", f"{ample - bare:.1f} µs", f"{MOST:g} µs", ample - bare <= MOST),
        Figure("a request that is refused", f"{scarce:.1f} µs"),
    ]


def _make_clients(turn: int) -> list[str]:
    return [f"192.0.2.{number}" for number in range(CLIENTS)]


def _run(runner: asyncio.Runner, application: Any, clients: Sequence[str]) -> None:
    runner.run(_ask(application, clients))


async def _ask(application: Any, clients: Sequence[str]) -> None:
    for client in clients:
        await application(_make_scope(client), _receive, _send)


def _make_scope(client: str) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"user-agent", b"bench"), (b"accept", b"*/*")],
        "client": (client, 40000),
        "server": ("127.0.0.1", 80),
    }


async def _receive() -> dict[str, object]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _send(message: object) -> None:
    pass
