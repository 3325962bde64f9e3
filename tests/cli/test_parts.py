"""The program itself, its settings, and the parts that `serve` runs, each alone."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from api.bootstrap import token_path
from netlimit.cli.daemons import listen
from netlimit.cli.database import find_token_file
from netlimit.cli.parts import open_store
from netlimit.rules import parse_rule
from netlimit.settings import Listen, Settings
from netlimit.store import Store
from tests.cli.running import PROGRAM, Netlimit, settings_in, until

EVERYBODY = ("--user", "nobody") if os.geteuid() == 0 else ()


def test_version(netlimit: Netlimit) -> None:
    assert netlimit.do("--version").startswith("netlimit")


def test_help_names_every_command(netlimit: Netlimit) -> None:
    said = netlimit.do("--help")
    commands = "serve controller api rule plan apply teardown status counters top explain db"
    assert [command for command in commands.split() if f"\n  {command} " not in said] == []


@pytest.mark.parametrize("group", [(), ("rule",), ("token",), ("db",), ("gateway",)])
def test_what_a_command_does_is_told_in_one_line(netlimit: Netlimit, group: tuple[str, ...]) -> None:
    commands = netlimit.do(*group, "--help").partition("\nCommands:\n")[2].splitlines()
    assert commands
    assert [line for line in commands if not line.endswith(".") or line.endswith("...")] == []


def test_an_answer_does_not_wait_for_the_other_end() -> None:
    with listen(Listen("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_settings_from_a_file(netlimit: Netlimit, directory: Path) -> None:
    config = directory / "netlimit.toml"
    config.write_text('backend = "fake"\nhost = "gw7"\n')
    netlimit.do("db", "upgrade")
    assert netlimit.do("--config", str(config), "plan") == "Nothing to do.\n"
    config.write_text('backend = "magic"\n')
    said = netlimit.refuse("--config", str(config), "plan", NETLIMIT_BACKEND="")
    assert "'magic' is no backend" in said
    assert "There is no settings file" in netlimit.refuse("--config", "/nosuch", "plan")


def test_a_copy_that_cannot_be_opened_is_a_fault_at_boot(netlimit: Netlimit, directory: Path) -> None:
    (directory / "file").touch()
    said = netlimit.refuse("apply", "--last", NETLIMIT_STATE_DIRECTORY=str(directory / "file" / "copy"))
    assert "The copy of the applied rules cannot be kept in" in said


@pytest.mark.parametrize("url", ["sqlite:////tmp/a/b.db", "sqlite:///b.db?x=y", "postgresql+psycopg://u@h/netlimit"])
def test_the_token_is_looked_for_where_the_api_writes_it(url: str) -> None:
    assert find_token_file(url) == token_path(url)


@pytest.mark.parametrize("command", ["api", "plan", "apply"])
def test_a_database_that_is_missing_is_a_sentence(netlimit: Netlimit, command: str) -> None:
    done = netlimit.run(command)
    assert done.returncode == 1
    assert "`netlimit db upgrade` makes one" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_controller_waits_for_a_database_that_is_missing(netlimit: Netlimit) -> None:
    controller = netlimit.start("controller")
    until(lambda: controller.ended or "`netlimit db upgrade` makes one" in controller.said(), controller.said)
    assert controller.end() == 0
    assert "Traceback" not in controller.said()


def test_upgrade_may_be_repeated(netlimit: Netlimit) -> None:
    assert netlimit.do("db", "upgrade") == netlimit.do("db", "upgrade")
    assert netlimit.ask("db", "upgrade") == {"revision": 0}


def test_controller_and_api_run_apart(netlimit: Netlimit) -> None:
    netlimit.do("db", "upgrade")
    if EVERYBODY:
        database = Path(netlimit.environment["NETLIMIT_DATABASE_URL"].partition("///")[2])
        for path, mode in ((database.parent, 0o777), *((found, 0o666) for found in database.parent.iterdir())):
            path.chmod(mode)
    api, controller = netlimit.start("api", *EVERYBODY), netlimit.start("controller")
    until(lambda: api.ended or not netlimit.run("status").returncode, api.said)
    rule = netlimit.ask("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--wait", "60")
    assert rule["status"]["state"] == "applied"
    assert (controller.end(), api.end(signal.SIGINT)) == (0, 0)
    assert "Traceback" not in api.said()


@pytest.mark.parametrize("command", ["serve", "controller", "plan", "apply", "teardown"])
def test_without_the_rights_it_says_so(root: None, netlimit: Netlimit, command: str) -> None:
    bound = Netlimit(netlimit.environment, before=("setpriv", "--bounding-set", "-net_admin"))
    said = bound.refuse(command, NETLIMIT_BACKEND="iptables")
    assert "run this as root" in said
    assert "NETLIMIT_BACKEND=fake" in said


def test_a_kernel_that_is_left_alone_takes_no_rights(root: None, directory: Path) -> None:
    settings = settings_in(directory, NETLIMIT_BACKEND="l7")
    nobody = Netlimit(settings, before=("setpriv", "--clear-groups", "--bounding-set=-all"))
    nobody.do("db", "upgrade")
    controller = nobody.start("controller")
    until(lambda: controller.ended or "Keeping the rules" in controller.said(), controller.said)
    rule = {"target": "10.0.0.1", "rate": "5 packets/s"}
    with closing(Store(settings["NETLIMIT_DATABASE_URL"])) as store:
        (kept,) = store.add([parse_rule(rule, datetime.now(UTC))], "test", datetime.now(UTC))
        until(lambda: kept.id in store.marked("gw1"), controller.said)
        said = store.marked("gw1")[kept.id].message
    assert "NETLIMIT_BACKEND is l7" in said
    assert "`netlimit limiter`" in said
    assert "capabilities" in nobody.run("doctor", "--json").stdout
    assert nobody.ask("plan")["steps"] == []
    assert controller.end() == 0


def test_output_that_nobody_reads_is_no_traceback(netlimit: Netlimit) -> None:
    shell = Netlimit(netlimit.environment, before=("sh", "-c", f"{' '.join(PROGRAM)} --help | true", "--"))
    assert "Traceback" not in shell.run().stderr


def test_the_settings_of_the_api_say_how_much_is_kept_and_those_of_others_do_not(directory: Path) -> None:
    """A shell that lacks the API's environment, another gateway: what they forget, the API's is gone for good."""
    url, now = f"sqlite:///{directory}/n.db", datetime.now(UTC)
    few = Settings(database_url=url, revisions=2, audit_length=3)
    with open_store(few) as store:
        store.upgrade()
        for n in range(9):
            store.add([parse_rule({"target": f"10.0.0.{n}", "action": "block"}, now)], "test", now)
        assert (len(store.revisions()), len(store.audit())) == (9, 9)
    with open_store(few, is_api=True) as store:
        store.note("look", "test", now)
        assert (len(store.revisions()), len(store.audit())) == (2, 3)


def test_where_no_api_runs_what_is_kept_has_a_bound(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, now = f"sqlite:///{directory}/n.db", datetime.now(UTC)
    monkeypatch.setattr("netlimit.cli.parts.MOST_REVISIONS", 4)
    monkeypatch.setattr("netlimit.cli.parts.MOST_AUDITED", 5)
    for revisions, kept in ((2, 4), (6, 6)):
        with open_store(Settings(database_url=url, revisions=revisions, audit_length=revisions)) as store:
            store.upgrade()
            for n in range(9):
                target = f"10.0.{revisions}.{n}"
                store.add([parse_rule({"target": target, "action": "block"}, now)], "test", now)
            assert len(store.revisions()) == kept
