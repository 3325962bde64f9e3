"""A real kernel behind a pipe: this process lives in a network namespace, for iptables handles belong to one.

Calls come as pickles (name, arguments) on standard input, answers go as pickles (error, value) to standard output.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from netlimit.conflicts import HostReport
from netlimit.errors import KernelError
from netlimit.kernel.base import Addresses, Connection, HostFacts, Reading
from netlimit.kernel.linux import LinuxKernel
from netlimit.marks import MarkUse
from netlimit.plan import Step
from netlimit.state import Structure
from netlimit.tree import Queues, SavedRoot, Topology, Usage
from netlimit.tunnels import Hop, Tunnels
from scripts.testbed.lock import wait_for_lock
from tests import warm

MODULE = "tests.kernel.worker"


class RemoteKernel:
    """`LinuxKernel` in another network namespace."""

    def __init__(self, namespace: str, env: dict[str, str] | None = None) -> None:
        """With an environment of its own it imports python-iptables anew, which reads it."""
        self.namespace = namespace
        (calls, self._calls), (self._answers, answers) = _open_pipe(), _open_pipe()
        with calls, answers:
            if env is None:
                self._process: warm.Started | subprocess.Popen[bytes] = warm.start(
                    MODULE, env=os.environ, namespace=namespace, stdin=calls, stdout=answers, stderr=sys.__stderr__
                )
            else:
                command = ["ip", "netns", "exec", namespace, sys.executable, "-m", MODULE]
                self._process = subprocess.Popen(command, stdin=calls, stdout=answers, env={**os.environ, **env})

    def call(self, name: str, *arguments: object) -> Any:
        """Call a method; its KernelError is raised here."""
        pickle.dump((name, arguments), self._calls)
        self._calls.flush()
        error, value = pickle.load(self._answers)  # noqa: S301 - from our own child
        if error:
            raise KernelError(*value)
        return value

    def close(self) -> None:
        """End the process."""
        self._calls.close()
        self._process.wait(60)
        self._answers.close()

    def run(self, *argv: str, stdin: str | None = None) -> str:
        """Run a command in the namespace; what takes the lock of iptables waits for it."""
        command = ["ip", "netns", "exec", self.namespace, *wait_for_lock(argv)]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def probe(self) -> HostFacts:
        return self.call("probe")

    def marks(self, patience: float = 30.0) -> MarkUse:
        return self.call("marks", patience)

    def survey(self, thorough: bool = True) -> HostReport:
        return self.call("survey", thorough)

    def addresses(self) -> Addresses:
        return self.call("addresses")

    def translating(self) -> frozenset[int]:
        return self.call("translating")

    def tunnels(self) -> Tunnels:
        return self.call("tunnels")

    def hops(self, addresses: Any, near: Any = {}) -> Mapping[str, tuple[Hop, ...]]:  # noqa: B006 - it is only read
        return self.call("hops", list(addresses), dict(near))

    def connections(self, ports: Any) -> list[Connection]:
        return self.call("connections", list(ports))

    def structure(self) -> Structure:
        return self.call("structure")

    def readings(self, names: Any) -> dict[str, dict[str, Reading]]:
        return self.call("readings", list(names))

    def leftovers(self) -> tuple[str, ...]:
        return self.call("leftovers")

    def held(self) -> tuple[str, ...]:
        return self.call("held")

    def counts(self, names: Any) -> dict[str, int]:
        return self.call("counts", list(names))

    def topology(self) -> Topology:
        return self.call("topology")

    def queues(self) -> Queues:
        return self.call("queues")

    def usages(self, device: str) -> dict[int, Usage]:
        return self.call("usages", device)

    def save_root(self, device: str) -> SavedRoot:
        return self.call("save_root", device)

    def refused_buckets(self, step: Any) -> Mapping[str, str]:
        return self.call("refused_buckets", step)

    def ingress(self) -> Mapping[str, str]:
        return self.call("ingress")

    def barred(self) -> Mapping[str, str]:
        return self.call("barred")

    def kept_clsacts(self) -> tuple[str, ...]:
        return self.call("kept_clsacts")

    def ingress_readings(self, names: Any) -> dict[str, dict[str, Reading]]:
        return self.call("ingress_readings", list(names))

    def ingress_seen(self, names: Any) -> dict[str, dict[str, int]]:
        return self.call("ingress_seen", list(names))

    def apply(self, step: Step) -> None:
        self.call("apply", step)


def _open_pipe() -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb")


def serve(calls: BinaryIO, answers: BinaryIO) -> None:
    kernel = LinuxKernel()
    while True:
        try:
            name, arguments = pickle.load(calls)  # noqa: S301 - from our own parent
        except EOFError:
            return
        try:
            if name == "exclusive":
                with kernel.exclusive():
                    answer = False, None
            else:
                answer = False, getattr(kernel, name)(*arguments)
        except KernelError as error:
            answer = True, (error.step, error.reason)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # What libraries print must not get between the answers.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, pipe)
