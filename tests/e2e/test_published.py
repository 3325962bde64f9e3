"""A port that the gateway publishes is another host's: rules `to` the gateway's own address miss it, and say so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, WAN, WAN6, Lab, close_pipes
from tests.e2e.gateway import Gateway
from tests.ports import free_port

TOKEN = "nlt_0123456789abcdef_0123456789abcdef0123456789abcdef"
SERVE = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()
class Server(http.server.HTTPServer):
    address_family = int(sys.argv[2])
server = Server((sys.argv[1], 80), Answer)
print("ready", flush=True)
server.serve_forever()
"""
LOCAL = ("-m", "addrtype", "--dst-type", "LOCAL")
LISTED = f"""table ip published {{
	chain docker {{
		iifname != "docker0" tcp dport 8080 dnat to {CLIENT}:80 comment "ip daddr 9.9.9.9"
		udp dport 8081 dnat to {CLIENT}:9000
	}}
	chain prerouting {{
		type nat hook prerouting priority dstnat
		fib daddr type local jump docker
	}}
}}
"""


@pytest.fixture(scope="module", autouse=True)
def site(lab: Lab) -> Iterator[None]:
    """A site behind the gateway, by both families."""
    places = ((CLIENT, "2"), (CLIENT6, "10"))
    sites = [lab.client.popen(sys.executable, "-c", SERVE, *place, stdout=PIPE) for place in places]
    for each in sites:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    yield
    for each in sites:
        each.kill()
        each.wait(60)
        close_pipes(each)


@contextmanager
def published(lab: Lab, program: str) -> Iterator[None]:
    """As Docker has it: in a chain of its own, where all leads that is for the gateway."""
    if program == "nft":
        lab.gateway.run("nft", "-f", "-", input=LISTED)
    else:
        to = f"[{CLIENT6}]" if program.startswith("ip6") else CLIENT
        nat = (program, "-t", "nat")
        lab.gateway.run(*nat, "-N", "DOCKER")
        lab.gateway.run(*nat, "-A", "PREROUTING", *LOCAL, "-j", "DOCKER")
        odd = ("-m", "comment", "--comment", "-d")
        tcp, udp = ("-p", "tcp", "--dport", "8080", *odd), ("-p", "udp", "--dport", "8081")
        lab.gateway.run(*nat, "-A", "DOCKER", "!", "-i", "docker0", *tcp, "-j", "DNAT", "--to-destination", f"{to}:80")
        lab.gateway.run(*nat, "-A", "DOCKER", *udp, "-j", "DNAT", "--to-destination", f"{to}:9000")
    try:
        yield
    finally:
        if program == "nft":
            lab.gateway.run("nft", "delete", "table", "ip", "published")
        else:
            lab.gateway.run(program, "-t", "nat", "-F")
            lab.gateway.run(program, "-t", "nat", "-X")


def ask(lab: Lab, address: str) -> str:
    """What the site answers to somebody outside; "000": nothing."""
    url = f"http://[{address}]:8080/" if ":" in address else f"http://{address}:8080/"
    said = lab.server.run("curl", "-s", "-o", "/dev/null", "-m", "2", "-w", "%{http_code}", url, check=False)
    return said.stdout


def look_again(gateway: Gateway) -> None:
    """A controller that starts looks round at once."""
    gateway.stop()
    gateway.launch()


@pytest.mark.parametrize("program", ["iptables-legacy", "iptables-nft", "ip6tables-legacy", "nft"])
def test_a_rule_to_the_gateway_tells_where_a_published_port_leads(gateway: Gateway, lab: Lab, program: str) -> None:
    six = program.startswith("ip6")
    own, inner, place = (WAN6, CLIENT6, f"[{CLIENT6}]") if six else (WAN, CLIENT, CLIENT)
    to_it = {"target": own, "direction": "to"}
    tcp, block = {"protocol": "tcp", "ports": [8080]}, {"action": "block"}
    limit = {"rate": "1 packet/h", "burst": 1}
    closed, limited, peers, every, *others = gateway.put(
        to_it | tcp | block,
        to_it | limit | {"protocol": "udp", "ports": [8081]},
        to_it | limit | tcp | {"per": "peer"},
        to_it | {"rate": "5000 packets/s"},
        to_it | block | tcp | {"ports": [80]},
        to_it | block | {"protocol": "udp", "ports": [8080]},
        to_it | block | {"protocol": "icmp"},
        {"target": "10.1.0.9", "direction": "to"} | block,
        {"target": own, "action": "observe", "rate": "1 packet/h"},
    )
    with published(lab, program):
        assert ask(lab, own) == "204", "the rule does not see it"
        with streams.receive(lab.client) as receiver:
            streams.send(lab.server, own, 8081, rate=200, count=20)
        assert receiver.report().packets == 20
        look_again(gateway)
        for rule in (closed, peers):
            said = gateway.wait_for_state(rule, State.DEGRADED)
            assert f"tcp port 8080 to {place}:80" in said
            assert "--dport 8080" in said or "dport 8080 dnat" in said
        assert f"udp port 8081 to {place}:9000" in gateway.wait_for_state(limited, State.DEGRADED)
        said = gateway.wait_for_state(every, State.DEGRADED)
        assert f"tcp port 8080 to {place}:80; udp port 8081 to {place}:9000" in said
        for rule in others:
            assert gateway.state(rule) == (State.APPLIED, "")
        told = gateway.attempt("doctor")
        assert (told.returncode, "WARNING: published ports" in told.stdout) == (0, True)
        (named,) = gateway.add({"target": inner, "direction": "to", "protocol": "tcp", "ports": [80]} | block)
        gateway.wait_for_state(named, State.APPLIED)
        assert ask(lab, own) == "000", "what it tells to name closes the port"
    look_again(gateway)
    gateway.wait_for_state(closed, State.APPLIED)


def test_explain_says_where_a_packet_may_be_led(gateway: Gateway, lab: Lab) -> None:
    (closed,) = gateway.put({"target": WAN, "direction": "to", "protocol": "tcp", "ports": [8080], "action": "block"})
    port = free_port()
    url = f"http://127.0.0.1:{port}/api/v1/explain?src=10.2.0.9&dst={WAN}&protocol=tcp&port=8080&in=wan"

    def explain() -> dict[str, str]:
        header = f"Authorization: Bearer {TOKEN}"
        found: dict[str, str] = json.loads(lab.gateway.run("curl", "-s", "-m", "30", "-H", header, url).stdout)
        return found

    with published(lab, "iptables-legacy"), gateway.serving(f"127.0.0.1:{port}", TOKEN):
        assert explain()["text"].startswith("The packet is blocked.\n")
        look_again(gateway)
        said = gateway.wait_for_state(closed, State.DEGRADED)
        text = explain()["text"]
        assert text.startswith("The packet is blocked, unless it gets past a rule that hits it and is degraded.\n")
        assert f"(degraded: {said})" in text
    look_again(gateway)
    gateway.wait_for_state(closed, State.APPLIED)
