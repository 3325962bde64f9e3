"""PostgreSQL databases that cannot hold every text, or are spoken to as if they could not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from netlimit.errors import StoreError
from netlimit.store import Store
from tests.databases import Postgres
from tests.store.examples import keep

WORDS = "ü €\u2026 \U0001f6a6"


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def narrow(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Store]:
    name = postgres.make_database(request.param)
    store = Store(postgres.url(name))
    yield store
    store.close()
    postgres.drop_database(name)


@pytest.mark.parametrize("use", [Store.upgrade, Store.revision, Store.watch])
def test_a_database_that_cannot_hold_every_text_is_refused(narrow: Store, use: Callable[[Store], object]) -> None:
    with pytest.raises(StoreError, match=r"has the encoding (LATIN1|SQL_ASCII), .*`createdb --encoding UTF8"):
        use(narrow)


def _by_environment(_postgres: Postgres, _name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    return ""


def _by_database(postgres: Postgres, name: str, _monkeypatch: pytest.MonkeyPatch) -> str:
    postgres.run("postgres", f"ALTER DATABASE {name} SET client_encoding = 'LATIN1'")
    return ""


def _by_url(_postgres: Postgres, _name: str, _monkeypatch: pytest.MonkeyPatch) -> str:
    return "&client_encoding=LATIN1"


def _by_options(_postgres: Postgres, _name: str, _monkeypatch: pytest.MonkeyPatch) -> str:
    return "&options=-c%20client_encoding%3DLATIN1"


@pytest.mark.parametrize("narrow", [_by_environment, _by_database, _by_url, _by_options])
def test_any_text_is_kept_whatever_clients_of_the_database_are_told(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, narrow: Callable[..., str]
) -> None:
    name = postgres.make_database()
    store = Store(postgres.url(name) + narrow(postgres, name, monkeypatch))
    store.upgrade()
    keep(store, comment=WORDS)
    assert store.select()[0][0].rule.comment == WORDS
    store.close()
    postgres.drop_database(name)
