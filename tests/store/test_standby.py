"""A standby that takes the primary's place for a moment: nobody stays where no change is taken."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy.engine import make_url

from netlimit.errors import StoreError
from netlimit.rules import parse_rule
from netlimit.store import Store
from netlimit.store.servers import find_primary
from tests.databases import Postgres, run_postgres

NOW = datetime.now(UTC)


class Pair(NamedTuple):
    """A server, and another that streams what it is told."""

    primary: Postgres
    standby: Postgres


@pytest.fixture
def pair() -> Iterator[Pair]:
    with run_postgres() as primary:
        home = Path(tempfile.mkdtemp(prefix="netlimit-standby-"))
        shutil.copystat(primary.home, home)
        os.chown(home, primary.home.stat().st_uid, primary.home.stat().st_gid)
        standby = Postgres(home, count())
        try:
            standby.copy(primary)
            standby.start()
            yield Pair(primary, standby)
            standby.stop()
        finally:
            shutil.rmtree(home)


def add(store: Store, host: int) -> None:
    store.add([parse_rule({"target": f"10.0.0.{host}", "action": "block"}, NOW)], "test", NOW)


def migrate(server: Postgres) -> None:
    store = Store(server.url("postgres"))
    store.upgrade()
    store.close()


def test_where_the_url_names_both_all_go_back_to_the_primary(pair: Pair) -> None:
    migrate(pair.primary)
    store = Store(f"postgresql+psycopg://postgres@/postgres?host={pair.primary.home},{pair.standby.home}")
    add(store, 1)
    pair.primary.stop()
    with pytest.raises(StoreError):
        store.revision()  # not what the standby has, which may lag
    pair.primary.start()
    add(store, 2)
    assert store.revision() == 2
    store.close()


def test_who_was_led_to_the_standby_by_a_name_goes_where_it_leads_now(pair: Pair, tmp_path: Path) -> None:
    migrate(pair.primary)
    wait_for(pair.standby)
    name = tmp_path / "server"
    name.symlink_to(pair.standby.home)
    store = Store(f"postgresql+psycopg://postgres@/postgres?host={name}")
    assert store.revision() == 0
    with pytest.raises(StoreError, match="let NETLIMIT_DATABASE_URL name the primary server"):
        add(store, 1)
    name.unlink()
    name.symlink_to(pair.primary.home)
    add(store, 1)
    assert store.revision() == 1
    store.close()


def wait_for(standby: Postgres) -> None:
    """Until it has what the primary has been told."""
    end = time.monotonic() + 30
    while True:
        store = Store(standby.url("postgres"))
        try:
            store.revision()
            return
        except StoreError:
            assert time.monotonic() < end
            time.sleep(0.05)
        finally:
            store.close()


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("?host=a,b", "read-write"),
        ("?host=a&host=b", "read-write"),
        ("?hostaddr=192.0.2.1,192.0.2.2", "read-write"),
        ("?host=a", None),
        ("?host=a,b&target_session_attrs=any", None),
        ("?host=a,b&target_session_attrs=standby", None),
    ],
)
def test_what_a_server_is_asked_to_be(query: str, asked: str | None) -> None:
    found = find_primary(make_url(f"postgresql+psycopg:///netlimit{query}"))
    assert found.get("target_session_attrs") == asked


def test_what_the_environment_asks_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "standby")
    assert find_primary(make_url("postgresql+psycopg:///netlimit?host=a,b")) == {}
