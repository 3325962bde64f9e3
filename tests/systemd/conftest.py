"""A gateway that is up, and a client that it blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.systemd.gateway import CLIENT, OTHER, ping, run, wait, wait_for_ports


@pytest.fixture(scope="module", autouse=True)
def up() -> None:
    """It has booted: nothing here has started these units. root needs no token: it is in the file of the API's user."""
    wait_for_ports("api")
    wait("netlimit status | grep -w live", "a controller that has reported")


@pytest.fixture(scope="module")
def client() -> Iterator[str]:
    """A namespace with two addresses behind the device `lan`."""
    run("ip", "netns", "add", "client")
    run("ip", "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", "client")
    run("ip", "addr", "add", "10.99.0.1/24", "dev", "lan")
    run("ip", "link", "set", "lan", "up")
    for address in (CLIENT, OTHER):
        run("ip", "-n", "client", "addr", "add", f"{address}/24", "dev", "eth0")
    run("ip", "-n", "client", "link", "set", "eth0", "up")
    yield "client"
    run("ip", "netns", "del", "client")


@pytest.fixture
def blocked(client: str) -> Iterator[str]:
    """A client that a rule blocks, which the kernel holds."""
    assert ping(client, CLIENT) == 5
    rule = json.loads(run("netlimit", "rule", "add", CLIENT, "--action", "block", "--wait", "60", "--json"))
    wait(f"! ip netns exec {client} ping -q -I {CLIENT} -c 1 -W 1 10.99.0.1", "a client that is blocked")
    assert ping(client, CLIENT) == 0
    assert ping(client, OTHER) == 5
    yield CLIENT
    run("netlimit", "rule", "remove", str(rule["id"]))
    wait(f"ip netns exec {client} ping -q -I {CLIENT} -c 1 -W 1 10.99.0.1", "a client that is free again")
