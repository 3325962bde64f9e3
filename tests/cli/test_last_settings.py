"""Settings that cannot be used any more: what was applied last comes back at a boot all the same, and it is told."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.cli import readers
from netlimit.cli.last_settings import FILE, keep_settings, load_settings_to_limit, print_settings, recall
from netlimit.cli.readers import find_unread
from netlimit.errors import SettingsError
from netlimit.records import Outcome
from netlimit.rules import parse_rule
from netlimit.settings import Settings, load_settings
from netlimit.store import Store
from tests.cli.running import SECONDS, Netlimit, Server, until
from tests.cli.test_host import forget, look
from tests.warm import ROOT

NOBODY = pwd.getpwnam("nobody")
INSTALLED = """
import importlib, sys
from pathlib import Path
from netlimit import settings
from netlimit.cli.privileges import NETWORK, become, find_user
settings.DEFAULT_FILE = Path(sys.argv.pop(1))
from netlimit.cli.main import app
if sys.argv[1] == "as-unit":
    for each in ("netlimit.controller", "netlimit.store.migrate", "netlimit.l7.redis.hosts", "netlimit.kernel.linux",
                 "alembic.command", "structlog.stdlib", "encodings.idna", "iptc", "netlimit.guard"):
        importlib.import_module(each)  # which nobody may be able to read
    sys.argv.pop(1)
    become(find_user("nobody"), NETWORK)
app()
"""
"""netlimit, with the settings file that nobody names elsewhere, and as the user of a unit."""
LOUD = "THE SETTINGS THAT WERE GOOD LAST ARE TAKEN INSTEAD"
PLACE = "mkdir -p /run/netlimit && mount -t tmpfs none /run/netlimit"
RULE = {"target": "10.9.9.9", "action": "block"}
BROKEN = ("saf = []", 'limiter_memory = "much"', "[")
"""A word that is no setting, a mistake in one of the limiter's, and what is no TOML."""
LOST = {"gone": "is gone", "empty": "states nothing", "dangling": "is a link to what is not there"}
"""How a file may be lost, and how that is told."""


class Installed:
    """An installed gateway: its settings are in a file, its controller is nobody."""

    def __init__(self, place: Netlimit, directory: Path) -> None:
        kept = ("PATH", "HOME", "LOG")
        self.state = directory / "state"
        environment = {name: place.environment[name] for name in kept}
        environment["NETLIMIT_STATE_DIRECTORY"] = str(self.state)
        self.file = directory / "netlimit.toml"
        prepare = shlex.join([*self.program, "prepare", "--user", "nobody"])
        unit = f'{PLACE} && {prepare} && exec "$@"'
        self.place = replace(place, environment=environment, before=("unshare", "--mount", "sh", "-c", unit, "sh"))
        self.as_root = replace(self.place, before=("unshare", "--mount", "sh", "-c", f'{PLACE} && exec "$@"', "sh"))
        self.url = f"sqlite:///{directory}/database/netlimit.db"
        self.file.write_text(
            f'database_url = "{self.url}"\nhost = "gw1"\nsafe = ["192.0.2.7"]\nbackend = "iptables"\n'
            f'bootstrap_token = "s3cret-token"\nlisten = "{place.environment["NETLIMIT_LISTEN"]}"\n'
        )
        place.make_database()
        self.state.mkdir(0o700)
        os.chown(self.state, NOBODY.pw_uid, NOBODY.pw_gid)
        with closing(Store(self.url)) as store:
            now = datetime.now(UTC)
            store.add([parse_rule(RULE, now)], "test", now)

    @property
    def program(self) -> tuple[str, ...]:
        return sys.executable, "-W", "error", "-c", INSTALLED, str(self.file)

    def run(self, *words: str, root: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        place = self.as_root if root else self.place
        return subprocess.run(
            place.within(*self.program, *([] if root else ["as-unit"]), *words),
            capture_output=True, text=True, timeout=2 * SECONDS, cwd=ROOT, env={**place.environment, **environment},
            check=False,
        )  # fmt: skip

    def start(self, *words: str) -> Server:
        return self.place.start("as-unit", *words, program=self.program)

    def apply(self) -> None:
        """A controller applies the rules, and keeps its copy; then it ends."""
        controller = self.start("controller")
        until(lambda: "is applied" in controller.said() or controller.ended, controller.said)
        until(lambda: (self.state / "applied.db").exists() or controller.ended, controller.said)
        assert controller.end() == 0, controller.said()

    def break_it(self, how: str) -> None:
        """As configuration management leaves the file, or an editor."""
        if how == "unreadable":
            self.file.chmod(0o600)
        elif how == "empty":  # as a loss of power leaves it, or a disk that is full
            self.file.write_text("")
        elif how in LOST:
            self.file.unlink()
            if how == "dangling":  # into a file system that is not mounted yet
                self.file.symlink_to(self.file.parent / "volume" / "netlimit.toml")
        else:
            self.file.write_text(f"{self.file.read_text()}{how}\n")

    def held(self) -> bool:
        return "10.9.9.9" in look(replace(self.place, before=()), "ipset", "list")

    def restart_machine(self) -> None:
        forget(replace(self.place, before=()))
        assert not self.held()


@pytest.fixture
def installed(gateway: Netlimit, directory: Path) -> Installed:
    return Installed(gateway, directory)


@pytest.mark.parametrize("how", ["unreadable", *BROKEN, *LOST])
def test_a_boot_puts_back_what_was_applied_last_whatever_has_become_of_the_settings(
    installed: Installed, how: str
) -> None:
    installed.apply()
    kept = installed.state / FILE
    assert (kept.stat().st_mode & 0o777, kept.stat().st_uid) == (0o600, NOBODY.pw_uid)
    assert "s3cret" not in kept.read_text()
    installed.restart_machine()
    installed.break_it(how)
    done = installed.run("apply", "--last")
    assert done.returncode == 0, done
    assert "1 rule in force here" in done.stdout
    assert installed.held()
    told = "nobody may not read the settings file" if how == "unreadable" else LOUD
    assert told in done.stderr.partition("apply: ")[0], "by root, who prepares"
    assert LOUD in done.stderr.partition("apply: ")[2]
    assert re.search(r"netlimit\.toml (cannot be read: Permission denied|is not valid TOML)|which \S+netlimit\.toml has"
                     r"|limiter_memory in \S+netlimit\.toml|netlimit\.toml (is gone|states nothing|is a link)",
                     done.stderr), done.stderr  # fmt: skip
    sets = look(replace(installed.place, before=()), "ipset", "list")
    assert "192.0.2.7" in sets, "who was safe is"


def test_who_is_safe_by_the_present_settings_is_though_they_have_a_mistake(installed: Installed) -> None:
    installed.apply()
    installed.restart_machine()
    text = installed.file.read_text().replace('"192.0.2.7"', '"192.0.2.8", "router", "192.0.2.9"')
    installed.file.write_text(text)
    done = installed.run("apply", "--last", NETLIMIT_SAFE="192.0.2.10,nonsense")
    assert done.returncode == 0, done
    sets = look(replace(installed.place, before=()), "ipset", "list")
    assert {each for each in ("192.0.2.7", "192.0.2.8", "192.0.2.9", "192.0.2.10") if each in sets} == {
        "192.0.2.7", "192.0.2.8", "192.0.2.9", "192.0.2.10"}  # fmt: skip


def has_ended(store: Store) -> bool:
    window = store.window()
    return window is not None and window.outcome is not None


@pytest.mark.parametrize("how", ["unreadable", BROKEN[0], "empty"])
def test_a_guard_undoes_a_window_and_goes_by_the_settings_once_they_can_be_used(installed: Installed, how: str) -> None:
    installed.apply()
    good = installed.file.read_text()
    installed.break_it(how)
    with closing(Store(installed.url)) as store:
        window = store.open_window(2, "test", datetime.now(UTC))
        guard = installed.start("guard")
        until(lambda: has_ended(store) or guard.ended, guard.said)
        found = store.window()
        assert found is not None, guard.said()
        assert (found.opened_at, found.outcome) == (window.opened_at, Outcome.EXPIRED), guard.said()
    assert LOUD in guard.said()
    assert not guard.ended
    installed.file.write_text(good)
    installed.file.chmod(0o644)
    assert guard.process.wait(SECONDS) == 0, "systemd starts another, which goes by them"
    assert "The settings can be used again" in guard.said()


def test_commands_that_are_typed_and_files_that_are_named_are_errors_as_ever(installed: Installed) -> None:
    installed.apply()
    installed.break_it(BROKEN[0])
    typed = [[word] for word in ("status", "plan", "apply", "teardown", "controller", "api")]
    for words in (*typed, *(["--config", file, "apply", "--last"] for file in (str(installed.file), "/nosuch"))):
        done = installed.run(*words, root=True)
        assert (done.returncode, LOUD in done.stderr) == (1, False), done


@pytest.mark.parametrize("how", LOST)
def test_nobody_limits_by_the_defaults_where_the_settings_are_lost(installed: Installed, how: str) -> None:
    installed.apply()
    kept = installed.state / FILE
    before = kept.read_text()
    installed.break_it(how)
    typed = (["controller"], ["serve", "--api-user", "nobody"], ["apply"], ["plan"])
    for words, root in ((["controller"], False), *((words, True) for words in typed)):
        done = installed.run(*words, root=root)
        assert (done.returncode, done.stdout) == (1, ""), done
        said = done.stderr.splitlines()[-1]  # before, root prepares for the unit
        assert LOUD not in said
        assert f"The settings file {installed.file} {LOST[how]}" in said
        assert 'host = "gw1"' in said
        assert 'safe = ["192.0.2.7/32"]' in said
        assert f"remove {kept}" in said
        assert "s3cret" not in said
    assert kept.read_text() == before
    kept.unlink()
    stated = {"NETLIMIT_DATABASE_URL": installed.url, "NETLIMIT_BACKEND": "iptables"}
    done = installed.run("apply", root=True, **stated)
    assert done.returncode == 0, done
    assert json.loads(kept.read_text())["safe"] == [], "on purpose"


def test_settings_may_be_moved_into_the_environment_and_be_others_there(installed: Installed) -> None:
    installed.apply()
    installed.break_it("gone")
    stated = {"NETLIMIT_DATABASE_URL": installed.url, "NETLIMIT_BACKEND": "iptables", "NETLIMIT_HOST": "gw2"}
    done = installed.run("plan", **stated, NETLIMIT_LISTEN="127.0.0.1:1")
    assert (done.returncode, "host =" in done.stderr, "safe =" in done.stderr) == (1, False, True), done
    stated |= {"NETLIMIT_LISTEN": "127.0.0.1:1", "NETLIMIT_SAFE": "192.0.2.8"}
    done = installed.run("apply", root=True, **stated)
    assert done.returncode == 0, done
    kept = json.loads((installed.state / FILE).read_text())
    assert (kept["host"], kept["safe"], kept["from_file"]) == ("gw2", ["192.0.2.8/32"], [])
    done = installed.run("apply", root=True, **{**stated, "NETLIMIT_SAFE": ""})
    assert done.returncode == 0, "who says it in the environment alone may say something else"


@pytest.mark.parametrize("what", ["missing", "garbage", "another's", "open", "a link", "a pipe", "lacking", "huge"])
def test_no_others_settings_are_taken_for_those_that_were_good(installed: Installed, what: str) -> None:
    installed.apply()
    kept = installed.state / FILE
    text = kept.read_text()
    kept.unlink()
    match what:
        case "garbage":
            kept.write_text("[" * 100_000)
        case "another's":
            kept.write_text(text)
            os.chown(kept, 1, 1)
        case "open":
            kept.write_text(text)
        case "a link":
            (installed.state / "other").write_text(text)
            kept.symlink_to("other")
        case "a pipe":
            os.mkfifo(kept)
        case "lacking":
            kept.write_text("{}")
        case "huge":
            kept.write_text(" " * 2**24)
    if what != "another's":
        with suppress(FileNotFoundError):
            os.chown(kept, NOBODY.pw_uid, NOBODY.pw_gid, follow_symlinks=False)
    with suppress(FileNotFoundError, NotImplementedError):
        os.chmod(kept, 0o622 if what == "open" else 0o644)
    installed.restart_machine()
    installed.break_it(BROKEN[0])
    done = installed.run("apply", "--last")
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "There is no setting 'saf'" in done.stderr
    assert f"Nor can the settings that were good last be taken from {kept}" in done.stderr
    assert "Traceback" not in done.stderr


def test_root_opens_no_database_that_another_user_names(installed: Installed) -> None:
    installed.apply()
    installed.break_it(BROKEN[0])
    done = installed.run("guard", "--once", root=True)
    assert done.returncode == 1, done
    assert "it belongs to nobody" in done.stderr


def test_settings_come_back_as_they_were_without_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        database_url="postgresql+psycopg://nl:hid-1@[fd00::5]:5433/rules?sslmode=require&pasword=hid-2",
        counters_url="redis+cluster://u:hid-3@red1:6379,[fd00::6]:6380/0?timeout_ms=5",
        bootstrap_token="hid-4", token="hid-5", limiter_token="hid-6",  # type: ignore[arg-type]
        host="gw7", listen="[::]:9000", mark_mask="0xff00", safe="10.0.0.0/8,fd00::/64",  # type: ignore[arg-type]
        trusted_proxies="10.0.0.1", set_size=4096, failure_seconds=5, backend="l7",  # type: ignore[arg-type]
        state_directory=tmp_path, log_format="json", log_level="warning",  # type: ignore[arg-type]
    )  # fmt: skip
    assert "hid-" not in print_settings(settings)
    keep_settings(settings)
    monkeypatch.setenv("NETLIMIT_STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("NETLIMIT_HOST", "gw8")
    fault = SettingsError("X", "No.")
    found = recall(fault)
    for name in ("host", "listen", "mark_mask", "safe", "trusted_proxies", "set_size", "failure_seconds", "backend",
                 "state_directory", "log_format", "log_level"):  # fmt: skip
        assert getattr(found, name) == getattr(settings, name), name
    from netlimit.l7.redis import hosts
    from netlimit.store import engine

    assert engine.name_hosts(found.database_url) == engine.name_hosts(settings.database_url) == ("fd00::5",)
    assert hosts.name_hosts(found.counters_url) == hosts.name_hosts(settings.counters_url) == ("red1", "fd00::6")
    with pytest.raises(SettingsError, match="the password of the database is not kept"):
        recall(fault, whole=True)
    monkeypatch.setenv("NETLIMIT_DATABASE_URL", settings.database_url)
    assert recall(fault, whole=True).database_url == settings.database_url
    monkeypatch.setenv("NETLIMIT_DATABASE_URL", "postgresql+psycopg://nl:hid-1@other/rules")
    with pytest.raises(SettingsError, match="the password of the database is not kept"):
        recall(fault, whole=True)


@pytest.mark.parametrize(
    "url", ["redis://:a/b@red1", "redis://u:a#b@red1", "memory://", "redis://[zz", "unix:///run/r"]
)
def test_of_a_counters_url_nothing_is_kept_that_may_be_of_a_password(url: str, tmp_path: Path) -> None:
    kept = json.loads(print_settings(Settings(counters_url=url, state_directory=tmp_path)))
    assert kept["counters_url"] == "memory://"


def test_settings_are_written_when_they_change_alone(tmp_path: Path) -> None:
    keep_settings(Settings(state_directory=tmp_path, host="gw1"))
    file = tmp_path / FILE
    before = file.stat().st_ino
    keep_settings(Settings(state_directory=tmp_path, host="gw1"))
    assert file.stat().st_ino == before
    keep_settings(Settings(state_directory=tmp_path, host="gw2"))
    assert json.loads(file.read_text())["host"] == "gw2"
    assert [each.name for each in tmp_path.iterdir()] == [FILE]


def test_a_file_that_states_something_or_that_nobody_misses_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETLIMIT_STATE_DIRECTORY", str(tmp_path))
    file = tmp_path / "netlimit.toml"
    addresses = [f"192.0.2.{number}" for number in range(12)]
    file.write_text(f'host = "gw1"\nsafe = {addresses}\nlog_level = "info"\n')
    keep_settings(load_settings_to_limit(file))
    file.write_text("# safe = []\n")
    had = r'had host = "gw1" and safe = \["192.0.2.0/32", .*\] and 4 more when'
    with pytest.raises(SettingsError, match=had) as raised:
        load_settings_to_limit(file)
    assert raised.value.file == file
    assert "log_level" not in str(raised.value), "it is what the default is"
    assert load_settings_to_limit(Path(os.devnull)).safe == (), "who names that wants none"
    kept = json.loads((tmp_path / FILE).read_text())
    for others in ("[", "[]", "{}", json.dumps({**kept, "from_file": 5}), json.dumps({**kept, "host": "a b"})):
        (tmp_path / FILE).write_text(others)
        assert load_settings_to_limit(file).safe == (), others
    (tmp_path / FILE).write_text(json.dumps(kept))
    file.write_text('host = "gw2"\n')
    assert load_settings_to_limit(file).safe == (), "somebody has written that"


@pytest.mark.parametrize("lacks", ["file", "folder", "nothing"])
def test_who_may_not_read_the_settings_is_told_with_the_remedy(root: None, directory: Path, lacks: str) -> None:
    folder = directory / "etc"
    folder.mkdir()
    file = folder / "netlimit.toml"
    file.write_text("")
    file.chmod(0o600 if lacks == "file" else 0o644)
    folder.chmod(0o700 if lacks == "folder" else 0o755)
    groups = os.getgroups()
    found = [*find_unread(file, {"nobody": NOBODY})]
    assert os.getgroups() == groups
    file.read_text()  # root has its rights again
    if lacks == "nothing":
        assert found == []
        return
    (finding,) = found
    assert finding.severity == "serious"
    assert f"the settings file {file}" in finding.what
    (remedy,) = re.findall("`(.*)`", finding.advice)
    subprocess.run(["sh", "-c", remedy], check=True)
    assert [*find_unread(file, {"nobody": NOBODY})] == [], shlex.quote(remedy)


def test_doctor_tells_root_of_settings_that_are_lost(installed: Installed) -> None:
    installed.apply()
    installed.break_it("empty")
    done = installed.run("doctor", "--json", root=True)
    (found,) = [each for each in json.loads(done.stdout)["findings"] if each["name"] == readers.NAME]
    assert (found["severity"], "states nothing" in found["what"]) == ("serious", True)


def test_doctor_tells_root_what_the_next_start_will_find(installed: Installed, tmp_path: Path) -> None:
    installed.apply()
    installed.break_it(BROKEN[1])
    other = installed.file.parent / "other.db"  # as a controller that somebody has taken over may name it
    kept = installed.state / FILE
    kept.write_text(kept.read_text().replace(installed.url, f"sqlite:///{other}"))
    done = installed.run("doctor", "--json", root=True)
    assert done.returncode == 1, done
    (found,) = [each for each in json.loads(done.stdout)["findings"] if each["name"] == readers.NAME]
    assert found["severity"] == "serious"
    assert "limiter_memory in" in found["what"]
    assert not other.exists()
    assert "no database" not in done.stdout
    assert str(other) not in done.stdout
    with pytest.raises(SettingsError):
        load_settings(installed.file)


def test_who_has_a_look_round_takes_nothing_from_a_boot(installed: Installed) -> None:
    installed.apply()
    kept = (installed.state / FILE).read_bytes()
    assert installed.run("apply", root=True, NETLIMIT_BACKEND="fake").returncode == 0
    assert (installed.state / FILE).read_bytes() == kept
