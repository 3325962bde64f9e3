"""Where the limiter listens, "host:port" or "unix:/path", and clients there."""

from __future__ import annotations

import socket

import httpx

_LOCAL = "unix:"


def find_path(place: str) -> str | None:
    """The path of a Unix socket; None of a port."""
    return place.removeprefix(_LOCAL) if place.startswith(_LOCAL) else None


def connect_to(place: str, timeout: float = 60) -> socket.socket:
    """A connection. Raises OSError."""
    path = find_path(place)
    if path is None:
        host, _, port = place.rpartition(":")
        return socket.create_connection((host, int(port)), timeout)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(timeout)
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def open_client(place: str, timeout: float = 60) -> httpx.Client:
    """A client of whoever listens there."""
    path = find_path(place)
    if path is None:
        return httpx.Client(base_url=f"http://{place}", trust_env=False, timeout=timeout)
    return httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=path), timeout=timeout)


def is_ready(place: str, client: httpx.Client) -> bool:
    """Whether the limiter there is ready."""
    try:
        connect_to(place).close()  # what a client cannot connect it leaves open
        return client.get("/readyz").status_code == 200
    except (OSError, httpx.TransportError):
        return False
