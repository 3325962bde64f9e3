"""Whose addresses netlimit protects by itself."""

import subprocess
import time
from collections.abc import Iterator

import pytest

from scripts.testbed.namespaces import SERVER, WAN, Lab, Namespace
from scripts.testbed.streams import listen

READ = (
    "from netlimit.kernel.addresses import read_addresses as read; found = read(); print(*found.own, '|', *found.peers)"
)
SESSION = f"exec -a '{{title}}' bash -c 'exec 3<>/dev/tcp/{SERVER}/9000; sleep 20; true'"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab, listen(lab.server, 9000):
        yield lab


def read(namespace: Namespace) -> tuple[list[str], list[str]]:
    import sys

    own, _, peers = namespace.run(sys.executable, "-c", READ).stdout.partition("|")
    return own.split(), peers.split()


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
