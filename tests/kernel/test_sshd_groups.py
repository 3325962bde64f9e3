"""Where sshd listens is known to who may look into nobody's process: by the control group in which it listens."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from netlimit.kernel.cgroups import find_groups
from scripts.testbed.namespaces import LAN, Lab, close_pipes
from tests.e2e.visitors import MOUNT_GROUPS, Groups, Sshd, Visitor, enter

NOBODY = 65534
READ = f"""
import os
from pathlib import Path
from netlimit.kernel.sessions import read_sessions
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
found = read_sessions()
print(*sorted({{door.port for door in found.doors}}))
print(*found.notes)
"""
LISTEN = "import socket, sys; server = socket.create_server(('', int(sys.argv[1]))); print(flush=True); input()"
PORT, OTHER = 2222, 8080


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture
def groups() -> Iterator[Groups]:
    with Groups() as groups:
        yield groups


def read(lab: Lab) -> tuple[list[str], str]:
    """The ports of sshd, and the notes, for a user without any rights."""
    script = f'{MOUNT_GROUPS} && exec "$@"'
    ports, notes = lab.gateway.run("sh", "-c", script, "sh", sys.executable, "-c", READ).stdout.split("\n")[:2]
    return ports.split(), notes


@contextmanager
def run(lab: Lab, group: Path, script: str, *words: str) -> Iterator[None]:
    """A program of root's in a control group."""
    command = (*enter(group), sys.executable, "-c", script, *words)
    process = lab.gateway.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        yield
    finally:
        process.kill()
        process.wait(60)
        close_pipes(process)


@pytest.mark.parametrize("name", ["ssh.service", "sshd.service", "ssh@7-10.0.0.1:22.service", "openrc.sshd", "own"])
def test_where_its_group_listens_is_sshd_s_port(lab: Lab, groups: Groups, name: str) -> None:
    group = groups.make(name)
    with Sshd(lab.gateway, PORT, group=group), run(lab, groups.make("nginx.service"), LISTEN, str(OTHER)):
        assert read(lab) == ([str(PORT)], "")


def test_what_others_listen_with_in_a_group_that_all_share_is_not_sshd_s(lab: Lab, groups: Groups) -> None:
    group = groups.make("container")
    with Sshd(lab.gateway, PORT, group=group), run(lab, group, LISTEN, str(OTHER)):
        assert read(lab)[0] == []


@pytest.mark.parametrize("path", ["user.slice/ssh.service", "user.slice/user-0.slice/session-1.scope"])
def test_what_listens_in_a_session_is_not_sshd_s(lab: Lab, groups: Groups, path: str) -> None:
    with Sshd(lab.gateway, PORT, group=groups.make(path)):
        assert read(lab)[0] == []


def test_what_a_user_runs_in_its_group_takes_nothing_away(lab: Lab, groups: Groups) -> None:
    """Where logind does not run, those who have logged in stay in the group of sshd."""
    group, of_user = groups.make("own"), f"import os, socket, sys; os.setuid({NOBODY}); {LISTEN}"
    with Sshd(lab.gateway, PORT, group=group), run(lab, group, of_user, str(OTHER)):
        assert read(lab) == ([str(PORT)], "")


def test_a_unit_of_systemd_s_is_sshd_s_though_no_process_of_it_runs(tmp_path: Path) -> None:
    """As with ssh.socket, by which systemd itself listens. The numbers are those of the directories."""
    (tmp_path / "cgroup.controllers").touch()
    unit = tmp_path / "system.slice" / "ssh.socket"
    unit.mkdir(parents=True)
    assert find_groups([], lambda _: False, [tmp_path / "missing", tmp_path]) == {unit.stat().st_ino}


@pytest.mark.parametrize("told", ["1:name=systemd:/ssh.service\n", "0::/\n", "0::/../ssh.service\n", "", None])
def test_without_a_group_of_its_own_none_is_known(tmp_path: Path, told: str | None) -> None:
    """Version 1 alone, a container in which all share one, one outside of it, and a process that has ended."""
    process, mount = tmp_path / "7", tmp_path / "cgroup"
    (mount / "ssh.service").mkdir(parents=True)
    (mount / "cgroup.controllers").touch()
    (mount / "cgroup.procs").touch()
    process.mkdir()
    if told is not None:
        (process / "cgroup").write_text(told)
    assert find_groups([process], lambda _: False, [mount]) == set()


def test_it_is_told_where_nothing_says_on_which_port_sshd_listens(lab: Lab) -> None:
    """Of one that shares the group of everybody."""
    with Sshd(lab.gateway, PORT):
        ports, notes = read(lab)
        assert ports == []
        assert "sshd runs" in notes
        assert "`netlimit prepare`, as root, while sshd listens" in notes


def test_who_may_look_into_sshd_is_told_nothing(lab: Lab) -> None:
    asks = "from netlimit.kernel.sessions import read_sessions; print(*read_sessions().notes)"
    with Sshd(lab.gateway, PORT), Visitor(lab.client, LAN, PORT) as visitor:
        assert visitor.say("login")
        assert lab.gateway.run(sys.executable, "-c", asks).stdout.strip() == ""


def test_a_login_of_which_only_the_name_is_known_is_told(lab: Lab) -> None:
    """With UseDNS, logind has the name; and the socket of the session cannot be seen."""
    with tempfile.TemporaryDirectory() as directory, Sshd(lab.gateway, PORT):
        Path(directory).chmod(0o755)
        Path(directory, "1").write_text("UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=active\nREMOTE_HOST=admin.example\n")
        asks = READ.replace("read_sessions()", f"read_sessions(logins=Path({directory!r}))")
        said = lab.gateway.run(sys.executable, "-c", asks).stdout
    assert "admin.example" in said
    assert "UseDNS" in said
