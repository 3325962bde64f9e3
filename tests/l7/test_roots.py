"""Limits of paths hold below root paths, whoever gives them: the server, the application itself, or what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Mount

from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.document import parse_document
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.middleware import RateLimit
from netlimit.l7.mounts import Mounts
from netlimit.l7.roots import APART, MOUNTED
from netlimit.l7.rules import RuleSet
from tests.l7.asking import ask, hello
from tests.l7.leaping import leaping_clock, run
from tests.l7.served import serving

DOCUMENT = """
domain: app
descriptors:
  - {key: path, value: /login, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: path, value: /api/old, rate_limit: {unit: minute, requests_per_unit: 1}}
"""
ANY = """
domain: app
descriptors:
  - {key: path, rate_limit: {name: general, unit: minute, requests_per_unit: 1}}
  - {key: path, value: /exempt}
  - {key: path, value: /orders, rate_limit: {unit: minute, requests_per_unit: 9, replaces: [{name: general}]}}
"""


def limited(app: Any, text: str = DOCUMENT, **others: Any) -> RateLimit:
    rules = RuleSet({"app": parse_document(text).root})
    return RateLimit(app, limits=lambda: rules, counters=MemoryStore(leaping_clock()), **others)


def make_site(root_path: str = "") -> FastAPI:
    """Its root path is what `FastAPI(root_path=…)` makes of it, which warns that servers should be told."""
    site = FastAPI()
    site.root_path = root_path

    @site.get("/login")
    @site.get("/old")
    @site.get("/exempt")
    @site.get("/orders")
    @site.get("/other")
    async def answer() -> str:
        return "in"

    return site


async def ask_paths(app: Any, *paths: str, **others: Any) -> list[int | None]:
    return [(await ask(app, path, **others)).status for path in paths]


LIMIT = "rate_limit: {unit: minute, requests_per_unit: 1}"
LOGINS = "/login", "/api/login", "/api/login\n", "/login"


def test_the_root_path_that_an_application_gives_itself_is_taken_away_around_it_too() -> None:
    async def main() -> None:
        app = limited(make_site(root_path="/api"))
        assert await ask_paths(app, *LOGINS) == [200, 429, 429, 429]
        assert await ask_paths(app, "/other", "/api/other", "/other") == [200] * 3

    run(main())


def test_also_through_what_is_around_it() -> None:
    async def main() -> None:
        site = limited(CORSMiddleware(make_site(root_path="/api")), "domain: app\ndescriptors: [{key: path}]")
        assert await ask_paths(limited(site), *LOGINS) == [200, 429, 429, 429]

    run(main())


def test_one_that_it_is_given_later_holds_from_then_on() -> None:
    async def main() -> None:
        site = make_site()
        app = limited(site)
        assert await ask_paths(app, "/login", "/api/login") == [200, 404]
        site.root_path = "/api"
        assert await ask_paths(app, "/api/login") == [429]

    run(main())


@pytest.mark.parametrize("where", ["/", ""])
def test_what_is_mounted_may_give_itself_one(where: str) -> None:
    async def main() -> None:
        within = Mount(where, CORSMiddleware(make_site(root_path="/api")))
        assert await ask_paths(limited(Starlette(routes=[within])), *LOGINS) == [200, 429, 429, 429]
        rules = RuleSet({"app": parse_document(DOCUMENT).root})
        site = Starlette(
            routes=[within],
            middleware=[Middleware(RateLimit, limits=lambda: rules, counters=MemoryStore(leaping_clock()))],
        )
        assert await ask_paths(site, *LOGINS) == [200, 429, 429, 429]

    run(main())


class Rooted:
    """A middleware that says where an application is."""

    def __init__(self, app: Any, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app({**scope, "root_path": self.root_path}, receive, send)


def test_a_middleware_may_give_one() -> None:
    async def main() -> None:
        assert await ask_paths(limited(Rooted(make_site(), "/api")), *LOGINS) == [200, 429, 429, 429]
        served = limited(Rooted(make_site(), "/other"))
        assert await ask_paths(served, "/login", "/api/login", root_path="/api") == [200, 429]

    run(main())


def test_a_directory_is_no_root_path() -> None:
    """Flask and Quart call so where the application's files are."""

    class Site:
        import_name, root_path = "site", "/app"

        async def __call__(self, *told: Any) -> None:
            await hello(*told)

    async def main() -> None:
        assert await ask_paths(limited(Site()), "/login", "/app/login", "/login") == [200, 200, 429]

    run(main())


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("before", ["", "/api"])
def test_rules_for_any_path_mean_those_of_the_routes(own: bool, before: str) -> None:
    """And exceptions hold by both names."""

    async def main() -> None:
        app = limited(make_site(root_path="/api") if own else make_site(), ANY)
        paths = [f"{before}/{name}" for name in ("exempt", "exempt", "orders", "orders", "other", "other")]
        root = "" if own else "/api"
        assert await ask_paths(app, *paths, root_path=root) == [200] * 5 + [429]
        assert await ask_paths(app, "/other", "/api/other", root_path=root) == [429] * 2

    run(main())


@pytest.mark.parametrize("own", [True, False])
def test_a_limit_by_the_whole_path_holds_where_a_server_or_proxy_leaves_the_root_path_out(own: bool) -> None:
    """Hypercorn hands on what was sent, and applications serve that with the root path and without it."""

    async def main() -> None:
        app = limited(make_site(root_path="/api") if own else make_site())
        root = "" if own else "/api"
        assert await ask_paths(app, "/old", "/api/old", "/old\n", "/x/../old", root_path=root) == [200, 429, 429, 429]

    run(main())


@pytest.mark.parametrize("path", ["/x/api/old", "/apiold", "/x/api/old\n", "/api//x/old", "/x/api/../old"])
def test_a_limit_by_the_whole_path_holds_wherever_the_root_path_is_taken_away(path: str) -> None:
    """Litestar makes `/old` of `/x/api/old`, and Quart of `/apiold`: these are other names of `/api/old`."""

    async def main() -> None:
        mounted = Starlette(routes=[Mount("/", Rooted(hello, "/api"))])
        for app, root in ((limited(hello), "/api"), (limited(mounted), "")):
            assert await ask_paths(app, path, "/api/old", path, root_path=root) == [200, 429, 429]

    run(main())


@pytest.mark.parametrize("path", ["/sub/api/sublogin", "/sub/x/api/sub/login", "/sub/api/sub/x/../login\n"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("rule", ["/sub/login", "/api/sub/login"])
def test_a_limit_holds_where_what_is_mounted_looks_for_root_path_and_mount_anywhere(
    path: str, own: bool, rule: str
) -> None:
    """Litestar makes `/login` of `/sub/api/sublogin`, where Starlette has mounted it at `/sub`, below `/api`."""
    text = f"domain: app\ndescriptors: [{{key: path, value: {rule}, {LIMIT}}}]"

    async def main() -> None:
        site = FastAPI()
        site.root_path = "/api" if own else ""
        site.mount("/sub", hello)
        for app in (limited(site, text), limited(CORSMiddleware(Starlette(routes=[Mount("/", site)])), text)):
            root = "" if own else "/api"
            assert await ask_paths(app, path, "/sub/login", path, root_path=root) == [200, 429, 429]
            assert await ask_paths(app, "/sub/other", "/sub/api/subother", root_path=root) == [200, 200]

    run(main())


def test_what_is_mounted_is_not_exempt_by_the_beginning_of_such_a_path() -> None:
    async def main() -> None:
        site = Starlette(routes=[Mount("/sub", hello)])
        text = f"domain: app\ndescriptors: [{{key: remote_address, {LIMIT}}}]"
        app = limited(site, text, exempt=["/sub/a*", "/sublogin"])
        paths = ["/sub/a/login", "/sub/api/sub/a", "/sub/api/sublogin", "/sub/api/sublogin"]
        assert await ask_paths(app, *paths, root_path="/api") == [200, 200, 200, 429]

    run(main())


@pytest.mark.parametrize("path", ["/my/apis", "/apis"])
def test_a_route_that_has_the_root_path_in_its_own_has_the_limit_of_the_whole(path: str) -> None:
    """`/my/apis` is no path below `/api`: Starlette takes nothing away there."""
    limit = "rate_limit: {unit: minute, requests_per_unit: 1}"
    text = f"domain: app\ndescriptors: [{{key: path, value: /api{path}, {limit}}}]"

    async def main() -> None:
        assert await ask_paths(limited(hello, text), path, f"/api{path}", path, root_path="/api") == [200, 429, 429]

    run(main())


def test_a_limit_by_the_whole_path_holds_where_what_is_mounted_has_the_root_path() -> None:
    async def main() -> None:
        site = Starlette(routes=[Mount("/", make_site(root_path="/api"))])
        assert await ask_paths(limited(site), "/old", "/api/old", "/old") == [200, 429, 429]
        paths = ("/exempt", "/exempt", "/orders", "/orders", "/other", "/other")
        assert await ask_paths(limited(site, ANY), *paths) == [200] * 5 + [429]

    run(main())


EXEMPT = ["/healthz", "/static/*"]


@pytest.mark.parametrize("path", ["/static/api/login", "/static/x/../api/login", "/static/api/static/../login"])
@pytest.mark.parametrize("own", [True, False])
def test_what_is_exempt_is_so_by_all_that_it_may_mean_below_the_root_path(path: str, own: bool) -> None:
    """Litestar serves `/login` for `/static/api/login`."""

    async def main() -> None:
        text = "domain: app\ndescriptors: [{key: remote_address, rate_limit: {unit: day, requests_per_unit: 1}}]"
        site = Starlette(routes=[Mount("/", Rooted(hello, "/api"))]) if own else hello
        app = limited(site, text, exempt=EXEMPT)
        root = "" if own else "/api"
        assert await ask_paths(app, "/static/a", "/healthz", path, path, root_path=root) == [200, 200, 200, 429]

    run(main())


@pytest.mark.parametrize("own", [True, False])
def test_what_is_exempt_by_its_whole_path_stays_so_below_the_root_path(own: bool) -> None:
    async def main() -> None:
        site = Starlette(routes=[Mount("/static", Rooted(hello, "/static"))]) if own else hello
        text = "domain: app\ndescriptors: [{key: remote_address, rate_limit: {unit: day, requests_per_unit: 1}}]"
        app = limited(site, text, exempt=EXEMPT)
        assert await ask_paths(app, *["/static/a"] * 3, root_path="" if own else "/static") == [200] * 3

    run(main())


def test_a_key_of_ones_own_sees_the_path_as_it_is() -> None:
    seen: list[tuple[str, str]] = []

    def find(scope: Any) -> str:
        seen.append((scope["path"], scope["root_path"]))
        return "one"

    async def main() -> None:
        app = RateLimit(make_site(root_path="/api"), "1/minute", key=find, counters=MemoryStore(leaping_clock()))
        await ask(app, "/login")

    run(main())
    assert seen == [("/login", "")]


def test_weights_go_by_it_too() -> None:
    async def main() -> None:
        for site in (make_site(root_path="/api"), Starlette(routes=[Mount("/", make_site(root_path="/api"))])):
            for path in ("/login", "/api/login"):
                app = RateLimit(
                    site,
                    "10/minute",
                    hits=lambda scope: 10 if scope["path"] == "/login" else 1,
                    counters=MemoryStore(leaping_clock()),
                )
                assert await ask_paths(app, path, "/other") == [200, 429], path
        whole = RateLimit(
            make_site(root_path="/api"),
            "10/minute",
            hits=lambda scope: 10 if scope["path"] == "/api/login" else 1,
            counters=MemoryStore(leaping_clock()),
        )
        assert await ask_paths(whole, "/login", "/other") == [200, 429]

    run(main())


DEFERRING = """
domain: app
descriptors:
  - {key: path, value: /login, rate_limit: {unit: hour, requests_per_unit: 1}, on_limit: defer}
"""


def test_what_is_deferred_is_told_of_below_it(tmp_path: Any) -> None:
    async def main() -> None:
        kept = Deferral(f"sqlite://{tmp_path}/deferred.db")
        app = limited(make_site(root_path="/api"), DEFERRING, deferral=kept)
        assert await ask_paths(app, "/login") == [200]
        answer = await ask(app, "/api/login")
        location = answer.headers["location"]
        assert (answer.status, location.startswith("/api/.netlimit/deferred/")) == (202, True)
        for path in (location, location.removeprefix("/api")):
            assert (await ask(app, path)).json()["state"] == "waiting"
        await kept.stop()

    run(main())


@pytest.mark.parametrize(
    ("given", "own", "expected"),
    [
        ("", "/api", [200, 429, 429]),
        ("/api", "", [200, 404, 429]),  # uvicorn puts it before what was sent
        ("/api", "/api", [200, 404, 429]),
        ("", "", [200, 404, 429]),
        ("api", "", [200, 404, 429]),  # what it puts before paths begins with no `/` then
    ],
)
def test_behind_uvicorn(given: str, own: str, expected: Sequence[int]) -> None:
    with serving(limited(make_site(root_path=own)), root_path=given) as place:
        paths = ("/login", "/api/login", "/login%0a")
        assert [httpx.get(f"http://{place}{path}").status_code for path in paths] == expected


def test_applications_that_are_mounted_in_themselves_are_looked_through_once() -> None:
    """Else those that two of them lead to would be as many as there are ways."""
    outer, inner = Starlette(), Starlette()
    vars(outer)["root_path"], vars(inner)["root_path"] = "/api", "/v1"
    for each in (outer, inner):
        for place in ("/a", "/b"):
            each.mount(place, outer)
            each.mount(place, inner)
    taken: dict[str, Any] = Mounts(outer).take_roots({"path": "/login"})
    assert taken == {"path": "/login", "root_path": "", APART: ("/api", "/v1"), MOUNTED: ("/a", "/b")}
