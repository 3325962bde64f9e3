"""A lab: client, gateway and server as network namespaces, joined by veth pairs.

    client eth0 10.1.0.2/16  ── lan 10.1.0.1/16  gateway  wan 10.2.0.1/16 ──  eth0 10.2.0.2/16 server
           fd00:1::2/64         fd00:1::1/64              fd00:2::1/64        fd00:2::2/64

Nothing outside these namespaces is touched, and several labs can stand side by side.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self

from scripts.testbed.errors import LabError
from scripts.testbed.lock import wait_for_lock

CLIENT, CLIENT6 = "10.1.0.2", "fd00:1::2"
LAN, LAN6 = "10.1.0.1", "fd00:1::1"
WAN, WAN6 = "10.2.0.1", "fd00:2::1"
SERVER, SERVER6 = "10.2.0.2", "fd00:2::2"
CLIENT_NETWORK, CLIENT_NETWORK6 = "10.1.0.0/16", "fd00:1::/64"
SERVER_NETWORK, SERVER_NETWORK6 = "10.2.0.0/16", "fd00:2::/64"

CLIENT_MAC, LAN_MAC = "02:00:00:01:00:02", "02:00:00:01:00:01"
WAN_MAC, SERVER_MAC = "02:00:00:02:00:01", "02:00:00:02:00:02"

NAMESPACES = Path("/run/netns")
PREFIXES = ("nl-c-", "nl-g-", "nl-s-")

# Every address must be usable at once (no duplicate address detection), and no packet dropped for the way
# it came: a kernel applies the larger of `all` and the device's rp_filter.
QUIET = (
    "net.ipv4.conf.all.rp_filter=0",
    "net.ipv4.conf.default.rp_filter=0",
    "net.ipv6.conf.all.disable_ipv6=0",
    "net.ipv6.conf.default.disable_ipv6=0",
    "net.ipv6.conf.default.accept_dad=0",
    "net.ipv6.conf.default.dad_transmits=0",
    "net.ipv6.conf.default.router_solicitations=0",
)
FORWARDING = ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")

# A packet must be a packet: with these on, one skb of up to 64 kB passes netfilter as one.
OFFLOADS = ("gro", "gso", "tso", "tx", "rx")


@dataclass(frozen=True)
class Namespace:
    """One network namespace of a lab, by its name under /run/netns."""

    name: str
    role: str
    started: list[subprocess.Popen[str]] = field(default_factory=list, repr=False, compare=False)

    def argv(self, *argv: str) -> list[str]:
        """The command that runs `argv` in here; what takes the lock of iptables waits for it."""
        return ["ip", "netns", "exec", self.name, *wait_for_lock(argv)]

    def run(
        self,
        *argv: str,
        check: bool = True,
        timeout: float = 30,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in here to its end, and returns what it printed.

        Without `input` it gets no standard input. Raises LabError when it takes longer than `timeout` seconds
        or, with `check`, when it fails.
        """
        try:
            done = subprocess.run(
                self.argv(*argv),
                check=False,
                capture_output=True,
                text=True,
                timeout=timeout,
                env=None if env is None else {**os.environ, **env},
                cwd=cwd,
                stdin=subprocess.DEVNULL if input is None else None,
                input=input,
            )
        except subprocess.TimeoutExpired as error:
            raise LabError(f"`{shlex.join(argv)}` in {self.role} did not end within {timeout:g} s.") from error
        return _checked(done, f"`{shlex.join(argv)}` in {self.role}") if check else done

    def popen(
        self,
        *argv: str,
        stdin: int | IO[str] | None = subprocess.DEVNULL,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a command in here, in a session of its own; the lab ends it, with its children, on removal."""
        process = subprocess.Popen(
            self.argv(*argv),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=None if env is None else {**os.environ, **env},
            cwd=cwd,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def ip(self, *lines: str) -> None:
        """Runs lines of `ip -batch` in here; raises LabError at the first that fails."""
        _batch(lines, "-n", self.name)

    def received_packets(self, device: str) -> int:
        """How many packets a device of this namespace has received since it was made."""
        return int(self.run("cat", f"/sys/class/net/{device}/statistics/rx_packets").stdout)

    def end_processes(self) -> None:
        """Ends what `popen` started: asks, and after two seconds insists."""
        for process in self.started:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + 2
        for process in self.started:
            while not _has_ended(process) and time.monotonic() < deadline:
                time.sleep(0.005)
            _signal_group(process, signal.SIGKILL)
            process.wait()
            close_pipes(process)
        self.started.clear()


class Lab:
    """Client, gateway and server; a context manager, which removes all of it however the block ends.

    nat: the gateway masquerades the client's IPv4 network on `wan`, as a home router does.
    """

    def __init__(self, *, nat: bool = False) -> None:
        self.nat = nat
        self.key = f"{os.getpid()}-{secrets.token_hex(3)}"
        self.client, self.gateway, self.server = (
            Namespace(prefix + self.key, role)
            for prefix, role in zip(PREFIXES, ("client", "gateway", "server"), strict=True)
        )
        self._handlers: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"<Lab {self.client.name} -- {self.gateway.name} -- {self.server.name}>"

    @property
    def namespaces(self) -> tuple[Namespace, Namespace, Namespace]:
        """Client, gateway, server."""
        return self.client, self.gateway, self.server

    def __enter__(self) -> Self:
        self._catch_signals()
        try:
            self.build()
        except BaseException:
            self.remove()
            self._release_signals()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.remove()
        finally:
            self._release_signals()

    def build(self) -> None:
        """Makes the namespaces, their links, addresses and routes; raises LabError when the host refuses."""
        if os.geteuid() != 0:
            raise LabError("A lab is made of network namespaces, which only root can make: run this as root.")
        remove_leftovers()
        _batch(f"netns add {namespace.name}" for namespace in self.namespaces)
        for namespace in self.namespaces:
            namespace.run("sysctl", "-q", "-w", *QUIET, *(FORWARDING if namespace is self.gateway else ()))
        _batch(
            (
                _veth(self.gateway, "lan", LAN_MAC, self.client, "eth0", CLIENT_MAC),
                _veth(self.gateway, "wan", WAN_MAC, self.server, "eth0", SERVER_MAC),
            )
        )
        for namespace, devices in self._devices().items():
            for device in devices:
                namespace.run("ethtool", "-K", device, *(word for name in OFFLOADS for word in (name, "off")))
        self.client.ip(
            *_up("eth0", CLIENT, CLIENT6),
            *_route("eth0", LAN, LAN6, LAN_MAC),
        )
        self.gateway.ip(
            *_up("lan", LAN, LAN6),
            *_up("wan", WAN, WAN6),
            *_neighbours("lan", CLIENT_MAC, CLIENT, CLIENT6),
            *_neighbours("wan", SERVER_MAC, SERVER, SERVER6),
        )
        self.server.ip(
            *_up("eth0", SERVER, SERVER6),
            *_route("eth0", WAN, WAN6, WAN_MAC),
        )
        if self.nat:
            self._nat("POSTROUTING", "-s", CLIENT_NETWORK, "-o", "wan", "-j", "MASQUERADE")

    def remove(self) -> None:
        """Ends what was started in the namespaces and removes them; once removed, does nothing."""
        with _signals_held():
            for namespace in self.namespaces:
                namespace.end_processes()
            _remove(namespace.name for namespace in self.namespaces)

    def add_client_addresses(self, *addresses: str) -> None:
        """Gives the client more addresses, v4 or v6; the gateway learns the way to those outside its subnets."""
        parsed = [ipaddress.ip_address(address) for address in addresses]
        self.client.ip(*(f"addr replace {a} dev eth0 {'nodad' if a.version == 6 else ''}" for a in parsed))
        self.gateway.ip(*(_way_to_client(a) for a in parsed))

    def forward_port(self, port: int, to_port: int | None = None, *, to: str = CLIENT, protocol: str = "tcp") -> None:
        """The gateway sends what arrives for `port` of its wan address on to the client (DNAT, IPv4)."""
        self._nat(
            *("PREROUTING", "-i", "wan", "-p", protocol, "-d", WAN, "--dport", str(port)),
            *("-j", "DNAT", "--to-destination", f"{to}:{to_port or port}"),
        )

    def topology(self) -> str:
        """The lab as a few lines of text, with the commands that enter it."""
        nat = "   (the client's IPv4 network is masqueraded on wan)" if self.nat else ""
        return "\n".join(
            (
                "  client                     gateway                     server",
                "  eth0 10.1.0.2/16 ──────── lan 10.1.0.1/16",
                "       fd00:1::2/64             fd00:1::1/64",
                "                            wan 10.2.0.1/16 ──────── eth0 10.2.0.2/16",
                f"                                fd00:2::1/64              fd00:2::2/64{nat}",
                "",
                *(f"  ip netns exec {n.name} bash    # {n.role}" for n in self.namespaces),
            )
        )

    def _devices(self) -> dict[Namespace, tuple[str, ...]]:
        return {self.client: ("eth0",), self.gateway: ("lan", "wan"), self.server: ("eth0",)}

    def _nat(self, chain: str, *rule: str) -> None:
        self.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", chain, *rule)

    def _catch_signals(self) -> None:
        """Lets SIGTERM and SIGHUP unwind the stack as Ctrl-C does, unless the program handles them itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, _exit_on)

    def _release_signals(self) -> None:
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler)


def remove_leftovers() -> None:
    """Removes the namespaces of labs whose process died without a chance to (SIGKILL)."""
    if NAMESPACES.is_dir():
        _remove(path.name for path in NAMESPACES.iterdir() if _is_leftover(path.name))


def _is_leftover(name: str) -> bool:
    owner = name[5:].partition("-")[0]
    return name.startswith(PREFIXES) and owner.isdigit() and not Path("/proc", owner).exists()


def _remove(names: Iterable[str]) -> None:
    _batch(f"netns del {name}" for name in names if (NAMESPACES / name).exists())


def _batch(lines: Iterable[str], *options: str) -> None:
    text = "".join(f"{line}\n" for line in lines)
    if text:
        command = ["ip", *options, "-batch", "-"]
        _checked(_ip(command, text), f"`{shlex.join(command)}` with\n{text}")


def _ip(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, text=True, capture_output=True, check=False, timeout=60)
    except FileNotFoundError as error:
        raise LabError("A lab needs `ip`: install the package iproute2, or run scripts/setup.") from error


def _checked(done: subprocess.CompletedProcess[str], what: str) -> subprocess.CompletedProcess[str]:
    if done.returncode != 0:
        raise LabError(f"{what} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done


def _veth(near: Namespace, device: str, mac: str, far: Namespace, far_device: str, far_mac: str) -> str:
    return (
        f"link add {device} address {mac} netns {near.name} "
        f"type veth peer name {far_device} address {far_mac} netns {far.name}"
    )


def _up(device: str, address: str, address6: str) -> Iterator[str]:
    yield "link set lo up"
    yield f"link set {device} up"
    yield f"addr add {address}/16 dev {device}"
    yield f"addr add {address6}/64 dev {device} nodad"


def _route(device: str, gateway: str, gateway6: str, mac: str) -> Iterator[str]:
    yield f"route add default via {gateway}"
    yield f"route add default via {gateway6}"
    yield from _neighbours(device, mac, gateway, gateway6)


def _neighbours(device: str, mac: str, *addresses: str) -> Iterator[str]:
    # Known from the start, so that a first burst is not lost while ARP asks; but not permanent, so that a lab
    # still shows what happens when neighbour discovery is blocked.
    return (f"neigh replace {address} lladdr {mac} nud reachable dev {device}" for address in addresses)


def _way_to_client(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    subnet = ipaddress.ip_network(CLIENT_NETWORK if address.version == 4 else CLIENT_NETWORK6)
    if address in subnet:
        return next(_neighbours("lan", CLIENT_MAC, str(address)))
    return f"route replace {address} via {CLIENT if address.version == 4 else CLIENT6}"


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    # Only while the leader is not reaped: until then its number, the group's too, belongs to nobody else.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _has_ended(process: subprocess.Popen[str]) -> bool:
    """Whether the leader has ended, without reaping it."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # another process has started it for this one, and reaps it
        return process.poll() is not None


def close_pipes(process: subprocess.Popen[str]) -> None:
    """Closes what this program holds of a process's standard streams."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _exit_on(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Holds Ctrl-C and its like back until the block is done, so that a removal is not left half way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
