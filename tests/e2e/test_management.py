"""Who manages a gateway reaches it through a device that is capped to next to nothing and full of others' packets."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from netlimit.tree import MANAGEMENT, ROUTERS, SERVICES, VISITORS
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, LAN, LAN6, SERVER, Lab, close_pipes
from tests.e2e.gateway import Gateway
from tests.e2e.loads import megabits, offer, shape
from tests.e2e.visitors import Sshd, Visitor

ADMIN, ADMIN6, STRANGER = "10.1.77.1", "fd00:1::77:1", "10.1.77.9"
SAFE = (ADMIN, ADMIN6)
CAP = shape("0.0.0.0/0", "8 kbit/s", direction="to", per="target", interface="lan")
TOKEN = "nlt_0123456789abcdef_0123456789abcdef0123456789abcdef"
LISTEN = {4: f"{LAN}:8750", 6: f"[{LAN6}]:8750"}
SECONDS = 1.0
"""Within which what undoes a cap must arrive."""
ASK = """
import http.client, sys, time
host, source, token, *requests = sys.argv[1:]
for request in requests:
    begun = time.monotonic()
    asked = http.client.HTTPConnection(host, 8750, timeout=8, source_address=(source, 0))
    method, _, path = request.partition(" ")
    asked.request(method, path, headers={"Authorization": f"Bearer {token}"})
    print(asked.getresponse().status, time.monotonic() - begun)
"""
FEED = """
import socket, sys
server = socket.create_server((sys.argv[1], 3128))
print("ready", flush=True)
stream = server.accept()[0]
while True:
    stream.sendall(bytes(65536))
"""
LOAD = """
import socket, sys, time
host, source, after, during = sys.argv[1:]
with socket.create_connection((host, 3128), 8, (source, 0)) as stream:
    begun, taken = time.monotonic() + float(after), 0
    while (passed := time.monotonic() - begun) < float(during):
        taken += len(stream.recv(65536)) * (passed > 0)
print(8 * taken / passed / 1e6)
"""


@pytest.fixture(scope="module", autouse=True)
def surroundings(lab: Lab) -> Iterator[None]:
    """An sshd, and addresses for those who come."""
    lab.add_client_addresses(ADMIN, ADMIN6, STRANGER)
    with Sshd(lab.gateway):
        yield


@contextmanager
def loaded(lab: Lab) -> Iterator[None]:
    """What the server sends the client through the gateway fills the queue of `lan`."""
    with offer(lab.server, CLIENT, megabits=2, seconds=30):
        time.sleep(0.7)
        yield


@contextmanager
def feeding(lab: Lab) -> Iterator[None]:
    """Whoever connects to the gateway is sent data without end, as by a proxy."""
    process = lab.gateway.popen(
        sys.executable, "-c", FEED, LAN, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.wait(60)
        close_pipes(process)


def ask(lab: Lab, source: str, *requests: str) -> list[tuple[int, float]]:
    """Send requests from an address of the client's, one after the other: status and seconds of each."""
    host = LAN6 if ":" in source else LAN
    printed = lab.client.run(sys.executable, "-c", ASK, host, source, TOKEN, *requests, timeout=120).stdout.split()
    return [(int(status), float(taken)) for status, taken in zip(printed[::2], printed[1::2], strict=True)]


def forget_neighbours(lab: Lab) -> None:
    """As if their entries had expired."""
    for namespace, device in ((lab.gateway, "lan"), (lab.client, "eth0")):
        namespace.run("ip", "-4", "neigh", "flush", "dev", device, "nud", "all")
        namespace.run("ip", "-6", "neigh", "flush", "dev", device, "nud", "all")


@pytest.mark.parametrize("family", [4, 6])
def test_the_cap_of_a_full_device_is_undone_within_a_second(gateway: Gateway, lab: Lab, family: int) -> None:
    """By who is safe, over that very device, though nobody remembers where the other is."""
    taken = []
    admin = ADMIN if family == 4 else ADMIN6
    with gateway.serving(LISTEN[family], TOKEN), loaded(lab):
        for _ in range(3):
            (cap,) = gateway.put(CAP)
            time.sleep(0.3)
            forget_neighbours(lab)
            ((status, seconds),) = ask(lab, admin, f"DELETE /api/v1/rules/{cap.id}")
            assert status == 204
            taken.append(seconds)
    assert statistics.median(taken) < SECONDS, taken


BUDGETS = [
    shape("10.1.0.0/16", "8 kbit/s", direction="to", per="target", interface="lan"),
    shape("10.1.0.0/16", "8 kbit/s", per="target"),
    shape("0.0.0.0/0", "8 kbit/s", direction="from", per="target", interface="lan", protocol="tcp"),
    shape("0.0.0.0/0", "8 kbit/s", direction="from", per="target", interface="lan"),
]


def test_budgets_around_who_is_safe_and_caps_by_the_source_leave_management_alone(gateway: Gateway, lab: Lab) -> None:
    """Also of what comes in, which is shaped on a device of its own."""
    taken = []
    with gateway.serving(LISTEN[4], TOKEN), loaded(lab):
        for fields in BUDGETS:
            (rule,) = gateway.put(fields)
            time.sleep(0.2)
            ((status, seconds),) = ask(lab, ADMIN, f"DELETE /api/v1/rules/{rule.id}")
            assert status == 204
            taken.append(seconds)
    assert statistics.median(taken) < SECONDS, taken


def sent(gateway: Gateway, minor: int) -> int:
    """The packets that a class of `lan` has sent or dropped."""
    found = [usage for number, usage in gateway.kernel.usages("lan").items() if number & 0xFFFF == minor]
    return sum(usage.packets + usage.dropped for usage in found)


@pytest.mark.parametrize(("destination", "port"), [(STRANGER, 3784), (STRANGER, 4784), (ADMIN, 9000)])
def test_what_local_users_send_does_not_keep_who_is_safe_from_working(
    gateway: Gateway, lab: Lab, destination: str, port: int
) -> None:
    """As if to another router, or to who is safe: four times what has a class beside the cap."""
    gateway.put(shape("0.0.0.0/0", "5 Mbit/s", direction="to", per="target", interface="lan"))
    with Visitor(lab.client, LAN, 22, ADMIN) as admin, ExitStack() as flooded:
        assert admin.say("before")
        flooded.enter_context(streams.sending(lab.gateway, destination, port, rate=420, seconds=5, size=1200))
        time.sleep(0.7)
        before = sent(gateway, MANAGEMENT)
        echoed = [number for number in range(20) if admin.works and admin.say(f"key {number}")]
        assert len(echoed) >= 15
        assert sent(gateway, MANAGEMENT) - before < 100, "nothing but the keys"


@pytest.mark.parametrize("closed", [179, 1179])
def test_what_closed_ports_answer_has_no_part_in_the_class_of_who_is_safe(
    gateway: Gateway, lab: Lab, closed: int
) -> None:
    """The port of BGP too, whoever asks: the resets are the kernel's own."""
    gateway.put(CAP)
    for source in (STRANGER, ADMIN):
        with streams.connect(lab.client, LAN, closed, count=200, rate=400, sources=[source]) as asked:
            asked.report()
    assert sent(gateway, MANAGEMENT) == 0
    assert sent(gateway, ROUTERS) < 100, "nor in that of other routers"


def test_what_strangers_cause_has_no_part_in_the_class_of_who_is_safe(gateway: Gateway, lab: Lab) -> None:
    """A stranger floods a port by which the gateway is managed, and one that has nobody behind it, with and without a
    connection."""
    (cap,) = gateway.put(CAP)
    with (
        gateway.serving(LISTEN[4], TOKEN),
        loaded(lab),
        streams.connect(lab.client, LAN, 22, count=300, rate=150, sources=[STRANGER]) as flood,
        streams.sending(lab.client, LAN, 22, rate=1500, seconds=8, sources=[STRANGER]),
    ):
        time.sleep(1)
        assert sent(gateway, VISITORS) > 50
        assert sent(gateway, MANAGEMENT) == 0
        forget_neighbours(lab)
        ((status, seconds),) = ask(lab, ADMIN, f"DELETE /api/v1/rules/{cap.id}")
        flood.stop()
    assert status == 204
    assert seconds < SECONDS


def test_what_is_forwarded_to_who_is_safe_is_under_the_cap(gateway: Gateway, lab: Lab) -> None:
    """So are its source port and its TOS of no use."""
    gateway.put(shape("0.0.0.0/0", "400 kbit/s", direction="to", per="target", interface="lan"))
    with (
        streams.receive(lab.client) as receiver,
        streams.sending(lab.server, ADMIN, rate=200, seconds=4, size=1500, source_port=22) as sender,
    ):
        sender.report()
        receiver.stop()
    assert sent(gateway, MANAGEMENT) == 0
    assert receiver.report().delivered().packets * 1514 * 8 / 4 < 700e3


def test_what_the_gateway_sends_who_is_safe_has_the_cap_for_a_bound(gateway: Gateway, lab: Lab) -> None:
    """Answers of a resolver, say."""
    gateway.put(shape("0.0.0.0/0", "400 kbit/s", direction="to", per="target", interface="lan"))
    with (
        streams.receive(lab.client) as receiver,
        streams.sending(lab.gateway, ADMIN, rate=600, seconds=3.2, size=1500, source_port=53) as sender,
    ):
        sender.report()
        receiver.stop()
    assert sent(gateway, SERVICES) > 50
    assert megabits(receiver.report(), LAN, after=0.6, during=2).is_about(0.4, rel=0.1)


@pytest.mark.parametrize(("offered", "least"), [(4, 2.5), (16, 0.12)], ids=["half the cap", "twice the cap"])
def test_who_is_safe_loads_from_the_gateway_what_others_leave_and_a_little_for_certain(
    gateway: Gateway, lab: Lab, offered: float, least: float
) -> None:
    """From a proxy on it, say. Others keep what they were sure of."""
    gateway.put(shape("0.0.0.0/0", "8 Mbit/s", direction="to", per="target", interface="lan"))
    with (
        feeding(lab),
        streams.receive(lab.client) as receiver,
        offer(lab.server, CLIENT, megabits=offered, seconds=5),
    ):
        loaded = lab.client.run(sys.executable, "-c", LOAD, LAN, ADMIN, "1", "3").stdout
        receiver.stop()
    assert float(loaded) > least
    assert megabits(receiver.report(), SERVER, after=1, during=2).is_about(min(offered, 7.8), rel=0.1)
