"""More are safe than sets have room for: rules are applied and repaired all the same, in both families."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from netlimit.roles import Role
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, SERVER, SERVER6, Lab
from tests.e2e.gateway import HOST, Gateway

SIZE = 32
SAFE = tuple(f"172.{16 + n // 256}.{n % 256}.1" for n in range(3 * SIZE))


@pytest.fixture(scope="module", autouse=True)
def small_sets(lab: Lab) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NETLIMIT_SET_SIZE", str(SIZE))
        yield


def leads_to_ours(lab: Lab, program: str) -> bool:
    return "NL-" in lab.gateway.run(program, "-t", "raw", "-S", "PREROUTING").stdout


def test_rules_are_applied_and_repaired(gateway: Gateway, lab: Lab) -> None:
    now = datetime.now(UTC)
    for number in range(3 * SIZE):
        gateway.store.saw_client(HOST, f"2001:db8:{number:x}::1", now, f"token-{number}", Role.OPERATOR)

    def told() -> bool:
        (status,) = gateway.store.hosts()
        return all(any(what in note for note in status.notes) for what in ("NETLIMIT_SAFE", "clients of the API"))

    gateway.wait(told, "what is left out to be told")
    gateway.put({"target": CLIENT, "action": "block"}, {"target": CLIENT6, "action": "block"})
    held = gateway.kernel.readings(["nl-safe4", "nl-safe6"])
    assert len(held["nl-safe4"].keys() & {*SAFE}) == SIZE * 3 // 4, "the settings leave room for others"
    assert len(held["nl-safe6"]) == SIZE // 2
    for server in (SERVER, SERVER6):
        assert streams.ping(lab.client, server, count=2) == 0
    programs = ("iptables-legacy", "ip6tables-legacy")
    for program in programs:
        lab.gateway.run(program, "-t", "raw", "-F", "PREROUTING")
    gateway.wait(lambda: all(leads_to_ours(lab, program) for program in programs), "it to be repaired")
    for server in (SERVER, SERVER6):
        assert streams.ping(lab.client, server, count=2) == 0
