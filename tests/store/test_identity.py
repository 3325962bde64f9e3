"""Which database it is: told from every other, carried by backups, known to copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import text

from netlimit.errors import StoreError
from netlimit.forgotten import Held, find_forgotten
from netlimit.origins import Origin, is_another, join
from netlimit.records import HostStatus
from netlimit.store import Replica, Store, homes, open_replica, read_held, take_snapshot
from netlimit.store.migrate import alembic_config
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
    return find_forgotten(store.origin(), copy.held()) is not None


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
    assert other.origin() == (None, 7, 0)
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
    assert other.origin().identity == store.origin().identity
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
    assert other.origin().identity == known


def test_a_copy_follows_no_other_database(store: Store, other: Store, copy: Replica) -> None:
    keep(store)
    copy.follow(store)
    other.upgrade()
    for _ in range(3):
        with pytest.raises(StoreError, match="this gateway holds 1 rule of revision 1, as its copy tells"):
            copy.follow(other)
        keep(other, f"10.0.0.{9 + other.revision()}")
    assert [rule.id for rule in copy.load("gw")[1]] == [1]
    copy.take(other.origin().identity)
    copy.follow(other)
    assert copy.revision() == 3
    assert refuses(copy, store)


@pytest.mark.parametrize("name", ["gw", "renamed"])
def test_what_a_copy_holds_does_not_depend_on_the_name_of_the_gateway(store: Store, tmp_path: Path, name: str) -> None:
    keep(store)
    directory = tmp_path / "state"
    with closing(open_replica(directory, "gw")) as copy:
        copy.follow(store)
    assert read_held(directory, name) == Held(1, Origin(store.origin().identity, 1))
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
            command.downgrade(alembic_config(connection), "0012")
    assert read_held(tmp_path, "gw") == Held(1, Origin(None, 1))


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
