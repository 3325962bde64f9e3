"""Whose addresses netlimit protects by itself."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.kernel import sessions
from scripts.testbed.namespaces import CLIENT, LAN, SERVER, WAN, Lab, Namespace
from scripts.testbed.streams import listen
from tests.e2e.visitors import Sshd, Visitor

READ = (
    "from netlimit.kernel.addresses import read_own; from netlimit.kernel.sessions import read_sessions; "
    "peers, ports = read_sessions(); print(*read_own(), '|', *peers, '|', *ports)"
)
SESSION = f"exec -a '{{title}}' bash -c 'exec 3<>/dev/tcp/{SERVER}/9000; sleep 20; true'"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab, listen(lab.server, 9000):
        yield lab


def read(namespace: Namespace) -> tuple[list[str], list[str], list[str]]:
    own, peers, ports = namespace.run(sys.executable, "-c", READ).stdout.split("|")
    return own.split(), peers.split(), ports.split()


def connect_as(lab: Lab, parent: str, title: str) -> subprocess.Popen[str]:
    """A connection of a process with this title, whose parent has that one."""
    inner = f"( {SESSION.format(title=title)} ); true"
    return lab.gateway.popen("bash", "-c", 'exec -a "$0" bash -c "$1"', parent, inner)


def wait_for(lab: Lab, wanted: list[str], seconds: float = 3) -> list[str]:
    end = time.monotonic() + seconds
    while (found := read(lab.gateway)[1]) != wanted and time.monotonic() < end:
        time.sleep(0.1)
    return found


def test_own_addresses_are_those_of_every_device(lab: Lab) -> None:
    assert WAN in read(lab.gateway)[0]


def test_who_is_logged_in_by_ssh_is_a_peer(lab: Lab) -> None:
    session = connect_as(lab, "sshd: /usr/sbin/sshd -D [listener]", "sshd: root@pts/0")
    try:
        assert wait_for(lab, [SERVER]) == [SERVER]
    finally:
        session.kill()


@pytest.mark.parametrize(
    ("parent", "title"),
    [
        ("sshd: /usr/sbin/sshd -D [listener]", "sshd: [accepted]"),
        ("sshd: /usr/sbin/sshd -D [listener]", "sshd: root [net]"),
        ("bash", "sshd: root@pts/0"),
    ],
)
def test_a_connection_alone_protects_nobody(lab: Lab, parent: str, title: str) -> None:
    session = connect_as(lab, parent, title)
    try:
        for _ in range(5):
            time.sleep(0.1)
            assert read(lab.gateway)[1] == []
    finally:
        session.kill()


def test_the_ports_are_those_on_which_root_s_sshd_listens(lab: Lab) -> None:
    assert read(lab.gateway)[2] == []
    with Sshd(lab.gateway, 2222), Visitor(lab.client, LAN, 2222) as visitor:
        assert read(lab.gateway)[1:] == ([], ["2222"])
        visitor.say("login")
        assert wait_for(lab, [CLIENT]) == [CLIENT]


def test_where_a_session_forwards_to_is_no_peer(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the connections that one process has, those to the port of sshd count."""
    process = tmp_path / "7"
    monkeypatch.setattr(sessions, "_read_sockets", lambda asked: iter(["1", "2"] if asked == process else []))
    session = sessions.Connection("01", 22, "198.51.100.7", 0, "1")
    forwarded = sessions.Connection("01", 40000, "203.0.113.5", 1000, "2")
    assert list(sessions._find_peers(process, [session, forwarded], {22})) == ["198.51.100.7"]


def test_systemd_tells_who_is_logged_in_where_no_process_may_be_looked_into(tmp_path: Path) -> None:
    for name, text in {
        "1": "UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=active\nREMOTE_HOST=198.51.100.7\n",
        "2": "UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=closing\nREMOTE_HOST=198.51.100.8\n",
        "3": "UID=0\nREMOTE=0\nSERVICE=login\nSTATE=active\n",
        "4": "UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=online\nREMOTE_HOST=fe80::1%eth0\n",
        "5": "UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=online\nREMOTE_HOST=admin.example\n",
        "1.ref": "",
    }.items():
        (tmp_path / name).write_text(text)
    assert set(sessions._read_logins(tmp_path)) == {"198.51.100.7", "fe80::1"}
    assert list(sessions._read_logins(tmp_path / "missing")) == []


def test_the_ports_of_sshd_s_configuration(tmp_path: Path) -> None:
    assert sessions._read_configured(tmp_path) == {22}
    (tmp_path / "sshd_config").write_text("#Port 22\nPort 2222\nAddressFamily any\n")
    (tmp_path / "sshd_config.d").mkdir()
    (tmp_path / "sshd_config.d" / "more.conf").write_text("port 2200\n")
    assert sessions._read_configured(tmp_path) == {2222, 2200}
