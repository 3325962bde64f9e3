"""Programs of netlimit that need not import it first: most of what a short one costs is importing.

A process imports what they need, and forks itself for each program. It is a process of its own, in a network
namespace if asked to, with all that a program is started with. What is about the start of a process (how it gives up
rights, and what it then still finds to import) is tested with processes that start as any does.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
NETLIMIT = (
    "alembic.command",
    "alembic.config",
    "httpx",
    "iptc",
    "netlimit.cli.doctor",
    "netlimit.cli.main",
    "netlimit.controller",
    "netlimit.kernel.capabilities",
    "netlimit.kernel.fake",
    "netlimit.kernel.linux",
    "netlimit.store",
    "pyroute2",
    "rich.live",
)
"""What commands, controllers and guards need."""
API = (
    *NETLIMIT,
    *("anyio._backends._asyncio", "api.app", "api.bootstrap", "api.server", "encodings.idna", "uvicorn.main"),
)
"""What a program needs that serves the API, too."""
_LARGEST_ORDER = 2**20
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2


@dataclass
class Started:
    """A program that runs, as `subprocess.Popen` has it."""

    args: list[str]
    answers: socket.socket = field(repr=False)
    pid: int = 0
    returncode: int | None = None
    stdin: IO[str] | None = None
    stdout: IO[str] | None = None
    stderr: IO[str] | None = None

    def __post_init__(self) -> None:
        self.pid = self._read_number()

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that has killed it; None while it runs."""
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        status = self._await(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Tell it to end, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _await(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.answers.settimeout(timeout)
            try:
                self.returncode = self._read_number()
            except (BlockingIOError, TimeoutError):
                return None
            self.answers.close()
        return self.returncode

    def _read_number(self) -> int:
        return int(self.answers.recv(32))


def start(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    cwd: Path = ROOT,
    namespace: str = "",
    stdin: IO[Any],
    stdout: IO[Any],
    stderr: IO[Any],
    imported: Sequence[str] = NETLIMIT,
) -> Started:
    """`python -m module arguments…`, in a session of its own, with these modules imported already."""
    order = {"argv": [module, *arguments], "env": dict(env), "cwd": str(cwd), "namespace": namespace}
    # Whole messages: a pid and a status that wait together are not to be read as one number.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        descriptors = [each.fileno() for each in (stdin, stdout, stderr, theirs)]
        socket.send_fds(_keep_warm(tuple(imported)), [json.dumps(order).encode()], descriptors)
    return Started([module, *arguments], ours)


def hand_over(order: bytes, descriptors: Sequence[int], imported: Sequence[str] = NETLIMIT) -> None:
    """Have a program run for another process that has made the order: with these for stdin, stdout and stderr, one at
    which that process is answered (its pid, and then its status), and its network and mount namespaces."""
    socket.send_fds(_keep_warm(tuple(imported)), [order], descriptors)


def run(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    cwd: Path = ROOT,
    namespace: str = "",
    given: str = "",
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """The same to its end, with `given` to read. Raises subprocess.TimeoutExpired."""
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        stdin.write(given)
        stdin.seek(0)
        process = start(module, *arguments, env=env, cwd=cwd, namespace=namespace, stdin=stdin, stdout=out, stderr=err)
        try:
            status = process.wait(timeout)
        except BaseException:
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(process.args, status, out.read(), err.read())


@cache
def _keep_warm(imported: tuple[str, ...]) -> socket.socket:
    """The process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    command = [sys.executable, "-W", "error", "-m", "tests.warm", str(number), *imported]
    with theirs:
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[number], stdin=subprocess.DEVNULL)
    atexit.register(lambda: (ours.close(), process.wait(60)))
    return ours


def await_order(orders: socket.socket) -> None:
    """Fork at every order. This returns in the forks, which are to run `sys.argv`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, _LARGEST_ORDER, 6)
        if not text:
            os._exit(0)
        if os.fork() == 0:
            break
        for each in descriptors:
            os.close(each)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    orders.close()
    with socket.socket(fileno=descriptors[3]) as answers:
        child = os.fork()
        if child:
            answers.send(b"%d" % child)
            _, status = os.waitpid(child, 0)
            with suppress(BrokenPipeError):  # nobody waits for it any more
                answers.send(b"%d" % os.waitstatus_to_exitcode(status))
            os._exit(0)
    become(json.loads(text), descriptors[:3], descriptors[4:])


def become(order: Mapping[str, Any], descriptors: list[int], spaces: list[int]) -> None:
    os.setsid()
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
        os.close(each)
    open_streams()
    if order["namespace"]:
        enter(order["namespace"])
    for space in spaces:
        if ctypes.CDLL(None, use_errno=True).setns(space, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(space)
    os.umask(order.get("umask", os.umask(0)))
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["argv"]


def open_streams() -> None:
    """As at the start of Python: whether one can be sought in, or is a terminal, is found out when it is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        former = getattr(sys, name)
        stream = open(  # noqa: SIM115
            number,
            "w" if number else "r",
            buffering=1 if name == "stderr" else -1,
            encoding=former.encoding,
            errors=former.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def enter(namespace: str) -> None:
    """Go where `ip netns exec` goes, with the namespace's own /sys. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(failed: int) -> None:
        if failed:
            raise OSError(ctypes.get_errno(), f"{namespace}: {os.strerror(ctypes.get_errno())}")

    with open(f"/run/netns/{namespace}") as place:
        must(libc.setns(place.fileno(), _CLONE_NEWNET))
    must(libc.unshare(_CLONE_NEWNS))
    must(libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None))
    libc.umount2(b"/sys", _MNT_DETACH)
    must(libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # no fork is to look through all of it for garbage
    await_order(socket.socket(fileno=int(sys.argv[1])))
    sys.modules.pop(sys.argv[0], None)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
