"""Many shaped flows at once: each gets what it is given, no less and no more.

All flows of the module run at the same time; each test looks at one of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from ipaddress import ip_interface
from itertools import chain

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, SERVER6, Lab
from scripts.testbed.reports import ReceiveReport
from scripts.testbed.stalls import Watch, share
from scripts.testbed.transfers import PORT as TCP_PORT
from scripts.testbed.transfers import transferring
from tests.e2e.gateway import HOST, Gateway
from tests.e2e.loads import FRAME, MEGABIT, Passed, add_server_addresses, megabits, offer, shape

OFFERED = 3.0
"""Megabits a second that every host sends, or is sent."""
SECONDS = 4.0
AFTER, DURING = 1.0, 2.5
SAFE = ("10.1.39.0/30",)
PORT, OTHER_PORT, DISCARD = 9000, 9001, 9
PAYLOAD = 1448 / 1514, 1428 / 1514
"""What is left of a frame's bytes for TCP, over IPv4 and over IPv6."""


@dataclass(frozen=True)
class Flow:
    """Traffic of some hosts under some rules: how many megabits a second pass of `each`, and of some `together`.

    None: all that is sent. `down`: towards the hosts.
    """

    rules: list[dict[str, object]]
    each: dict[str, float | None] = field(default_factory=dict)
    together: dict[tuple[str, ...], float] = field(default_factory=dict)
    port: int = PORT
    down: bool = False

    @property
    def hosts(self) -> list[str]:
        return sorted({*self.each, *chain(*self.together)})

    @property
    def blocks(self) -> list[str]:
        """Whoever gets a class when it first appears."""
        lengths = {str(rule["per"]) for rule in self.rules if rule.get("per") not in (None, "target")}
        shaped = [host for host in self.hosts if self.each.get(host, 0) is not None]
        networks = [ip_interface(host + each.removeprefix("host")).network for each in lengths for host in shaped]
        return [str(each).removesuffix(f"/{each.max_prefixlen}") for each in networks]


FLOWS = {
    "no rule": Flow([], {"10.1.30.1": None}),
    "one host": Flow([shape("10.1.31.1")], {"10.1.31.1": 1, "10.1.31.2": None}),
    "kilobits": Flow([shape("10.1.31.9", "300 kbit/s")], {"10.1.31.9": 0.3}),
    "a budget": Flow([shape("10.1.32.0/24", "1.2 Mbit/s", per="target")], together={("10.1.32.1", "10.1.32.2"): 1.2}),
    "what is guaranteed": Flow(
        [
            shape("10.1.33.0/24", "2 Mbit/s", per="target"),
            shape("10.1.33.1", "500 kbit/s", ceil="2 Mbit/s"),
            shape("10.1.33.2", "1500 kbit/s", ceil="2 Mbit/s"),
        ],
        {"10.1.33.1": 0.5, "10.1.33.2": 1.5},
    ),
    "what is borrowed": Flow(
        [
            shape("10.1.34.0/24", "2 Mbit/s", per="target"),
            shape("10.1.34.1", "500 kbit/s", ceil="1800 kbit/s"),
            shape("10.1.34.2", "1500 kbit/s", ceil="2 Mbit/s"),
        ],
        {"10.1.34.1": 1.8},
    ),
    "a budget in a budget": Flow(
        [
            shape("10.64.0.0/16", "2 Mbit/s", per="target"),
            shape("10.64.1.0/24", per="target"),
            shape("10.64.1.1", "500 kbit/s", ceil="5 Mbit/s"),
            shape("10.64.2.1", "500 kbit/s", ceil="5 Mbit/s"),
        ],
        {"10.64.1.1": 1, "10.64.2.1": 1},
    ),
    "each host of a subnet, and one of them": Flow(
        [shape("10.1.35.0/24", "500 kbit/s", per="host"), shape("10.1.35.3")],
        {"10.1.35.1": 0.5, "10.1.35.2": 0.5, "10.1.35.3": 1},
    ),
    "each block of a subnet": Flow(
        [shape("10.1.36.0/24", per="/28")], {"10.1.36.17": 1}, together={("10.1.36.1", "10.1.36.2"): 1}
    ),
    "another port": Flow([shape("10.1.37.1", protocol="udp", ports="9001-9100")], {"10.1.37.1": None}),
    "this port": Flow([shape("10.1.37.2", protocol="udp", ports=[53, "9001-9100"])], {"10.1.37.2": 1}, port=OTHER_PORT),
    "another protocol": Flow([shape("10.1.37.3", protocol="tcp")], {"10.1.37.3": None}),
    "an exempt host": Flow(
        [shape("10.1.38.0/24", per="host"), {"target": "10.1.38.1", "action": "allow"}],
        {"10.1.38.1": None, "10.1.38.2": 1},
    ),
    "the safe set": Flow(
        [shape("10.1.39.0/24", per="target"), shape("10.1.39.2", "500 kbit/s", forced_by="root")],
        {"10.1.39.1": None, "10.1.39.2": 0.5, "10.1.39.9": 1},
    ),
    "policed below its rate": Flow(
        [shape("10.1.40.1"), {"target": "10.1.40.1", "rate": "50 packets/s"}], {"10.1.40.1": 50 * FRAME / MEGABIT}
    ),
    "policed above its rate": Flow(
        [shape("10.1.40.2"), {"target": "10.1.40.2", "rate": "150 packets/s"}], {"10.1.40.2": 1}
    ),
    "where it leaves": Flow([shape("10.1.41.1", interface="wan")], {"10.1.41.1": 1}),
    "where it does not leave": Flow([shape("10.1.41.2", interface="lan")], {"10.1.41.2": None}),
    "six: one host": Flow([shape("fd00:1::3101")], {"fd00:1::3101": 1, "fd00:1::3102": None}),
    "six: each block of a prefix": Flow(
        [shape("fd00:9::/48", per="/64")], {"fd00:9:0:1::1": 1}, together={("fd00:9::1", "fd00:9::2"): 1}
    ),
    "six: a budget and a host in it": Flow(
        [shape("fd00:1::3300/120", "1.5 Mbit/s", per="target"), shape("fd00:1::3301", ceil="2 Mbit/s")],
        {"fd00:1::3301": 1, "fd00:1::3302": 0.5},
    ),
    "to a host": Flow([shape("10.1.50.1", direction="to")], {"10.1.50.1": 1, "10.1.50.2": None}, down=True),
    "to each host of a subnet": Flow(
        [shape("10.1.51.0/24", per="host", direction="to")], {"10.1.51.1": 1, "10.1.51.2": 1}, down=True
    ),
    "to a port": Flow(
        [shape("10.1.52.1", direction="to", protocol="udp", ports=9001)], {"10.1.52.1": 1}, port=9001, down=True
    ),
    "to an exempt host": Flow(
        [
            shape("10.1.53.0/24", per="target", direction="to"),
            {"target": "10.1.53.1", "direction": "to", "action": "allow"},
        ],
        {"10.1.53.1": None, "10.1.53.2": 1},
        down=True,
    ),
    "six: to a host": Flow(
        [shape("fd00:1::5001", direction="to")], {"fd00:1::5001": 1, "fd00:1::5002": None}, down=True
    ),
}

DOWN = [host for flow in FLOWS.values() if flow.down for host in flow.hosts]
SENDERS = {host: (f"fd00:2::50{n:02x}" if ":" in host else f"10.2.50.{n}") for n, host in enumerate(DOWN, 1)}
"""Which of the server's addresses sends to a host: that is how its packets are known where they arrive."""


@dataclass(frozen=True)
class Run:
    """What was sent to or from each host, and what arrived."""

    sent: dict[str, int]
    received: dict[tuple[bool, int], ReceiveReport] = field(repr=False)

    def report(self, flow: Flow) -> ReceiveReport:
        return self.received[flow.down, flow.port]


@pytest.fixture(scope="module")
def run(lab: Lab, controller: Gateway) -> Iterator[Run]:
    lab.add_client_addresses(*{host for flow in FLOWS.values() for host in flow.hosts})
    add_server_addresses(lab, *SENDERS.values())
    put(controller, *(fields for flow in FLOWS.values() for fields in flow.rules))
    assert not controller.drift()
    show_newcomers(lab, controller)
    sent = {}
    with ExitStack() as stack:
        receivers = {
            (down, port): stack.enter_context(streams.receive(lab.client if down else lab.server, port))
            for down in (False, True)
            for port in (PORT, OTHER_PORT)
        }
        senders = [(hosts, stack.enter_context(start(lab, flow, hosts))) for flow, hosts in parts()]
        for hosts, sender in senders:
            sent |= {known_as(host): sender.report().packets / len(hosts) for host in hosts}
        reports = {key: receiver.stop() for key, receiver in receivers.items()}
    assert all(report.lost == 0 for report in reports.values())
    yield Run(sent, reports)
    controller.clear()


def put(controller: Gateway, *wanted: dict[str, object]) -> None:
    """Add rules. Several networks lie behind `lan`: what their hosts send each other is said of rules `from` them."""
    controller.add(*wanted)
    said = controller.store.marked(HOST).values()
    assert all(each.state is State.DEGRADED and " by lan is not shaped. " in each.message for each in said), said


def show_newcomers(lab: Lab, controller: Gateway) -> None:
    """Let those send, or be sent something, who get their class then: what waits before does not count."""
    new = {block for flow in FLOWS.values() for block in flow.blocks}
    with ExitStack() as stack:
        for flow, hosts in parts():
            if flow.blocks:
                stack.enter_context(start(lab, replace(flow, port=DISCARD), hosts))
        controller.wait(lambda: all(map(controller.class_of, new)), "classes of those who are new")


def parts() -> Iterator[tuple[Flow, list[str]]]:
    """Hosts whose traffic one sender can make."""
    for flow in FLOWS.values():
        yield from ((flow, [host]) for host in flow.hosts) if flow.down else [(flow, flow.hosts)]


def start(lab: Lab, flow: Flow, hosts: list[str]) -> streams.Stream:
    ends = (lab.server, hosts[0], SENDERS[hosts[0]]) if flow.down else (lab.client, "", *hosts)
    return offer(*ends, megabits=OFFERED, seconds=SECONDS, port=flow.port)


def known_as(host: str) -> str:
    return SENDERS.get(host, host)


@pytest.mark.parametrize("name", FLOWS)
def test_what_passes_of_udp(run: Run, name: str) -> None:
    flow = FLOWS[name]
    report = run.report(flow)
    for host, expected in flow.each.items():
        source = known_as(host)
        if expected is None:
            assert report.by_source[source] == pytest.approx(run.sent[source], abs=1)
        else:
            assert megabits(report, source, after=AFTER, during=DURING).is_about(expected), host
    for hosts, expected in flow.together.items():
        assert megabits(report, *hosts, after=AFTER, during=DURING).is_about(expected)


def test_what_passes_of_tcp(gateway: Gateway, lab: Lab) -> None:
    """Up and down over IPv4 and IPv6, all at once."""
    ends = {TCP_PORT: ("10.1.60.1", SERVER), TCP_PORT + 1: ("fd00:1::6001", SERVER6)}
    hosts = {TCP_PORT + 2: "10.1.60.2", TCP_PORT + 3: "fd00:1::6002"}
    lab.add_client_addresses(*(host for host, _ in ends.values()), *hosts.values())
    put(
        gateway,
        *(shape(host, "4 Mbit/s") for host, _ in ends.values()),
        *(shape(host, "4 Mbit/s", direction="to") for host in hosts.values()),
    )
    began = time.time()
    with Watch() as watch, ExitStack() as stack:
        transfers = [
            *(
                transferring(lab.client, lab.server, to, seconds=3, source=host, port=n)
                for n, (host, to) in ends.items()
            ),
            *(transferring(lab.server, lab.client, host, seconds=3, port=n) for n, host in hosts.items()),
        ]
        rates = [stack.enter_context(transfer).report().bits_per_second / MEGABIT for transfer in transfers]
    stalled = share(watch.found, began, time.time())
    for rate, payload in zip(rates, PAYLOAD + PAYLOAD, strict=True):
        assert Passed(rate, stalled).is_about(4 * payload)
