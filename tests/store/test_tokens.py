from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest

from netlimit.store import Store, Token, TokenExists
from tests.store.examples import NOW


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
