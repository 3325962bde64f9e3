"""A database in a container that the gateway publishes: rules for the containers' network leave it in reach."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.store import Store
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, LAN, SERVER, SERVER_NETWORK, Lab
from scripts.testbed.service import Service
from tests.databases import Postgres, run_postgres

PORT, PUBLISHED = 5432, 5440
WAIT = "Prefer: wait=60"
LEAD = ("-j", "DNAT", "--to-destination", f"{SERVER}:{PORT}")
LED = ("OUTPUT", "-d", LAN, "-p", "tcp", "--dport", str(PUBLISHED), *LEAD)
"""As Docker has it for a port that is published on an address of the host."""
PROXY = """
import asyncio, sys
async def copy(reader, writer):
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
    writer.close()
async def join(reader, writer):
    far_reader, far_writer = await asyncio.open_connection(sys.argv[2], int(sys.argv[3]))
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True)
async def main():
    server = await asyncio.start_server(join, "127.0.0.1", int(sys.argv[1]))
    print("listening", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
"""As Docker's own is there for one that is published on loopback."""


@pytest.fixture(scope="module")
def container(lab: Lab) -> Iterator[Postgres]:
    with run_postgres(PORT, SERVER, lab.server.name) as server:
        yield server


@pytest.fixture
def database(container: Postgres) -> Iterator[str]:
    """A migrated one that knows nothing of who was safe for a test before."""
    name = container.make_database()
    store = Store(container.url(name))
    store.upgrade()
    store.close()
    yield name
    container.drop_database(name)


@pytest.fixture(params=["translated", "by a proxy"])
def address(request: pytest.FixtureRequest, lab: Lab) -> Iterator[str]:
    """Where the gateway publishes it."""
    if request.param == "translated":
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *LED)
        yield LAN
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *LED)
        return
    words = (sys.executable, "-c", PROXY, str(PUBLISHED), SERVER, str(PORT))
    with lab.gateway.popen(*words, stdout=subprocess.PIPE) as proxy:
        assert proxy.stdout is not None
        assert proxy.stdout.readline() == "listening\n"
        yield "127.0.0.1"
        proxy.kill()


@pytest.fixture
def service(lab: Lab, database: str, address: str, tmp_path: Path) -> Iterator[Service]:
    settings = {
        "NETLIMIT_DATABASE_URL": f"postgresql://postgres@{address}:{PUBLISHED}/{database}",
        "NETLIMIT_BOOTSTRAP_TOKEN": "a-token-of-the-tests",
        "NETLIMIT_STATE_DIRECTORY": str(tmp_path / "controller"),
    }
    with Service(lab.gateway, settings=settings) as running:
        yield running


def count_forwarded(lab: Lab) -> int:
    """How many of 20 packets of the container arrive at the client."""
    with streams.receive(lab.client) as receiver:
        streams.send(lab.server, CLIENT, rate=200, count=20)
    return receiver.report().packets


def test_a_block_around_its_container_holds_and_leaves_the_database_in_reach(service: Service, lab: Lab) -> None:
    assert count_forwarded(lab) == 20
    added = service.request("POST", "/api/v1/rules", {"target": SERVER_NETWORK, "action": "block"}, WAIT)
    assert added.body["status"]["state"] == "applied", added
    assert f"{SERVER} (where gw1 has its database" in " ".join(added.body["warnings"])
    assert count_forwarded(lab) == 0
    alone = service.request("POST", "/api/v1/rules", {"target": SERVER, "action": "block"})
    assert alone.body["status"] == 409, alone
    removed = service.request("DELETE", f"/api/v1/rules/{added.body['id']}", None, WAIT)
    assert removed.body is None, removed
    assert count_forwarded(lab) == 20
