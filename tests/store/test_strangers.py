"""Other users of a PostgreSQL server, who have no right on any table of netlimit's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from netlimit.cli import doctor
from netlimit.errors import StoreError
from netlimit.faults import find_faults
from netlimit.kernel.none import NoKernel
from netlimit.settings import Settings
from netlimit.store import Store
from netlimit.store.tables import SCHEMA
from tests.databases import Postgres
from tests.store.examples import NOW, keep

OWNER, STRANGER = "netlimit_shared", "netlimit_stranger"

TRAP = """
CREATE FUNCTION public.same(text, varchar) RETURNS bool LANGUAGE plpgsql AS $f$
BEGIN
  IF current_user OPERATOR(pg_catalog.=) 'netlimit_shared'::name THEN
    GRANT ALL ON ALL TABLES IN SCHEMA public TO netlimit_stranger;
  END IF;
  RETURN $1 OPERATOR(pg_catalog.=) $2::text;
EXCEPTION WHEN OTHERS THEN RETURN $1 OPERATOR(pg_catalog.=) $2::text;
END $f$;
CREATE OPERATOR public.= (LEFTARG=text, RIGHTARG=varchar, FUNCTION=public.same);
CREATE FUNCTION public.same(name, varchar) RETURNS bool LANGUAGE sql
  AS 'SELECT $1::text OPERATOR(pg_catalog.=) $2::text';
CREATE OPERATOR public.= (LEFTARG=name, RIGHTARG=varchar, FUNCTION=public.same);
"""
"""Fits `name = 'boss'` as it is asked better than what PostgreSQL has itself."""


@dataclass
class Shared:
    """A database of netlimit's own user, whom another may watch."""

    server: Postgres
    name: str
    url: str

    def as_stranger(self, *statements: str) -> None:
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        where = f"host={self.server.home} dbname={self.name} user={STRANGER}"
        return psycopg.connect(where, autocommit=True)

    def open_schema(self) -> None:
        """As PostgreSQL had it up to version 14, and has it still where it was upgraded."""
        self.server.run(self.name, "GRANT CREATE ON SCHEMA public TO PUBLIC")

    def close_schema(self) -> None:
        self.server.run(self.name, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")

    def lag_behind(self) -> None:
        """As if a migration were due."""
        self.server.run(self.name, f"UPDATE alembic_version SET version_num = '{int(SCHEMA) - 1:04}'")  # noqa: S608


@pytest.fixture
def shared(postgres: Postgres) -> Iterator[Shared]:
    name = postgres.make_database()
    postgres.run("postgres", *(f"CREATE ROLE {each} LOGIN" for each in (OWNER, STRANGER)))
    postgres.run("postgres", f"ALTER DATABASE {name} OWNER TO {OWNER}")
    yield Shared(postgres, name, postgres.url(name).replace("//postgres@", f"//{OWNER}@"))
    postgres.drop_database(name)
    postgres.run("postgres", *(f"DROP ROLE {each}" for each in (OWNER, STRANGER)))


def opened(url: str) -> closing[Store]:
    return closing(Store(url))


def upgrade(url: str) -> None:
    with opened(url) as store:
        store.upgrade()


def test_operators_that_a_stranger_makes_are_not_used(shared: Shared) -> None:
    upgrade(shared.url)
    shared.open_schema()
    shared.as_stranger(TRAP)
    with opened(shared.url) as store:
        store.add_token("boss", "hash", "admin", NOW)
        assert [each.name for each in store.tokens()] == ["boss"]
        keep(store, "10.0.0.1")
        store.upgrade()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        shared.as_stranger("SELECT * FROM tokens")


def test_where_a_stranger_may_make_operators_nothing_is_migrated_and_the_rest_goes_on(shared: Shared) -> None:
    shared.open_schema()
    with opened(shared.url) as store:
        with pytest.raises(
            StoreError, match=rf"others \([^)]*{STRANGER}[^)]*\).*`REVOKE CREATE ON SCHEMA public FROM PUBLIC`"
        ):
            store.upgrade()
        shared.close_schema()
        store.upgrade()
        shared.open_schema()
        store.upgrade()
        keep(store, "10.0.0.1")
        shared.lag_behind()
        with pytest.raises(StoreError, match=STRANGER):
            store.upgrade()


def test_doctor_tells_before_a_migration_is_refused(shared: Shared, tmp_path: Path) -> None:
    upgrade(shared.url)
    settings = Settings(database_url=shared.url, host="gw1")

    def find() -> list[str]:
        found = find_faults(doctor._survey_service(settings, NoKernel(tmp_path)))
        return [str(each) for each in found if each.name == "others in the database"]

    assert find() == []
    shared.open_schema()
    (told,) = find()
    assert STRANGER in told
    assert "REVOKE CREATE ON SCHEMA public FROM PUBLIC" in told


def test_who_may_not_connect_makes_nothing(shared: Shared) -> None:
    shared.open_schema()
    shared.server.run(shared.name, f"REVOKE CONNECT ON DATABASE {shared.name} FROM PUBLIC")
    upgrade(shared.url)


def test_a_group_may_make_what_its_members_make(shared: Shared) -> None:
    shared.server.run(shared.name, "CREATE ROLE netlimit_group", "GRANT CREATE ON SCHEMA public TO netlimit_group")
    try:
        upgrade(shared.url)
        shared.lag_behind()
        shared.server.run(shared.name, f"GRANT netlimit_group TO {STRANGER}")
        with pytest.raises(StoreError, match=STRANGER):
            upgrade(shared.url)
    finally:
        shared.server.run(shared.name, "DROP OWNED BY netlimit_group", "DROP ROLE netlimit_group")


def test_what_a_stranger_has_left_is_told(shared: Shared) -> None:
    shared.open_schema()
    shared.as_stranger(TRAP)
    shared.close_schema()
    with pytest.raises(StoreError, match=rf"there are operators or functions of others \({STRANGER}\)"):
        upgrade(shared.url)
    shared.server.run(shared.name, f"DROP OWNED BY {STRANGER}")
    upgrade(shared.url)


def test_tables_that_a_stranger_has_made_are_not_used(shared: Shared) -> None:
    shared.open_schema()
    with opened(shared.url) as store:
        with pytest.raises(StoreError, match="no tables yet"):
            store.select()
        shared.as_stranger(
            "CREATE TABLE public.alembic_version (version_num varchar(32))",
            f"INSERT INTO public.alembic_version VALUES ('{SCHEMA}')",  # noqa: S608
            "GRANT ALL ON public.alembic_version TO PUBLIC",
        )
        shared.close_schema()
        for attempt in (store.select, store.upgrade):
            with pytest.raises(StoreError, match=rf"alembic_version .* belongs to {STRANGER}"):
                attempt()


def test_a_schema_of_its_own_is_found(shared: Shared) -> None:
    shared.open_schema()
    shared.server.run(shared.name, f"CREATE SCHEMA AUTHORIZATION {OWNER}")
    upgrade(shared.url)
    with opened(shared.url) as store:
        keep(store, "10.0.0.1")
        assert store.select()[1] == 1
    shared.server.run(shared.name, f"SELECT FROM {OWNER}.rules")


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_lock_that_needs_no_right_keeps_nobody_from_upgrading(
    shared: Shared, is_empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.store.engine.BUSY_SECONDS", 1)
    if not is_empty:
        upgrade(shared.url)
    with shared.connect() as stranger:
        stranger.execute("SELECT pg_advisory_lock(hashtext('netlimit'))")
        upgrade(shared.url)


def test_of_several_that_make_the_tables_at_once_one_does_it(shared: Shared) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upgrade, [shared.url] * 4))
    with opened(shared.url) as store:
        keep(store, "10.0.0.1")


def test_one_who_has_nothing_to_migrate_waits_for_nobody(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.store.engine.BUSY_SECONDS", 1)
    upgrade(shared.url)
    with opened(shared.url) as other, other._database.engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE public.alembic_version IN EXCLUSIVE MODE")
        upgrade(shared.url)


def test_a_flood_of_notices_wakes_nobody_without_end(shared: Shared) -> None:
    upgrade(shared.url)
    ended = threading.Event()

    def flood() -> None:
        with shared.connect() as stranger:
            while not ended.is_set():
                stranger.execute("NOTIFY netlimit")

    with opened(shared.url) as store, closing(store.watch()) as watch, ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        try:
            assert watch.wait(60)
            end, woken = time.monotonic() + 1, 0
            while time.monotonic() < end:
                woken += watch.wait(1)
        finally:
            ended.set()
        flooding.result(60)
        assert 1 <= woken <= 60
        while watch.wait(0.3):
            pass
        keep(store, "10.0.0.1")
        assert watch.wait(60)
