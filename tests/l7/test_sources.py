"""Rules from files and a database, followed as they change."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from netlimit.errors import LimitError, StoreError
from netlimit.l7 import files
from netlimit.l7.rules import RuleSet
from netlimit.l7.sources import SECONDS, Sources
from netlimit.origins import Origin, Trace, mark, may_lack
from netlimit.store import LimitDocument, Store
from tests.api.test_stopped_server import stopped
from tests.databases import Postgres
from tests.store.examples import NOW


def text(domain: str, amount: int = 1) -> str:
    return f"domain: {domain}\ndescriptors: [{{key: k, rate_limit: {{unit: day, requests_per_unit: {amount}}}}}]\n"


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Table:
    """A database of documents that can be away."""

    documents: dict[str, LimitDocument] = field(default_factory=dict)
    revision: int = 0
    away: bool = False
    read: int = 0
    name: str | None = None
    is_server: bool = False

    def put(self, domain: str, document: str, content_type: str = "application/yaml") -> None:
        self.revision += 1
        self.documents[domain] = LimitDocument(domain, document, content_type, self.revision, NOW, NOW, "ann")

    def origin(self) -> Origin:
        return Origin(self.name, 0, self.revision, is_server=self.is_server)

    def look_back(self, known: Trace | None) -> tuple[Trace, bool]:
        lost = known is not None and self.revision < known.line
        return Trace(self.name, self.revision, ""), lost and may_lack(known, self.name)

    def limits_identity(self) -> tuple[str | None, int]:
        if self.away:
            raise StoreError("The database does not answer.")
        return self.name, self.revision

    def limits(self) -> tuple[int, list[LimitDocument]]:
        self.read += 1
        return self.revision, list(self.documents.values())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "limits"
    folder.mkdir()
    return folder


def amounts(sources: Sources) -> dict[str, int]:
    """How many requests a day each domain lets pass."""
    return amounts_of(sources.rules)


def amounts_of(rules: RuleSet) -> dict[str, int]:
    return {rule.domain: rule.limit.amount for rule in rules if rule.limit}


def settle(sources: Sources, clock: Clock) -> None:
    """Look, and again when nobody has changed anything for a while."""
    sources.refresh()
    clock.now += files.REST
    sources.refresh()


def test_one_file_is_read_at_once_and_again_when_it_changes(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text(text("auth", 5))
    sources = Sources(path, clock=clock)
    assert amounts(sources) == {}
    sources.refresh()
    assert amounts(sources) == {"auth": 5}
    before = sources.rules
    settle(sources, clock)
    assert sources.rules is before
    path.write_text(text("auth", 6))
    settle(sources, clock)
    assert amounts(sources) == {"auth": 6}
    assert amounts_of(before) == {"auth": 5}


def test_a_folder_holds_a_domain_in_each_file(folder: Path, clock: Clock) -> None:
    (folder / "a.yaml").write_text(text("auth", 1))
    (folder / "b.yml").write_text(text("edge", 2))
    (folder / "c.json").write_text('{"domain": "json", "descriptors": [{"key": "k", "concurrency": 3}]}')
    (folder / ".hidden.yaml").write_text("domain: [")
    (folder / "README.txt").write_text("domain: [")
    (folder / "folder.yaml").mkdir()
    (folder / "D.JSON").write_text('{"domain":\t"capitals", "descriptors": [{"key": "k", "concurrency": 3}]}')
    sources = Sources(folder, clock=clock)
    sources.refresh()
    assert set(sources.rules.domains) == {"auth", "edge", "json", "capitals"}
    assert sources.troubles == ()
    (folder / "a.yaml").unlink()
    (folder / "d.yaml").write_text(text("new", 4))
    settle(sources, clock)
    assert set(sources.rules.domains) == {"edge", "json", "capitals", "new"}


def test_a_bad_file_leaves_its_rules_and_says_why(folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    good, bad = folder / "good.yaml", folder / "bad.yaml"
    good.write_text(text("good", 1))
    bad.write_text(text("bad", 1))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    good.write_text(text("good", 2))
    bad.write_text("domain: bad\ndescriptors: [{kez: k}, {key: other, rate_limit: 5}]\n")
    settle(sources, clock)
    assert amounts(sources) == {"good": 2, "bad": 1}
    (trouble,) = sources.troubles
    assert trouble == (
        f"{bad}: line 2, descriptors[0].kez: `kez` is not known in a descriptor; did you mean `key`? "
        f"{bad}: line 2, descriptors[1].rate_limit: A map is wanted here: `rate_limit`, with `unit: …` and so on. "
        "What it said before stays in force."
    )
    settle(sources, clock)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [trouble]
    bad.write_text(text("bad", 3))
    settle(sources, clock)
    assert amounts(sources) == {"good": 2, "bad": 3}
    assert sources.troubles == ()
    assert f"This is over: {trouble}" in caplog.messages


def test_what_cannot_be_meant_so_is_logged_where_it_comes_into_force(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "web.yaml"
    item = "- {key: host, value: '*%d.Example', rate_limit: {unit: day, requests_per_unit: 1}}\n"
    path.write_text("domain: web\ndescriptors:\n" + item % 1)
    sources = Sources(folder, clock=clock)
    sources.refresh()
    settle(sources, clock)
    said = "The limits of the domain 'web': line 3, descriptors[0].value: Each host is compared in its plain form, "
    assert [each.message for each in caplog.records] == [said + "'*1.example'; write that."]
    assert sources.troubles == ()  # it is in force
    caplog.clear()
    path.write_text("domain: web\ndescriptors:\n" + "".join(item % number for number in range(30)))
    settle(sources, clock)
    assert len(caplog.messages) == 11
    assert "have 20 more such places" in caplog.messages[-1]


@contextmanager
def out_of_descriptors() -> Iterator[None]:
    """This process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_could_not_be_read_for_a_while_is_read_again(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text(text("auth", 1))
    sources = Sources(path, clock=clock)
    sources.refresh()
    path.write_text(text("auth", 2))
    with out_of_descriptors():
        settle(sources, clock)
    (trouble,) = sources.troubles
    assert "Too many open files" in trouble
    assert amounts(sources) == {"auth": 1}
    settle(sources, clock)
    assert (amounts(sources), sources.troubles) == ({"auth": 2}, ())


def test_a_file_that_is_bad_from_the_beginning_has_no_rules(folder: Path, clock: Clock) -> None:
    (folder / "a.yaml").write_bytes(b"domain: \xff")
    (folder / "b.yaml").write_text(text("b"))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    assert amounts(sources) == {"b": 1}
    assert sources.troubles == (f"{folder / 'a.yaml'}: Byte 8 is not UTF-8.",)


def test_a_half_written_file_is_let_alone(folder: Path, clock: Clock) -> None:
    """Its beginning is good YAML, too: only waiting tells that there is more to come."""
    path = folder / "a.yaml"
    path.write_text(text("auth", 1))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    for size in (13, 20, 30):
        path.write_text(text("auth", 2)[:size])
        clock.now += files.REST * 0.9
        sources.refresh()
        assert (amounts(sources), sources.troubles) == ({"auth": 1}, ())
    path.write_text(text("auth", 2))
    settle(sources, clock)
    assert amounts(sources) == {"auth": 2}


def test_a_restless_file_holds_up_the_others_for_a_while_only(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    restless, calm, gone = folder / "a.yaml", folder / "b.yaml", folder / "c.yaml"
    for path, domain in ((restless, "auth"), (calm, "edge"), (gone, "shop")):
        path.write_text(text(domain, 1))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    calm.write_text(text("edge", 2))
    gone.unlink()
    (folder / "d.yaml").write_text(text("new", 4))
    for size in range(1, 10):
        restless.write_text(text("auth", 2) + "#" * size)
        clock.now += 1
        sources.refresh()
        if size < files.PATIENCE:
            assert (amounts(sources), sources.troubles) == ({"auth": 1, "edge": 1, "shop": 1}, ())
    assert amounts(sources) == {"auth": 1, "edge": 2, "new": 4}
    assert sources.troubles == (
        f"{restless}: It changes again and again; it is read once it has rested for half a second. "
        "What it said before stays in force.",
    )
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [*sources.troubles]
    calm.write_text(text("edge", 3))
    for size in range(10, 13):  # others have waited long enough
        restless.write_text(text("auth", 2) + "#" * size)
        clock.now += 1
        sources.refresh()
    assert amounts(sources) == {"auth": 1, "edge": 3, "new": 4}
    settle(sources, clock)
    assert (amounts(sources), sources.troubles) == ({"auth": 2, "edge": 3, "new": 4}, ())


def test_a_file_that_comes_and_goes_holds_up_no_other_and_keeps_what_it_had(folder: Path, clock: Clock) -> None:
    flighty, calm = folder / "a.yaml", folder / "b.yaml"
    flighty.write_text(text("auth", 1))
    calm.write_text(text("edge", 1))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    calm.write_text(text("edge", 2))
    for _ in range(5):
        flighty.unlink()
        clock.now += 1
        sources.refresh()
        flighty.write_text(text("auth", 2))
        clock.now += 1
        sources.refresh()
    assert amounts(sources) == {"auth": 1, "edge": 2}
    assert "It changes again and again" in sources.troubles[0]
    flighty.write_text("domain: [")
    settle(sources, clock)
    assert amounts(sources) == {"auth": 1, "edge": 2}
    (trouble,) = sources.troubles
    assert "The YAML cannot be read" in trouble


def test_what_belongs_together_comes_together_though_it_is_written_one_after_the_other(
    folder: Path, clock: Clock
) -> None:
    one, other = folder / "a.yaml", folder / "b.yaml"
    one.write_text(text("auth", 1))
    other.write_text("domain: edge\ndescriptors: []\n")
    sources = Sources(folder, clock=clock)
    sources.refresh()
    one.write_text("domain: edge\ndescriptors: []\n")
    clock.now += files.REST * 0.9
    sources.refresh()
    other.write_text(text("auth", 2))
    clock.now += files.REST * 0.9
    sources.refresh()
    assert amounts(sources) == {"auth": 1}
    clock.now += files.REST
    settle(sources, clock)
    assert amounts(sources) == {"auth": 2}


def test_links_are_exchanged_as_kubernetes_does(folder: Path, clock: Clock) -> None:
    for number in (1, 2):
        (folder / f"..{number}").mkdir()
        (folder / f"..{number}" / "a.yaml").write_text(text("auth", number))
    (folder / "..data").symlink_to("..1")
    (folder / "a.yaml").symlink_to("..data/a.yaml")
    sources = Sources(folder, clock=clock)
    sources.refresh()
    assert amounts(sources) == {"auth": 1}
    (folder / "..new").symlink_to("..2")
    (folder / "..new").rename(folder / "..data")
    settle(sources, clock)
    assert amounts(sources) == {"auth": 2}


def test_a_file_in_the_place_of_another_is_seen_whatever_its_time(folder: Path, clock: Clock) -> None:
    path, other = folder / "a.yaml", folder.parent / "other"
    path.write_text(text("auth", 1))
    other.write_text(text("auth", 2))
    for each in (path, other):
        os.utime(each, ns=(0, 0))
    sources = Sources(path, clock=clock)
    sources.refresh()
    other.rename(path)
    settle(sources, clock)
    assert amounts(sources) == {"auth": 2}


def test_rules_stay_while_the_folder_is_away(folder: Path, clock: Clock) -> None:
    (folder / "a.yaml").write_text(text("auth", 1))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    folder.rename(folder.parent / "elsewhere")
    settle(sources, clock)
    assert amounts(sources) == {"auth": 1}
    assert sources.troubles == (f"{folder}: No such file or directory.",)
    (folder.parent / "elsewhere").rename(folder)
    settle(sources, clock)
    assert (amounts(sources), sources.troubles) == ({"auth": 1}, ())


def test_a_file_that_becomes_a_folder_leaves_its_rules(tmp_path: Path, clock: Clock) -> None:
    """Also a link that leads to one by now: so does whoever mounts something that is missing."""
    path, other = tmp_path / "limits.yaml", tmp_path / "other"
    path.write_text(text("auth", 1))
    other.mkdir()
    sources = Sources(path, clock=clock)
    sources.refresh()
    path.rename(tmp_path / "kept")
    for become in (path.mkdir, lambda: path.symlink_to(other)):
        become()
        settle(sources, clock)
        assert amounts(sources) == {"auth": 1}
        assert sources.troubles == (
            f"{path}: It was a file, and is a folder now. What it said before stays in force; "
            "if that is meant, start the limiter anew.",
        )
        path.rename(tmp_path / f"was{path.is_symlink()}")
    (tmp_path / "kept").rename(path)
    settle(sources, clock)
    assert (amounts(sources), sources.troubles) == ({"auth": 1}, ())


def test_a_folder_that_becomes_a_file_leaves_its_rules(folder: Path, clock: Clock) -> None:
    (folder / "a.yaml").write_text(text("auth", 1))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    folder.rename(folder.parent / "kept")
    folder.write_text("domain: [")
    settle(sources, clock)
    assert amounts(sources) == {"auth": 1}
    assert sources.troubles == (
        f"{folder}: It was a folder, and is a file now. What it said before stays in force; "
        "if that is meant, start the limiter anew.",
    )


def test_what_becomes_a_folder_in_a_folder_leaves_its_rules(folder: Path, clock: Clock) -> None:
    path = folder / "a.yaml"
    path.write_text(text("auth", 1))
    (folder / "b.yaml").write_text(text("edge", 2))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    path.unlink()
    path.mkdir()
    for _ in range(2):
        settle(sources, clock)
        assert amounts(sources) == {"auth": 1, "edge": 2}
        assert sources.troubles == (f"{path}: It is a folder. What it said before stays in force.",)
    path.rmdir()
    settle(sources, clock)
    assert (amounts(sources), sources.troubles) == ({"edge": 2}, ())


def test_a_folder_that_is_found_empty_leaves_the_rules(folder: Path, clock: Clock) -> None:
    """So does one whose volume is not mounted any more. Who wants no limits says so in a file."""
    path = folder / "a.yaml"
    path.write_text(text("auth", 1))
    (folder / "b.yaml").write_text(text("edge", 2))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    folder.rename(folder.parent / "kept")
    folder.mkdir()
    for _ in range(2):
        settle(sources, clock)
        assert amounts(sources) == {"auth": 1, "edge": 2}
        assert sources.troubles == (
            f"{folder}: There is no file of limits any more. What they said stays in force; "
            "for no limits at all write a file without descriptors, or start the limiter anew.",
        )
    path.write_text("domain: auth\ndescriptors: []\n")
    settle(sources, clock)
    assert (amounts(sources), list(sources.rules.domains), sources.troubles) == ({}, ["auth"], ())


def test_a_file_that_is_back_as_it_was_is_no_trouble(tmp_path: Path, clock: Clock) -> None:
    """What is mounted again has the mark that it had."""
    path = tmp_path / "limits.yaml"
    (tmp_path / "1").write_text(text("auth", 1))
    path.symlink_to("1")
    sources = Sources(path, clock=clock)
    sources.refresh()
    path.unlink()
    settle(sources, clock)
    assert (amounts(sources), sources.troubles) == ({"auth": 1}, (f"{path}: No such file or directory.",))
    path.symlink_to("1")
    settle(sources, clock)
    assert (amounts(sources), sources.troubles) == ({"auth": 1}, ())


def test_what_is_no_file_is_trouble_of_its_own(folder: Path, clock: Clock) -> None:
    (folder / "link.yaml").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.yaml")
    (folder / "good.yaml").write_text(text("auth", 1))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    assert amounts(sources) == {"auth": 1}
    assert sources.troubles == (
        f"{folder / 'link.yaml'}: No such file or directory.",
        f"{folder / 'pipe.yaml'}: It is no file.",
    )


def test_too_many_files_are_too_many(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 2)
    for number in range(3):
        (folder / f"{number}.yaml").write_text(text(f"d{number}"))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    assert sources.troubles == (f"{folder}: There are 3 files of limits; 2 are the most.",)


def test_a_domain_in_two_files_keeps_what_it_had(folder: Path, clock: Clock) -> None:
    first, second = folder / "1.yaml", folder / "2.yaml"
    first.write_text(text("auth", 1))
    sources = Sources(folder, clock=clock)
    sources.refresh()
    second.write_text(text("auth", 2))
    settle(sources, clock)
    assert amounts(sources) == {"auth": 1}
    assert sources.troubles == (
        f"The domain 'auth' is in several files: {first}, {second}. Put its limits into one of them.",
    )
    first.unlink()
    settle(sources, clock)
    assert (amounts(sources), sources.troubles) == ({"auth": 2}, ())
    both = Sources(folder, clock=clock)
    first.write_text(text("auth", 1))
    both.refresh()
    assert amounts(both) == {}


def test_the_database_has_rules_too_and_files_count_before_it(folder: Path, clock: Clock) -> None:
    table = Table()
    table.put("base", text("base", 1))
    table.put("both", text("both", 1))
    table.put("json", '{"domain": "json", "descriptors": []}', "application/json")
    (folder / "both.yaml").write_text(text("both", 2))
    sources = Sources(folder, table, clock)
    sources.refresh()
    assert amounts(sources) == {"base": 1, "both": 2}
    assert set(sources.rules.domains) == {"base", "both", "json"}
    assert sources.troubles == (
        f"The limits of the domain 'both' in the database do not count: {folder / 'both.yaml'} has some, too.",
    )
    sources.refresh()
    assert table.read == 1
    del table.documents["both"]
    table.put("base", text("base", 3))
    sources.refresh()
    assert (amounts(sources), sources.troubles) == ({"base": 3, "both": 2}, ())


def test_rules_stay_while_the_database_is_away_or_holds_what_cannot_be_read(clock: Clock) -> None:
    table = Table()
    table.put("base", text("base", 1))
    sources = Sources(database=table, clock=clock)
    sources.refresh()
    table.away = True
    sources.refresh()
    assert (amounts(sources), sources.troubles) == ({"base": 1}, ("The database does not answer.",))
    table.away = False
    table.put("base", "domain: base\nfuture: 5\n")
    table.put("more", text("more", 2))
    sources.refresh()
    assert amounts(sources) == {"base": 1, "more": 2}
    assert sources.troubles[0].startswith(
        "The limits of the domain 'base' in the database: line 2, future: `future` is"
    )
    del table.documents["base"]
    table.put("base", text("base", 4))
    sources.refresh()
    assert (amounts(sources), sources.troubles) == ({"base": 4, "more": 2}, ())


def test_who_starts_without_what_is_to_be_in_force_is_told_all_of_it(folder: Path, clock: Clock) -> None:
    table = Table(away=True)
    (folder / "a.yaml").write_text(text("auth", 1))
    (folder / "b.yaml").write_text(text("auth", 2))
    (folder / "c.yaml").write_text("domain: [")
    with pytest.raises(LimitError) as told:
        Sources(folder, table, clock).start()
    for part in ("The domain 'auth' is in several files", "c.yaml: line", "The database does not answer."):
        assert part in str(told.value)
    (folder / "b.yaml").unlink()
    (folder / "c.yaml").unlink()
    Sources(folder, table, clock, is_absent=lambda: True).start()
    table.away = False
    table.put("auth", "domain: auth\nfuture: 5\n")
    Sources(folder, table, clock).start()  # the file counts
    table.put("base", "domain: base\nfuture: 5\n")
    with pytest.raises(LimitError, match="domain 'base' in the database"):
        Sources(folder, table, clock).start()


def wait_until(come: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not come():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_change_in_the_database_is_in_force_in_a_moment(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/netlimit.db"
    store, other = Store(url), Store(url)
    store.upgrade()
    watch, ending = store.watch(), threading.Event()
    sources = Sources(database=store)
    thread = threading.Thread(target=sources.run, args=(ending, watch.wait))
    thread.start()
    for amount in (7, 8):
        other.put_limits("auth", text("auth", amount), "application/yaml", "ann", NOW)
        wait_until(lambda amount=amount: amounts(sources) == {"auth": amount})
    ending.set()
    thread.join()
    watch.close()
    other.close()
    store.close()


def test_files_are_followed_while_the_database_hangs(folder: Path, postgres: Postgres) -> None:
    """Just then an operator edits one to stop a flood."""
    store = Store(postgres.url(postgres.make_database()))
    store.upgrade()
    ending = threading.Event()
    path = folder / "auth.yaml"
    path.write_text(text("auth", 1))
    sources = Sources(folder, store)
    sources.start()
    thread = threading.Thread(target=sources.run, args=(ending,), daemon=True)
    thread.start()
    with stopped(postgres):
        time.sleep(2 * SECONDS)  # it asks by now
        path.write_text(text("auth", 2))
        wait_until(lambda: amounts(sources) == {"auth": 2})
    store.put_limits("base", text("base", 3), "application/yaml", "ann", NOW)
    wait_until(lambda: amounts(sources) == {"auth": 2, "base": 3})
    ending.set()
    thread.join()
    store.close()


@pytest.mark.parametrize(("name", "revision"), [("other", 0), ("other", 3), ("one", 0)])
def test_another_database_in_the_place_of_the_first_takes_no_limits_away(
    clock: Clock, name: str, revision: int
) -> None:
    table = Table(name="one")
    table.put("auth", text("auth", 5))
    sources = Sources(database=table, clock=clock)
    sources.refresh()
    table.documents, table.revision, table.name = {}, revision, name
    sources.refresh()
    assert amounts(sources) == {"auth": 5}
    assert "another database" in " ".join(sources.troubles)
    table.put("auth", text("auth", 6))
    table.name = "other one"  # a backup of the first was restored into it
    sources.refresh()
    assert amounts(sources) == {"auth": 6}
    assert sources.troubles == ()


def test_an_older_file_of_the_database_takes_no_limits_away(clock: Clock) -> None:
    """What is restored there is taken, whatever its revision; and so is what a standby has that lagged."""
    table = Table(name="one")
    table.put("auth", text("auth", 4))
    table.put("auth", text("auth", 5))
    sources = Sources(database=table, clock=clock)
    sources.refresh()
    table.revision = 0
    table.put("auth", text("auth", 4))
    sources.refresh()
    assert amounts(sources) == {"auth": 5}
    assert "an older state (revision 1) of the limits than the one that is in force (revision 2)" in str(
        sources.troubles
    )
    table.name = mark("one", "restored")
    sources.refresh()
    assert amounts(sources) == {"auth": 4}
    assert sources.troubles == ()
    table.put("auth", text("auth", 6))
    sources.refresh()
    table.is_server, table.revision = True, 0
    table.put("auth", text("auth", 7))
    sources.refresh()
    assert amounts(sources) == {"auth": 7}


def test_who_begins_anew_goes_by_the_database_that_is_there(clock: Clock) -> None:
    table = Table(name="other")
    table.put("auth", text("auth", 6))
    sources = Sources(database=table, clock=clock)
    sources.refresh()
    assert amounts(sources) == {"auth": 6}


def test_the_last_document_may_be_removed(clock: Clock) -> None:
    table = Table(name="one")
    table.put("auth", text("auth", 6))
    sources = Sources(database=table, clock=clock)
    sources.refresh()
    table.documents.clear()
    table.revision += 1
    sources.refresh()
    assert amounts(sources) == {}
