"""Starts traffic in a namespace of a lab and returns what was counted.

with receive(lab.server, 5000) as receiver:
    send(lab.client, SERVER, 5000, rate=1000, seconds=6)
receiver.report().delivered(after=1, during=5).packets_per_second
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from scripts.testbed.errors import LabError
from scripts.testbed.namespaces import LAN_MAC, Lab, Namespace, close_pipes
from scripts.testbed.reports import (
    ConnectReport,
    FloodReport,
    ListenReport,
    MeterReport,
    ReceiveReport,
    SendReport,
)

TRAFFIC = "scripts.testbed.traffic"
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0  # seconds that traffic without a time of its own may last
SINK, SINK_MAC = "10.2.255.254", "02:00:00:02:ff:fe"
"""Nobody's address on the server's leg; once it is open, the server's link counts what comes for it and drops it."""

Report = TypeVar("Report", SendReport, ReceiveReport, FloodReport, ConnectReport, ListenReport, MeterReport)


def _launch(namespace: Namespace, argv: Sequence[str]) -> subprocess.Popen[str]:
    return namespace.popen(
        *(sys.executable, "-m", TRAFFIC, *argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )


class Stream(Generic[Report]):
    """Traffic that is under way: a context manager, which stops it at the end of the block."""

    launch: ClassVar[Callable[[Namespace, Sequence[str]], subprocess.Popen[str]]] = staticmethod(_launch)
    """Starts the tool, with pipes to it. Whoever starts many may have a way that takes less time."""

    def __init__(self, namespace: Namespace, parse: Callable[[dict[str, Any]], Report], *argv: str) -> None:
        self.what = f"`traffic {shlex.join(argv)}` in {namespace.role}"
        self._parse: Callable[[dict[str, Any]], Report] = parse
        self._report: Report | None = None
        self._process = type(self).launch(namespace, argv)
        self._await_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            self._process.terminate()

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def report(self) -> Report:
        """Waits until it has counted and returns what; LabError when it failed.

        A sender has at its end, `connect` as soon as all connections are decided, and those that only
        wait for traffic (`receive`, `listen`) when they are stopped, or at their time limit.
        """
        if self._report is None:
            line = self._process.stdout.readline() if self._process.stdout else ""
            if not line:
                raise LabError(f"{self.what} failed: {self._errors()}")
            self._report = self._parse(json.loads(line))
        return self._report

    def stop(self) -> Report:
        """Ends it now and returns what was counted until then; once it has ended, only that."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            return self.report()
        finally:
            self._process.wait()
            close_pipes(self._process)

    def _await_ready(self) -> None:
        line = self._process.stderr.readline() if self._process.stderr else ""
        if line != "ready\n":
            raise LabError(f"{self.what} did not start: {(line + self._errors()).strip()}")

    def _errors(self) -> str:
        return (self._process.stderr.read() if self._process.stderr else "").strip()


def send(
    namespace: Namespace,
    destination: str,
    port: int = 9000,
    *,
    rate: float | None,
    count: int | None = None,
    seconds: float | None = None,
    size: int = 128,
    sources: Sequence[str] = (),
    source_port: int = 0,
) -> SendReport:
    """Sends UDP to the end (see `sending`) and returns what was sent."""
    with sending(
        *(namespace, destination, port),
        rate=rate,
        count=count,
        seconds=seconds,
        size=size,
        sources=sources,
        source_port=source_port,
    ) as stream:
        return stream.report()


def sending(
    namespace: Namespace,
    destination: str,
    port: int = 9000,
    *,
    rate: float | None,
    count: int | None = None,
    seconds: float | None = None,
    size: int = 128,
    sources: Sequence[str] = (),
    source_port: int = 0,
) -> Stream[SendReport]:
    """Starts to send UDP packets of `size` IP bytes, `rate` a second in all, from `sources` in turn.

    Give `count` packets or `seconds`. Without a rate, `count` packets leave at once. A source must be an
    address of the namespace (Lab.add_client_addresses).
    """
    return Stream(
        namespace,
        lambda found: SendReport(**found),
        *("send", destination, f"--port={port}", f"--size={size}", f"--source-port={source_port}"),
        *_given(rate=rate, count=count, seconds=seconds),
        *(f"--source={source}" for source in sources),
        *_bounds((seconds or (count or 0) / (rate or 1e5)) + LIMIT),
    )


def receive(
    namespace: Namespace, port: int = 9000, *, answer: bool = False, limit: float = LIMIT
) -> Stream[ReceiveReport]:
    """Counts UDP packets for `port`, v4 and v6, until stopped or for `limit` seconds; it is up on return.

    answer: sends one byte back for each, so that connection tracking sees an answered flow.
    """
    flags = ("--answer",) if answer else ()
    return Stream(namespace, _received, "receive", f"--port={port}", *flags, *_bounds(limit))


def flood(
    lab: Lab,
    *,
    seconds: float = 2,
    sources: str = "10.64.0.0/16",
    destination: str = SINK,
    size: int = 64,
    core: int | None = None,
) -> tuple[FloodReport, int]:
    """Floods from the client through the gateway; what was sent at which cost, and how much was forwarded.

    By default to an address on the server's leg that belongs to nobody: the server's link drops it at once,
    so that the cost is the gateway's (and the sender's). `core`: all runs on it; default the last.
    """
    open_sink(lab)
    before = lab.server.received_packets("eth0")
    with Stream(
        lab.client,
        lambda found: FloodReport(**found),
        *("flood", destination, f"--sources={sources}", f"--gateway-mac={LAN_MAC}", f"--size={size}"),
        *_given(seconds=seconds, core=core),
    ) as stream:
        report = stream.report()
    return report, lab.server.received_packets("eth0") - before


def open_sink(lab: Lab) -> None:
    """Lets the gateway send on what comes for SINK: traffic that costs the other end nothing."""
    lab.gateway.ip(f"neigh replace {SINK} lladdr {SINK_MAC} nud permanent dev wan")


def metering(
    namespace: Namespace, device: str = "eth0", *, every: float = 0.1, limit: float = LIMIT
) -> Stream[MeterReport]:
    """Reads what a device has received, `every` so many seconds, until stopped or for `limit` seconds."""
    return Stream(
        namespace,
        lambda found: MeterReport(**found),
        *("meter", f"--device={device}", f"--every={every}"),
        *_bounds(limit),
    )


def connect(
    namespace: Namespace,
    destination: str,
    port: int = 9000,
    *,
    count: int = 1,
    rate: float | None = None,
    sources: Sequence[str] = (),
    wait: float = 0.9,
    limit: float = LIMIT,
) -> Stream[ConnectReport]:
    """Opens `count` TCP connections from `sources` in turn, `rate` a second or all at once.

    `report()` returns when each is established, refused, or has had `wait` seconds (below one second its SYN
    is sent only once). They are held until `stop()`, or the end of a `with` block, or for `limit` seconds.
    """
    return Stream(
        namespace,
        lambda found: ConnectReport(**found),
        *("connect", destination, f"--port={port}", f"--count={count}", f"--wait={wait}"),
        *_given(rate=rate),
        *(f"--source={source}" for source in sources),
        *_bounds(limit),
    )


def listen(namespace: Namespace, port: int = 9000, *, limit: float = LIMIT) -> Stream[ListenReport]:
    """Accepts TCP connections on `port`, v4 and v6, and holds them; it is up on return."""
    return Stream(namespace, lambda found: ListenReport(**found), "listen", f"--port={port}", *_bounds(limit))


def ping(
    namespace: Namespace, destination: str, *, count: int = 1, interval: float = 0.01, source: str | None = None
) -> int:
    """Sends `count` ICMP echo requests, v4 or v6, and returns how many were answered within a second."""
    return len(round_trips(namespace, destination, count=count, interval=interval, source=source))


def round_trips(
    namespace: Namespace, destination: str, *, count: int = 1, interval: float = 0.01, source: str | None = None
) -> list[float]:
    """Sends `count` ICMP echo requests, v4 or v6, `interval` seconds apart; milliseconds of each that was answered
    within a second."""
    origin = ("-I", source) if source else ()
    done = namespace.run(
        *("ping", "-n", "-c", str(count), "-i", str(interval), "-W", "1", *origin, destination),
        check=False,
        timeout=count * interval + 30,
    )
    if " packets transmitted" not in done.stdout:
        raise LabError(f"ping of {destination} in {namespace.role} failed: {done.stderr.strip()}")
    return [float(taken) for taken in re.findall(r"time=([\d.]+) ms", done.stdout)]


def _received(found: dict[str, Any]) -> ReceiveReport:
    names = {field.name for field in dataclasses.fields(ReceiveReport)}
    return ReceiveReport(**{name: value for name, value in found.items() if name in names})


def _given(**options: float | None) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def _bounds(limit: float) -> tuple[str, str]:
    return f"--limit={limit}", "--until-eof"
