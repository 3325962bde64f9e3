"""Nobody of ours is in the group root: whoever is may speak to containerd, Podman and CRI-O, who do what root may. What
the controller has to read and to lock, root lets it have, and nobody else."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.gateway import COMMAND
from tests.e2e.stage import GROUP, USERS, Stage
from tests.warm import ROOT

CONTROLLER, API = "netlimit-controller", "netlimit"
AS = f"""
import os, pwd, socket, sys
sys.path.insert(0, {str(ROOT)!r})
from netlimit.cli.privileges import NETWORK, become
from netlimit.kernel import lock, tables
become(pwd.getpwnam(sys.argv[1]), NETWORK if sys.argv[1] == {CONTROLLER!r} else ())
try:
    exec(sys.argv[2])
except Exception as error:
    print(error)
"""
"""Do something as the parts of netlimit do it that are not root: `python -c AS USER CODE`."""
TAKE = "with lock.locked('/run/xtables.lock', 'try it'): print('held')"
AS_ROOT = f"from netlimit.kernel import lock\n{TAKE}"
SOCKET = "/run/engine.sock"
LISTEN = f"""
import os, socket, time
from contextlib import suppress
with suppress(FileNotFoundError):
    os.unlink({SOCKET!r})
listening = socket.socket(socket.AF_UNIX)
listening.bind({SOCKET!r})
os.chmod({SOCKET!r}, 0o660)
listening.listen()
print("listens", flush=True)
time.sleep(60)
"""
CONNECT = f"socket.socket(socket.AF_UNIX).connect({SOCKET!r}); print('connected')"
NAMES = ("/proc/net/ip_tables_names", "/proc/net/ip6_tables_names", "/proc/net/netfilter/nfnetlink_log")


@pytest.fixture(scope="module")
def stage(root: None) -> Iterator[Stage]:
    stage = Stage()
    try:
        stage.shell("iptables-legacy -t mangle -S && ip6tables-legacy -t raw -S")
        prepare(stage)
        yield stage
    finally:
        stage.close()


def act(stage: Stage, user: str, code: str) -> str:
    """What it says who has become that user."""
    done = stage.run(sys.executable, "-c", AS, user, code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def prepare(stage: Stage, *options: str) -> str:
    done = stage.netlimit("prepare", *options)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("user", [CONTROLLER, API])
def test_none_of_them_is_in_it(stage: Stage, user: str) -> None:
    assert act(stage, user, "print(os.getgroups(), os.getresgid())") == f"[{GROUP}] ({GROUP}, {GROUP}, {GROUP})"


@pytest.mark.parametrize("user", [CONTROLLER, API])
def test_a_socket_of_that_group_refuses_them(stage: Stage, user: str) -> None:
    with stage.running(sys.executable, "-c", LISTEN) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listens\n"
        assert stage.shell(f"stat -c '%a %U %G' {SOCKET}") == "660 root root\n"
        assert act(stage, user, CONNECT) == "[Errno 13] Permission denied"
        done = stage.run(sys.executable, "-c", f"import socket; {CONNECT}")
        assert done.stdout == "connected\n"


def test_what_the_kernel_shows_to_root_it_shows_to_the_controller_too(stage: Stage) -> None:
    stage.shell(f"chown root {' '.join(NAMES)}")
    said = act(stage, CONTROLLER, "tables.list_tables(4)")
    assert "only root may read /proc/net/ip_tables_names" in said
    assert "`netlimit prepare`" in said
    assert prepare(stage) == ""
    assert act(stage, CONTROLLER, "print(tables.list_tables(4), tables.list_tables(6))") == "['mangle'] ['raw']"
    assert "only root may read" in act(stage, API, "tables.list_tables(4)")
    shown = stage.shell(f"stat -c '%a %u %g' {' '.join(NAMES)}")
    assert shown.split("\n")[:-1] == [f"440 {USERS[CONTROLLER]} 0"] * 3


def test_and_to_another_one_when_that_is_prepared_for(stage: Stage) -> None:
    prepare(stage, "--user", "nobody")
    assert "only root may read" in act(stage, CONTROLLER, "tables.list_tables(4)")
    prepare(stage)
    assert act(stage, CONTROLLER, "print(tables.list_tables(4))") == "['mangle']"


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
@pytest.mark.parametrize("mode", [None, 600, 640])
def test_the_lock_of_iptables_is_for_root_and_the_controller(stage: Stage, kind: str, mode: int | None) -> None:
    """Also where iptables has made it before (0600), or an earlier version, for root's group (0640); in ramfs no list
    says who else may open a file. The API, in the group of the controller, could keep all others from writing."""
    made = f"touch /run/xtables.lock && chmod {mode} /run/xtables.lock" if mode else "true"
    python = shlex.join([sys.executable, "-c", AS])
    command = shlex.join([sys.executable, *COMMAND, "prepare"])
    script = f"""
        mount -t {kind} -o mode=755 none /run
        mkdir -p /run/netlimit/bpf && mount -t bpf bpf /run/netlimit/bpf  # else prepare tells that it is apart
        {made}
        {command} && {command}
        for each in {CONTROLLER} {API} nobody; do {python} $each {shlex.quote(TAKE)}; done
        {shlex.join([sys.executable, "-c", AS_ROOT])}
        iptables-legacy -w 1 -t mangle -A OUTPUT -j RETURN && iptables-legacy -w 1 -t mangle -F OUTPUT
        ls -n /run/xtables.lock
    """
    done = stage.run("unshare", "--mount", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr
    controller, *others, as_root, shown = done.stdout.splitlines()
    assert (controller, as_root, done.stderr) == ("held", "held", "")
    assert len(others) == 2
    assert all("the lock file /run/xtables.lock cannot be opened: Permission denied" in said for said in others)
    assert shown.split()[0].rstrip("+") == "-rw-r-----"
    assert shown.split()[2:4] == [str(0 if kind == "tmpfs" else USERS[CONTROLLER]), "0"]


def test_a_lock_that_it_may_not_have_is_told_by_both(stage: Stage) -> None:
    stage.shell("rm -f /run/xtables.lock && : >/run/xtables.lock && chmod 600 /run/xtables.lock")
    stage.shell("ln /run/xtables.lock /run/another")
    assert "/run/xtables.lock cannot be given to netlimit-controller: " in prepare(stage)
    assert "`netlimit prepare`, as root, gives it to the controller" in act(stage, CONTROLLER, TAKE)
    stage.shell("rm /run/another")
    assert prepare(stage) == ""
    assert act(stage, CONTROLLER, TAKE) == "held"


def test_who_starts_a_second_controller_as_somebody_else_takes_nothing_from_the_first(stage: Stage) -> None:
    hold = "from netlimit.kernel.linux import LinuxKernel\nimport time\nwith LinuxKernel().sole():\n"
    with stage.running(sys.executable, "-c", f"{hold}    print('held', flush=True)\n    time.sleep(60)") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        prepare(stage)
        done = stage.netlimit("controller", "--user", "nobody")
        assert "another controller runs here already" in done.stderr
        assert act(stage, CONTROLLER, "print(tables.list_tables(4))") == "['mangle']"
        assert act(stage, CONTROLLER, TAKE) == "held"


def test_no_unit_is_in_it() -> None:
    units = sorted((ROOT / "packaging/systemd").glob("*"))
    assert len(units) > 5
    for unit in units:
        lines = unit.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("SupplementaryGroups=", "Group=root", "Group=0"))]
