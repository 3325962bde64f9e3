"""A network namespace with a real kernel in it, and one in memory beside it."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import pytest

from netlimit.kernel.base import Kernel, observe
from netlimit.kernel.capabilities import WRITER
from netlimit.kernel.fake import FakeKernel
from netlimit.packet import Packet
from netlimit.plan import diff
from netlimit.state import State
from tests.kernel.worker import RemoteKernel

HERE, THERE = "10.1.0.1", "10.1.0.2"
HERE6, THERE6 = "fd00:1::1", "fd00:1::2"
WRITERS: dict[str, dict[str, str]] = {"usual": {}, "restore": {WRITER: "restore"}}


@pytest.fixture(scope="session")
def namespace(root: None) -> Iterator[str]:
    """A namespace with one device, behind which packets vanish."""
    name = f"nl-g-{os.getpid()}-{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    lines = [
        "link set lo up",
        "link add near type veth peer name far",
        "link set near up",
        "link set far up",
        f"addr add {HERE}/16 dev near",
        f"addr add {HERE6}/64 dev near nodad",
        f"neigh replace {THERE} lladdr 02:00:00:00:00:02 nud permanent dev near",
        f"neigh replace {THERE6} lladdr 02:00:00:00:00:02 nud permanent dev near",
    ]
    subprocess.run(["ip", "-n", name, "-batch", "-"], input="\n".join(lines), text=True, check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def untouched(root: None) -> Iterator[RemoteKernel]:
    """A kernel in a namespace in which nothing has been done yet."""
    name = f"nl-g-{os.getpid()}-{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    kernel = RemoteKernel(name)
    yield kernel
    kernel.close()
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture(scope="session")
def worker(namespace: str) -> Iterator[RemoteKernel]:
    kernel = RemoteKernel(namespace)
    yield kernel
    kernel.close()


@pytest.fixture
def linux(worker: RemoteKernel) -> Iterator[RemoteKernel]:
    """The real kernel, empty before and afterwards."""
    assert worker.structure().chains == {}
    yield worker
    wipe(worker)


@pytest.fixture(scope="session")
def workers(namespace: str) -> Iterator[dict[str, RemoteKernel]]:
    made = {name: RemoteKernel(namespace, env) for name, env in WRITERS.items()}
    yield made
    for kernel in made.values():
        kernel.close()


@pytest.fixture(params=WRITERS)
def writing(request: pytest.FixtureRequest, workers: dict[str, RemoteKernel]) -> Iterator[RemoteKernel]:
    """A kernel that is written in one of the two ways, empty before and afterwards."""
    yield workers[request.param]
    wipe(workers[request.param])


@pytest.fixture(params=["fake", "linux"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """One suite over both."""
    return FakeKernel() if request.param == "fake" else request.getfixturevalue("linux")


@pytest.fixture
def emit(kernel: Kernel) -> Callable[[int, int], None]:
    """Send UDP packets of some IP length from this host to another; what is dropped on the way is no error."""

    def send(count: int, length: int) -> None:
        if isinstance(kernel, FakeKernel):
            ends = ip_address(HERE), ip_address(THERE)
            packet = Packet(*ends, port=9, source_port=40_000, out_interface="near", length=length, opens=True)
            for _ in range(count):
                kernel.trace(packet)
        else:
            script = (
                "import socket, sys, contextlib\n"
                "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                f"for _ in range({count}):\n"
                "    with contextlib.suppress(PermissionError):\n"
                f"        sock.sendto(bytes({length - 28}), ('{THERE}', 9))\n"
            )
            kernel.run("python3", "-c", script)

    return send


def wipe(kernel: RemoteKernel) -> None:
    """Take away all of ours; then whatever a test has left."""
    for step in diff(State(), observe(kernel)).steps:
        kernel.apply(step)
    for prefix in ("iptables", "ip6tables"):
        for table in ("raw", "mangle", "nat", "filter", "security"):
            kernel.run(f"{prefix}-legacy", "-t", table, "-F")
            kernel.run(f"{prefix}-legacy", "-t", table, "-X")
    kernel.run("ipset", "destroy")
