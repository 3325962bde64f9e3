"""Controller, API and others at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from netlimit.rules import Rule
from netlimit.store import Conflict, Stale, Store
from tests.store.examples import NOW, keep, rule

WRITES = 200
WRITER = """
import sys
from netlimit.records import HostStatus
from netlimit.store import Store
from tests.store.examples import NOW, rule
url, number, writes = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = Store(url)
for n in range(writes):
    match n % 4:
        case 0: store.add([rule(f"10.{number}.{n >> 8}.{n & 255}")], number, NOW)
        case 1: store.report(HostStatus(f"gw{number}", "fake", applied_revision=n))
        case 2: store.ask(f"gw{number}", "plan", {})
        case 3: store.add([rule(f"10.{number}.{n >> 8}.{n & 255}")], number, NOW)
    store.select(limit=1)
"""


def test_two_processes_write_without_getting_into_each_others_way(url: str, store: Store) -> None:
    here = Path(__file__).parents[2]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, url, number, str(WRITES)], cwd=here, stderr=subprocess.PIPE, text=True
        )
        for number in ("1", "2")
    ]
    at = 0
    while any(process.poll() is None for process in running):
        changes = store.changes(at, "gw1")
        assert changes is not None
        assert sorted(kept.revision for kept in changes.rules) == list(range(at + 1, changes.revision + 1))
        at = changes.revision
    for process in running:
        assert process.stderr is not None
        assert process.communicate()[1] == ""
        assert process.returncode == 0
    assert store.revision() == store.select()[1] == WRITES


def test_threads_share_a_store(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        kept = list(pool.map(lambda n: keep(store, f"10.0.0.{n}"), range(100)))
    assert sorted(one.revision for one in kept) == sorted(one.id for one in kept) == list(range(1, 101))


def test_of_many_who_limit_the_same_one_wins(store: Store) -> None:
    start = threading.Barrier(8)

    def attempt(number: int) -> bool:
        start.wait()
        try:
            store.add([rule(comment=str(number))], "test", NOW)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
    assert store.revision() == 1


def test_changes_of_one_rule_are_made_of_each_other(store: Store) -> None:
    kept = keep(store, comment="0")

    def raise_it(before: Rule) -> Rule:
        return replace(before, comment=str(int(before.comment) + 1))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: store.change(kept.id, raise_it, "test", NOW), range(100)))
    found = store.find(kept.id)
    assert found is not None
    assert (found.rule.comment, store.revision()) == ("100", 101)


def test_of_many_who_change_what_they_have_read_one_wins(store: Store) -> None:
    kept = keep(store)

    def attempt(number: int) -> bool:
        try:
            store.replace(kept.id, replace(kept, comment=str(number)), "test", NOW, kept.revision)
        except Stale:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(attempt, range(16))) == 1
    assert store.revision() == 2


def test_a_large_batch_appears_at_once(url: str, store: Store) -> None:
    size = 5000
    other = Store(url)
    seen = {other.select(limit=1)[1]}  # which also connects: that may take longer than the batch
    batch = [rule(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}") for n in range(size)]
    writer = threading.Thread(target=store.add, args=(batch, "test", NOW))
    writer.start()
    while writer.is_alive():
        seen.add(other.select(limit=1)[1])
    seen.add(other.select(limit=1)[1])
    assert seen == {0, size}
    other.close()
