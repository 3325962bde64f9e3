from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta

import pytest

from netlimit.records import Actor
from netlimit.rules import Rule
from netlimit.store import Store, Token, TokenEnded, TokenExists
from tests.store.examples import NOW, rule


def test_a_token_is_kept_by_its_hash(store: Store) -> None:
    assert not store.tokens_exist()
    assert store.tokens() == store.active_tokens(NOW) == []
    token = store.add_token("bootstrap", "hash-1", "admin", NOW)
    assert token == Token(1, "bootstrap", "hash-1", "admin", NOW, None, None)
    assert store.tokens_exist()
    assert store.token("bootstrap") == store.token(1) == token
    assert store.token("other") is store.token(2) is store.token(10**30) is None
    assert "hash-1" not in repr(token)


def test_a_name_is_given_once(store: Store) -> None:
    store.add_token("ci", "hash-1", "admin", NOW)
    with pytest.raises(TokenExists, match="a token named 'ci' already"):
        store.add_token("ci", "hash-2", "viewer", NOW)
    assert [token.hash for token in store.tokens()] == ["hash-1"]


def test_of_many_who_want_a_name_at_once_one_has_it(store: Store) -> None:
    def add(number: int) -> None:
        with suppress(TokenExists):
            store.add_token("ci", f"hash-{number}", "viewer", NOW)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert len(store.tokens()) == 1


def test_expired_and_revoked_tokens_are_not_active(store: Store) -> None:
    forever = store.add_token("forever", "1", "admin", NOW)
    soon = store.add_token("soon", "2", "viewer", NOW, NOW + timedelta(minutes=1))
    gone = store.add_token("gone", "3", "viewer", NOW)
    assert store.revoke_token(gone.id, NOW)
    assert not store.revoke_token(gone.id, NOW + timedelta(minutes=1))
    assert not store.revoke_token(99, NOW)
    assert store.active_tokens(NOW) == [forever, soon]
    assert store.active_tokens(NOW + timedelta(minutes=1)) == [forever]
    revoked = store.token("gone")
    assert revoked is not None
    assert revoked.revoked_at == NOW
    assert len(store.tokens()) == 3


def actor_of(token: Token) -> Actor:
    return Actor(token.name, token=token.id, role=token.role)


def test_a_change_is_not_kept_whose_token_expires_meanwhile(store: Store) -> None:
    began = datetime.now(UTC)
    token = store.add_token("ci", "hash-1", "operator", NOW, began + timedelta(seconds=1))

    def outlast(changes: object, standing: object) -> dict[int, Rule]:
        time.sleep((began + timedelta(seconds=1.1) - datetime.now(UTC)).total_seconds())
        return {}

    with pytest.raises(TokenEnded, match="'ci' was revoked, has expired, or is of another role"):
        store.add([rule()], actor_of(token), NOW, outlast)
    assert store.revision() == 0


def test_a_change_is_not_kept_whose_token_is_revoked_meanwhile(postgres_url: str) -> None:
    with closing(Store(postgres_url)) as store:
        token = store.add_token("ci", "hash-1", "operator", NOW)

        def outlast(changes: object, standing: object) -> dict[int, Rule]:
            assert store.revoke_token(token.id, NOW)  # waits for no change
            return {}

        with pytest.raises(TokenEnded):
            store.add([rule()], actor_of(token), NOW, outlast)
        assert store.revision() == 0


def test_of_two_admins_who_revoke_each_other_one_is_heard(store: Store) -> None:
    for number in range(20):
        one, other = (store.add_token(f"{name}-{number}", "hash", "admin", NOW) for name in ("one", "other"))

        def revoke(who: Token, whom: Token) -> bool:
            with suppress(TokenEnded):
                return store.revoke_token(whom.id, NOW, actor_of(who))
            return False

        with ThreadPoolExecutor(2) as pool:
            heard = list(pool.map(revoke, (one, other), (other, one)))
        assert sorted(heard) == [False, True]


def test_a_token_of_another_database_is_not_taken_for_the_one_of_its_number(store: Store) -> None:
    token = store.add_token("ci", "hash-1", "operator", NOW)
    with pytest.raises(TokenEnded):
        store.add([rule()], Actor("other", token=token.id, role="operator"), NOW)
    with pytest.raises(TokenEnded):
        store.add([rule()], Actor("ci", token=token.id + 1, role="operator"), NOW)
    store.add([rule()], actor_of(token), NOW)
