"""`netlimit` as a shell runs it, with its imports done already: a short program asks for one over a socket.

They have the shell's namespaces, directory and settings, but no part in its jobs: what goes on is started as ever.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread

from tests import warm
from tests.warm import ROOT

MODULE = "netlimit.cli.main"
_GOING_ON = {"api", "controller", "guard", "limiter", "serve"}
_SPACES = ("/proc/self/ns/net", "/proc/self/ns/mnt")
_PROGRAM = f"""#!{sys.executable} -IS
import json, os, socket, sys
words = ["{MODULE}", *sys.argv[1:]]
if {{*sys.argv[1:2]}} & {_GOING_ON}:
    os.environ["PYTHONPATH"] = "{ROOT}"
    os.execv("{sys.executable}", ["{sys.executable}", "-m", *words])
os.umask(umask := os.umask(0))
order = {{"argv": words, "env": dict(os.environ), "cwd": os.getcwd(), "namespace": "", "umask": umask}}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect("{{place}}")
    spaces = [os.open(space, os.O_RDONLY) for space in {_SPACES}]
    socket.send_fds(asked, [json.dumps(order).encode()], [0, 1, 2, *spaces])
    asked.recv(32)
    status = int(asked.recv(32))
sys.exit(status if status >= 0 else 128 - status)
"""
_LARGEST_ORDER = 2**17


@contextmanager
def offered(program: Path) -> Iterator[None]:
    """Make the program; it does its work until the block ends."""
    place = program.with_name("asked")
    program.write_text(_PROGRAM.replace("{place}", str(place)))
    program.chmod(0o755)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listening:
        listening.bind(str(place))
        listening.listen()
        thread = Thread(target=_hand_over, args=[listening], daemon=True)
        thread.start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def _hand_over(listening: socket.socket) -> None:
    while True:
        try:
            asked, _ = listening.accept()
        except OSError:  # it listens no more
            return
        with asked:
            order, descriptors, _, _ = socket.recv_fds(asked, _LARGEST_ORDER, 5)
            given = [*descriptors[:3], asked.fileno(), *descriptors[3:]]
            warm.hand_over(order, given)
            for each in descriptors:
                socket.close(each)
