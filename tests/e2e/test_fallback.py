"""A gateway whose kernel cannot meter: the limiter does, over HTTP, until the kernel can; and whom the limiter keeps
refusing is blocked in the kernel."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.kernel.capabilities import LIBRARY, NAMES, judge_library
from netlimit.records import L7, Counts
from netlimit.rules import Rule
from scripts.testbed.namespaces import CLIENT, LAN, SERVER, Lab
from scripts.testbed.streams import receive, send
from tests.e2e.gateway import COMMAND, HOST, Gateway
from tests.warm import ROOT

PORT = 8751
TOKEN = "a-token-of-the-tests"
LACK = "This host has no hashlimit."
LIMITS = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 5}
    escalate: {after: 100, within: 1m, block: 10m}
"""
REQUESTS = f"""
import http.client, sys
connection = http.client.HTTPConnection("{LAN}", {PORT}, timeout=60)
for _ in range(int(sys.argv[1])):
    path = f"/v1/auth?domain={{sys.argv[2]}}&key=remote_address&deny=429"
    connection.request("GET", path, headers={{"X-Forwarded-For": "{CLIENT}", "X-Netlimit-Token": "{TOKEN}"}})
    answer = connection.getresponse()
    answer.read()
    print(answer.status, flush=True)
"""
CONNECTIONS = f"""
import select, socket, sys, time
made = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in made:
    each.setblocking(False)
    each.connect_ex(("{LAN}", {PORT}))
time.sleep(0.5)  # before a second attempt is made
print(len(select.select([], made, [], 0)[1]))
"""


class Running(Gateway):
    """A controller that finds what it is told to find, and a limiter beside it."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        super().__init__(lab, directory)
        self._findings = directory / "capabilities.json"

    @property
    def _environment(self) -> dict[str, str]:
        return {**super()._environment, "FINDINGS": str(self._findings)}

    def begin(self, lack: str | None) -> None:
        """Start the controller; `lack` is why there is no hashlimit. It has reported all rules on return."""
        self._findings.write_text(json.dumps(dict.fromkeys(NAMES) | {"hashlimit": lack, LIBRARY: judge_library()}))
        self.launch("-m", "tests.e2e.lacking", "controller")
        self.wait_until_taken_in()

    def limit(self, limits: Path) -> None:
        """Start the limiter, which listens where all can reach it."""
        environment = {
            **self._environment,
            "PATH": os.environ["PATH"],
            "NETLIMIT_LIMITS": str(limits),
            "NETLIMIT_LIMITER_LISTEN": f"{LAN}:{PORT}",
            "NETLIMIT_TRUSTED_PROXIES": SERVER,
            "NETLIMIT_LIMITER_TOKEN": TOKEN,
        }
        with self.log.open("a") as log:
            command = (sys.executable, *COMMAND, "limiter", "--user", "root")
            self.lab.gateway.popen(*command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        self.wait(lambda: "Deciding at" in self.log.read_text(), "the limiter")

    def layer(self, rule: Rule) -> str | None:
        said = self.store.marked(HOST).get(rule.id)
        return said.layer if said else None


@pytest.fixture(scope="module")
def gateway(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("gateway")
    limits = directory / "limits.yaml"
    limits.write_text(LIMITS)
    gateway = Running(lab, directory)
    gateway.begin(LACK)
    gateway.limit(limits)
    yield gateway
    gateway.close()


def ask(lab: Lab, times: int, domain: str) -> list[int]:
    """The statuses of requests of the client, of which a proxy tells over one connection."""
    said = lab.server.run(sys.executable, "-c", REQUESTS, str(times), domain).stdout
    return list(map(int, said.split()))


def connect(lab: Lab, times: int) -> int:
    """How many connections come about, of those that the client opens at once."""
    return int(lab.client.run(sys.executable, "-c", CONNECTIONS, str(times)).stdout)


def test_a_rule_is_in_one_layer_and_goes_on_counting_in_the_other(lab: Lab, gateway: Running) -> None:
    rule, by_port = gateway.add(
        {"target": CLIENT, "rate": "6 connections/h"},
        {"target": CLIENT, "protocol": "tcp", "ports": 9, "rate": "6 connections/h"},
    )
    assert gateway.layer(rule) == L7
    assert "The limiter cannot either: it names ports" in gateway.state(by_port)[1]
    assert connect(lab, 12) == 12, "the kernel leaves them alone"
    assert ask(lab, 12, "free") == [200] * 5 + [429] * 7
    gateway.wait(lambda: gateway.count(rule).dropped_packets == 7, "what the limiter has counted")
    assert gateway.count(rule) == Counts(12, 0, 7, 0)

    gateway.stop()
    gateway.begin(None)
    assert (gateway.layer(rule), gateway.store.assigned(HOST).rules) == (None, {})
    assert gateway.state(by_port)[1] == ""
    assert connect(lab, 12) == 5, "real connections"
    both = gateway.count(rule)
    assert (both.matched_packets, both.dropped_packets) == (24, 14)

    gateway.stop(signal.SIGKILL)
    gateway.begin(LACK)
    assert gateway.layer(rule) == L7
    assert connect(lab, 12) == 12
    after = gateway.count(rule)
    assert (after.matched_packets, after.dropped_packets) == (24, 14)
    assert set(ask(lab, 20, "free")[5:]) == {429}
    gateway.wait(lambda: gateway.count(rule).matched_packets == 44, "what the limiter has counted since")
    assert gateway.count(rule).dropped_packets >= 29
    gateway.erase(rule, by_port)


def test_the_packets_of_who_keeps_being_refused_die_in_the_kernel(lab: Lab, gateway: Running) -> None:
    def deliver() -> int:
        with receive(lab.server) as receiver:
            send(lab.client, SERVER, rate=500, count=100)
            receiver.stop()
        return receiver.report().delivered().packets

    assert ask(lab, 100, "web") == [200] * 5 + [429] * 95
    assert deliver() == 100
    assert ask(lab, 5, "web") == [429] * 5
    gateway.wait(lambda: bool(gateway.store.select(action="block")[1]), "the block")
    (kept,), _ = gateway.store.select(action="block")
    gateway.wait_until_taken_in()
    assert str(kept.rule.target) == f"{CLIENT}/32"
    assert (
        kept.rule.comment
        == f"{CLIENT} was refused 100 times within 60 s by the limit remote_address of the domain web."
    )
    assert gateway.store.audit()[0].actor == "limiter"
    assert deliver() == 0
    assert gateway.count(kept.rule).dropped_packets >= 100
    gateway.erase(kept.rule)
    gateway.wait_until_taken_in()
    assert deliver() == 100
