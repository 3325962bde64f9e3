"""The limiter's documents: kept as given, with a revision of their own, in the audit and in backups."""

from __future__ import annotations

import hashlib
import resource
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from netlimit.errors import StoreError
from netlimit.records import Actor
from netlimit.store import DocumentChanged, InUse, LimitDocument, NoDocument, Store, homes
from netlimit.store.former import keep_former
from tests.store.examples import NOW, keep

YAML = "application/yaml"
TEXT = "domain: auth  # ä\ndescriptors: []\n"
LATER = NOW + timedelta(hours=1)


@pytest.fixture
def other(empty_url: str) -> Iterator[Store]:
    """Another database, without tables."""
    store = Store(empty_url)
    yield store
    store.close()


def put(store: Store, domain: str = "auth", text: str = TEXT, expected: int | None = None) -> LimitDocument:
    document, _ = store.put_limits(domain, text, YAML, "ann", LATER, expected)
    return document


def test_a_document_is_kept_as_it_was_given(store: Store) -> None:
    assert (store.limits_revision(), store.limits(), store.find_limits("auth")) == (0, (0, []), None)
    kept, is_new = store.put_limits("auth", TEXT, YAML, Actor("ann", "192.0.2.1", "r1"), NOW)
    assert kept == LimitDocument("auth", TEXT, YAML, 1, NOW, NOW, "ann")
    assert is_new
    assert store.find_limits("auth") == kept
    again, is_new = store.put_limits("auth", "{}", "application/json", "bob", LATER)
    assert again == LimitDocument("auth", "{}", "application/json", 2, NOW, LATER, "bob")
    assert not is_new
    put(store, "Ärger/mit allem", TEXT)
    revision, documents = store.limits()
    assert revision == store.limits_revision() == 3
    assert [(each.domain, each.revision) for each in documents] == [("auth", 2), ("Ärger/mit allem", 3)]
    assert [(head.domain, head.letters, head.actor) for head in store.list_limits()] == [
        ("auth", 2, "bob"),
        ("Ärger/mit allem", len(TEXT), "ann"),
    ]


def test_the_same_again_changes_nothing(store: Store) -> None:
    first = put(store)
    assert store.put_limits("auth", TEXT, YAML, "bob", NOW) == (first, False)
    assert len(store.audit()) == 1


def test_a_change_moves_its_own_revision_and_wakes_who_watches_but_is_none_of_the_rules(store: Store, url: str) -> None:
    keep(store)
    watching = Store(url)
    watch = watching.watch()
    assert not watch.changed()
    put(store)
    assert watch.wait(60)
    assert watching.limits_revision() == 1
    assert store.revision() == 1
    changes = store.changes(1, "gw1")
    assert changes is not None
    assert (changes.rules, changes.removed) == ((), ())
    store.remove_limits("auth", "ann", NOW)
    assert watch.wait(60)
    assert watching.limits_revision() == 2
    watch.close()
    watching.close()


def test_who_has_read_an_older_one_is_told(store: Store) -> None:
    first = put(store)
    second = put(store, text="domain: auth")
    with pytest.raises(DocumentChanged, match="they are at revision 2, not at 1") as caught:
        put(store, expected=first.revision)
    assert caught.value.revision == 2
    with pytest.raises(DocumentChanged):
        store.remove_limits("auth", "ann", NOW, first.revision)
    with pytest.raises(DocumentChanged, match="they are not there"):
        put(store, "other", expected=1)
    assert store.limits() == (2, [second])
    store.remove_limits("auth", "ann", NOW, second.revision)
    assert store.limits() == (3, [])
    with pytest.raises(NoDocument, match="'auth' has no limits"):
        store.remove_limits("auth", "ann", NOW)


def test_the_audit_tells_the_new_text_and_the_digest_of_the_former(store: Store) -> None:
    """The former is the new one of an earlier line."""
    long = TEXT + "#" * 10_000
    put(store)
    put(store, text=long)
    store.remove_limits("auth", "ann", NOW)
    removed, changed, made = store.audit()
    assert (made.action, made.before, made.rule_id) == ("put-limits", None, None)
    assert made.after == {"domain": "auth", "content_type": YAML, "document": TEXT}
    assert changed.before == {
        "domain": "auth",
        "content_type": YAML,
        "letters": len(TEXT),
        "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
    }
    assert removed.action == "remove-limits"
    assert removed.after is None
    assert removed.before == changed.after
    assert changed.after is not None
    assert changed.after["letters"] == len(long)
    assert len(changed.after["sha256"]) == 64


def test_a_line_of_the_audit_is_short_whatever_letters_a_text_has(store: Store) -> None:
    """As JSON, some letters take twelve bytes."""
    for face in "\N{GRINNING FACE}\N{GRINNING FACE WITH SMILING EYES}":
        put(store, text="# " + face * 8000)
    put(store, text="# " + "\N{GRINNING FACE}" * 600)
    with store._database.reading() as connection, homes.by_name(connection):
        row = "SELECT max(length(CAST(before AS TEXT))), max(length(CAST(after AS TEXT))) FROM audit"
        before, after = connection.execute(text(row)).one()
    assert before < 300
    assert 7000 < after < 8400


def test_an_empty_database_takes_them_from_a_backup(store: Store, other: Store, tmp_path: Path) -> None:
    kept = put(store)
    put(store, "gone")
    store.remove_limits("gone", "ann", NOW)
    store.back_up(tmp_path / "backup", NOW)
    other.restore(tmp_path / "backup", "bob", NOW)
    assert other.limits() == (4, [kept])
    assert put(other, "new").revision == 5


def test_those_of_a_backup_come_in_the_place_of_others(store: Store, tmp_path: Path) -> None:
    put(store)
    put(store, "same")
    store.back_up(tmp_path / "backup", NOW)
    put(store, text="domain: auth")
    put(store, "new")
    with pytest.raises(InUse, match=r"limits of 3 domains, .* use --force"):
        store.restore(tmp_path / "backup", "bob", NOW)
    store.restore(tmp_path / "backup", "bob", NOW, force=True)
    revision, documents = store.limits()
    assert revision == 5
    assert [(each.domain, each.document, each.revision) for each in documents] == [
        ("auth", TEXT, 5),
        ("same", TEXT, 2),
    ]
    lines = [(line.action, (line.after or line.before or {})["domain"]) for line in store.audit()[1:3]]
    assert lines == [("remove-limits", "new"), ("put-limits", "auth")]


def test_what_a_restore_takes_away_is_written_beside_the_backup(store: Store, tmp_path: Path) -> None:
    """However long it is: the audit has digests of long ones, and of each that goes."""
    long = "domain: auth\n" + "# ä\n" * 20_000
    put(store)
    put(store, "same")
    store.back_up(tmp_path / "backup", NOW)
    put(store, text=long)
    put(store, "same", "domain: same")
    put(store, "same")  # at another revision
    store.put_limits("Ärger/..", "{}", "application/json", "ann", LATER)
    former = store.restore(tmp_path / "backup", "bob", NOW, force=True).former
    assert former is not None
    assert former.domains == ("auth", "Ärger/..")
    assert former.folder == tmp_path / f"backup.limits-{NOW:%Y%m%dT%H%M%S}"
    assert former.folder.stat().st_mode & 0o777 == 0o700
    files = {each.name: each.read_bytes().decode() for each in former.folder.iterdir()}
    assert files == {"1-auth.yaml": long, "2-%C3%84rger%2F...json": "{}"}
    assert {each.stat().st_mode & 0o777 for each in former.folder.iterdir()} == {0o600}


def test_a_restore_that_takes_no_document_away_writes_nothing(store: Store, other: Store, tmp_path: Path) -> None:
    put(store)
    store.back_up(tmp_path / "backup", NOW)
    assert store.restore(tmp_path / "backup", "bob", NOW, force=True).former is None
    assert other.restore(tmp_path / "backup", "bob", NOW).former is None
    store.remove_limits("auth", "ann", NOW)
    assert store.restore(tmp_path / "backup", "bob", NOW).former is None
    assert [each.name for each in tmp_path.glob("backup*")] == ["backup"]


def test_a_restore_that_could_not_write_them_takes_nothing_away(store: Store, tmp_path: Path) -> None:
    """Nothing of the rules comes either; somewhere else it does."""
    keep(store)
    put(store)
    store.back_up(tmp_path / "backup", NOW)
    revision = store.revision()
    new = put(store, text="domain: auth")
    put(store, "web")
    (tmp_path / f"backup.limits-{NOW:%Y%m%dT%H%M%S}").symlink_to(tmp_path)
    with pytest.raises(StoreError, match=r"limits of 'auth' and 1 more, .*: File exists\. Copy the backup"):
        store.restore(tmp_path / "backup", "bob", NOW, force=True)
    assert store.revision() == revision
    assert store.find_limits("auth") == new
    assert not list(tmp_path.glob("*.yaml"))
    restored = store.restore((tmp_path / "backup").rename(tmp_path / "moved"), "bob", NOW, force=True)
    assert restored.former is not None
    assert len(list(restored.former.folder.iterdir())) == 2


def test_a_folder_of_former_documents_is_whole_or_not_there(store: Store, tmp_path: Path) -> None:
    """As on a full disk."""
    store.back_up(tmp_path / "backup", NOW)
    put(store, "a", "domain: a")
    put(store, "b", "domain: b\n" + "#" * 100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder = tmp_path / f"backup.limits-{NOW:%Y%m%dT%H%M%S}"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(StoreError):
            keep_former(tmp_path / "backup", store.limits()[1], NOW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not folder.exists()
