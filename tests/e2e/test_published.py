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
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, SERVER, WAN, WAN6, Lab, close_pipes
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
server = Server((sys.argv[1], int(sys.argv[3])), Answer)
print("ready", flush=True)
server.serve_forever()
"""
VIP, VIP6 = "10.2.0.9", "fd00:2::9"
ROUTED, ROUTED6 = "203.0.113.0/29", "fd00:9::/64"
PUBLIC, PUBLIC6 = "203.0.113.5", "fd00:9::5"
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
    """A site behind the gateway, and one of its own, by both families."""
    places = ((lab.client, CLIENT, "2", "80"), (lab.client, CLIENT6, "10", "80"), (lab.gateway, "::", "10", "8088"))
    sites = [host.popen(sys.executable, "-c", SERVE, *place, stdout=PIPE) for host, *place in places]
    for vip, network, way in ((VIP, ROUTED, WAN), (VIP6, ROUTED6, WAN6)):
        lab.gateway.run("ip", "address", "add", f"{vip}/{64 if ':' in vip else 16}", "dev", "wan")
        lab.server.run("ip", "route", "add", network, "via", way)
    lab.gateway.run("sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")
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


def ask(lab: Lab, address: str, port: int = 8080) -> str:
    """What a site answers to somebody outside; "000": nothing."""
    url = f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"
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


RANGE = ("-m", "iprange", "--dst-range", f"203.0.113.4-{PUBLIC}")
TAKEN = ("-p", "tcp", "--dport", "8080", "-j")
TRANSLATIONS: dict[str, tuple[tuple[str, ...], str, str, str, int]] = {
    "REDIRECT of a second address": (
        ("iptables-legacy", "-d", VIP, *TAKEN, "REDIRECT", "--to-ports", "8088"),
        *(VIP, "--dport 8080 -j REDIRECT", WAN, 8088),
    ),
    "REDIRECT of any address": (
        ("iptables-nft", *TAKEN, "REDIRECT", "--to-ports", "8088"),
        *(VIP, f"{WAN}:8088", WAN, 8088),
    ),
    "REDIRECT of IPv6": (  # the address that came last is the first
        ("ip6tables-legacy", "-i", "wan", *TAKEN, "REDIRECT", "--to-ports", "8088"),
        *(WAN6, f"[{VIP6}]:8088", VIP6, 8088),
    ),
    "redirect": (
        ("nft", "iifname wan tcp dport 8080 redirect to :8088"),
        VIP,
        f"tcp port 8080 to {WAN}:8088",
        WAN,
        8088,
    ),
    "DNAT to another own address": (
        ("iptables-legacy", "-d", WAN, *TAKEN, "DNAT", "--to-destination", f"{LAN}:8088"),
        *(WAN, f"tcp port 8080 to {LAN}:8088", LAN, 8088),
    ),
    "DNAT to loopback": (
        ("iptables-legacy", "-d", WAN, *TAKEN, "DNAT", "--to-destination", "127.0.0.1:8088"),
        *(WAN, "tcp port 8080 to 127.0.0.1:8088", "127.0.0.1", 8088),
    ),
    "DNAT of a routed address": (
        ("iptables-legacy", "-d", PUBLIC, *TAKEN, "DNAT", "--to-destination", f"{CLIENT}:80"),
        *(PUBLIC, f"tcp port 8080 to {CLIENT}:80", CLIENT, 80),
    ),
    "DNAT of a routed address of IPv6": (
        ("ip6tables-nft", "-d", PUBLIC6, *TAKEN, "DNAT", "--to-destination", f"[{CLIENT6}]:80"),
        *(PUBLIC6, f"tcp port 8080 to [{CLIENT6}]:80", CLIENT6, 80),
    ),
    "DNAT of a routed address to the gateway": (
        ("iptables-legacy", "-d", PUBLIC, *TAKEN, "DNAT", "--to-destination", f"{WAN}:8088"),
        *(PUBLIC, f"tcp port 8080 to {WAN}:8088", WAN, 8088),
    ),
    "DNAT of a range": (
        ("iptables-legacy", *RANGE, *TAKEN, "DNAT", "--to-destination", f"{CLIENT}:80"),
        *(PUBLIC, f"tcp port 8080 to {CLIENT}:80", CLIENT, 80),
    ),
    "routed addresses with ports": (
        ("nft", f"ip daddr . tcp dport {{ {PUBLIC} . 8080, 203.0.113.6 . 8081 }} dnat to {CLIENT}:80"),
        *(PUBLIC, f"tcp port 8080 to {CLIENT}:80", CLIENT, 80),
    ),
    "a map of routed addresses": (
        ("nft", f"dnat to ip daddr . tcp dport map {{ {PUBLIC} . 8080 : {CLIENT} . 80 }}"),
        *(PUBLIC, f"tcp port 8080 to {CLIENT}:80", CLIENT, 80),
    ),
}
SAME: dict[str, tuple[tuple[str, ...], str]] = {
    "REDIRECT of the first address": (("iptables-legacy", "-i", "wan", *TAKEN, "REDIRECT", "--to-ports", "8088"), WAN),
    "DNAT to another port": (("iptables-legacy", "-d", VIP, *TAKEN, "DNAT", "--to-destination", ":8088"), VIP),
    "redirect of IPv6": (("nft", "iifname wan tcp dport 8080 redirect to :8088"), VIP6),
}


@contextmanager
def translated(lab: Lab, program: str, *rule: str) -> Iterator[None]:
    chain = "chain p { type nat hook prerouting priority dstnat;"
    family = "ip" if "ip daddr" in rule[0] else "inet"
    if program == "nft":
        lab.gateway.run("nft", "-f", "-", input=f"table {family} led {{\n{chain}\n{rule[0]}\n}}\n}}\n")
    else:
        lab.gateway.run(program, "-t", "nat", "-A", "PREROUTING", *rule)
    try:
        yield
    finally:
        delete, flush = ("nft", "delete", "table", family, "led"), (program, "-t", "nat", "-F")
        lab.gateway.run(*(delete if program == "nft" else flush))


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_a_rule_to_what_is_translated_tells_what_to_name_instead(gateway: Gateway, lab: Lab, name: str) -> None:
    rule, target, told, place, port = TRANSLATIONS[name]
    about = {"direction": "to", "protocol": "tcp", "action": "block"}
    closed, other = gateway.put(
        {"target": target, "ports": [8080, 8088]} | about, {"target": target} | about | {"protocol": "udp"}
    )
    with translated(lab, *rule):
        assert ask(lab, target) == "204", "the rule does not see it"
        look_again(gateway)
        assert told in gateway.wait_for_state(closed, State.DEGRADED)
        assert gateway.state(other) == (State.APPLIED, "")
        said = gateway.attempt("doctor").stdout
        assert "WARNING: published ports" in said
        assert told in said
        gateway.add({"target": place, "ports": [port]} | about)
        assert ask(lab, target) == "000", "what it tells to name holds it"
    look_again(gateway)
    gateway.wait_for_state(closed, State.APPLIED)


def test_what_is_local_by_a_route_is_led_away_as_own_addresses_are(gateway: Gateway, lab: Lab) -> None:
    anywhere, behind = "203.0.113.0/24", {"direction": "to", "protocol": "tcp", "action": "block"}
    (closed,) = gateway.put({"target": PUBLIC, "ports": [8080]} | behind)
    local = ("-m", "addrtype", "--dst-type", "LOCAL")
    lab.gateway.run("ip", "route", "add", "local", anywhere, "dev", "lo")
    try:
        with translated(lab, "iptables-legacy", *local, *TAKEN, "DNAT", "--to-destination", f"{CLIENT}:80"):
            assert ask(lab, PUBLIC) == "204", "the rule does not see it"
            look_again(gateway)
            assert f"tcp port 8080 to {CLIENT}:80" in gateway.wait_for_state(closed, State.DEGRADED)
        look_again(gateway)
        gateway.wait_for_state(closed, State.APPLIED)
    finally:
        lab.gateway.run("ip", "route", "del", "local", anywhere, "dev", "lo")


@pytest.mark.parametrize("name", SAME)
def test_a_rule_that_is_met_at_the_port_behind_is_applied(gateway: Gateway, lab: Lab, name: str) -> None:
    rule, target = SAME[name]
    about = {"target": target, "direction": "to", "protocol": "tcp", "action": "block"}
    both, before = gateway.put(about | {"ports": [8080, 8088]}, about | {"ports": [8080]})
    with translated(lab, *rule):
        assert ask(lab, target) == "000"
        look_again(gateway)
        assert ":8088" in gateway.wait_for_state(before, State.DEGRADED)
        assert gateway.state(both) == (State.APPLIED, "")
        gateway.erase(both)
        gateway.wait_until_taken_in()
        assert ask(lab, target) == "204", "the port that was sent is not the one that rules see"
    look_again(gateway)
    gateway.wait_for_state(before, State.APPLIED)


def test_a_network_with_a_small_part_that_is_led_elsewhere_is_applied_with_a_note(gateway: Gateway, lab: Lab) -> None:
    about = {"direction": "to", "action": "block"}
    narrow, wide, every = gateway.put(
        *({"target": target} | about for target in (ROUTED, "203.0.113.0/24", "198.51.100.0/24"))
    )
    with translated(lab, "iptables-legacy", "-d", PUBLIC, "-j", "NETMAP", "--to", f"{CLIENT}/32"):
        assert ask(lab, PUBLIC, 80) == "204"
        look_again(gateway)
        gateway.wait_for_state(narrow, State.DEGRADED)
        state, said = gateway.state(wide)
        assert state is State.APPLIED
        assert said.startswith("Some of what comes for 203.0.113.0/24 ")
        assert f"all to {CLIENT}/32" in said
        assert gateway.state(every) == (State.APPLIED, "")
    look_again(gateway)
    gateway.wait_for_state(narrow, State.APPLIED)


@pytest.mark.parametrize("program", ["iptables-legacy", "iptables-nft"])
def test_a_rule_from_what_is_given_on_the_way_out_says_whom_to_name(gateway: Gateway, lab: Lab, program: str) -> None:
    def reach() -> bool:
        return lab.client.run("ping", "-c", "1", "-W", "1", SERVER, check=False).returncode == 0

    (outer,) = gateway.put({"target": PUBLIC, "action": "block"})
    chain = (program, "-t", "nat", "-A", "POSTROUTING")
    lab.gateway.run(*chain, "-s", CLIENT, "-o", "wan", "-j", "SNAT", "--to-source", PUBLIC)
    try:
        assert reach(), "the rule does not see it"
        look_again(gateway)
        gateway.wait(lambda: gateway.state(outer)[1] != "", "a note")
        state, said = gateway.state(outer)
        assert state is State.APPLIED
        assert said.endswith(f"Name that one in a rule `from` ({CLIENT}).")
        gateway.add({"target": CLIENT, "action": "block"})
        assert not reach(), "what it tells to name holds it"
    finally:
        lab.gateway.run(program, "-t", "nat", "-F")
    look_again(gateway)
    gateway.wait(lambda: gateway.state(outer)[1] == "", "nothing to be said")


@pytest.mark.parametrize("name", ["REDIRECT of any address", "DNAT of a routed address", "a published port"])
def test_explain_says_where_a_packet_may_be_led(gateway: Gateway, lab: Lab, name: str) -> None:
    rule, target = TRANSLATIONS[name][:2] if name in TRANSLATIONS else ((), WAN)
    about = {"target": target, "direction": "to", "protocol": "tcp", "ports": [8080]}
    (closed,) = gateway.put(about | {"action": "block"})
    port = free_port()
    url = f"http://127.0.0.1:{port}/api/v1/explain?src=10.2.0.2&dst={target}&protocol=tcp&port=8080&in=wan"

    def explain() -> dict[str, str]:
        header = f"Authorization: Bearer {TOKEN}"
        found: dict[str, str] = json.loads(lab.gateway.run("curl", "-s", "-m", "30", "-H", header, url).stdout)
        return found

    leads = translated(lab, *rule) if rule else published(lab, "iptables-legacy")
    with leads, gateway.serving(f"127.0.0.1:{port}", TOKEN):
        assert explain()["text"].startswith("The packet is blocked.\n")
        look_again(gateway)
        said = gateway.wait_for_state(closed, State.DEGRADED)
        text = explain()["text"]
        assert text.startswith("The packet is blocked, unless it gets past a rule that hits it and is degraded.\n")
        assert f"(degraded: {said})" in text
    look_again(gateway)
    gateway.wait_for_state(closed, State.APPLIED)
