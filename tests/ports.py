"""Ports for programs that are told where to listen: free when they are given, and nobody else's while the tests run.

A port that the kernel has given to who asked for any may be given again, to a connection of somebody else, before the
program listens. So these are below those that Linux gives away, and a name tells tests beside that one is taken.
"""

from __future__ import annotations

import random
import socket

PORTS = range(12000, 32000)
"""Linux gives away 32768 and up (net.ipv4.ip_local_port_range)."""
BUS = 10000
"""How far above its own port a node of a Redis cluster listens for other nodes."""

_claims: list[socket.socket] = []


def free_port() -> int:
    """A TCP port that nobody listens at."""
    while True:
        port = random.choice(PORTS)
        if _claim(port) and _is_free(port):
            return port


def free_port_of_cluster() -> int:
    """A TCP port that nobody listens at, nor at the one of the bus above it."""
    while True:
        port = free_port()
        if port + BUS in PORTS and _claim(port + BUS) and _is_free(port + BUS):
            return port


def _claim(port: int) -> bool:
    """Take a port's name in this network namespace, for as long as this process lives; False if it is taken."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0netlimit-test-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
