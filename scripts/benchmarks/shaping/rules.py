"""The rules that are measured: what a client sends is shaped where it leaves the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scripts.benchmarks.gateway import Gateway

HOSTS = "10.64.0.0/15"
"""Where the many are: the sources of a flood, and as many more."""


def shape(target: str, rate: str, **fields: str) -> dict[str, Any]:
    """A rule that shapes, as the API takes it; `fields` are `ceil`, `per`, `direction` (`from` without one)."""
    return {"target": target, "action": "shape", "rate": rate, **fields}


def shape_each(hosts: int, **fields: str) -> list[dict[str, Any]]:
    """A rule for each of so many addresses of HOSTS, at a rate that no benchmark reaches."""
    return [shape(f"10.64.{host >> 8}.{host & 255}", "1 Mbit/s", **fields) for host in range(hosts)]


@contextmanager
def held(gateway: Gateway, *rules: dict[str, Any]) -> Iterator[None]:
    """The kernel holds these rules meanwhile. Raises httpx.HTTPStatusError when one is refused."""
    added = [gateway.request("POST", "/rules", json=rule).json() for rule in rules]
    for rule in added:
        assert rule["status"]["state"] == "applied", rule
    yield
    for rule in added:
        gateway.request("DELETE", f"/rules/{rule['id']}")
