"""`netlimit limits …`."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.store import Store
from tests.cli.running import Netlimit

TEXT = """\
# Who logs in
domain: auth
descriptors:
- key: auth_type
  Value: login
  rate_limit: {unit: minute, requests_per_unit: 5}
"""
WARNING = "line 5, descriptors[0].Value: `Value` is taken for `value`; write that, others are strict."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "limits"
    folder.mkdir()
    (folder / "auth.yaml").write_text(TEXT)
    return folder


@pytest.fixture
def limited(served: Netlimit) -> Netlimit:
    """A place where `netlimit serve` runs, without limits."""
    for each in served.ask("limits", "list")["items"]:
        served.do("limits", "remove", each["domain"])
    return served


def test_documents_are_checked_without_an_api(netlimit: Netlimit, folder: Path) -> None:
    file = folder / "auth.yaml"
    wanted = f"{file}: The domain auth has 1 rule.\n  {WARNING}\n"
    assert netlimit.do("limits", "check", str(file)) == wanted
    assert netlimit.do("limits", "check", str(folder)) == wanted
    (found,) = netlimit.ask("limits", "check", str(folder))["files"]
    assert (found["file"], found["domain"], found["rules"]) == (str(file), "auth", ["auth_type=login"])


def test_every_wrong_place_is_printed(netlimit: Netlimit, folder: Path) -> None:
    (folder / "b.yaml").write_text("domain: b\ndesciptors:\n- {key: k, rate_limit: {unit: minutes}}\n")
    (folder / "c.json").write_text('{"domain": "auth"}')
    said = netlimit.refuse("limits", "check", str(folder))
    assert said.splitlines() == [
        f"netlimit: {folder}/b.yaml: line 2, desciptors: `desciptors` is not known in a document; did you mean "
        "`descriptors`?",
        f"{folder}/b.yaml: line 3, descriptors[0].rate_limit.unit: minutes is none of second, minute, hour, day, week, "
        "month, year; did you mean `minute`?",
        f"{folder}/b.yaml: line 3, descriptors[0].rate_limit.requests_per_unit: It is missing; write for example "
        "`requests_per_unit: 5`.",
        f"{folder}/c.json: The domain 'auth' is in {folder}/auth.yaml already; put its limits into one file.",
    ]
    empty = folder / "empty"
    empty.mkdir()
    assert "holds no files of limits" in netlimit.refuse("limits", "check", str(empty))
    assert "No such file" in netlimit.refuse("limits", "check", str(folder / "gone"))


def test_limits_go_to_the_api_and_come_back(limited: Netlimit, folder: Path) -> None:
    file = str(folder / "auth.yaml")
    tried = limited.do("limits", "put", file, "--dry-run")
    assert tried == f"The document is good, and not kept. The domain auth has 1 rule.\n  {WARNING}\n"
    assert limited.ask("limits", "list")["items"] == []
    said = limited.do("limits", "put", file)
    assert said.startswith("The document is kept at revision ")
    assert said.endswith(f". The domain auth has 1 rule.\n  {WARNING}\n")
    assert limited.do("limits", "show", "auth") == TEXT
    fields = limited.ask("limits", "show", "auth")
    assert fields["descriptors"][0]["value"] == "login"
    head, line = limited.do("limits", "list").splitlines()[::2]
    assert head.split() == ["DOMAIN", "REVISION", "GIVEN", "BY", "AT", "AS"]
    assert line.split()[0] == "auth"
    assert line.split()[-1] == "application/yaml"
    kept = limited.ask("limits", "put", "-", given=json.dumps(fields))
    assert (kept["content_type"], kept["warnings"]) == ("application/json", [])
    assert limited.do("limits", "remove", "auth") == "Removed the limits of the domain auth.\n"
    assert "has no limits in the database" in limited.refuse("limits", "show", "auth")
    assert "has no limits in the database" in limited.refuse("limits", "remove", "auth")


def test_changes_of_limits_tell_of_a_window_that_does_not_undo_them(limited: Netlimit, folder: Path) -> None:
    with closing(Store(limited.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.open_window(3600, "test", store.now())
        told = "opened by test: it undoes changes of rules alone, and these limits stay as they are now.\n"
        assert limited.do("limits", "put", str(folder / "auth.yaml")).endswith(told)
        assert limited.do("limits", "remove", "auth").endswith(told)
        store.confirm("test", store.now())


def test_a_restore_says_where_the_limits_are_that_it_takes_away(limited: Netlimit, folder: Path) -> None:
    backup = folder / "backup"
    limited.do("backup", str(backup))
    long = TEXT + "# ä\n" * 20_000
    (folder / "auth.yaml").write_text(long)
    limited.do("limits", "put", str(folder / "auth.yaml"))
    limited.do("limits", "put", "-", given='{"domain": "web", "descriptors": []}')
    assert "limits of 2 domains, which those of the backup" in limited.refuse("restore", str(backup))
    said = limited.do("restore", str(backup), "--force")
    (kept,) = folder.glob("backup.limits-*")
    assert said.splitlines()[1] == (
        f"The limits of 'auth', 'web' were others. What is no more is in {kept}: `netlimit limits put` brings one of "
        "its files back."
    )
    assert limited.ask("limits", "list")["items"] == []
    for file in sorted(kept.iterdir()):
        limited.do("limits", "put", str(file))
    assert limited.do("limits", "show", "auth") == long
    types = [(each["domain"], each["content_type"]) for each in limited.ask("limits", "list")["items"]]
    assert types == [("auth", "application/yaml"), ("web", "application/json")]
    shutil.rmtree(kept)
    told = limited.ask("restore", str(backup), "--force")["former_limits"]
    assert told["domains"] == ["auth", "web"]
    assert Path(told["folder"]).is_dir()
    assert limited.ask("restore", str(backup), "--force")["former_limits"] is None


def test_what_is_wrong_never_reaches_the_api(netlimit: Netlimit, folder: Path) -> None:
    """Nothing runs there."""
    said = netlimit.refuse("limits", "put", "-", given="domain: a\ndescriptors:\n- {}\n- {key: k, vlaue: v}\n")
    assert said.splitlines() == [
        "netlimit: line 3, descriptors[0].key: It is missing: what is told of a request, such as "
        "`key: remote_address`.",
        "line 4, descriptors[1].vlaue: `vlaue` is not known in a descriptor; did you mean `value`?",
    ]


def test_a_descriptor_is_followed_to_its_rule(limited: Netlimit, folder: Path) -> None:
    file = str(folder / "auth.yaml")
    limited.do("limits", "put", file)
    for source in (file, "auth"):
        assert limited.do("limits", "explain", source, "auth_type=login").splitlines() == [
            "auth_type=login: there is this very value.",
            "The rule is auth_type=login: 5/minute by fixed_window (hard; on the limit: reject; without counters: "
            "open).",
            "Its counter is one for all.",
        ]
    none = limited.ask("limits", "explain", "auth", "auth_type=token")
    assert (none["rule"], none["counter"]) == (None, None)
    assert none["steps"] == ["auth_type=token: nothing here fits. There is auth_type=login."]
    assert "is no descriptor" in limited.refuse("limits", "explain", file, "=x")
    (folder / "binary.yaml").write_bytes(b"domain: \xff")
    assert "Byte 8 is not UTF-8" in limited.refuse("limits", "explain", str(folder / "binary.yaml"), "a=b")
