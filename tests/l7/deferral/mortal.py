"""A process that is killed: an application behind the middleware, which writes down what it serves.

Arguments: the backlog's URL, the file to write to, and "accept" (requests of two users, of which all but the first are
deferred; each is printed as soon as its client has the answer) or "replay".
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from netlimit.l7.deferral.backlog import Bounds
from netlimit.l7.deferral.deferral import Deferral, open_backlog
from netlimit.l7.identity import header
from netlimit.l7.limit import Limit
from netlimit.l7.middleware import RateLimit
from netlimit.l7.rules import OnLimit, Rule
from tests.l7.asking import ask

LEASE = 0.5
HUNDRED_A_SECOND = Limit(100, 1)


class Keeping(Deferral):
    """Replays nothing, and puts nothing off until its turn tomorrow."""

    def start(self, *_: Any) -> None: ...


async def main(url: str, served: Path, role: str) -> None:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        body = (await receive())["body"]
        await asyncio.sleep(0.002)
        with served.open("a") as file:
            file.write(f"{body.decode()}\n")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    backlog = open_backlog(url, Bounds(lease=LEASE))
    limit = HUNDRED_A_SECOND if role == "replay" else Limit(1, 86_400)
    rule = Rule("app", "user", limit, on_limit=OnLimit.DEFER)
    deferral = Deferral(backlog) if role == "replay" else Keeping(backlog)
    app_ = RateLimit(app, rule, key=header("X-User"), deferral=deferral)
    if role == "replay":
        life: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        life.put_nowait({"type": "lifespan.startup"})

        async def ignore(message: dict[str, Any]) -> None: ...

        await app_({"type": "lifespan", "state": {}}, life.get, ignore)  # which never ends
    for number in range(50):
        for user in ("alice", "bob"):
            label = f"{user} {number}"
            answer = await ask(app_, "/", label.encode(), method="POST", headers={"X-User": user})
            assert answer.status in (200, 202), answer.messages
            print(label, answer.status, flush=True)
    await asyncio.Future()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
