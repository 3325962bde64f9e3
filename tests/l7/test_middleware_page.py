"""The programs of docs/middleware.md run, and do what the page says."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.testbed.streams import ROOT
from tests.docs.transcripts import read_fences
from tests.l7.asking import ask
from tests.l7.deferral.test_deferral import living
from tests.l7.deferral.test_proxies import RULES
from tests.l7.redis.driving import PATIENT
from tests.l7.redis.servers import Server

PAGE = (ROOT / "docs/middleware.md").read_text("utf-8")


def find_blocks(language: str) -> list[str]:
    return ["\n".join(fence.lines) for fence in read_fences(PAGE) if fence.language == language]


ONE_LINE, MANY, DEFERRING, PROXIES, FUNCTIONS = find_blocks("python")


def run_program(program: str) -> Any:
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102, it is our own
    return names


def test_one_line() -> None:
    async def main() -> None:
        app = run_program(ONE_LINE)["app"]
        statuses = [(await ask(app)).status for _ in range(101)]
        assert statuses == [404] * 100 + [429]

    asyncio.run(main())


def test_many_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "limits.yaml").write_text(find_blocks("yaml")[0])

    async def main() -> None:
        names = run_program(MANY)
        app = names["app"]
        names["pressure"].signal(0.9)
        proxied = {"peer": "10.1.2.3", "headers": {"X-Forwarded-For": "203.0.113.1", "X-Device": "d1"}}
        logins = [await ask(app, "/login", **proxied) for _ in range(6)]
        assert [answer.status for answer in logins] == [404] * 5 + [429]
        assert logins[0].headers["ratelimit-policy"].count(";q=") == 3
        assert '"remote_address";r=590' in (await ask(app, "/export", peer="203.0.113.9")).headers["ratelimit"]
        assert "ratelimit" not in (await ask(app, "/static/a.css")).headers

    asyncio.run(main())


def test_deferring(tmp_path: Path) -> None:
    async def main() -> None:
        program = DEFERRING.replace("sqlite:///var/lib/shop/deferred.db", f"sqlite://{tmp_path}/deferred.db")
        async with living(run_program(program)["app"]) as app:
            first = await ask(app, "/jobs", b"one", method="POST")
            assert (first.status, first.json()) == (200, "done: one")
            kept = await ask(app, "/jobs", b"two", method="POST")
            assert kept.status == 202
            deadline = time.monotonic() + 60
            while (report := (await ask(app, kept.headers["location"])).json())["state"] == "waiting":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert (report["state"], report["reply"]["body"]) == ("done", '"done: two"')

    asyncio.run(main())


def test_deferring_for_proxies(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "limits.yaml").write_text(RULES)
    here = {"/var/lib/shop/deferred.db": f"{tmp_path}/deferred.db", "redis://localhost:6379": server.url + PATIENT}
    program = PROXIES
    for there, instead in here.items():
        program = program.replace(there, instead)

    async def main() -> None:
        app = run_program(program)["app"]
        proxied = {"peer": "127.0.0.1", "headers": {"X-Forwarded-For": "203.0.113.1"}}
        kept = await ask(app, "/v1/defer/jobs", b"one", method="POST", **proxied)
        assert kept.status == 202
        assert (await ask(app, kept.headers["location"])).json()["state"] == "waiting"
        (tmp_path / "limits.yaml").write_text(RULES.replace("on_limit: defer", "on_limit: reject"))
        deadline = time.monotonic() + 60
        while (await ask(app, "/v1/defer/jobs", b"two", method="POST", **proxied)).status == 202:
            assert time.monotonic() < deadline, "the program has not heard of the change"
            await asyncio.sleep(0.1)
        await app._limiter._store.aclose()
        await app._deferral.stop()

    asyncio.run(main())


def test_functions(capsys: pytest.CaptureFixture[str]) -> None:
    run_program(FUNCTIONS)
    assert capsys.readouterr().out == "sent to ann sent to ann\nTrue\n"
