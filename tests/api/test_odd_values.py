"""One value after the other that nobody would write, in every column of every table: the API goes on answering."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from netlimit.records import Counts, HostStatus, RuleCounters
from netlimit.settings import Settings
from netlimit.store import Store
from netlimit.store.columns import Document
from netlimit.store.tables import metadata
from tests.api.server import connect, serve

WATCHED = ("/status", "/rules", "/rules/1/counters", "/gateways", "/audit", "/revisions", "/confirmation")
NUMBERS = (2**63 - 1, -1, float("inf"), b"\xff\x00", "9" * 400)
DOCUMENTS = ('{"garbage": 1}', "[1e400]", '{"0.1": null, "sum": -1}', "[" * 5000)
MANY = 1_000_000


def fill(store: Store) -> None:
    """A row in most tables."""
    now = store.now()
    reading = Counts(1, 2, 3, 4, 5)
    store.report(HostStatus("gw1", "iptables", applied_revision=1, applying={"0.1": 1, "+Inf": 2, "sum": 0.2}))
    store.count("gw1", [RuleCounters(1, reading, reading, now, now)])
    store.count_requests("gw1", {1: reading}, now)
    store.guarded("gw1")
    store.repaired("gw1", "chains", "found", 0.1, now)
    store.saw_client("gw1", "192.0.2.7")
    store.open_window(600, "test", now)


def test_the_api_goes_on_answering(settings: Settings, store: Store, tmp_path: Path) -> None:
    spoiled = 0
    path = tmp_path / "netlimit.db"
    with (
        serve(settings.model_copy(update={"request_rate": MANY}), store) as url,
        connect(url, "admin") as client,
        closing(sqlite3.connect(path)) as live,
        closing(sqlite3.connect(":memory:")) as pristine,
    ):
        assert client.post("/rules", json={"target": "10.0.0.1", "rate": "5 packets/s", "name": "a"}).status_code == 201
        fill(store)
        live.backup(pristine)
        columns = [(table, column) for table in metadata.sorted_tables for column in table.columns]
        for number, (table, column) in enumerate(columns):
            if table.name in ("tokens", "clock") or column.primary_key:
                continue
            some = DOCUMENTS if isinstance(column.type, Document) else NUMBERS
            value = some[number % len(some)]
            try:
                live.execute(f'UPDATE {table.name} SET "{column.name}" = ?', (value,))  # noqa: S608
                live.commit()
            except sqlite3.Error:  # a unique key, or a trigger of the audit
                live.rollback()
                continue
            spoiled += 1
            what = f"{table.name}.{column.name} = {value!r:.30}"
            for each in WATCHED:
                assert client.get(each).status_code == 200, (what, each)
            assert "netlimit_database_up 1.0" in client.get(f"{url}/metrics").text, what
            pristine.backup(live)
    assert spoiled > 80
