"""Many limits at once, each with traffic of its own: what arrives, and what the rules have counted.

All flows of the module run at the same time; each test looks at one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from netlimit.records import Counts
from netlimit.rules import Rule
from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, SERVER6, SERVER_MAC, Lab
from scripts.testbed.reports import ReceiveReport
from tests.e2e.gateway import Gateway

RATE = 400.0
"""Packets a second that every source sends."""
SECONDS = 2.0
AFTER, DURING = 0.75, 1.0
SIZE = 1000
SAFE = ("10.1.16.0/30",)
PORT, OTHER_PORT = 9000, 9001


@dataclass(frozen=True)
class Flow:
    """Traffic from some sources under some rules.

    `passes` is what arrives from all of them together, in packets a second; None: everything that is sent.
    """

    rules: list[dict[str, object]]
    sources: list[str]
    passes: float | None
    destination: str = SERVER
    port: int = PORT
    source_port: int = 0
    each: dict[str, float | None] = field(default_factory=dict)
    """What arrives from one source, where that is known."""


def limit(target: str, rate: str = "100 packets/s", **fields: object) -> dict[str, object]:
    return {"target": target, "rate": rate, **fields}


A, B, C = "10.2.1.1", "10.2.1.2", "10.2.1.3"
A6 = "fd00:2::a"
FLOWS: dict[str, Flow] = {
    "no rule": Flow([], ["10.1.1.1"], None),
    "one host": Flow([limit("10.1.1.2")], ["10.1.1.2"], 100),
    "a rate by the minute": Flow([limit("10.1.1.3", "6000 packets/min")], ["10.1.1.3"], 100),
    "per host": Flow(
        [limit("10.1.2.0/24", per="host")], ["10.1.2.1", "10.1.2.2"], 200, each={"10.1.2.1": 100, "10.1.2.2": 100}
    ),
    "the most specific wins": Flow(
        [
            limit("10.1.3.0/24", per="host"),
            limit("10.1.3.0/30", "150 packets/s", per="host"),
            limit("10.1.3.2", "200 packets/s"),
        ],
        ["10.1.3.1", "10.1.3.2", "10.1.3.9"],
        450,
        each={"10.1.3.1": 150, "10.1.3.2": 200, "10.1.3.9": 100},
    ),
    "per target": Flow([limit("10.1.4.0/24", per="target")], ["10.1.4.1", "10.1.4.2"], 100),
    "per block": Flow(
        [limit("10.1.5.0/24", per="/25")], ["10.1.5.1", "10.1.5.2", "10.1.5.200"], 200, each={"10.1.5.200": 100}
    ),
    "bytes": Flow([limit("10.1.6.1", "1 Mbit/s")], ["10.1.6.1"], 1e6 / 8 / 1008),
    "observe": Flow([limit("10.1.7.1", action="observe")], ["10.1.7.1"], None),
    "an allow in a block": Flow(
        [{"target": "10.1.8.0/24", "action": "block"}, {"target": "10.1.8.1", "action": "allow"}],
        ["10.1.8.1", "10.1.8.2"],
        RATE,
        each={"10.1.8.1": None, "10.1.8.2": 0},
    ),
    "a block in an allow": Flow(
        [{"target": "10.1.9.0/24", "action": "allow"}, {"target": "10.1.9.1", "action": "block"}],
        ["10.1.9.1", "10.1.9.2"],
        RATE,
        each={"10.1.9.1": 0, "10.1.9.2": None},
    ),
    "an allow in a limit": Flow(
        [limit("10.1.10.0/24", per="host"), {"target": "10.1.10.1", "action": "allow"}],
        ["10.1.10.1", "10.1.10.2"],
        RATE + 100,
        each={"10.1.10.1": None, "10.1.10.2": 100},
    ),
    "reject": Flow([limit("10.1.11.1", action="reject")], ["10.1.11.1"], 100),
    "another protocol": Flow([limit("10.1.12.1", protocol="tcp")], ["10.1.12.1"], None),
    "this protocol": Flow([limit("10.1.12.2", protocol="udp")], ["10.1.12.2"], 100),
    "another port": Flow([limit("10.1.13.1", protocol="udp", ports="9001-9100")], ["10.1.13.1"], None),
    "this port": Flow(
        [limit("10.1.13.2", protocol="udp", ports=[53, "9001-9100"])], ["10.1.13.2"], 100, port=OTHER_PORT
    ),
    "another source port": Flow([limit("10.1.14.1", protocol="udp", source_ports=5353)], ["10.1.14.1"], None),
    "this source port": Flow(
        [limit("10.1.14.2", protocol="udp", source_ports=5353)], ["10.1.14.2"], 100, source_port=5353
    ),
    "this interface": Flow([limit("10.1.15.1", interface="lan")], ["10.1.15.1"], 100),
    "another interface": Flow([limit("10.1.15.2", interface="wan")], ["10.1.15.2"], None),
    "the safe set": Flow(
        [{"target": "10.1.16.0/24", "action": "block"}, limit("10.1.16.2", forced_by="root")],
        ["10.1.16.1", "10.1.16.2", "10.1.16.9"],
        RATE + 100,
        each={"10.1.16.1": None, "10.1.16.2": 100, "10.1.16.9": 0},
    ),
    "to a host": Flow([limit(A, direction="to")], ["10.1.17.1", "10.1.17.2"], 100, destination=A),
    "to a host, by peer": Flow(
        [limit(B, direction="to", per="peer")],
        ["10.1.18.1", "10.1.18.2"],
        200,
        destination=B,
        each={"10.1.18.1": 100, "10.1.18.2": 100},
    ),
    "to a host, where it leaves": Flow([limit(C, direction="to", interface="wan")], ["10.1.19.1"], 100, destination=C),
    "from a subnet, by peer": Flow([limit("10.1.20.0/24", per="peer")], ["10.1.20.1", "10.1.20.2"], 100),
    "both ends": Flow(
        [limit("10.1.21.1", "150 packets/s"), limit("10.2.1.4", direction="to")],
        ["10.1.21.1"],
        100,
        destination="10.2.1.4",
    ),
    "packets and bytes": Flow(
        [limit("10.1.22.1", "200 packets/s"), limit("10.1.22.1", "400 kbit/s")], ["10.1.22.1"], 400e3 / 8 / 1008
    ),
    "one flow is one connection": Flow([limit("10.1.23.1", "1 connections/h")], ["10.1.23.1"], None),
    "block to": Flow(
        [{"target": "10.2.1.5", "direction": "to", "action": "block"}], ["10.1.24.1"], 0, destination="10.2.1.5"
    ),
    "six: one host": Flow([limit("fd00:1::101")], ["fd00:1::101"], 100, destination=SERVER6),
    "six: no rule": Flow([], ["fd00:1::102"], None, destination=SERVER6),
    "six: per host and an exception": Flow(
        [limit("fd00:1::200/120", per="host"), limit("fd00:1::201", "200 packets/s")],
        ["fd00:1::201", "fd00:1::202"],
        300,
        destination=SERVER6,
        each={"fd00:1::201": 200, "fd00:1::202": 100},
    ),
    "six: per block": Flow(
        [limit("fd00:1::300/120", per="/124")], ["fd00:1::301", "fd00:1::302"], 100, destination=SERVER6
    ),
    "six: bytes": Flow([limit("fd00:1::401", "1 Mbit/s")], ["fd00:1::401"], 1e6 / 8 / 1008, destination=SERVER6),
    "six: blocked": Flow(
        [{"target": "fd00:1::500/120", "action": "block"}, {"target": "fd00:1::501", "action": "allow"}],
        ["fd00:1::501", "fd00:1::502"],
        RATE,
        destination=SERVER6,
        each={"fd00:1::501": None, "fd00:1::502": 0},
    ),
    "six: to a host": Flow([limit(A6, direction="to")], ["fd00:1::601"], 100, destination=A6),
    "six: by peer, which is a /64": Flow(
        [limit("fd00:2::b", direction="to", per="peer")], ["fd00:1::701", "fd00:1::702"], 100, destination="fd00:2::b"
    ),
}


@dataclass(frozen=True)
class Run:
    """What came of it all."""

    sent: dict[str, int]
    received: ReceiveReport
    rules: dict[str, list[Rule]]
    counts: dict[int, Counts]
    refusals: int

    def rate(self, source: str) -> float:
        return self.received.delivered(after=AFTER, during=DURING, source=source).packets_per_second

    def arrived(self, source: str) -> int:
        return self.received.by_source.get(source, 0)


@pytest.fixture(scope="module")
def run(lab: Lab, controller: Gateway) -> Iterator[Run]:
    prepare(lab)
    wanted = [fields for flow in FLOWS.values() for fields in flow.rules]
    kept = iter(controller.put(*wanted))
    rules = {name: [next(kept) for _ in flow.rules] for name, flow in FLOWS.items()}
    before = unreachables(lab)
    sent: dict[str, int] = {}
    with ExitStack() as stack:
        receivers = [stack.enter_context(streams.receive(lab.server, port)) for port in (PORT, OTHER_PORT)]
        senders = {key: stack.enter_context(start(lab, key, sources)) for key, sources in groups().items()}
        for key, stream in senders.items():
            report = stream.report()
            assert report.refused == 0
            sources = groups()[key]
            sent |= {source: report.packets // len(sources) for source in sources}
    reports = [receiver.report() for receiver in receivers]
    assert all(report.lost == 0 for report in reports)
    counts = {rule.id: controller.count(rule) for each in rules.values() for rule in each}
    yield Run(sent, merge(*reports), rules, counts, unreachables(lab) - before)
    controller.clear()


def prepare(lab: Lab) -> None:
    lab.add_client_addresses(*{source for flow in FLOWS.values() for source in flow.sources})
    for address in {flow.destination for flow in FLOWS.values()} - {SERVER, SERVER6}:
        lab.server.ip(f"addr add {address} dev eth0 {'nodad' if ':' in address else ''}")
        lab.gateway.ip(f"neigh replace {address} lladdr {SERVER_MAC} nud reachable dev wan")


def groups() -> dict[tuple[str, int, int], list[str]]:
    """Sources that can share one sender."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for flow in FLOWS.values():
        found.setdefault((flow.destination, flow.port, flow.source_port), []).extend(flow.sources)
    return found


def start(lab: Lab, key: tuple[str, int, int], sources: list[str]) -> streams.Stream:
    destination, port, source_port = key
    count = round(RATE * SECONDS) * len(sources)
    return streams.sending(
        *(lab.client, destination, port),
        rate=RATE * len(sources),
        count=count,
        size=SIZE,
        sources=sources,
        source_port=source_port,
    )


def merge(first: ReceiveReport, second: ReceiveReport) -> ReceiveReport:
    """Two receivers as one: their sources differ, and each flow's bins begin with itself."""
    series = {}
    for report in (first, second):
        for source, bins in report.series.items():
            begin = bins[0][0]
            series[source] = [(number - begin, packets, size) for number, packets, size in bins]
    return ReceiveReport(first.packets + second.packets, first.bytes + second.bytes, None, None, first.start, 0, series)


def unreachables(lab: Lab) -> int:
    """How many ICMP errors "destination unreachable" the client has received."""
    lines = [line.split() for line in lab.client.run("cat", "/proc/net/snmp").stdout.splitlines() if "Icmp:" in line]
    return int(dict(zip(*lines, strict=True))["InDestUnreachs"])


@pytest.mark.parametrize("name", FLOWS)
def test_what_arrives(run: Run, name: str) -> None:
    flow = FLOWS[name]
    for source, expected in flow.each.items():
        check(run, [source], expected)
    check(run, flow.sources, flow.passes)


def check(run: Run, sources: list[str], expected: float | None) -> None:
    if expected is None:
        assert {source: run.arrived(source) for source in sources} == {source: run.sent[source] for source in sources}
    else:
        rate = sum(run.rate(source) for source in sources)
        assert rate == pytest.approx(expected, rel=0.05, abs=2)


SINGLE = [name for name, flow in FLOWS.items() if len(flow.rules) == 1 and flow.rules[0].get("action") != "observe"]


@pytest.mark.parametrize("name", SINGLE)
def test_what_was_counted_is_what_was_sent_and_dropped(run: Run, name: str) -> None:
    flow, counts = FLOWS[name], run.counts[run.rules[name][0].id]
    sent = sum(run.sent[source] for source in flow.sources)
    arrived = sum(run.arrived(source) for source in flow.sources)
    if name.startswith("another"):
        assert counts == Counts()
    elif name == "one flow is one connection":
        assert counts == Counts(1, SIZE, 0, 0)
    else:
        assert counts == Counts(sent, sent * SIZE, sent - arrived, (sent - arrived) * SIZE)


def test_observe_counts_what_would_be_dropped(run: Run) -> None:
    counts = run.counts[run.rules["observe"][0].id]
    assert counts.matched_packets == run.sent["10.1.7.1"]
    would_pass = counts.matched_packets - counts.dropped_packets
    assert would_pass == pytest.approx(10 + 100 * SECONDS, rel=0.05)


def test_each_of_several_rules_counts_its_own(run: Run) -> None:
    flow, rules = FLOWS["the most specific wins"], run.rules["the most specific wins"]
    of = {rule.target.prefixlen: run.counts[rule.id] for rule in rules}
    by_source = dict(zip((30, 32, 24), flow.sources, strict=True))
    for length, source in by_source.items():
        assert of[length].matched_packets == run.sent[source]
        assert of[length].dropped_packets == run.sent[source] - run.arrived(source)


def test_the_burst_is_what_it_says(run: Run) -> None:
    """A tenth of a second of the rate, and not a packet of grace more."""
    arrived, expected = run.arrived("10.1.1.2"), 10 + 100 * SECONDS
    assert expected * 0.97 - 2 <= arrived <= expected * 1.03 + 2


def test_who_is_rejected_is_told(run: Run) -> None:
    assert run.refusals >= 1


def test_offenders_are_remembered(run: Run, controller: Gateway) -> None:
    question = controller.store.ask("gw", "offenders", {})
    controller.wait(lambda: controller.store.answered(question) is not None, "offenders")
    answer = controller.store.answered(question)
    assert answer is not None
    addresses = {item["address"] for item in answer["items"]}
    assert {"10.1.1.2", "10.1.2.1", "10.1.11.1", A, "fd00:1::101"} <= addresses
    assert "10.1.1.1" not in addresses
    assert "10.1.16.1" not in addresses
