"""A PostgreSQL server that hides rows from who owns them: what is not seen must not be taken for gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.errors import StoreError
from netlimit.store import Store
from tests.databases import Postgres
from tests.store.examples import NOW, keep

OWNER = "netlimit_owner"


@pytest.fixture
def hidden(postgres: Postgres) -> Iterator[Store]:
    """Three rules, whose rows the server hides."""
    name = postgres.make_database()
    postgres.run("postgres", f"CREATE ROLE {OWNER} LOGIN", f"ALTER DATABASE {name} OWNER TO {OWNER}")
    store = Store(postgres.url(name).replace("//postgres@", f"//{OWNER}@"))
    store.upgrade()
    for number in range(3):
        keep(store, f"10.0.0.{number}")
    postgres.run(name, *(f"ALTER TABLE rules {what} ROW LEVEL SECURITY" for what in ("ENABLE", "FORCE")))
    yield store
    store.close()
    postgres.drop_database(name)
    postgres.run("postgres", f"DROP ROLE {OWNER}")


def test_rows_that_are_hidden_are_told_and_not_taken_for_gone(hidden: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"row-level security"):
        hidden.select()
    with pytest.raises(StoreError, match=r"row-level security"):
        list(hidden.load("gw1")[1])
    with pytest.raises(StoreError, match=r"row-level security"):
        hidden.back_up(tmp_path / "backup", NOW)
