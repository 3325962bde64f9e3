"""A port by which the gateway is managed is so where it is managed, and not for what else uses its number."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from scripts.testbed.namespaces import LAN, SERVER, WAN, Lab, Namespace, close_pipes
from tests.e2e.gateway import Gateway
from tests.e2e.visitors import Sshd, Visitor

PORT, API = 2222, 8750
NOBODY = 65534
ECHO = """
import os, socket, sys
port, address, user, accepts = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "accepts"
os.setgid(user); os.setuid(user)
with socket.create_server((address, port)) as server:
    print("ready", flush=True)
    while accepts:
        connection, _ = server.accept()
        with connection:
            while line := connection.recv(100):
                connection.sendall(line)
    sys.stdin.read()
"""
CALL = """
import encodings.idna, os, socket, struct, sys
os.setgid(65534); os.setuid(65534)
s = socket.socket()
# It ends at once: nothing is left of it on the port, on which others are to listen next.
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was served here before may be closing still
s.settimeout(2)
s.bind((sys.argv[2], int(sys.argv[3])))
s.connect((sys.argv[1], 9000))
s.settimeout(0.7)
print("ready", flush=True)
for line in sys.stdin:
    s.sendall(line.encode())
    try: print(s.recv(100).decode(), end="", flush=True)
    except TimeoutError: print("silence", flush=True)
"""


@contextmanager
def run(namespace: Namespace, code: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    process = namespace.popen(
        sys.executable, "-c", code, *map(str, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield process
    finally:
        process.kill()
        process.wait(60)
        close_pipes(process)


def listen(
    lab: Lab, address: str, port: int = PORT, user: int = NOBODY, accepts: str = "accepts"
) -> AbstractContextManager[subprocess.Popen[str]]:
    return run(lab.gateway, ECHO, port, address, user, accepts)


@pytest.fixture(scope="module", autouse=True)
def surroundings(lab: Lab) -> Iterator[None]:
    """An sshd at one address; before the controller begins, which the API listens beside at that address alone."""
    with pytest.MonkeyPatch.context() as patch, Sshd(lab.gateway, PORT, LAN):
        patch.setenv("NETLIMIT_LISTEN", f"{LAN}:{API}")
        yield


def held(lab: Lab) -> str:
    return lab.gateway.run("ipset", "list", "nl-open4").stdout.partition("Members:")[2]


@pytest.mark.parametrize("port", [PORT, API])
@pytest.mark.parametrize("user", [NOBODY, 0], ids=["a user", "root"])
def test_another_server_s_connections_at_another_address_are_not_spared(
    gateway: Gateway, lab: Lab, port: int, user: int
) -> None:
    with (
        listen(lab, WAN, port, user),
        Visitor(lab.server, WAN, port, SERVER) as stranger,
        Visitor(lab.server, LAN, PORT, SERVER) as managing,
    ):
        assert stranger.say("before")
        assert managing.say("before")
        gateway.put({"target": SERVER, "action": "block"})
        assert managing.say("after")
        assert not stranger.say("after")
        assert f"tcp:{port},{WAN}" not in held(lab)


def test_nor_are_those_that_its_server_has_not_accepted_nor_those_that_a_user_opens_from_the_port(
    gateway: Gateway, lab: Lab
) -> None:
    gateway.put({"target": "10.9.9.9", "action": "block"})
    with run(lab.server, ECHO, 9000, "", 0, "accepts"), run(lab.gateway, CALL, SERVER, WAN, PORT) as caller:
        assert caller.stdin is not None
        assert caller.stdout is not None
        gateway.put({"target": SERVER, "action": "block"})
        caller.stdin.write("after\n")
        caller.stdin.flush()
        assert caller.stdout.readline().strip() == "silence"
        assert f",{WAN}" not in held(lab)
    gateway.clear()
    with listen(lab, WAN, accepts="waits"), Visitor(lab.server, WAN, PORT, SERVER) as stranger:
        assert stranger.connected
        gateway.put({"target": SERVER, "action": "block"})
        assert f",{WAN}" not in held(lab)


def test_nor_is_a_server_that_comes_after_an_sshd_that_has_ended(gateway: Gateway, lab: Lab) -> None:
    """Where sshd listened the door stays, for the connections that it served."""
    with Sshd(lab.gateway, 2223):

        def is_known() -> bool:
            (status,) = gateway.store.hosts()
            return 2223 in status.management

        gateway.wait(is_known, "the second sshd to be known")
    for accepts in ("accepts", "waits"):
        with listen(lab, WAN, 2223, accepts=accepts), Visitor(lab.server, WAN, 2223, SERVER) as stranger:
            assert stranger.connected
            gateway.put({"target": SERVER, "action": "block"})
            assert not (accepts == "accepts" and stranger.say("after"))
            assert "tcp:" not in held(lab)
        gateway.clear()


def test_the_api_s_connections_at_its_own_address_are_spared(gateway: Gateway, lab: Lab) -> None:
    with listen(lab, LAN, API, user=0), Visitor(lab.server, LAN, API, SERVER) as client:
        assert client.say("before")
        gateway.put({"target": SERVER, "action": "block"})
        assert client.say("after")
