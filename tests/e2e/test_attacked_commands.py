"""Each command that root runs on a gateway, while somebody with the rights of one of our users exchanges every name
that he may: nothing outside of netlimit changes owner, mode or content, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stage import GROUP, LIB, USERS, Stage

ENVIRONMENT = Path(sys.prefix)
COMMANDS = {
    "prepare": ("prepare",),
    "plan": ("plan",),
    "apply": ("apply",),
    "apply --last": ("apply", "--last"),
    "doctor": ("doctor",),
    "backup": ("backup", "{place}/new"),
    "backup beside the database": ("backup", f"{LIB}/netlimit/new"),
    "restore": ("restore", "--force", "{place}/backup"),
    "db upgrade": ("db", "upgrade"),
    "teardown": ("teardown",),
}
SCRIPTS = {
    "install": ("scripts/install", "--no-start", "--venv", ENVIRONMENT, "--prefix", "{prefix}"),
    "uninstall": ("scripts/uninstall", "--purge", "--prefix", "{prefix}"),
}
NOT_HARMLESS = {"doctor"}
"""Ends with 1 where something keeps rules from holding, as no API does here."""


@pytest.fixture(scope="module")
def stage(root: None) -> Iterator[Stage]:
    """One on which netlimit is installed and has applied a rule. Its state is put by."""
    stage = Stage()
    try:
        for words in (
            (*fill(stage, SCRIPTS["install"]),),
            (ENVIRONMENT / "bin/netlimit", "prepare"),
            (ENVIRONMENT / "bin/netlimit", "apply"),
            (ENVIRONMENT / "bin/netlimit", "backup", stage.others.parent / "inside/backup"),
        ):
            done = stage.run(*words)
            assert done.returncode == 0, done.stderr
        place = f"{stage.others.parent}/inside"
        stage.shell(f"cp -a {LIB} {place}/kept && cp -a /etc/passwd /etc/group /etc/shadow /etc/gshadow {place}")
        yield stage
    finally:
        stage.close()


def fill(stage: Stage, words: tuple[str | Path, ...]) -> list[str]:
    names = {"prefix": stage.prefix, "place": stage.others.parent / "inside"}
    return [str(word).format(**names) for word in words]


def put_back(stage: Stage) -> None:
    """Directories and users as they were at first."""
    place = f"{stage.others.parent}/inside"
    stage.shell(f"rm -rf {place}/new {LIB}/* {LIB}/.[!.]* && cp -a {place}/kept/. {LIB}")
    stage.shell(f"cd {place} && cp -a passwd group shadow gshadow /etc")


def make_former(stage: Stage) -> None:
    """Directories as an earlier version had them: the controller's in reach of the API's user, locks in its own."""
    stage.shell(f"""
        rm -rf {LIB}/netlimit/controller
        mv {LIB}/netlimit-controller {LIB}/netlimit/controller
        mkdir -p /run/netlimit
        chown {USERS["netlimit-controller"]}:{GROUP} /run/netlimit {LIB}/netlimit/controller
    """)


def run(stage: Stage, name: str) -> subprocess.CompletedProcess[str]:
    if name in SCRIPTS:
        return stage.run(*fill(stage, SCRIPTS[name]))
    return stage.netlimit(*fill(stage, COMMANDS[name]))


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", [*COMMANDS, "install"])
def test_nothing_outside_changes_and_nothing_hangs(stage: Stage, name: str, user: str) -> None:
    put_back(stage)
    before = stage.describe_outside()
    with stage.attacked(user):
        run(stage, name)
    assert stage.describe_outside() == before


@pytest.mark.parametrize("user", USERS)
def test_nor_when_netlimit_goes(stage: Stage, user: str) -> None:
    put_back(stage)
    run(stage, "install")
    before = stage.describe_others()
    with stage.attacked(user):
        run(stage, "uninstall")
    assert stage.describe_others() == before


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", ["prepare", "install", "apply --last"])
def test_nor_where_an_earlier_version_was(stage: Stage, name: str, user: str) -> None:
    put_back(stage)
    make_former(stage)
    before = stage.describe_outside()
    with stage.attacked(user):
        run(stage, name)
    # What stands in the controller's own directory, its user has put there, and may have left when he was ended.
    after = [line for line in stage.describe_outside() if not str(line).startswith("/run/netlimit/")]
    assert [line for line in after if line not in before] == []


def test_all_of_them_do_their_work_where_nobody_does(stage: Stage) -> None:
    """Else the tests above would try nothing."""
    put_back(stage)
    for name in (*COMMANDS, *SCRIPTS):
        done = run(stage, name)
        assert done.returncode == (1 if name in NOT_HARMLESS else 0), (name, done.stdout, done.stderr)
