"""Where a kernel has no sock_diag, its files tell the same of sockets; of UDP too."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from netlimit.kernel.sockets import _FILES, ESTABLISHED, LISTENING, OPEN, Socket, read_listed, read_sockets

_CLOSE = 7
"""The state of a UDP socket that is connected to nobody."""
UDP, TCP = socket.IPPROTO_UDP, socket.IPPROTO_TCP
STATES = {UDP: (ESTABLISHED, _CLOSE), TCP: (LISTENING, *OPEN)}


@pytest.fixture
def ours() -> Iterator[set[tuple[int, str, int]]]:
    """Sockets of all kinds that this process has: the protocol, the near end and its port."""
    with ExitStack() as stack:
        opened = []
        for family, host in (
            (socket.AF_INET, "127.0.0.1"),
            (socket.AF_INET6, "::1"),
            (socket.AF_INET6, "::ffff:127.0.0.1"),
        ):
            for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                far, near = (stack.enter_context(socket.socket(family, kind)) for _ in range(2))
                far.bind((host, 0))
                if kind == socket.SOCK_STREAM:
                    far.listen()
                near.connect(far.getsockname()[:2])
                opened += [far, near]
        yield {
            (
                TCP if each.type == socket.SOCK_STREAM else UDP,
                each.getsockname()[0].removeprefix("::ffff:"),
                each.getsockname()[1],
            )
            for each in opened
        }


def read_files(protocol: int) -> set[Socket]:
    return {
        each
        for family in (socket.AF_INET, socket.AF_INET6)
        for each in read_listed(_FILES[protocol, family], family, STATES[protocol])
    }


@pytest.mark.parametrize("protocol", [UDP, TCP], ids=["udp", "tcp"])
def test_files_tell_what_sock_diag_tells(ours: set[tuple[int, str, int]], protocol: int) -> None:
    wanted = {(near, port) for of, near, port in ours if of == protocol}
    asked = {each._replace(group=0) for each in read_sockets(STATES[protocol], protocol=protocol)}
    asked = {each for each in asked if (each.near, each.near_port) in wanted}
    listed = {each for each in read_files(protocol) if (each.near, each.near_port) in wanted}
    assert {(each.near, each.near_port) for each in listed} == wanted
    assert {each for each in listed if each.inode} == {each for each in asked if each.inode}
    for each in listed:
        if each.inode:
            assert each.owner == os.getuid()


def test_a_connected_socket_of_udp_is_told_with_its_far_end() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as near:
        near.connect(("127.0.0.1", 53))
        host, port = near.getsockname()
        for state, found in ((ESTABLISHED, True), (_CLOSE, False)):
            listed = {*read_listed(_FILES[UDP, socket.AF_INET], socket.AF_INET, [state])}
            inode = os.fstat(near.fileno()).st_ino
            assert (Socket(ESTABLISHED, host, port, "127.0.0.1", 53, os.getuid(), inode) in listed) is found
