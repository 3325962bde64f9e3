"""Who is logged in, where sshd listens, and by which connections this host is managed is found out without a look at
the sockets of others, of which any user can have as many as he likes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from scripts.testbed.namespaces import Lab

HOLD = """
import encodings.idna, os, socket, sys
user, port, accepted, waiting = map(int, sys.argv[1:])
os.setuid(user)
server = socket.create_server((f"127.0.0.{1 + user % 250}", port), backlog=128)
clients = [socket.create_connection(server.getsockname()) for _ in range(accepted)]
served = [server.accept() for _ in range(accepted)]
clients += [socket.create_connection(server.getsockname()) for _ in range(waiting)]
print(flush=True)
input()
"""
ROOT, USER, API = 0, 65534, 65533
PORT = 8750
LIST_ROOT_S = "from netlimit.kernel.sessions import *; print(*sorted({each.near_port for each in list_root_sockets()}))"
LIST_CONNECTIONS = f"""
from netlimit.kernel import connections, sockets
def refuse(asked):
    raise FileNotFoundError
connections._MOST_STRAY = 5
for read in (sockets._read_answers, refuse):
    sockets._read_answers = read
    found = [each.owner for each in connections.list_connections({PORT}, [{ROOT}, {API}])]
    print([found.count(owner) for owner in ({ROOT}, {API}, {USER}, None)])
"""


@pytest.fixture
def lab(root: None) -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


def hold(lab: Lab, user: int, port: int, accepted: int = 0, waiting: int = 0) -> None:
    """A server of a user, with connections that it has accepted, and that it has not."""
    process = lab.gateway.popen(
        *(sys.executable, "-c", HOLD, *map(str, (user, port, accepted, waiting))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"


def test_of_those_that_listen_root_s_are_told(lab: Lab) -> None:
    hold(lab, ROOT, 2022)
    hold(lab, USER, 2023)
    assert lab.gateway.run(sys.executable, "-c", LIST_ROOT_S).stdout == "2022\n"


def test_what_nobody_accepts_is_not_taken_for_root_s(lab: Lab) -> None:
    hold(lab, USER, 2023, waiting=9)
    assert lab.gateway.run(sys.executable, "-c", LIST_ROOT_S).stdout == "\n"


def test_of_connections_those_of_others_are_not_told_and_few_of_those_that_nobody_accepts(lab: Lab) -> None:
    hold(lab, ROOT, PORT, accepted=2)
    hold(lab, API, PORT, accepted=3)
    hold(lab, USER, PORT, accepted=20, waiting=20)
    assert lab.gateway.run(sys.executable, "-c", LIST_CONNECTIONS).stdout == "[2, 3, 0, 5]\n" * 2
