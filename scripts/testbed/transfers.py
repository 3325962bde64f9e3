"""TCP as fast as it goes, by iperf3.

with transferring(lab.client, lab.server, SERVER, seconds=5) as transfer:
    transfer.report().bits_per_second
"""

from __future__ import annotations

import subprocess
from types import TracebackType
from typing import Self

from scripts.testbed.errors import LabError
from scripts.testbed.namespaces import Namespace, close_pipes
from scripts.testbed.reports import TransferReport

PORT = 5201
PATIENCE = 30.0  # seconds that iperf3's last words may wait behind what is queued


class Transfer:
    """One TCP connection that is kept full: a context manager, which ends it with the block."""

    def __init__(self, receiver: Namespace, sender: Namespace, port: int, *options: str, seconds: float) -> None:
        self.what = f"iperf3 from {sender.role} to {receiver.role}"
        self._limit = seconds + PATIENCE
        self._receiver = _start(receiver, "--server", "--one-off", f"--port={port}", "--forceflush")
        self._await_listening()
        self._sender = _start(sender, "--json", f"--port={port}", *options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._sender, self._receiver):
            process.terminate()
            process.wait()
            close_pipes(process)

    def report(self) -> TransferReport:
        """Waits until it is over and returns what the receiver got. Raises LabError."""
        try:
            said, _ = self._sender.communicate(timeout=self._limit)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{self.what} did not end within {self._limit:g} s.") from error
        return TransferReport.parse(said)

    def _await_listening(self) -> None:
        said = ""
        for line in self._receiver.stdout or ():
            if "listening" in line:
                return
            said += line
        raise LabError(f"{self.what} did not start: {said.strip()}")


def transferring(
    sender: Namespace,
    receiver: Namespace,
    destination: str,
    *,
    seconds: float,
    skip: float = 1,
    source: str | None = None,
    port: int = PORT,
) -> Transfer:
    """Starts to fill a TCP connection for `skip` seconds, which are not counted, and `seconds` more.

    Several at once need a port each. By CUBIC, whatever else the host prefers: one that paces itself would be
    measured instead of the queue.
    """
    options = ["--client", destination, f"--omit={skip:g}", f"--time={seconds:g}", "--congestion=cubic"]
    if source is not None:
        options += ["--bind", source]
    return Transfer(receiver, sender, port, *options, seconds=seconds + skip)


def _start(namespace: Namespace, *options: str) -> subprocess.Popen[str]:
    return namespace.popen("iperf3", *options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
