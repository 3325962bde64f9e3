"""What a request weighs (`hits`) goes by all that its path may mean, and by GET where it is HEAD."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from netlimit.errors import LimitError
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.middleware import RateLimit
from netlimit.l7.targets import MOST_PARTS
from tests.l7.asking import ask, hello, make_scope
from tests.l7.leaping import leaping_clock, run


def weigh_export(scope: Any) -> int:
    return 10 if scope["path"] == "/export" and scope.get("method") == "GET" else 1


def limited(app: Any = hello, **others: Any) -> RateLimit:
    return RateLimit(app, "10/minute", counters=MemoryStore(leaping_clock()), **others)


async def find_weight(app: RateLimit, path: str, **others: Any) -> int:
    """By what is left of ten."""
    told = (await ask(app, path, **others)).headers["ratelimit"]
    return 10 - int(told.partition(";r=")[2].partition(";")[0])


def test_a_path_that_is_led_to_the_same_endpoint_weighs_the_same() -> None:
    inner = FastAPI()

    @inner.get("/export")
    async def export() -> str:
        return "much"

    async def main() -> None:
        app = limited(inner, hits=weigh_export)
        answer = await ask(app, "/export\n", raw_path=b"/export%0a")
        assert answer.json() == "much"
        assert (await ask(app, "/")).status == 429

    run(main())


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/export", ""), ("/export\n", ""), ("/export;1", ""), ("//export", ""), ("/x/..;/export", ""),
        ("/./export", ""), ("/x/../export", ""), ("/x\\..\\export", ""), ("//x/export", ""), ("/a//../export", ""),
        ("/index.php/export", ""), ("/api/export", "/api"), ("/api/export\n", "/api"), ("/apiexport", "/api"),
        ("/x/api/export", "/api"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "head"])
def test_the_largest_weight_of_all_that_a_request_may_be_for_counts(path: str, root: str, method: str) -> None:
    async def main() -> None:
        app = limited(hits=weigh_export)
        assert await find_weight(app, path, root_path=root, method=method) == 10
        other = {"root_path": root, "method": method, "peer": "192.0.2.2"}
        assert await find_weight(app, path.replace("export", "other"), **other) == 1

    run(main())


@pytest.mark.parametrize("path", ["/export", "/x/api/export", "/apiexport", "/api//x/export", "/api/export"])
def test_so_does_that_of_the_whole_path(path: str) -> None:
    async def main() -> None:
        app = limited(hits=lambda scope: 10 if scope["path"] == "/api/export" else 1)
        assert await find_weight(app, path, root_path="/api") == 10
        assert await find_weight(app, path.replace("export", "other"), root_path="/api", peer="192.0.2.2") == 1

    run(main())


def test_a_post_is_not_taken_for_a_get() -> None:
    async def main() -> None:
        assert await find_weight(limited(hits=weigh_export), "/export", method="POST") == 1

    run(main())


def test_who_gives_the_weight_sees_the_request_as_it_is_and_then_each_meaning() -> None:
    seen: list[tuple[str, bytes, str]] = []

    def watch(scope: Any) -> int:
        seen.append((scope["path"], scope["raw_path"], scope["method"]))
        return 1

    async def main() -> None:
        app = limited(hits=watch)
        await ask(app, "/a b\n", raw_path=b"/a%20b%0a")
        assert seen == [("/a b\n", b"/a%20b%0a", "GET"), ("/a b", b"/a%20b", "GET")]
        seen.clear()
        await ask(app, "/plain")
        assert seen == [("/plain", b"/plain", "GET")]

    run(main())


def test_a_path_that_may_mean_more_than_is_looked_at_is_refused_where_paths_may_weigh() -> None:
    """Though no limit looks at paths."""
    path = "/x;" * (MOST_PARTS + 1)

    async def main() -> None:
        assert (await ask(limited(hits=weigh_export), path)).status == 400
        assert (await ask(limited(), path)).status == 200

    run(main())


def test_the_weight_of_any_meaning_that_is_none_is_an_error() -> None:
    async def main() -> None:
        app = limited(hits=lambda scope: -1 if scope["path"] == "/export" else 1)
        with pytest.raises(LimitError, match="weighs -1"):
            await ask(app, "/export\n")

    run(main())


def test_a_websocket_has_a_weight_by_its_path_too() -> None:
    seen: list[str] = []

    def watch(scope: Any) -> int:
        seen.append(scope["path"])
        return 1

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "code": 1000, "reason": ""})

    async def main() -> None:
        app = limited(serve, hits=watch)
        scope = {key: told for key, told in make_scope("/feed\n").items() if key != "method"} | {"type": "websocket"}

        async def send(message: Any) -> None: ...

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        await app(scope, receive, send)
        assert seen == ["/feed\n", "/feed"]

    run(main())
