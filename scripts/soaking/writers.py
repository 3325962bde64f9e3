"""Many writers at one API, all at once, and a look at the database for what they were told was done.

`netlimit serve` runs over a database of its own, with a kernel in memory. Each writer adds, changes and removes rules
of its own, and all of them change two that they share: one holds a number that everybody raises by one with If-Match,
the other a label for each, set without. Nothing that was acknowledged may be lost, and nothing may be answered by 5xx.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from netlimit.store import AuditEntry, Store
from tests.cli.running import Netlimit, settings_in, until
from tests.databases import run_postgres

TOKEN = "soak-token"  # noqa: S105  # of a server that nobody else can reach
SETTINGS = {
    "NETLIMIT_BOOTSTRAP_TOKEN": TOKEN,
    "NETLIMIT_TOKEN": TOKEN,
    "NETLIMIT_REQUEST_RATE": "1000000",
    "NETLIMIT_REVISIONS": "1000000",
}
"""All come from one address, and all that they do shall be undone at the end."""
BULK = 10
TALLY, SHARED = "tally", "shared"
BEGINNING = 2
"""The revision at which these two are there, and nothing else."""
RULE: dict[str, Any] = {"rate": "100 packets/s"}


@dataclass(frozen=True)
class Answer:
    """What the API said: its status, the body, and the ETag."""

    status: int
    body: Any
    etag: str | None


@dataclass
class Writer:
    """One client with a connection of its own; what it was told was done."""

    number: int
    address: tuple[str, int]
    random: random.Random
    kept: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The comment and the ETag of each rule of its own, by id."""
    removed: set[int] = field(default_factory=set)
    raised: int = 0
    label: str | None = None
    done: Counter[str] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _targets: int = 0

    def write(self, end: float) -> None:
        """Make changes until the time is over."""
        self._connection = http.client.HTTPConnection(*self.address, timeout=120)
        while time.monotonic() < end and not self.wrong:
            chances = {self.add: 4, self.change: 4, self.remove: 2, self.add_many: 1, self.tally: 3, self.share: 3}
            (chosen,) = self.random.choices(list(chances), list(chances.values()))
            if chosen():
                self.done[chosen.__name__] += 1
        self._connection.close()

    def add(self) -> bool:
        comment = self._say()
        answer = self._ask("POST", "/rules", RULE | {"target": self._target(), "comment": comment})
        if self._expect(answer, 201):
            self.kept[answer.body["id"]] = (comment, str(answer.etag))
        return True

    def add_many(self) -> bool:
        batch = [RULE | {"target": self._target()} for _ in range(BULK)]
        answer = self._ask("POST", "/rules/bulk", batch)
        if self._expect(answer, 201):
            self.kept |= dict.fromkeys(answer.body["ids"], ("", f'"{answer.body["revision"]}"'))
        return True

    def change(self) -> bool:
        number = self._pick()
        if number is None:
            return False
        comment = self._say()
        answer = self._ask("PATCH", f"/rules/{number}", {"comment": comment}, self.kept[number][1])
        if self._expect(answer, 200):
            self.kept[number] = (comment, str(answer.etag))
        return True

    def remove(self) -> bool:
        number = self._pick()
        if number is None:
            return False
        if self._expect(self._ask("DELETE", f"/rules/{number}", None, self.kept[number][1]), 204):
            del self.kept[number]
            self.removed.add(number)
        return True

    def tally(self) -> bool:
        """Raise the number that all share by one: read it, and write what follows if nobody else was quicker."""
        before = self._ask("GET", f"/rules/{TALLY}")
        if not self._expect(before, 200):
            return False
        raised = {"comment": str(int(before.body["comment"]) + 1)}
        answer = self._ask("PATCH", f"/rules/{TALLY}", raised, before.etag)
        if answer.status == 412:
            return False
        self.raised += self._expect(answer, 200)
        return True

    def share(self) -> bool:
        """Set a label of one's own on a rule of all, whatever others do to it."""
        label = self._say()
        if self._expect(self._ask("PATCH", f"/rules/{SHARED}", {"labels": {f"w{self.number}": label}}), 200):
            self.label = label
        return True

    def _ask(self, method: str, path: str, body: object = None, etag: str | None = None) -> Answer:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        headers |= {"If-Match": etag} if etag else {}
        began = time.monotonic()
        self._connection.request(method, f"/api/v1{path}", json.dumps(body) if body is not None else None, headers)
        answer = self._connection.getresponse()
        text = answer.read()
        self.seconds.append(time.monotonic() - began)
        self.answers[answer.status] += 1
        return Answer(answer.status, json.loads(text) if text else None, answer.headers["ETag"])

    def _expect(self, answer: Answer, status: int) -> bool:
        if answer.status != status:
            self.wrong.append(f"writer {self.number} wanted {status} and got {answer.status}: {answer.body}")
        return answer.status == status

    def _target(self) -> str:
        self._targets += 1
        return f"10.{self.number}.{self._targets >> 8}.{self._targets & 255}"

    def _say(self) -> str:
        return f"{self.number}-{self.random.randrange(2**32)}"

    def _pick(self) -> int | None:
        return self.random.choice(list(self.kept)) if self.kept else None


@dataclass(frozen=True)
class Outcome:
    """What the writers did in how many seconds, and what of it is not so in the database."""

    writers: Sequence[Writer]
    seconds: float
    wrong: Sequence[str]

    @property
    def changes(self) -> int:
        """How many changes were made."""
        return sum(sum(writer.done.values()) for writer in self.writers)

    def __str__(self) -> str:
        answers: Counter[int] = sum((writer.answers for writer in self.writers), Counter())
        done: Counter[str] = sum((writer.done for writer in self.writers), Counter())
        took = sorted(second for writer in self.writers for second in writer.seconds)
        late = took[len(took) * 99 // 100]
        return (
            f"{len(self.writers)} writers, {self.seconds:.0f} s: {self.changes} changes, "
            f"{self.changes / self.seconds:.0f} a second; "
            f"answers after {1000 * statistics.median(took):.0f} ms (median), {1000 * late:.0f} ms (p99), "
            f"{1000 * took[-1]:.0f} ms (most)\n"
            f"changes: {_list(done)}; answers: {_list(answers)}\n"
            + ("\n".join(self.wrong[:20]) if self.wrong else "Nothing was lost, and nothing failed.")
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")


def run(options: argparse.Namespace) -> int:
    """Run it over a database that is made for it."""
    with make_database(options.database) as others:
        outcome = soak(others, options.seconds, options.writers, options.seed)
    print(outcome)
    return 1 if outcome.wrong else 0


@contextmanager
def make_database(kind: str) -> Iterator[dict[str, str]]:
    """The settings that name a new database; none of them for SQLite."""
    if kind == "sqlite":
        yield {}
        return
    with run_postgres() as server:
        yield {"NETLIMIT_DATABASE_URL": server.url(server.make_database())}


def soak(others: Mapping[str, str], seconds: float, writers: int, seed: int) -> Outcome:
    """Let them write for so long, and look."""
    directory = Path(tempfile.mkdtemp(prefix="netlimit-soak-"))
    directory.chmod(0o755)  # the API's user passes it
    settings = settings_in(directory, **SETTINGS, **others)
    place = Netlimit(settings)
    server = place.serve()
    store = Store(settings["NETLIMIT_DATABASE_URL"])
    try:
        for name, target in ((TALLY, "192.0.2.1"), (SHARED, "192.0.2.2")):
            place.do("rule", "add", target, "--rate", "1 packets/s", "--name", name, "--comment", "0", "--no-wait")
        address, _, port = settings["NETLIMIT_LISTEN"].partition(":")
        all_of_them = [Writer(n, (address, int(port)), random.Random(f"{seed}-{n}")) for n in range(writers)]
        began = time.monotonic()
        _run_together(all_of_them, began + seconds)
        took = time.monotonic() - began
        revision = store.revision()
        until(lambda: all(host.applied_revision == revision for host in store.hosts()), server.said)
        server.end()
        wrong = [sentence for writer in all_of_them for sentence in writer.wrong]
        return Outcome(all_of_them, took, wrong + list(find_losses(store, all_of_them)))
    finally:
        store.close()
        if not server.ended:
            server.end()
        shutil.rmtree(directory)


def _run_together(writers: Sequence[Writer], end: float) -> None:
    threads = [threading.Thread(target=writer.write, args=(end,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def find_losses(store: Store, writers: Sequence[Writer]) -> Iterator[str]:
    """What was acknowledged and is not so, or is so and was not."""
    kept = {each.rule.id: each.rule for each in store.select(limit=10**9)[0]}
    shared = {rule.name: rule for rule in kept.values() if rule.name}
    wanted = {number: comment for writer in writers for number, (comment, _) in writer.kept.items()}
    for number, comment in wanted.items():
        if number not in kept or kept[number].comment != comment:
            yield f"rule {number} should say {comment!r} and is {kept.get(number)}"
    removed = {number for writer in writers for number in writer.removed}
    if unwanted := kept.keys() - wanted.keys() - {rule.id for rule in shared.values()}:
        yield f"rules {sorted(unwanted)[:10]} are there; removed of them were {sorted(unwanted & removed)[:10]}"
    raised = sum(writer.raised for writer in writers)
    if shared[TALLY].comment != str(raised):
        yield f"the number was raised {raised} times, and is {shared[TALLY].comment}"
    labels = {f"w{writer.number}": writer.label for writer in writers if writer.label is not None}
    if dict(shared[SHARED].labels) != labels:
        yield f"the labels should be {labels}, and are {dict(shared[SHARED].labels)}"
    changes = BEGINNING + sum(sum(writer.done.values()) for writer in writers)
    if store.revision() != changes:
        yield f"{changes} changes were made, and the revision is {store.revision()}"
    lines = Counter(line.revision for line in _read_audit(store) if line.rule_id is not None)
    batches = sum(writer.done["add_many"] for writer in writers)
    if lines.keys() != set(range(1, changes + 1)) or lines.total() != changes + batches * (BULK - 1):
        yield f"the audit has {lines.total()} lines of {len(lines)} revisions for {changes} changes"
    yield from _undo(store)


def _undo(store: Store) -> Iterator[str]:
    """Go back to where all began."""
    store.rollback(BEGINNING, "soak", datetime.now(UTC))
    left = {each.rule.name: (each.rule.comment, each.rule.labels) for each in store.select(limit=10**9)[0]}
    if left != {TALLY: ("0", ()), SHARED: ("0", ())}:
        yield f"after all is undone there is {left}"


def _read_audit(store: Store) -> Iterator[AuditEntry]:
    after: int | None = None
    while page := store.audit(limit=10_000, after=after):
        yield from page
        after = page[-1].id


def _list(counted: Counter[Any]) -> str:
    return ", ".join(f"{what} {number}" for what, number in counted.most_common())
