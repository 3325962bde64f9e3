"""Somebody has the database do nothing, and say nothing, where it is told to: what is told as done must have been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, text

from netlimit.errors import StoreError
from netlimit.store import Store
from tests.store.examples import NOW, keep, rule

CHANGES: dict[str, tuple[str, str, Callable[[Store, int], object]]] = {
    "a rule": ("rules", "INSERT", lambda store, kept: keep(store, "10.0.0.2")),
    "many rules": (
        "rules", "INSERT", lambda store, kept: store.add([rule(f"10.0.1.{n}") for n in range(250)], "test", NOW)
    ),
    "a removal": ("rules", "DELETE", lambda store, kept: store.remove(kept, "test", NOW)),
    "a change": (
        "rules", "DELETE",
        lambda store, kept: store.change(kept, lambda before: replace(before, enabled=False), "test", NOW),
    ),
    "a rollback": ("undo", "INSERT", lambda store, kept: store.rollback(0, "test", NOW)),
    "a window": ("windows", "INSERT", lambda store, kept: store.open_window(60, "test", NOW)),
}  # fmt: skip


def swallow(url: str, table: str, what: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            statement = f"CREATE TRIGGER swallow BEFORE {what} ON {table} BEGIN SELECT RAISE(IGNORE); END"
            connection.execute(text(statement))
        else:
            connection.execute(
                text("CREATE FUNCTION swallow() RETURNS trigger AS 'BEGIN RETURN NULL; END' LANGUAGE plpgsql")
            )
            connection.execute(
                text(f"CREATE TRIGGER swallow BEFORE {what} ON {table} FOR EACH ROW EXECUTE FUNCTION swallow()")
            )
    engine.dispose()


def spit_out(url: str, table: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.execute(text("DROP TRIGGER swallow"))
        else:
            connection.execute(text("DROP FUNCTION swallow CASCADE"))
    engine.dispose()


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_trigger_swallows_is_refused(store: Store, url: str, name: str) -> None:
    table, what, change = CHANGES[name]
    kept = keep(store)
    swallow(url, table, what)
    try:
        with pytest.raises(StoreError, match=f"only 0 of .* changes of its table {table}"):
            change(store, kept.id or 0)
        assert store.revision() == 1
        assert [each.rule for each in store.select()[0]] == [kept]
        assert store.window() is None
    finally:
        spit_out(url, table)
    change(store, kept.id or 0)
