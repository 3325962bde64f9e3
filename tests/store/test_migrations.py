from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import NullPool, create_engine, inspect, text

from netlimit.errors import StoreError
from netlimit.records import Counts
from netlimit.store import Store, homes
from netlimit.store.migrate import alembic_config
from netlimit.store.tables import SCHEMA, metadata
from tests.store.examples import keep

COUNTED = """
    INSERT INTO counters (host, rule_id, matched_packets, matched_bytes, dropped_packets, dropped_bytes,
        raw_matched_packets, raw_matched_bytes, raw_dropped_packets, raw_dropped_bytes, since, as_of)
    VALUES ('gw1', 1, 10, 1000, 5, 500, 1, 2, 3, 4, 5, 6)
"""


@pytest.fixture
def store(empty_url: str) -> Iterator[Store]:
    """A store that is not migrated yet."""
    store = Store(empty_url)
    yield store
    store.close()


def steps() -> list[str]:
    script = ScriptDirectory.from_config(alembic_config())
    return [step.revision for step in reversed(list(script.walk_revisions()))]


def take(store: Store, revision: str, up: bool = True) -> None:
    with store._database.migrating() as connection, homes.by_name(connection):
        (command.upgrade if up else command.downgrade)(alembic_config(connection), revision)


def tables(store: Store) -> set[str]:
    return set(inspect(create_engine(store._database.url, poolclass=NullPool)).get_table_names()) - {"alembic_version"}


def differences(store: Store) -> list[object]:
    with create_engine(store._database.url, poolclass=NullPool).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return list(compare_metadata(context, metadata))


def test_the_newest_step_is_the_one_that_the_code_expects() -> None:
    assert steps()[-1] == SCHEMA


def test_the_migrated_schema_is_that_of_the_code(store: Store) -> None:
    store.upgrade()
    assert differences(store) == []
    assert tables(store) == set(metadata.tables)


def test_every_step_up_and_down_and_up_again(store: Store) -> None:
    schemas = [shape(store)]
    for step in steps():
        take(store, step)
        schemas.append(shape(store))
    for before in reversed(schemas[:-1]):
        take(store, "-1", up=False)
        assert shape(store) == before
    take(store, "head")
    assert shape(store) == schemas[-1]
    assert keep(store).revision == 1


def test_counters_that_are_there_have_nothing_delayed_nor_queued(store: Store) -> None:
    take(store, "0001")
    with store._database.migrating() as connection:
        connection.execute(text(COUNTED))
    store.upgrade()
    assert keep(store).id == 1
    (counters,) = store.counters(1).values()
    assert counters.total == Counts(10, 1000, 5, 500, 0)
    assert (counters.raw, counters.queued_packets, counters.queued_bytes) == (Counts(1, 2, 3, 4, 0), 0, 0)
    assert store.saved_roots("gw1") == {}


def shape(store: Store) -> list[object]:
    """Tables, columns, keys and indexes, as the database tells them; nothing for one that is not there."""
    path = store._database.path
    if path is not None and not path.exists():
        return []
    looked_at = inspect(create_engine(store._database.url, poolclass=NullPool))
    return [
        (
            table,
            [(column["name"], str(column["type"]), column["nullable"]) for column in looked_at.get_columns(table)],
            looked_at.get_pk_constraint(table)["constrained_columns"],
            sorted(str(index["name"]) for index in looked_at.get_indexes(table)),
            sorted(str(key["name"]) for key in looked_at.get_foreign_keys(table)),
            sorted(str(key["name"]) for key in looked_at.get_unique_constraints(table)),
        )
        for table in sorted(tables(store))
    ]


def test_upgrading_again_changes_nothing(store: Store) -> None:
    store.upgrade()
    kept = keep(store)
    store.upgrade()
    found = store.find(kept.id)
    assert found is not None
    assert found.rule == kept


def test_several_processes_may_upgrade_at_once(empty_url: str) -> None:
    script = "import sys; from netlimit.store import Store; Store(sys.argv[1]).upgrade()"
    here = Path(__file__).parents[2]
    running = [
        subprocess.Popen([sys.executable, "-c", script, empty_url], cwd=here, stderr=subprocess.PIPE) for _ in range(4)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, b"")
    store = Store(empty_url)
    assert store.revision() == 0
    store.close()


def test_a_step_that_fails_leaves_the_database_as_it_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(Operations, "execute", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        store.upgrade()
    monkeypatch.undo()
    assert tables(store) == set()
    store.upgrade()
    assert keep(store).revision == 1


def test_migrations_are_found_by_import_not_by_directory(tmp_path: Path) -> None:
    script = "import sys; from netlimit.store import Store; s = Store(sys.argv[1]); s.upgrade(); print(s.revision())"
    done = subprocess.run(
        [sys.executable, "-c", script, f"sqlite:///{tmp_path}/x.db"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_who_writes_during_an_upgrade_loses_nothing(store: Store, empty_url: str) -> None:
    """Processes of the older netlimit go on to write: first the clock, then the audit. Two upgrade at once."""
    take(store, "0002")
    ended, lines = threading.Event(), Counter[int]()
    others = [Store(empty_url) for _ in range(4)]

    def write(number: int) -> None:
        database = others[number]._database
        while not ended.is_set() or not lines[number]:
            with database._writer.connect() as connection, connection.begin(), homes.by_name(connection):
                connection.execute(text("UPDATE clock SET revision = revision + 1"))
                connection.execute(
                    text("INSERT INTO audit (at, actor, revision, action) SELECT 1, 'x', revision, 'add' FROM clock")
                )
            lines[number] += 1

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, number) for number in (2, 3)]
        time.sleep(0.1)
        upgrading = [pool.submit(other.upgrade) for other in others[:2]]
        for each in upgrading:
            each.result(120)
        time.sleep(0.1)
        ended.set()
        for each in writing:
            each.result(120)
    assert store.revision() == lines.total()
    assert sorted(line.revision for line in store.audit(limit=100_000)) == list(range(1, lines.total() + 1))
    assert differences(store) == []
    for other in others:
        other.close()


def test_who_has_begun_before_an_upgrade_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that knows an older schema goes on as long as that works, and then says why it does not."""
    store.upgrade()
    with store._database.migrating() as connection, homes.by_name(connection):
        connection.execute(text("ALTER TABLE clock RENAME COLUMN pruned TO cut"))
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError):
        keep(store)
    with pytest.raises(StoreError, match="newer than this netlimit knows"):
        keep(store)
