"""Bad tokens: few are let in, none costs much, and nobody else suffers from them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from api.buckets import Buckets
from api.doorkeeper import FAILURES, Doorkeeper
from api.origin import find_origin, read_address
from api.problems import Problem
from netlimit.roles import Role
from netlimit.settings import Settings
from netlimit.store import Store, Token
from netlimit.tokens import hash_token, verify_token
from tests.api.server import TOKENS, connect, get, serve

NOW = datetime.now(UTC)
HERE, THERE = "192.0.2.1", "192.0.2.2"


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the tests take, nobody may show another bad token by that."""
    monkeypatch.setattr("api.doorkeeper.Buckets", partial(Buckets, clock=lambda: 0.0))


class Hashing:
    """Verifies tokens, and counts that."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, text: str, kept: str) -> bool:
        self.done.append(text)
        return verify_token(text, kept)


def guess(number: int, handle: str = "x" * 12) -> str:
    return f"nl_{handle}_{number:0>43}"


def show(url: str, token: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return get(f"{url}/api/v1/rules", headers=headers)


def refused(doorkeeper: Doorkeeper, token: str, place: str) -> int:
    """The status with which a token is refused at the door."""

    async def find() -> int:
        try:
            return 200 if await doorkeeper.find(token, place) else 401
        except Problem as problem:
            return problem.status if int((problem.headers or {})["Retry-After"]) >= 1 else 0

    return asyncio.run(find())


def test_too_many_bad_tokens_from_one_address_are_told_to_wait(url: str) -> None:
    answers = [show(url, guess(number)) for number in range(FAILURES + 2)]
    assert [answer.status_code for answer in answers] == [401] * FAILURES + [429] * 2
    assert int(answers[-1].headers["Retry-After"]) == 6
    assert answers[-1].json()["title"] == "Too Many Requests"
    with connect(url, "viewer") as good:  # never shown before, from the same address
        assert good.get("/rules").status_code == 200
    assert show(url, guess(0)).status_code == 429


def test_a_token_that_is_not_known_is_never_hashed_and_a_known_handle_once(store: Store) -> None:
    hashing = Hashing()
    doorkeeper = Doorkeeper(store, verify=hashing)
    for number in range(FAILURES):
        assert refused(doorkeeper, guess(number), HERE) == 401
    assert refused(doorkeeper, "chosen by somebody", THERE) == 401
    assert hashing.done == []
    wrong = guess(1, TOKENS["admin"][3:15])
    assert refused(doorkeeper, wrong, HERE) == 401
    assert hashing.done == [wrong]


def test_a_fresh_token_is_good_at_once_and_no_try_of_it_counts(url: str, store: Store) -> None:
    with connect(url, "admin") as admin:
        for number in range(2 * FAILURES):
            assert admin.get("/rules").status_code == 200  # tokens have been read this second
            _, text = store.issue_token(f"fresh-{number}", Role.VIEWER, datetime.now(UTC), None, "test")
            assert show(url, text).status_code == 200, number
        made = admin.post("/tokens", json={"name": "by-rest", "role": "viewer"}).json()
        assert show(url, made["token"]).status_code == 200
    assert [show(url, guess(number)).status_code for number in range(FAILURES + 1)] == [401] * FAILURES + [429]
    _, text = store.issue_token("last", Role.VIEWER, datetime.now(UTC), None, "test")
    assert show(url, text).status_code == 200, "also where others have shown bad ones"


def test_tokens_that_nobody_knows_have_the_database_asked_seldom(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def read(now: datetime, read: Callable[[datetime], list[Token]] = store.active_tokens) -> list[Token]:
        asked.append(time.monotonic())
        return read(now)

    monkeypatch.setattr(store, "active_tokens", read)
    hashing = Hashing()
    doorkeeper = Doorkeeper(store, verify=hashing)

    async def knock() -> tuple[list[object], float]:
        await doorkeeper.find(TOKENS["viewer"], HERE)
        began = time.monotonic()
        found: list[object] = []
        for number in range(0, 3000, 1000):  # each from a place of its own
            tries = (
                doorkeeper.find(guess(each), f"10.0.{each >> 8}.{each & 255}") for each in range(number, number + 1000)
            )
            found += await asyncio.gather(*tries)
        return found, time.monotonic() - began

    found, seconds = asyncio.run(knock())
    assert found == [None] * 3000
    assert len(asked) <= 2 + seconds / 0.05 + seconds
    assert len(asked) < 300
    assert hashing.done == [TOKENS["viewer"]]


def test_who_is_told_to_come_again_has_shown_no_bad_token(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    doorkeeper = Doorkeeper(store)
    with monkeypatch.context() as busy:
        busy.setattr("api.doorkeeper._MOST_HASHING", -1)
        for _ in range(2 * FAILURES):
            with pytest.raises(Problem) as told:
                asyncio.run(doorkeeper.find(TOKENS["viewer"], HERE))
            assert told.value.status == 503
    assert refused(doorkeeper, TOKENS["viewer"], HERE) == 200


def test_a_good_token_is_hashed_once_however_many_show_it_at_once(store: Store) -> None:
    hashing = Hashing()
    doorkeeper = Doorkeeper(store, verify=hashing)

    async def show_at_once() -> list[str]:
        found = await asyncio.gather(*(doorkeeper.find(TOKENS["viewer"], HERE) for _ in range(100)))
        return [token.name for token in found if token is not None]

    assert asyncio.run(show_at_once()) == ["viewer"] * 100
    assert hashing.done == [TOKENS["viewer"]]


def test_who_guesses_one_token_locks_out_neither_another_nor_who_has_shown_the_same(store: Store) -> None:
    doorkeeper = Doorkeeper(store)
    assert refused(doorkeeper, TOKENS["operator"], HERE) == 200
    handle = TOKENS["operator"][3:15]
    assert [refused(doorkeeper, guess(n, handle), HERE) for n in range(FAILURES + 1)] == [401] * FAILURES + [429]
    assert refused(doorkeeper, TOKENS["operator"], HERE) == 200
    assert refused(doorkeeper, TOKENS["admin"], HERE) == 200
    assert refused(doorkeeper, guess(0, handle), THERE) == 401


def test_a_token_of_the_settings_passes_behind_an_address_that_is_told_to_wait(store: Store) -> None:
    store.add_token("bootstrap", hash_token("given by the settings", cost=2), "admin", NOW)
    hashing = Hashing()
    doorkeeper = Doorkeeper(store, "given by the settings", hashing)
    for number in range(FAILURES):
        refused(doorkeeper, f"guess {number}", HERE)
    assert len(hashing.done) == FAILURES  # a chosen text costs one hash: of the one such token there can be
    assert refused(doorkeeper, "one more", HERE) == 429
    assert refused(doorkeeper, "given by the settings", HERE) == 200


def test_memory_does_not_grow_with_addresses(store: Store) -> None:
    doorkeeper = Doorkeeper(store)

    async def knock() -> None:
        for number in range(6000):
            await doorkeeper.find("x", f"10.0.{number >> 8}.{number & 255}")

    asyncio.run(knock())
    assert len(doorkeeper._failures) <= 4096
    assert len(doorkeeper._remembered) == 0


def test_hashing_bad_tokens_keeps_nobody_waiting(settings: Settings, store: Store) -> None:
    """All that bad tokens of the free form can do is to keep two threads busy; those who are known pass."""
    store.add_token("bootstrap", hash_token("given by the settings", cost=2**15), "admin", NOW)
    with serve(settings, store) as url, connect(url, "viewer") as client:
        assert client.get("/rules").status_code == 200
        flood = [threading.Thread(target=show, args=(url, f"guess {number}")) for number in range(FAILURES)]
        for thread in flood:
            thread.start()
        asked = 0
        while any(thread.is_alive() for thread in flood):
            assert client.get("/rules").status_code == 200
            asked += 1
        assert asked > 3


def test_bootstrap_in_the_settings_needs_no_handle(tmp_path: Path) -> None:
    from api.bootstrap import bootstrap_token

    settings = Settings(database_url=f"sqlite:///{tmp_path}/netlimit.db", bootstrap_token=SecretStr("of my own"))
    store = Store(settings.database_url)
    store.upgrade()
    bootstrap_token(store, settings, NOW)
    with serve(settings, store) as url:
        assert show(url, "of my own").status_code == 200
    assert store.tokens()[0].handle is None
    store.close()


def test_a_revoked_token_is_forgotten_though_it_was_remembered(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.doorkeeper._FRESH_SECONDS", 0)
    token, text = store.issue_token("guest", Role.VIEWER, NOW, None, "test")
    assert show(url, text).status_code == 200
    store.revoke_token(token.id, NOW)
    assert show(url, text).status_code == 401


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("testclient", None),
        ("", None),
    ],
)
def test_addresses_have_one_form(text: str, address: str | None) -> None:
    assert read_address(text) == address


def test_who_has_a_whole_network_counts_as_one() -> None:
    scope = {"client": ("2001:db8:0:1:a:b:c:d", 1), "headers": []}
    assert find_origin(scope).place == "2001:db8:0:1::/64"
    assert find_origin(scope | {"client": ("192.0.2.1", 1)}).place == "192.0.2.1"
    assert find_origin(scope | {"client": None}).place == ""
