"""Which database it is: told from every other, carried by backups, known to copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import text

from netlimit.errors import StoreError
from netlimit.forgotten import Held, find_forgotten, has_lost
from netlimit.origins import MOST_MARKS, Origin, has_word, is_another, is_older, join, mark
from netlimit.records import HostStatus
from netlimit.store import Replica, Store, audit, homes, open_replica, read_held, take_snapshot
from netlimit.store.migrate import alembic_config
from tests.databases import Postgres
from tests.store.examples import NOW, keep


@pytest.fixture
def other(empty_url: str) -> Iterator[Store]:
    """Another database, without tables."""
    store = Store(empty_url)
    yield store
    store.close()


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Replica]:
    with closing(open_replica(tmp_path / "state", "gw")) as copy:
        yield copy


def forget(store: Store) -> None:
    """As it is with a database of an older netlimit."""
    with store._database.writing() as connection, homes.by_name(connection):
        connection.execute(text("UPDATE clock SET identity = NULL"))


def refuses(copy: Replica, store: Store) -> bool:
    """Whether who holds what the copy tells does not go by a database."""
    held = copy.held()
    return find_forgotten(store.origin(held.origin.revision), held) is not None


def tells_loss(copy: Replica, store: Store) -> bool:
    """Whether it goes by it, and says that something is lost."""
    held = copy.held()
    return has_lost(store.origin(held.origin.revision), held)


@pytest.fixture
def save(store: Store, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Copies a database as it stands: the file, or as a server does it. What comes of it, as a store."""
    saved: list[Store] = []

    def save() -> Store:
        store.close()
        path = store.path
        if path is not None:
            there = tmp_path / f"saved{len(saved)}.db"
            shutil.copy(path, there)
            saved.append(Store(f"sqlite:///{there}"))
        else:
            server: Postgres = request.getfixturevalue("postgres")
            name = f"saved{len(saved)}_{next(server.numbers)}"
            server.run("postgres", f"CREATE DATABASE {name} TEMPLATE {request.getfixturevalue('migrated')}")
            saved.append(Store(server.url(name)))
        return saved[-1]

    yield save
    for each in saved:
        each.close()


def test_a_database_has_a_word_of_its_own_from_when_it_is_made(other: Store, tmp_path: Path) -> None:
    other.upgrade()
    with closing(Store(f"sqlite:///{tmp_path}/third.db")) as third:
        third.upgrade()
        words = {store.origin().identity for store in (other, third)}
    assert len(words) == 2
    assert None not in words
    before = other.origin()
    other.upgrade()
    assert other.origin() == before


def test_one_that_had_rules_before_is_named_by_who_goes_by_it_first(other: Store, copy: Replica) -> None:
    """An old file, or an old dump, may be put back at any time: until then it is no other than it was."""
    with other._database.migrating() as connection:
        command.upgrade(alembic_config(connection), "0012")
        connection.execute(text("UPDATE clock SET revision = 7"))
    other.upgrade()
    assert other.origin()[:3] == (None, 7, 0)
    copy.follow(other)
    named = other.origin().identity
    assert named is not None
    assert copy.origin().identity == named
    assert other.identify("another") == named


def test_an_old_file_that_is_put_back_is_known_by_its_former_name(store: Store, copy: Replica) -> None:
    keep(store)
    copy.follow(store)
    named = copy.origin().identity
    forget(store)
    copy.follow(store)
    assert store.origin().identity == copy.origin().identity == named


def is_marked(other: Store, store: Store) -> bool:
    """Whether it is the same, and somebody has restored it since."""
    known, found = store.origin().identity, other.origin().identity
    return found != known == " ".join((found or "").split()[:-1])


def test_a_backup_brings_it_to_a_new_database(store: Store, other: Store, copy: Replica, tmp_path: Path) -> None:
    keep(store)
    copy.follow(store)
    file = tmp_path / "rules.backup"
    store.back_up(file, NOW)
    keep(store, "10.0.0.2")
    copy.follow(store)
    other.upgrade()
    assert refuses(copy, other)
    other.restore(file, "test", NOW)
    assert is_marked(other, store)
    assert not refuses(copy, other)


def test_a_backup_brings_it_to_one_in_which_somebody_has_made_rules(
    store: Store, other: Store, copy: Replica, tmp_path: Path
) -> None:
    """And who goes by that one goes on doing so."""
    keep(store)
    copy.follow(store)
    file = tmp_path / "rules.backup"
    store.back_up(file, NOW)
    other.upgrade()
    keep(other, "10.0.0.9")
    assert refuses(copy, other)
    with closing(open_replica(tmp_path / "neighbour", "gw2")) as neighbour:
        neighbour.follow(other)
        other.restore(file, "test", NOW, force=True)
        assert not refuses(copy, other)
        assert not refuses(neighbour, other)


def test_a_backup_of_an_older_netlimit_is_no_other_than_it_was(
    store: Store, other: Store, copy: Replica, tmp_path: Path
) -> None:
    keep(store)
    copy.follow(store)
    forget(store)
    file = tmp_path / "rules.backup"
    store.back_up(file, NOW)
    other.restore(file, "test", NOW)
    other.upgrade()
    assert not refuses(copy, other)
    known = copy.origin().identity
    copy.follow(other)
    assert known is not None
    assert join(known, other.origin().identity) == other.origin().identity


def test_a_copy_follows_no_other_database(store: Store, other: Store, copy: Replica) -> None:
    keep(store)
    copy.follow(store)
    other.upgrade()
    for _ in range(3):
        with pytest.raises(StoreError, match="this gateway holds 1 rule of revision 1, as its copy tells"):
            copy.follow(other)
        keep(other, f"10.0.0.{9 + other.revision()}")
    assert [rule.id for rule in copy.load("gw")[1]] == [1]
    copy.take(other.origin())
    copy.follow(other)
    assert copy.revision() == 3
    assert refuses(copy, store)


def test_an_older_state_is_not_gone_by_without_a_word_where_no_rule_is_held(
    store: Store, copy: Replica, save: Callable[[], Store]
) -> None:
    """It has a rule that was removed: it would be in force again."""
    rule = keep(store)
    older = save()
    store.remove(rule.id or 0, "test", NOW)
    copy.follow(store)
    assert not refuses(copy, store)
    assert not tells_loss(copy, store)
    assert refuses(copy, older) != tells_loss(copy, older)
    copy.follow_pause(True)
    assert not refuses(copy, older)
    assert not tells_loss(copy, older)


def test_another_database_is_gone_by_where_no_rule_is_held(store: Store, other: Store, copy: Replica) -> None:
    store.remove(keep(store).id or 0, "test", NOW)
    copy.follow(store)
    other.upgrade()
    assert not refuses(copy, other)
    keep(other, "10.0.0.9")
    assert not refuses(copy, other)


@pytest.mark.parametrize("name", ["gw", "renamed"])
def test_what_a_copy_holds_does_not_depend_on_the_name_of_the_gateway(store: Store, tmp_path: Path, name: str) -> None:
    keep(store)
    directory = tmp_path / "state"
    with closing(open_replica(directory, "gw")) as copy:
        copy.follow(store)
    assert read_held(directory, name) == Held(1, Origin(store.origin().identity, 1, past=store.origin(1).past))
    with closing(open_replica(directory, name)) as copy:
        copy.report(HostStatus(name, "fake"))
        assert copy.held().rules == 1
        copy.follow_pause(True)
        assert copy.held().rules == 0


def test_a_copy_of_an_older_netlimit_tells_what_it_holds(store: Store, tmp_path: Path) -> None:
    """Also before any controller has brought it to the present tables."""
    keep(store)
    with closing(open_replica(tmp_path, "gw")) as copy:
        copy.follow(store)
        with copy._database.migrating() as connection:
            connection.execute(text("DELETE FROM revisions"))
            command.downgrade(alembic_config(connection), "0012")
    assert read_held(tmp_path, "gw") == Held(1, Origin(None, 1, past=(1, 0)))


def test_what_a_guard_puts_into_a_copy_is_of_the_database_it_was_read_from(store: Store, copy: Replica) -> None:
    keep(store)
    copy.hold(take_snapshot(store, "gw", 1, False), None)
    assert copy.origin().identity == store.origin().identity


@pytest.mark.parametrize(
    ("known", "identity", "revision", "other"),
    [
        ("one", "one", 1, False),
        ("one", "two", 1, True),
        ("one", "two one", 1, False),
        ("one two", "two three", 1, False),
        (None, "one", 1, False),
        ("one", None, 1, False),
        ("one", "one", 0, True),
        (None, None, 0, True),
    ],
)
def test_what_is_another_database(known: str | None, identity: str | None, revision: int, other: bool) -> None:
    assert is_another(known, Origin(identity, revision)) == other


def test_words_are_joined_once() -> None:
    assert join("a b", "b c") == "a b c"
    assert join(None, None) is None


KNOWN = Origin("one", 5, past=(5, 50))
RESTORED = Origin(mark("one", "a"), 5, past=(5, 50))


@pytest.mark.parametrize(
    ("known", "found", "older"),
    [
        (KNOWN, Origin("one", 4, past=(5, 0)), True),
        (KNOWN, Origin("one", 5, past=(5, 50)), False),
        (KNOWN, Origin("one", 9, past=(5, 50)), False),
        (KNOWN, Origin("one", 5, past=(5, 51)), True),
        (KNOWN, Origin("one", 9, past=(5, 51)), True),
        (KNOWN, Origin("one", 9, past=(5, 0)), False),
        (KNOWN, Origin("one", 9, past=(4, 40)), False),
        (KNOWN._replace(past=(5, 0)), Origin("one", 9, past=(5, 51)), False),
        (KNOWN._replace(past=(5, 0)), Origin("one", 4), True),
        (KNOWN, Origin(None, 4), True),
        (KNOWN._replace(identity=None), Origin("one", 4), True),
        (KNOWN, Origin(mark("one", "a"), 4), False),
        (KNOWN, Origin(mark("one", "a"), 9, past=(5, 51)), False),
        (RESTORED, Origin(mark("one", "a"), 4), True),
        (RESTORED, Origin("one", 4), True),
        (RESTORED, Origin(mark(mark("one", "a"), "b"), 4), False),
    ],
)
def test_what_is_an_older_state(known: Origin, found: Origin, older: bool) -> None:
    """It has not the revision that is known, by number and stamp; where both are known."""
    assert is_older(known, found) == older


@pytest.mark.parametrize(("stamp", "has", "older"), [(50, 50, False), (50, 0, True), (0, 0, False), (0, 51, False)])
def test_what_is_doubted_has_to_prove_itself(stamp: int, has: int, older: bool) -> None:
    """As far as what is known can be proved."""
    known = KNOWN._replace(past=(5, stamp))
    assert is_older(known, Origin("one", 9, past=(5, has)), is_doubted=True) == older


def test_marks_are_no_words() -> None:
    assert not has_word(mark(None, "a"))
    assert not is_another(mark(None, "a"), Origin("one", 1))
    assert is_another(mark("one", "a"), Origin(mark("two", "a"), 1))


def test_the_oldest_marks_go() -> None:
    identity = "one two"
    for number in range(MOST_MARKS + 5):
        identity = mark(identity, str(number))
    words = identity.split()
    assert words[:3] == ["one", "two", "+5"]
    assert (len(words), words[-1]) == (2 + MOST_MARKS, f"+{MOST_MARKS + 4}")


def test_an_older_state_is_gone_by_on_a_server_alone(store: Store, copy: Replica, save: Callable[[], Store]) -> None:
    """Whatever is changed there: its revision may become as high as that which is known, and higher."""
    keep(store)
    older = save()
    keep(store, "10.0.0.2")
    copy.follow(store)
    for _ in range(3):
        assert refuses(copy, older) == (store.path is not None)
        assert tells_loss(copy, older) == (store.path is None)
        keep(older, f"10.0.0.{9 + older.revision()}")
    keep(store, "10.0.0.3")
    assert not refuses(copy, store)
    assert not tells_loss(copy, store)


def test_a_copy_follows_no_older_file(sqlite_store: Store, tmp_path: Path, copy: Replica) -> None:
    store = sqlite_store
    assert store.path is not None
    keep(store)
    store.close()
    shutil.copy(store.path, tmp_path / "older.db")
    keep(store, "10.0.0.2")
    copy.follow(store)
    with closing(Store(f"sqlite:///{tmp_path}/older.db")) as older:
        with pytest.raises(StoreError, match=r"it lacks that revision \(it is at 1\)"):
            copy.follow(older)
        assert {rule.id for rule in copy.load("gw")[1]} == {1, 2}
        copy.take(older.origin())
        assert not refuses(copy, older)
        assert not refuses(copy, store), "the newer one has all that is in the older"
        copy.follow(older)
        assert {rule.id for rule in copy.load("gw")[1]} == {1}
        keep(older, "10.0.0.3")
        copy.follow(older)
        assert refuses(copy, store), "nor does it have what was changed in the older since"


def test_an_older_backup_that_is_restored_is_gone_by(
    store: Store, other: Store, copy: Replica, save: Callable[[], Store], tmp_path: Path
) -> None:
    """Whatever its revision is: somebody has decided so."""
    keep(store)
    file = tmp_path / "rules.backup"
    store.back_up(file, NOW)
    older = save()
    for number in range(2, 9):
        keep(store, f"10.0.0.{number}")
    copy.follow(store)
    for restored in (older, other):
        restored.restore(file, "test", NOW, force=True)
        assert restored.revision() < 8
        assert not refuses(copy, restored)
        assert not tells_loss(copy, restored)
    copy.follow(other)
    assert copy.revision() == other.revision()
    assert not refuses(copy, other)
    assert refuses(copy, store) == (store.path is not None), "it lacks what may have been changed since"


def test_a_copy_knows_the_stamp_of_what_it_holds(store: Store, copy: Replica) -> None:
    """However it came to hold it; and none after an older netlimit has written to it."""
    keep(store)
    copy.follow(store)
    assert copy.held().origin.past == store.origin(1).past
    keep(store, "10.0.0.2")
    copy.follow(store)
    assert copy.held().origin.past == store.origin(2).past
    store.open_window(60, "test", NOW)
    keep(store, "10.0.0.3")
    assert not copy.follow(store)
    assert copy.held().origin.past == store.origin(2).past
    store.confirm("test", NOW)
    changes = store.changes(2, "gw", store.stamp_of(2))
    assert changes is not None
    assert copy.keep(2, changes)
    assert copy.held().origin.past == store.origin(3).past
    copy.hold(take_snapshot(store, "gw", 2, False), None)
    assert copy.held().origin.past == store.origin(2).past
    with copy._database.writing() as connection:
        connection.execute(text("UPDATE clock SET revision = 3"))
    assert copy.held().origin.past == (3, 0)
    assert not refuses(copy, store)


def put(store: Store, number: int) -> None:
    store.put_limits("web", f"domain: web\ndescriptors: [] # {number}\n", "application/yaml", "test", NOW)


def test_a_database_that_lacks_a_line_of_the_audit_has_lost_it(store: Store, save: Callable[[], Store]) -> None:
    """Whatever it was, and however many have come since."""
    put(store, 1)
    saved = save()
    known, is_lost = store.look_back(None)
    assert not is_lost
    assert saved.look_back(known) == (known, False)
    put(store, 2)
    known, is_lost = store.look_back(known)
    assert not is_lost
    for number in range(3, 6):
        found, is_lost = saved.look_back(known)
        assert is_lost
        assert not saved.look_back(found)[1], "it is told once"
        put(saved, number)


def test_what_was_given_up_of_the_audit_is_not_lost(store: Store) -> None:
    put(store, 1)
    known, _ = store.look_back(None)
    for number in range(2, 30):
        put(store, number)
    with store._database.writing() as connection:
        audit.prune(connection, 5)
    assert store.look_back(known)[0].line > known.line
    assert not store.look_back(known)[1]


def test_what_a_backup_lacks_that_was_restored_is_not_lost(store: Store, other: Store, tmp_path: Path) -> None:
    """Somebody has decided for that; and another database has lost nothing either."""
    put(store, 1)
    file = tmp_path / "rules.backup"
    store.back_up(file, NOW)
    put(store, 2)
    known, _ = store.look_back(None)
    other.upgrade()
    other.identify("other")
    assert not other.look_back(known)[1]
    other.restore(file, "test", NOW)
    assert not other.look_back(known)[1]
