"""The units, and what scripts/install puts on a gateway."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from netlimit.kernel.tc import PINNED
from netlimit.settings import FORMER_STATE, STATE

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "packaging/systemd").glob("*.service"))
MOUNT = ROOT / "packaging/systemd/run-netlimit-bpf.mount"
ENVIRONMENT = Path(sys.prefix)
UNPRIVILEGED = ("netlimit-api", "netlimit-limiter")
KEPT = {"/etc/netlimit", "/etc/netlimit/netlimit.toml", "/var/lib/netlimit", "/var/lib/netlimit-controller"}
MODES = {
    "/etc/netlimit": 0o750,
    "/etc/netlimit/netlimit.toml": 0o640,
    "/var/lib/netlimit": 0o2770,
    "/var/lib/netlimit-controller": 0o700,
    "/opt/netlimit/share/uninstall": 0o755,
    "/etc/systemd/system/netlimit-controller.service": 0o644,
}
EXPOSURE = re.compile(r"Overall exposure level for \S+: (\d\.\d)")
ROW = re.compile(r"^\| `(netlimit-[a-z@-]+\.service)` \|.*\| (\d\.\d) \|$", re.MULTILINE)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert not done.returncode, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def staged(root: None, tmp_path: Path) -> Path:
    """An image of a gateway in which netlimit is installed, with the environment that runs these tests."""
    run("scripts/install", "--root", tmp_path, "--venv", ENVIRONMENT)
    return tmp_path


def list_files(place: Path) -> dict[str, os.stat_result]:
    """Everything but the directories that any gateway has."""
    found = {f"/{path.relative_to(place)}": path.lstat() for path in place.rglob("*")}
    return {
        name: each
        for name, each in found.items()
        if not stat.S_ISDIR(each.st_mode) or re.match("/(etc|var/lib|opt)/netlimit", name)
    }


def test_what_is_installed_runs_and_belongs_to_the_right_ones(staged: Path) -> None:
    found = list_files(staged)
    modes = {name: stat.S_IMODE(found[name].st_mode) for name in MODES}
    assert modes == MODES
    assert {f"/etc/systemd/system/{unit.name}" for unit in (*UNITS, MOUNT)} <= set(found)
    assert "netlimit" in run(staged / "opt/netlimit/bin/netlimit", "--version")


def test_installing_twice_changes_nothing_and_leaves_settings_alone(staged: Path) -> None:
    settings = staged / "etc/netlimit/netlimit.toml"
    settings.write_text('host = "gw7"\n')
    before = {name: each.st_mode for name, each in list_files(staged).items()}
    run("scripts/install", "--root", staged, "--venv", ENVIRONMENT)
    assert {name: each.st_mode for name, each in list_files(staged).items()} == before
    assert settings.read_text() == 'host = "gw7"\n'


def test_uninstalling_leaves_what_the_operator_has_written(staged: Path) -> None:
    run(staged / "opt/netlimit/share/uninstall", "--root", staged)
    assert set(list_files(staged)) == KEPT


def test_uninstalling_names_what_still_runs(staged: Path) -> None:
    program = make_environment(staged / "opt/netlimit", 1) / "sleep"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as running:
        try:
            said = run("scripts/uninstall", "--root", staged)
        finally:
            running.kill()
    assert f"It still runs (process {running.pid})" in said
    assert set(list_files(staged)) == KEPT


def test_uninstalling_names_nothing_where_nothing_runs(staged: Path) -> None:
    assert "still runs" not in run("scripts/uninstall", "--root", staged)


UNINSTALLING = """
mount -t tmpfs none /run && mount -t tmpfs none /sys/fs/bpf && mkdir -p "$0/share" && : >"$0/share/installed"
scripts/uninstall --prefix "$0" --keep-rules "$@"
"""


UNKEPT = """
mount -t tmpfs none /run && mount -t tmpfs none /sys/fs/bpf
scripts/uninstall --prefix "$0" </dev/null
"""


def test_who_keeps_the_limits_is_told_that_they_go_on(root: None, tmp_path: Path) -> None:
    said = run("unshare", "--mount", "bash", "-ec", UNINSTALLING, tmp_path / "limits")
    assert "Its limits are still in the kernel, until the next boot" in said
    assert "a teardown pauses" not in said


def test_purging_leaves_nothing(staged: Path) -> None:
    run("scripts/uninstall", "--root", staged, "--purge")
    assert list_files(staged) == {}


@pytest.mark.parametrize("options", [["--purge"], []])
def test_uninstalling_names_the_drop_ins_that_are_left(staged: Path, options: list[str]) -> None:
    """Whoever installs again has decided nothing of what these give; but others have written them."""
    units = staged / "etc/systemd/system"
    written = [units / "netlimit-controller.service.d/shaping.conf", units / "netlimit-api.service.d/own words.conf"]
    for each in (*written, units / "other.service.d/own.conf"):
        each.parent.mkdir()
        each.write_text("[Service]\n")
    said = run("scripts/uninstall", "--root", staged, *options)
    told = "They hold again for who installs netlimit anew: remove what is not wanted"
    assert f"Drop-ins of its units are left, which it has not written: {written[1]}, {written[0]}. {told}" in said
    assert all(each.exists() for each in written)


def test_uninstalling_takes_its_own_drop_ins_with_it(staged: Path) -> None:
    """Those that an installation has put there, for the operator had written one."""
    units = staged / "etc/systemd/system"
    mine = units / "netlimit-controller.service.d/shaping.conf"
    mine.parent.mkdir()
    mine.write_text("[Service]\n")
    run("scripts/install", "--root", staged, "--venv", ENVIRONMENT)
    assert len(list(units.glob("*/shaping.conf"))) == 5
    assert f"which it has not written: {mine}. They" in run("scripts/uninstall", "--root", staged, "--purge")
    assert list(list_files(staged)) == [f"/{mine.relative_to(staged)}"]


MOVING = """
mount -t tmpfs none /run && mount -t tmpfs none "$0"
for each in etc var opt usr/local; do
    mkdir -p "$0/$each.new" "$0/$each.work"
    mount -t overlay overlay -o "lowerdir=/$each,upperdir=$0/$each.new,workdir=$0/$each.work" "/$each"
done
[[ ! -e /run/systemd/system && ! -e /var/lib/netlimit-controller ]]
rm -rf /var/lib/netlimit  # one that lies below the overlay could not be moved
install() { scripts/install --no-start --venv "$1" 2>&1; }
install "$1"
rmdir /var/lib/netlimit-controller
command install -d -m 700 -o netlimit-controller -g netlimit /var/lib/netlimit/controller
echo "what was applied last" >/var/lib/netlimit/controller/applied.db
sleep 60 </var/lib/netlimit/controller/applied.db &>/dev/null &
install "$1" >"$0/said"
grep -F "stays in /var/lib/netlimit/controller, for something has it open (process $!)" "$0/said"
grep -q applied /var/lib/netlimit/controller/applied.db && [[ ! -e /var/lib/netlimit-controller ]]
kill $! && ! wait $!
install "$1"
grep -q applied /var/lib/netlimit-controller/applied.db && [[ ! -e /var/lib/netlimit/controller ]]
stat -c "%U %G" /var/lib/netlimit-controller | grep -x "netlimit-controller netlimit"
mkdir -p /var/lib/netlimit/elsewhere && mv -T /var/lib/netlimit-controller /var/lib/netlimit/elsewhere/controller
mkdir /var/lib/netlimit/controller && mount --bind /var/lib/netlimit/elsewhere/controller /var/lib/netlimit/controller
install "$1" >"$0/said"
grep -F "cannot be moved to /var/lib/netlimit-controller: Device or resource busy" "$0/said"
grep -F "It stays in use" "$0/said" && grep -q applied /var/lib/netlimit/controller/applied.db
"""


def test_the_copy_is_moved_when_nobody_has_it_open(root: None, tmp_path: Path) -> None:
    """And where it cannot be, all else is installed."""
    command = ("unshare", "--mount", "bash", "-xec", MOVING, tmp_path / "changed", ENVIRONMENT)
    (tmp_path / "changed").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert not done.returncode, f"{done.stdout}\n{done.stderr}"


def test_the_copy_of_an_image_is_moved(staged: Path) -> None:
    former, present = staged / "var/lib/netlimit/controller", staged / "var/lib/netlimit-controller"
    present.rename(former)
    (former / "applied.db").write_text("what was applied last")
    os.chown(former, 4711, 0)
    install = ("scripts/install", "--root", staged, "--venv", ENVIRONMENT)
    assert f"{former} cannot be moved to {present}: It belongs to user 4711." in run(*install)
    (staged / "etc/passwd").write_text("root:x:0:0::/:\nnetlimit-controller:x:4711:4711::/:\n")
    run(*install)
    assert (present / "applied.db").read_text() == "what was applied last"
    assert not former.exists()


def test_another_prefix_is_in_all_files(root: None, tmp_path: Path) -> None:
    run("scripts/install", "--root", tmp_path, "--venv", ENVIRONMENT, "--prefix", "/srv/limits")
    written = [path.read_text() for path in (tmp_path / "etc/systemd").rglob("*.service")]
    assert written
    assert not any("/opt/netlimit" in text for text in written)
    run("scripts/uninstall", "--root", tmp_path, "--prefix", "/srv/limits", "--purge")
    assert list_files(tmp_path) == {}


@pytest.fixture
def moved(staged: Path) -> Path:
    """The image, in which netlimit has been installed at another prefix since."""
    said = run("scripts/install", "--root", staged, "--venv", ENVIRONMENT, "--prefix", "/srv/limits")
    assert f"{staged}/srv/limits/share/uninstall --root {staged} --prefix /opt/netlimit" in said
    return staged


def list_shared(place: Path) -> set[str]:
    return {name for name in list_files(place) if not name.startswith("/opt/netlimit")}


def test_who_takes_a_former_prefix_off_leaves_what_the_other_uses(moved: Path) -> None:
    alone = moved / "etc/systemd/system/netlimit-former.service"  # an earlier version had it, and this one has not
    alone.touch()
    with (moved / "opt/netlimit/share/installed").open("a") as listed:
        listed.write("/etc/systemd/system/netlimit-former.service\n")
    before = list_shared(moved)
    said = run(moved / "srv/limits/share/uninstall", "--root", moved, "--prefix", "/opt/netlimit")
    assert "The one in /srv/limits stays" in said
    assert not (moved / "opt/netlimit").exists()
    assert list_shared(moved) == before - {f"/{alone.relative_to(moved)}"}
    assert "netlimit" in run(moved / "srv/limits/bin/netlimit", "--version")
    run("scripts/uninstall", "--root", moved, "--prefix", "/srv/limits")
    assert set(list_files(moved)) == KEPT


def test_a_former_prefix_takes_no_settings_of_the_other_with_it(moved: Path) -> None:
    before = set(list_files(moved))
    command = ("scripts/uninstall", "--root", moved, "--purge")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode
    assert "the one in /srv/limits uses" in done.stderr
    assert set(list_files(moved)) == before


def test_who_has_deleted_the_other_prefix_by_hand_can_uninstall(moved: Path) -> None:
    shutil.rmtree(moved / "srv/limits")
    run("scripts/uninstall", "--root", moved)
    assert set(list_files(moved)) == KEPT


def test_who_takes_off_what_the_units_start_takes_them_off_too(moved: Path) -> None:
    """Also where somebody has led the command back to the former one."""
    command = moved / "usr/local/bin/netlimit"
    command.unlink()
    command.symlink_to("/opt/netlimit/bin/netlimit")
    said = run("scripts/uninstall", "--root", moved, "--prefix", "/srv/limits")
    assert "stays" not in said.replace("is not netlimit's, and stays", "")
    assert not (moved / "etc/systemd/system/netlimit-controller.service").exists()
    assert (moved / "opt/netlimit/bin/netlimit").exists()


def test_one_prefix_by_two_names_is_one(staged: Path) -> None:
    (staged / "srv").symlink_to("opt")
    said = run("scripts/install", "--root", staged, "--venv", ENVIRONMENT, "--prefix", "/srv/netlimit")
    assert "is installed in" not in said
    run("scripts/uninstall", "--root", staged)
    assert not (staged / "usr/local/bin/netlimit").is_symlink()


MOVED = """
mount -t tmpfs none /run && mount -t tmpfs none /etc/systemd/system
mkdir -p /run/netlimit "$0"/{former,other}/{bin,share}
touch /run/netlimit/held "$0"/{former,other}/share/installed
printf '#!/bin/sh\ntouch "%s/$1"\n' "$0" | install -m 755 /dev/stdin "$0/former/bin/netlimit"
echo "ExecStart=$0/other/bin/netlimit controller" >/etc/systemd/system/netlimit-controller.service
scripts/uninstall --prefix "$0/former"
test -e /run/netlimit/held && test -e /etc/systemd/system/netlimit-controller.service
"""


def test_a_former_prefix_takes_no_limits_of_the_other_with_it(root: None, tmp_path: Path) -> None:
    run("unshare", "--mount", "bash", "-ec", MOVED, tmp_path)
    assert not (tmp_path / "teardown").exists()


def test_an_installation_that_cannot_be_made_leaves_the_former(staged: Path, tmp_path: Path) -> None:
    before = list_files(staged)
    command = ("scripts/install", "--root", str(staged), "--venv", str(tmp_path / "none"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode
    assert set(list_files(staged)) == set(before)
    assert (staged / "opt/netlimit/bin/netlimit").exists()


def test_packages_that_cannot_be_fetched_are_told_of_and_leave_the_former(staged: Path) -> None:
    before = list_files(staged)
    nowhere = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    done = subprocess.run(
        ["scripts/install", "--root", staged],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | nowhere,
    )
    assert done.returncode == 1
    assert "scripts/install: the Python packages could not be installed." in done.stderr.splitlines()[-1]
    assert set(list_files(staged)) == set(before)


@contextmanager
def holding(*paths: Path) -> Iterator[None]:
    """Keep the locks (flock(2)) of files and directories."""
    with ExitStack() as held:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def test_no_other_user_keeps_an_installation_waiting(staged: Path) -> None:
    """Whoever may open something may lock it, and keep that for as long as he likes."""
    found = [staged / "opt/netlimit", *(staged / "opt/netlimit").rglob("*")]
    open_to_all = [path for path in found if not path.is_symlink() and path.stat().st_mode & stat.S_IROTH]
    with holding(*open_to_all):
        run("timeout", "120", "scripts/install", "--root", staged, "--venv", ENVIRONMENT)
    assert stat.S_IMODE((staged / "opt/netlimit/share/lock").lstat().st_mode) == 0o600


def test_an_installation_says_that_it_waits_for_another(staged: Path) -> None:
    command = ["scripts/install", "--root", staged, "--venv", ENVIRONMENT]
    with ExitStack() as waited:
        with holding(staged / "opt/netlimit/share/lock"):
            waiting = waited.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT))
            assert waiting.stderr
            assert waiting.stderr.readline().startswith("scripts/install: another one is at work")
        waiting.communicate(timeout=120)
    assert waiting.returncode == 0


def test_another_is_not_waited_for_without_end(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    script = 'set -euo pipefail; source scripts/debian.bash; hold_lock "$1" 1; echo held'
    command = ["bash", "-c", script, "scripts/install", str(lock)]
    assert run(*command) == "held\n"
    with holding(lock):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        f"scripts/install: another one has held {lock} for 1 seconds. Try again when it has ended."
    )


def test_scripts_lock_nothing_that_others_may_open() -> None:
    locking = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and "flock " in path.read_text()}
    assert locking == {"debian.bash"}, "hold_lock makes a file that only its owner may open"


KEEPING_DOWN = """
set -euo pipefail
mount -t tmpfs none /usr/sbin
begin() { bash -c 'source scripts/debian.bash; keep_services_down; '"$1"; }
begin 'exit 1' || [[ ! -e $policy ]]
begin 'kill -KILL $$' || [[ -x $policy ]]
begin '"$policy"' || [[ $? == 101 && ! -e $policy ]]
echo 'exit 0' >$policy
begin true
cat $policy
"""


def test_who_is_killed_while_packages_come_keeps_no_service_down_for_ever(root: None) -> None:
    """What was left is taken for ours by the next that runs, and what somebody else has put there is not."""
    script = f"policy=/usr/sbin/policy-rc.d; {KEEPING_DOWN}"
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "exit 0\n"), done.stderr


SETTING_UP = """
set -euo pipefail
mount -t tmpfs none /etc/systemd/system
mkdir /etc/systemd/system/multi-user.target.wants
enable() { ln -s "/lib/systemd/system/$1" /etc/systemd/system/multi-user.target.wants/; }
enable nginx.service
enable haproxy.service
mount -t tmpfs none /usr/sbin
{
    source scripts/debian.bash
    apt-get() { [[ " $* " != *" install "* ]] || enable redis-server.service; }
    missing_packages() { echo redis-server haproxy; }
    hold_lock() { :; }
    source /dev/stdin <<<"$(sed -n '/^wanted=/,/^fi$/p' scripts/setup)"
} >&2
ls /etc/systemd/system/multi-user.target.wants
"""


def test_what_comes_for_its_program_does_not_listen_from_the_next_boot_on(root: None) -> None:
    """But what was there before stays as it was."""
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", SETTING_UP], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "haproxy.service\nnginx.service\n"), done.stderr


def test_nothing_is_uninstalled_where_nothing_is(root: None, tmp_path: Path) -> None:
    done = subprocess.run(
        ["scripts/uninstall", "--root", tmp_path], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode
    assert "is not installed in" in done.stderr


def test_scripts_are_sound() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and b"bash" in path.read_bytes()[:30]]
    assert {"install", "uninstall", "setup", "bare", "vm"} <= {path.name for path in scripts}
    sourced = sorted((ROOT / "scripts").glob("*.bash"))
    assert run("shellcheck", "--external-sources", *scripts, *sourced) == ""


def test_systemd_has_nothing_to_say_of_the_units(staged: Path, tmp_path: Path) -> None:
    """Verified where the program is, for systemd looks whether it is there."""
    place = tmp_path / "verified"
    place.mkdir()
    for unit in (*UNITS, MOUNT):
        text = unit.read_text().replace("/opt/netlimit", str(staged / "opt/netlimit"))
        (place / unit.name).write_text(text)
    assert run("systemd-analyze", "verify", *sorted(place.iterdir())) == ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_exposed_as_little_as_the_page_says(unit: Path) -> None:
    page = (ROOT / "docs/install.md").read_text("utf-8")
    told = dict(ROW.findall(page))
    assert set(told) == {unit.name for unit in UNITS}
    judged = EXPOSURE.search(run("systemd-analyze", "security", "--offline=true", unit))
    assert judged
    version = run("systemd-analyze", "--version").split()[1]
    if f"systemd {version} " in page:
        assert judged[1] == told[unit.name]
    assert float(judged[1]) <= 2.5  # other versions ask for more, and give other marks


def test_the_units_of_the_controller_give_it_two_capabilities() -> None:
    for unit in UNITS:
        text = unit.read_text()
        given = "" if unit.stem in UNPRIVILEGED else "CAP_NET_ADMIN CAP_NET_RAW"
        assert f"\nCapabilityBoundingSet={given}\n" in text
        assert f"\nAmbientCapabilities={given}\n" in text


def test_systemd_runs_one_command_of_ours_as_root() -> None:
    """docs/security.md has the reasons."""
    files = [*UNITS, ROOT / "packaging/systemd/shaping.conf"]
    found = {
        (file.stem, line) for file in files for line in re.findall(r"^Exec\w+=[-:@|]*[+!].*", file.read_text(), re.M)
    }
    prepare = "ExecStartPre=+/opt/netlimit/bin/netlimit prepare"
    assert found == {
        *((f"netlimit-{unit}", prepare) for unit in ("controller", "guard", "restore")),
        ("shaping", f"{prepare} --bpf"),
    }
    assert not any(re.search(r"^User=root|^PermissionsStartOnly", file.read_text(), re.M) for file in files)


def test_what_root_pins_is_where_systemd_mounts_it_for_all() -> None:
    """A mount of a unit's own command would be in the mount namespace of that alone. Where none can be made, the unit
    starts all the same."""
    assert f"\nWhere={Path(PINNED).parent}\n" in MOUNT.read_text()
    for unit in UNITS:
        text = unit.read_text()
        wanted = "ExecStartPre=+/opt/netlimit/bin/netlimit prepare" in text
        for word in ("Wants", "After"):
            assert (f"\n{word}={MOUNT.name}\n" in text) == wanted, (unit.name, word)


def test_nothing_but_a_boot_puts_back_what_was_applied_last() -> None:
    """The copy of it lacks what is in force in a window of confirmation: no controller that is started anew has it put
    back."""
    for unit in UNITS:
        assert not re.search(r"^(Wants|Requires|BindsTo|Upholds)=.*netlimit-restore", unit.read_text(), re.M), unit.name
    text = (ROOT / "packaging/systemd/netlimit-restore.service").read_text()
    assert "\nWantedBy=sysinit.target\n" in text


def test_units_look_for_what_was_applied_last_where_it_is(staged: Path) -> None:
    """In the place that the settings name, or, before an upgrade has moved it, in the former."""
    settings = (staged / "etc/netlimit/netlimit.toml").read_text()
    places = re.findall(r'^state_directory = "(.*)"$', settings, re.M)
    assert places == [str(STATE)]
    for unit in UNITS:
        looked = re.findall(r"^ConditionPathExists=\|(.*)/applied.db$", unit.read_text(), re.M)
        assert looked in ([], [str(STATE), str(FORMER_STATE)])


def test_what_can_do_without_the_database_waits_for_no_disk_of_it() -> None:
    """A directory that is not there would keep a unit from starting, and so would a mount that does not come. The API
    and the limiter, which cannot, are tried again by systemd until it is there: then they may write it."""
    for unit in UNITS:
        text = unit.read_text()
        written = re.findall(r"^ReadWritePaths=(.*)$", text, re.M)
        if "=CAP_NET_ADMIN" in text:
            assert written == [f"-/var/lib/netlimit -{STATE}"], unit.name
        else:
            assert written[0].split()[0] == "/var/lib/netlimit", unit.name
            assert "\nRestart=always\n" in text, unit.name
        assert set(re.findall(r"^\w*MountsFor=(.*)$", text, re.M)) <= {f"/opt/netlimit {STATE}"}, unit.name


def test_the_drop_in_for_shaping_is_for_all_units_that_touch_the_kernel() -> None:
    named = re.search(r"for unit in (.*); do", (ROOT / "packaging/systemd/shaping.conf").read_text())
    assert named
    touching = {unit.stem for unit in UNITS if "=CAP_NET_ADMIN" in unit.read_text()}
    assert {f"netlimit-{unit}" for unit in named[1].split()} == touching


def test_who_shapes_what_ends_here_does_so_in_all_units_after_an_upgrade(staged: Path) -> None:
    units = staged / "etc/systemd/system"
    mine = units / "netlimit-controller.service.d/shaping.conf"
    mine.parent.mkdir(parents=True)
    mine.write_text("# as it was put here\n")
    run("scripts/install", "--root", staged, "--venv", ENVIRONMENT)
    assert mine.read_text() == "# as it was put here\n"
    given = {path.parent.name for path in units.glob("*/shaping.conf")}
    assert given == {f"{unit.name}.d" for unit in UNITS if "=CAP_NET_ADMIN" in unit.read_text()}
    assert "prepare --bpf" in (units / "netlimit-restore-again.service.d/shaping.conf").read_text()
    former = units / "netlimit-device@.service"
    former.touch()
    with (staged / "opt/netlimit/share/installed").open("a") as installed:
        installed.write("/etc/systemd/system/netlimit-device@.service\n")
    mine.unlink()
    run("scripts/install", "--root", staged, "--venv", ENVIRONMENT)
    assert not list(units.glob("*/shaping.conf"))
    assert not former.exists(), "and what an earlier version has put there"


@pytest.mark.parametrize("script", ["install", "uninstall", "setup"])
def test_scripts_tell_what_they_do(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / script, "--help"], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=10
    )
    assert done.returncode == 0, done.stderr
    assert "netlimit" in done.stdout
    assert "set -euo" not in done.stdout


def test_an_environment_in_which_something_runs_stays(root: None, tmp_path: Path) -> None:
    target = tmp_path / "opt/netlimit"
    command = ["scripts/install", "--root", str(tmp_path), "--venv", str(ENVIRONMENT)]
    run(*command)
    used, unused = (make_environment(target, number) for number in (1, 2))
    shutil.copy("/bin/sleep", used / "sleep")
    with subprocess.Popen([used / "sleep", "60"]) as running:
        try:
            said = run(*command)
        finally:
            running.kill()
    assert f"(process {running.pid}) and keeps {used}" in said
    assert (used.exists(), unused.exists()) == (True, False)
    run(*command)
    assert not used.exists()


def make_environment(target: Path, number: int) -> Path:
    """One as an earlier version has left it, which kept no list of them."""
    made = target / f"venv-2020010100000{number}-77"
    (made / "bin").mkdir(parents=True)
    (made / "bin/netlimit").touch()
    return made


def test_an_environment_that_is_installed_again_stays(staged: Path) -> None:
    """Whatever it is called by: `--venv` puts units and files right without fetching anything."""
    place = staged / "opt/netlimit/venv-20260101000000-1"
    (place / "bin").mkdir(parents=True)
    for name in ("netlimit", "python"):
        (place / "bin" / name).write_text(f'#!/bin/sh\nexec {ENVIRONMENT}/bin/{name} "$@"\n')
        (place / "bin" / name).chmod(0o755)
    former = staged / "opt/netlimit/venv-20250101000000-1"
    shutil.copytree(place, former)
    run("scripts/install", "--root", staged, "--venv", place)
    assert (staged / "opt/netlimit/bin/netlimit").exists()
    assert place.is_dir()
    assert not former.exists()


def test_settings_that_are_elsewhere_are_waited_for(staged: Path) -> None:
    settings = staged / "etc/netlimit/netlimit.toml"
    settings.unlink()
    settings.symlink_to("/mnt/not-there-yet")
    done = subprocess.run(
        ["scripts/install", "--root", staged, "--venv", ENVIRONMENT],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, "is a link to what is not there" in done.stderr) == (1, True)
    assert settings.is_symlink()


def test_what_others_have_below_the_prefix_stays(root: None, tmp_path: Path) -> None:
    target = tmp_path / "opt"
    target.mkdir()
    install = ["scripts/install", "--root", str(tmp_path), "--venv", str(ENVIRONMENT), "--prefix", "/opt"]
    run(*install)
    former = make_environment(target, 1)
    theirs = [target / name for name in ("app/data", "share/mine", "share/docs/theirs.md", "venv-app/bin/python",
                                         "venv-20240101000000-7/bin/python")]  # fmt: skip
    for each in theirs:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.touch()
    run(*install)
    assert not former.exists()
    make_environment(target, 2)
    said = run(target / "share/uninstall", "--root", tmp_path, "--prefix", "/opt")
    assert f"What is left in {target} is not netlimit's" in said
    assert {path for path in target.rglob("*") if not path.is_dir()} == set(theirs)
    assert all(each.exists() for each in theirs)
    assert not (target / "share/docs/prometheus").exists()


@pytest.mark.parametrize("place", ["app/data", "share/app/data", "bin/program"])
def test_a_prefix_that_others_use_is_refused(root: None, tmp_path: Path, place: str) -> None:
    theirs = tmp_path / "opt" / place
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    command = ["scripts/install", "--root", tmp_path, "--venv", ENVIRONMENT, "--prefix", "/opt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert f"{tmp_path}/opt is not empty, and netlimit is not installed there" in done.stderr
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == [theirs]


@pytest.mark.parametrize(
    "prefix", ["/srv/R&D", "/srv/my limits", "/srv/a|b", "/srv/50%", "/srv/$HOME", "/srv/é", "/srv\n"]
)
def test_a_prefix_that_units_cannot_name_is_refused(root: None, tmp_path: Path, prefix: str) -> None:
    command = ["scripts/install", "--root", tmp_path, "--venv", ENVIRONMENT, "--prefix", prefix]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "--prefix may have letters (a to z), digits and / . _ - alone" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_installation_that_was_ended_early_is_begun_anew(root: None, tmp_path: Path) -> None:
    (tmp_path / "opt/netlimit/share").mkdir(parents=True)
    (tmp_path / "opt/netlimit/share/lock").touch()
    run("scripts/install", "--root", tmp_path, "--venv", ENVIRONMENT)
    assert (tmp_path / "opt/netlimit/bin/netlimit").exists()


@pytest.mark.parametrize(
    ("program", "turn"),
    [
        ("install", 1),
        ("install", 2),
        ("ln", 1),
        ("mv", 1),
        ("install", 3),
        ("mv", 2),
        ("mv", 20),
        ("ln", 2),
        ("mv", 40),
    ],
)
def test_one_that_is_killed_is_gone_on_with(root: None, tmp_path: Path, program: str, turn: int) -> None:
    """As it is about to run a program for so many a time: whatever it has left, it is run again, and all is there."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    install = ("scripts/install", "--venv", ENVIRONMENT, "--root")
    stub, number = tmp_path / "stubs" / program, tmp_path / "number"
    stub.parent.mkdir()
    stub.write_text(
        f"#!/bin/bash\necho >>{number}\n[[ $(wc -l <{number}) != {turn} ]] || kill -KILL $PPID\n"
        f'exec /usr/bin/{program} "$@"\n'
    )
    stub.chmod(0o755)
    searched = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"}
    done = subprocess.run([*install, killed], capture_output=True, text=True, check=False, cwd=ROOT, env=searched)
    assert done.returncode == -9, done
    run(*install, killed)
    run(*install, whole)
    assert set(list_files(killed)) == set(list_files(whole))
    assert (killed / "opt/netlimit/share/installed").read_text().split() == (
        whole / "opt/netlimit/share/installed"
    ).read_text().split()


def test_one_that_is_killed_can_be_uninstalled(root: None, tmp_path: Path) -> None:
    stub = tmp_path / "stubs/ln"
    stub.parent.mkdir()
    stub.write_text('#!/bin/bash\n[[ $* != */usr/local/bin/netlimit ]] || kill -KILL $PPID\nexec /usr/bin/ln "$@"\n')
    stub.chmod(0o755)
    searched = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"}
    command = ["scripts/install", "--venv", ENVIRONMENT, "--root", tmp_path / "killed"]
    assert subprocess.run(command, capture_output=True, check=False, cwd=ROOT, env=searched).returncode == -9
    assert list((tmp_path / "killed/etc/systemd/system").iterdir())
    run("scripts/uninstall", "--root", tmp_path / "killed", "--purge")
    assert list_files(tmp_path / "killed") == {}


KILLED = """
mount -t tmpfs none /run && mount -t tmpfs none /sys/fs/bpf
stubs=$1/stubs
uninstall() { scripts/uninstall --prefix "$1/limits" "${@:2}" </dev/null; }
(PATH=$stubs:$PATH; uninstall "$@") && exit 9
[[ -n ${2-} ]] || grep -qx teardown "$1/done"
: >"$1/done"
uninstall "$1"
"""


def make_limits(place: Path, teardown: str = "") -> list[Path]:
    """An installation in `limits`, whose command notes in `done` what it is told; a teardown does that, too."""
    target = place / "limits"
    made = make_environment(target, 1)
    command = made / "bin/netlimit"
    command.write_text(f'#!/bin/sh\necho "$1" >>{place}/done\n[ "$1" != teardown ] || {teardown or "exit 0"}\n')
    command.chmod(0o755)
    (target / "bin").symlink_to("venv-20200101000001-77/bin")
    (target / "share/docs").mkdir(parents=True)
    files = [place / "unit", target / "share/docs/page.md"]
    for each in files:
        each.touch()
    (target / "share/installed").write_text("".join(f"{each}\n" for each in files))
    (target / "share/environments").write_text(f"{made.name}\n")
    return files


def make_killer(place: Path, program: str, turn: int) -> None:
    """A program that kills who runs it for so many a time."""
    stub, number = place / "stubs" / program, place / "number"
    stub.parent.mkdir()
    stub.write_text(
        f"#!/bin/bash\necho >>{number}\n[[ $(wc -l <{number}) != {turn} ]] || kill -KILL $PPID\n"
        f'exec /usr/bin/{program} "$@"\n'
    )
    stub.chmod(0o755)


@pytest.mark.parametrize(
    ("program", "turn"), [("mv", 1), ("rm", 2), ("rm", 3), ("rm", 4), ("rm", 5), ("rm", 6), ("rmdir", 1)]
)
def test_an_uninstallation_that_is_killed_is_gone_on_with(root: None, tmp_path: Path, program: str, turn: int) -> None:
    """As it runs a program for so many a time. The limits are out of the kernel by then, and whatever of the command is
    left, it need not run once more."""
    files = make_limits(tmp_path)
    make_killer(tmp_path, program, turn)
    said = run("unshare", "--mount", "bash", "-ec", KILLED, "killed", tmp_path)
    assert "netlimit is gone" in said
    assert "a teardown pauses" in said
    assert "still in the kernel" not in said
    assert not (tmp_path / "limits").exists()
    assert not any(each.exists() for each in files)


@pytest.mark.parametrize(("program", "turn"), [("rm", 5), ("rm", 6), ("rmdir", 1)])
def test_one_that_is_gone_on_with_knows_whether_the_limits_stay(
    root: None, tmp_path: Path, program: str, turn: int
) -> None:
    """As it runs a program for so many a time: the command is gone by then."""
    make_limits(tmp_path)
    make_killer(tmp_path, program, turn)
    said = run("unshare", "--mount", "bash", "-ec", KILLED, "killed", tmp_path, "--keep-rules")
    assert "Its limits are still in the kernel, until the next boot" in said
    assert "a teardown pauses" not in said
    assert not (tmp_path / "limits").exists()


@pytest.mark.parametrize(
    ("teardown", "told"),
    [
        ("exit 3", "netlimit's limits are out of the kernel, and the controller keeps off until `netlimit apply`"),
        ("exit 1", "the limits are still in the kernel"),
    ],
)
def test_one_whose_teardown_is_not_all_done_says_how_far_it_came(
    root: None, tmp_path: Path, teardown: str, told: str
) -> None:
    files = make_limits(tmp_path, teardown)
    command = ["unshare", "--mount", "bash", "-ec", UNKEPT, tmp_path / "limits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert told in done.stderr
    assert (teardown == "exit 3") != ("still in the kernel" in done.stderr)
    assert "netlimit is still installed" in done.stderr
    assert all(each.exists() for each in files)


@pytest.mark.parametrize("name", ["removing", "removing.kept"])
def test_who_installs_after_an_uninstallation_that_was_killed_has_all_of_it(staged: Path, name: str) -> None:
    before, share = set(list_files(staged)), staged / "opt/netlimit/share"
    (share / "installed").rename(share / name)
    for path in (share / "uninstall", staged / "opt/netlimit/bin", share / "environments"):
        path.unlink(missing_ok=True)
    run("scripts/install", "--root", staged, "--venv", ENVIRONMENT)
    assert set(list_files(staged)) == before
    run("scripts/uninstall", "--root", staged, "--purge")
    assert list_files(staged) == {}


def test_one_that_is_killed_as_it_notes_its_environment_is_begun_anew(root: None, tmp_path: Path) -> None:
    (tmp_path / "opt/netlimit/share").mkdir(parents=True)
    (tmp_path / "opt/netlimit/share/environments.new").touch()
    run("scripts/install", "--root", tmp_path, "--venv", ENVIRONMENT)
    assert (tmp_path / "opt/netlimit/bin/netlimit").exists()
