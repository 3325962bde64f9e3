"""`netlimit serve`: three processes that live and die together, and share a database."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.cli.database import share
from netlimit.rules import parse_rule
from netlimit.store import Store
from tests.cli.running import Netlimit, Server, alive, settings_in, until
from tests.cli.strangers import stranger
from tests.warm import ROOT


def test_a_rule_is_applied_when_the_command_returns(netlimit: Netlimit) -> None:
    server = netlimit.serve()
    rule = netlimit.ask("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--wait", "60")
    assert rule["status"]["state"] == "applied"
    server.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_of_it(netlimit: Netlimit, number: signal.Signals) -> None:
    server = netlimit.serve()
    children = list(server.children)
    assert len(children) == 3
    assert server.end(number) == 0
    assert not any(map(alive, children))
    assert "Traceback" not in server.said()


def test_killing_it_leaves_nothing_behind(netlimit: Netlimit) -> None:
    server = netlimit.serve()
    children = list(server.children)
    server.end(signal.SIGKILL)
    until(lambda: not any(map(alive, children)))


@pytest.mark.parametrize("harm", ["gone", "empty"])
def test_a_database_that_is_lost_takes_no_limits_out_of_force(root: None, gateway: Netlimit, harm: str) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.3", "--action", "block", "--wait", "60")
    server.end()
    backup = _database(gateway).parent / "rules.backup"
    gateway.do("backup", str(backup))
    database = _database(gateway) / "netlimit.db"
    for ending in ("-wal", "-shm"):
        database.with_name(database.name + ending).unlink(missing_ok=True)
    if harm == "gone":
        database.unlink()
    else:
        os.truncate(database, 0)
    said = gateway.refuse("serve", "--api-user", "nobody")
    what = f"There is no database at {database}" if harm == "gone" else f"The database {database} is empty (0 bytes)"
    assert f"{what}, but this gateway holds 1 rule of revision 1, as its copy tells in " in said
    assert database.exists() == (harm == "empty")
    assert _is_blocked(gateway)
    gateway.do("restore", str(backup))
    server = gateway.serve()
    assert [each["target"] for each in gateway.ask("rule", "list")["items"]] == ["10.1.2.3"]
    assert _is_blocked(gateway)
    server.end()


@pytest.fixture
def replaced(root: None, gateway: Netlimit) -> Iterator[Netlimit]:
    """A gateway that holds a block of 10.1.2.3, whose database somebody has taken away and put a new one in its place;
    serving."""
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.3", "--action", "block", "--wait", "60")
    server.end()
    gateway.do("backup", str(_find_backup(gateway)))
    for file in _database(gateway).glob("netlimit.db*"):
        file.unlink()
    gateway.do("db", "upgrade")
    server = gateway.serve()
    until(lambda: "Nothing was ever changed in this database" in str(_find_error(gateway)), server.said)
    yield gateway
    assert "Traceback" not in server.said()
    server.end()


def _find_backup(gateway: Netlimit) -> Path:
    return _database(gateway).parent / "rules.backup"


def _make_rule(gateway: Netlimit) -> None:
    """In the database, as a program does that adds rules all day."""
    now = datetime.now(UTC)
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.add([parse_rule({"target": "10.1.2.4", "action": "block"}, now)], "test", now)


def test_an_empty_database_that_somebody_has_made_takes_no_limits_out_of_force(replaced: Netlimit) -> None:
    assert _is_blocked(replaced)
    doctor = replaced.run("doctor")
    assert doctor.returncode == 1
    assert "Nothing was ever changed in this database" in " ".join(doctor.stdout.split())
    for command in ("apply", "plan", "rollback"):
        assert "Nothing was ever changed in this database" in replaced.refuse(command), command
    assert "make its rules first" in replaced.refuse("apply")
    assert "to take it would take every limit out of force" in replaced.refuse("apply", "--take-database").lower()
    assert _is_blocked(replaced)
    replaced.do("teardown")
    replaced.do("apply")
    until(lambda: _find_error(replaced) is None)
    assert not _is_blocked(replaced)
    replaced.do("rule", "add", "10.1.2.4", "--action", "block", "--wait", "60")


def test_the_first_rule_of_a_new_database_takes_no_limits_out_of_force(replaced: Netlimit) -> None:
    _make_rule(replaced)
    until(lambda: "This is another database" in str(_find_error(replaced)))
    for command in (["apply"], ["plan"], ["rollback", "0"], ["apply", "--confirm", "60s"]):
        assert "This is another database" in replaced.refuse(*command), command
    assert _is_blocked(replaced)
    assert not _is_blocked(replaced, "10.1.2.4")
    replaced.do("apply", "--take-database")
    assert not _is_blocked(replaced)
    assert _is_blocked(replaced, "10.1.2.4")
    until(lambda: _find_error(replaced) is None)
    replaced.do("apply", "--take-database")


def test_a_backup_that_is_restored_over_it_is_gone_by(replaced: Netlimit) -> None:
    _make_rule(replaced)
    until(lambda: "This is another database" in str(_find_error(replaced)))
    replaced.do("restore", "--force", str(_find_backup(replaced)))
    until(lambda: _find_error(replaced) is None)
    assert _is_blocked(replaced)
    assert "1 rule in force" in replaced.do("apply")


@pytest.fixture
def set_back(root: None, gateway: Netlimit) -> Iterator[Netlimit]:
    """A gateway that holds blocks of 10.1.2.3 and 10.1.2.4, and in whose database there is only the first: an older
    file is in the place of the newer, as below a mount that is missing; serving. The newer is beside it."""
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.3", "--action", "block", "--wait", "60")
    server.end()
    file = _database(gateway) / "netlimit.db"
    shutil.copy(file, file.with_name("older.db"))
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.4", "--action", "block", "--wait", "60")
    server.end()
    gateway.do("backup", str(_find_backup(gateway)))
    _exchange(gateway, "newer.db", "older.db")
    server = gateway.serve()
    until(lambda: "This database is in an older state" in str(_find_error(gateway)), server.said)
    yield gateway
    assert "Traceback" not in server.said()
    if not server.ended:
        server.end()


def _exchange(gateway: Netlimit, aside: str, other: str) -> None:
    """Put the database aside, and another file in its place."""
    directory = _database(gateway)
    for ending in ("-wal", "-shm"):
        (directory / f"netlimit.db{ending}").unlink(missing_ok=True)
    (directory / "netlimit.db").rename(directory / aside)
    shutil.copy(directory / other, directory / "netlimit.db")
    share(directory / "netlimit.db", pwd.getpwnam("nobody"))


def _list_blocked(gateway: Netlimit) -> list[bool]:
    return [_is_blocked(gateway, f"10.1.2.{host}") for host in (3, 4, 5)]


def test_an_older_file_takes_no_limits_out_of_force_until_it_is_taken(set_back: Netlimit) -> None:
    """Nor does what is changed in it."""
    doctor = set_back.run("doctor")
    assert doctor.returncode == 1
    assert "SERIOUS: last error. This database is in an older state" in " ".join(doctor.stdout.split())
    for number in (3, 4):
        for command in (["apply"], ["plan"], ["rollback", "0"], ["apply", "--confirm", "60s"]):
            assert "an older state than the one of which this gateway holds 2 rules" in set_back.refuse(*command)
        assert _list_blocked(set_back) == [True, True, False]
        rule = set_back.ask("rule", "add", f"10.1.2.{2 + number}", "--action", "block")
        assert rule["status"]["state"] == "pending"
        assert "The gateway does not go by this database" in rule["status"]["message"]
    assert set_back.ask("rule", "show", "1")["status"]["state"] == "pending"
    set_back.do("apply", "--take-database")
    assert _list_blocked(set_back) == [True, False, True]
    until(lambda: _find_error(set_back) is None)
    set_back.do("rule", "add", "10.1.2.9", "--action", "block", "--wait", "60")


def test_a_boot_on_an_older_file_brings_back_what_was_applied_last(set_back: Netlimit) -> None:
    set_back.started[-1].end()
    name = set_back.namespace
    for change in (("netns", "del", name), ("netns", "add", name), ("-n", name, "link", "set", "lo", "up")):
        subprocess.run(["ip", *change], check=True)
    assert _list_blocked(set_back) == [False, False, False]
    assert "Revision 2 is back: 2 rules in force here." in set_back.run("apply", "--last").stdout
    assert _list_blocked(set_back) == [True, True, False]
    server = set_back.serve()
    until(lambda: _find_error(set_back) is not None, server.said)
    assert _list_blocked(set_back) == [True, True, False]
    server.end()


def test_a_newer_file_that_is_back_is_gone_by(set_back: Netlimit) -> None:
    set_back.started[-1].end()
    _exchange(set_back, "older-again.db", "newer.db")
    server = set_back.serve()
    set_back.do("rule", "add", "10.1.2.5", "--action", "block", "--wait", "60")
    assert _list_blocked(set_back) == [True, True, True]
    assert _find_error(set_back) is None
    server.end()


def test_a_newer_file_is_gone_by_once_its_disk_is_mounted_with_the_log_of_a_crash(
    root: None, gateway: Netlimit, directory: Path
) -> None:
    """By API, controller and guard, which have run on the older one below."""
    state = {"NETLIMIT_STATE_DIRECTORY": str(directory / "controller")}
    gateway = replace(gateway, environment={**gateway.environment, **state})
    below, disk, older = _database(gateway), directory / "disk", directory / "older"
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.3", "--action", "block", "--wait", "60")
    server.end()
    shutil.copytree(below, older)
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.4", "--action", "block", "--wait", "60")
    _crash(server)
    below.rename(disk)
    older.rename(below)
    share(below / "netlimit.db", pwd.getpwnam("nobody"))
    server = gateway.serve()
    until(lambda: "This database is in an older state" in str(_find_error(gateway)), server.said)
    assert (disk / "netlimit.db-wal").stat().st_size
    place = ("nsenter", f"--target={server.process.pid}", "--mount", f"--wd={ROOT}")
    subprocess.run([*place, "mount", "--bind", disk, below], check=True)
    until(lambda: "10.1.2.4" in gateway.run("rule", "list").stdout and _find_error(gateway) is None, server.said)
    gateway.do("rule", "add", "10.1.2.5", "--action", "block", "--wait", "60")
    there = replace(gateway, before=place)
    there.do("apply", "--confirm", "5m")
    there.do("confirm")
    assert _list_blocked(gateway) == [True, True, True]
    assert "beside the log of the former" not in server.said()
    assert "Traceback" not in server.said()
    server.end()


def test_a_backup_that_is_restored_over_an_older_file_is_gone_by(set_back: Netlimit) -> None:
    set_back.do("restore", "--force", str(_find_backup(set_back)))
    until(lambda: _find_error(set_back) is None)
    assert _list_blocked(set_back) == [True, True, False]
    assert "2 rules in force" in set_back.do("apply")


def test_a_gateway_that_is_renamed_holds_its_limits_when_its_database_is_gone(root: None, gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.3", "--action", "block", "--wait", "60")
    server.end()
    (_database(gateway) / "netlimit.db").rename(_database(gateway) / "hidden.db")
    renamed = replace(gateway, environment={**gateway.environment, "NETLIMIT_HOST": "renamed"})
    assert "this gateway holds 1 rule of revision 1" in renamed.refuse("serve", "--api-user", "nobody")
    (_database(gateway) / "hidden.db").rename(_database(gateway) / "netlimit.db")
    server = renamed.serve()
    assert _is_blocked(gateway)
    server.end()


def test_who_has_torn_down_may_begin_anew(root: None, gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.3", "--action", "block", "--wait", "60")
    server.end()
    gateway.do("teardown")
    for file in _database(gateway).glob("netlimit.db*"):
        file.unlink()
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.4", "--action", "block", "--wait", "60")
    server.end()


def test_who_tears_down_without_a_controller_beside_another_database_may_begin_anew(
    root: None, gateway: Netlimit
) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.2.3", "--action", "block", "--wait", "60")
    server.end()
    for file in _database(gateway).glob("netlimit.db*"):
        file.unlink()
    gateway.do("db", "upgrade")
    _make_rule(gateway)
    gateway.do("teardown")
    assert not _is_blocked(gateway)
    gateway.do("apply")
    assert _is_blocked(gateway, "10.1.2.4")


def _is_blocked(gateway: Netlimit, address: str = "10.1.2.3") -> bool:
    held = subprocess.run(gateway.within("ipset", "save"), capture_output=True, text=True, check=True).stdout
    return address in held


def _crash(server: Server) -> None:
    """End all of it at once, as when the power fails: the log stays beside the database."""
    children = list(server.children)
    server.process.send_signal(signal.SIGSTOP)  # it would end the rest in peace
    for each in children:
        os.kill(each, signal.SIGKILL)
    until(lambda: not any(map(alive, children)))
    server.end(signal.SIGKILL)


def _find_error(gateway: Netlimit) -> str | None:
    (host,) = gateway.ask("status")["hosts"] or [{"last_error": None}]
    error: str | None = host["last_error"]
    return error


@pytest.mark.parametrize("which", [0, 1, 2])
def test_when_one_part_dies_the_other_is_ended(netlimit: Netlimit, which: int) -> None:
    server = netlimit.serve()
    children = list(server.children)
    os.kill(children[which], signal.SIGKILL)
    until(lambda: server.ended)
    assert server.process.returncode == 1
    assert not any(map(alive, children))


def test_a_part_that_hangs_is_killed(netlimit: Netlimit) -> None:
    server = netlimit.serve()
    children = list(server.children)
    os.kill(children[0], signal.SIGSTOP)
    assert server.end() == 0
    assert not any(map(alive, children))


def test_root_keeps_the_api_out_of_its_rights(root: None, netlimit: Netlimit) -> None:
    server = netlimit.serve()
    assert sorted(server.children.values()) == [0, 0, pwd.getpwnam("nobody").pw_uid]
    netlimit.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--wait", "60")
    database = _database(netlimit)
    group = pwd.getpwnam("nobody").pw_gid
    for name, mode in (("", 0o2770), ("netlimit.db", 0o660), ("netlimit.db-wal", 0o660), ("netlimit.db-shm", 0o660)):
        found = (database / name).stat()
        assert (name, found.st_gid, stat.S_IMODE(found.st_mode)) == (name, group, mode)
    token = (database / "admin.token").stat()
    assert (token.st_uid, stat.S_IMODE(token.st_mode)) == (0, 0o600)
    server.end()


def test_it_goes_on_where_it_ended(netlimit: Netlimit) -> None:
    server = netlimit.serve()
    netlimit.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--name", "one")
    server.end()
    server = netlimit.serve()
    until(lambda: netlimit.ask("rule", "show", "one")["status"]["state"] == "applied")
    server.end()


def test_logs_are_json_that_tells_no_secret(directory: Path) -> None:
    netlimit = Netlimit(settings_in(directory, NETLIMIT_LOG_FORMAT="json", NETLIMIT_LOG_LEVEL="debug"))
    server = netlimit.serve()
    added = netlimit.ask("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--wait", "60")
    server.end()
    lines = [json.loads(line) for line in server.said().splitlines()]
    assert {line["part"] for line in lines} >= {"api", "controller"}
    assert all({"time", "level", "host", "event"} <= line.keys() for line in lines)
    (applied,) = [line for line in lines if line.get("rules") == [added["id"]]]
    assert (applied["part"], applied["revision"], applied["seconds"] > 0) == ("controller", added["revision"], True)
    (asked,) = [line for line in lines if (line.get("method"), line.get("status")) == ("POST", 201)]
    assert (asked["route"], asked["actor"], len(asked["request"])) == ("/api/v1/rules", "bootstrap", 32)
    assert (_database(netlimit) / "admin.token").read_text().strip() not in server.said()


def test_a_place_that_is_taken_keeps_nobody_but_the_api_from_running(root: None, netlimit: Netlimit) -> None:
    """Rules are kept meanwhile; and once the place is free, the API takes it."""
    netlimit.do("db", "upgrade")
    _add_rule(netlimit)
    with stranger(netlimit, "127.0.0.1"):
        server = netlimit.start("serve", "--api-user", "nobody")
        until(lambda: server.ended or _is_applied(netlimit), server.said)
        until(lambda: server.ended or "cannot listen" in server.said(), server.said)
        assert not server.ended, server.said()
        assert f"cannot listen at {netlimit.environment['NETLIMIT_LISTEN']}: Address already in use" in server.said()
        assert list(server.children.values()) == [0, 0]
        assert "Answering at" not in server.said()
    until(lambda: server.ended or not netlimit.run("status").returncode, server.said)
    assert f"Answering at {netlimit.environment['NETLIMIT_LISTEN']}." in server.said()
    assert sorted(server.children.values()) == [0, 0, pwd.getpwnam("nobody").pw_uid]
    assert server.end() == 0
    assert "Traceback" not in server.said()
    assert server.said().count("cannot listen") == 1


def test_an_address_that_comes_late_is_taken_when_it_comes(root: None, gateway: Netlimit) -> None:
    port = gateway.environment["NETLIMIT_LISTEN"].rpartition(":")[2]
    place = f"192.0.2.1:{port}"
    late = replace(
        gateway, environment={**gateway.environment, "NETLIMIT_LISTEN": place, "NETLIMIT_URL": f"http://{place}"}
    )
    server = late.start("serve", "--api-user", "nobody")
    until(lambda: server.ended or "cannot listen" in server.said(), server.said)
    assert not server.ended, server.said()
    subprocess.run(["ip", "-n", gateway.namespace, "address", "add", "192.0.2.1/24", "dev", "lo"], check=True)
    until(lambda: server.ended or not late.run("status").returncode, server.said)
    assert server.end() == 0


def test_a_signal_ends_it_while_the_api_waits_for_its_place(root: None, netlimit: Netlimit) -> None:
    with stranger(netlimit, "127.0.0.1"):
        server = netlimit.start("serve", "--api-user", "nobody")
        until(lambda: server.ended or "cannot listen" in server.said(), server.said)
        assert server.end() == 0


def test_a_place_that_nobody_can_ever_take_ends_it(root: None, gateway: Netlimit) -> None:
    """Without root's rights, a port below 1024."""
    plain = replace(gateway, before=("setpriv", "--bounding-set=-net_bind_service"))
    environment = {**gateway.environment, "NETLIMIT_LISTEN": "127.0.0.1:80"}
    said = replace(plain, environment=environment).start("serve", "--api-user", "nobody")
    until(lambda: said.ended)
    assert said.process.returncode == 1
    assert "cannot listen at 127.0.0.1:80: Permission denied. Set NETLIMIT_LISTEN to another place." in said.said()


def test_the_place_is_held_by_who_goes_on_while_the_api_is_there(root: None, netlimit: Netlimit) -> None:
    """And not by the others, who may outlive all: nobody would answer there."""
    server = netlimit.serve()
    port = netlimit.environment["NETLIMIT_LISTEN"].rpartition(":")[2]
    listed = subprocess.run(["ss", "-Hltnp", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    holders = {int(number) for number in re.findall(r"pid=(\d+)", listed)}
    (api,) = [child for child, user in server.children.items() if user]
    assert holders == {server.process.pid, api}
    server.end()


def test_a_user_that_is_missing_is_named(root: None, netlimit: Netlimit) -> None:
    said = netlimit.refuse("serve", "--api-user", "nosuchuser")
    assert "adduser --system --group nosuchuser" in said
    assert not _database(netlimit).exists()


def test_a_directory_of_others_is_left_alone(root: None, netlimit: Netlimit) -> None:
    database = _database(netlimit)
    database.mkdir(mode=0o755)
    (database / "other").touch()
    said = netlimit.refuse("serve", "--api-user", "nobody")
    assert f"chgrp nogroup {database}" in said
    assert stat.S_IMODE(database.stat().st_mode) == 0o755


def test_a_directory_that_the_user_cannot_reach_is_named(root: None, netlimit: Netlimit, directory: Path) -> None:
    directory.chmod(0o700)
    assert f"may not pass {directory}" in netlimit.refuse("serve", "--api-user", "nobody")


def test_a_link_in_the_place_of_the_log_is_not_followed(root: None, netlimit: Netlimit, directory: Path) -> None:
    secret = directory / "secret"
    secret.write_text("")
    secret.chmod(0o600)
    netlimit.do("db", "upgrade")
    (_database(netlimit) / "netlimit.db-journal").symlink_to(secret)
    netlimit.refuse("serve", "--api-user", "nobody")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.parametrize("command", [("serve",), ("api",), ("db", "upgrade")])
def test_every_command_refuses_a_link_in_the_place_of_the_database(
    root: None, netlimit: Netlimit, directory: Path, command: tuple[str, ...]
) -> None:
    netlimit.do("db", "upgrade")
    database = _database(netlimit) / "netlimit.db"
    database.rename(directory / "elsewhere.db").chmod(0o640)
    database.symlink_to(directory / "elsewhere.db")
    said = netlimit.refuse(*command)
    assert f"The database {database} is a symbolic link" in said
    assert stat.S_IMODE((directory / "elsewhere.db").stat().st_mode) == 0o640


def _add_rule(netlimit: Netlimit) -> None:
    """Without an API."""
    store = Store(netlimit.environment["NETLIMIT_DATABASE_URL"])
    now = datetime.now(UTC)
    store.add([parse_rule({"target": "10.1.2.3", "rate": "200 packets/s"}, now)], "test", now)
    store.close()


def _is_applied(netlimit: Netlimit) -> bool:
    store = Store(netlimit.environment["NETLIMIT_DATABASE_URL"])
    try:
        return any(each.applied_revision == store.revision() for each in store.hosts())
    finally:
        store.close()


def _database(netlimit: Netlimit) -> Path:
    return Path(netlimit.environment["NETLIMIT_DATABASE_URL"].partition("///")[2]).parent
