"""What closes a gateway to those who come to manage it, by one rule or by several, needs force."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from time import process_time
from typing import Any

import pytest

from netlimit.lockout import Havens
from netlimit.records import HostStatus
from netlimit.rules import Rule, parse_rule
from tests.unit.test_judgement import Kept

NOW = datetime(2030, 1, 1, tzinfo=UTC)
OWN = "10.1.0.1"
PRIVATE = HostStatus(
    "gw1", "iptables", own=(OWN, "10.2.0.1", "fd00:1::1", "fe80::1"), management=(22, 8750), silence=timedelta(0),
    networks={
        "10.1.0.0/16": ("lan",), "10.2.0.0/24": ("wan",), "0.0.0.0/0": ("wan",), "fd00:1::/64": ("lan",),
    },
)  # fmt: skip
PUBLIC = replace(PRIVATE, own=(OWN, "8.8.4.1"), networks={**PRIVATE.networks, "8.8.4.0/24": ("wan",)})


def rule(number: int = 1, **fields: Any) -> Rule:
    return replace(parse_rule({"action": "block", **fields}, NOW), id=number)


def to_ssh(**fields: Any) -> dict[str, Any]:
    return {"target": OWN, "direction": "to", "protocol": "tcp", "ports": [22], **fields}


def from_ssh(**fields: Any) -> dict[str, Any]:
    """The same way, by the answers."""
    ports = fields.pop("source_ports", None)
    return {"target": OWN, "direction": "from", "protocol": "tcp", "source_ports": [22], "ports": ports, **fields}


def is_kept(*rules: dict[str, Any], host: HostStatus = PRIVATE) -> bool:
    """Whether an operator may add these, one after the other."""
    kept = Kept({}, Havens([host], NOW))
    return all(kept.change({number: rule(number, **fields)}) for number, fields in enumerate(rules))


@pytest.mark.parametrize("way", [to_ssh, from_ssh])
@pytest.mark.parametrize(
    "parts",
    [
        [{"source_ports": "0-65535"}], [{"source_ports": "1024-65535"}], [{"source_ports": "32768-60999"}],
        [{"source_ports": "49152-65535"}], [{"source_ports": ["1024-40000", "40001-65535"]}],
        [{"source_ports": "0-32767"}, {"source_ports": "32768-65535"}], [{"interface": "wan"}],
        [{"source_ports": "32768-46000"}, {"source_ports": "46001-60999", "interface": "lan"}],
        [{"source_ports": f"{low}-{low + 999}"} for low in range(33000, 48000, 1000)],
        [{"source_ports": "33000-45000"}, {"target": "0.0.0.0/0", "direction": None, "source_ports": "45001-60999"}],
    ],
    ids=lambda parts: str([list(each.values()) for each in parts])[:40],
)  # fmt: skip
def test_a_port_by_which_a_gateway_is_managed_is_not_closed_from_the_ports_of_clients(
    way: Any, parts: list[dict[str, Any]]
) -> None:
    rules = [to_ssh(**part) if "target" in part else way(**part) for part in parts]
    assert not is_kept(*rules)
    assert is_kept(*rules[:-1])


@pytest.mark.parametrize(
    "rules",
    [
        [to_ssh(source_ports="1-1023")], [to_ssh(source_ports="33000-40000")], [to_ssh(source_ports=[50000])],
        [to_ssh(source_ports="0-65535", ports=[80])], [to_ssh(source_ports="0-65535", protocol="udp")],
        [from_ssh(ports=[443])], [to_ssh(source_ports="0-32767"), to_ssh(source_ports="0-32767", target="10.2.0.1")],
        [to_ssh(source_ports="0-65535", target="10.1.0.9")],
        [to_ssh(action="drop", rate="1 packets/day", source_ports="0-65535")],
    ],
    ids=str,
)  # fmt: skip
def test_what_leaves_it_open_to_most_is_kept(rules: list[dict[str, Any]]) -> None:
    assert is_kept(*rules)


def block(*targets: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"target": target, **fields} for target in targets]


RFC1918 = block("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")


@pytest.mark.parametrize(
    "rules",
    [
        RFC1918, block("10.0.0.0/8"), block("10.1.0.0/16", "10.2.0.0/24"),
        block("10.2.0.0/25", "10.2.0.128/25", "10.1.0.0/16"),
        [*block("10.1.0.0/16", interface="lan"), *block("10.2.0.0/24", interface="wan")],
        [*block("10.1.0.0/16", protocol="tcp", ports="1-1023"), *block("10.2.0.0/24", direction="to")],
        block("fc00::/7"), block("fd00:1::/64"), block("fd00::/8", direction="to"),
        block("fd00:1::/65", "fd00:1:0:0:8000::/65"),
        block("10.1.0.0/16", "10.2.0.0/24", action="drop", rate="1 connections/day", per="target"),
        block("2000::/3"),
    ],
    ids=lambda rules: " ".join(each["target"] for each in rules),
)  # fmt: skip
def test_a_gateway_without_a_public_address_is_closed_with_its_own_networks(rules: list[dict[str, Any]]) -> None:
    assert not is_kept(*rules)
    assert is_kept(*rules[:-1]) or rules is RFC1918  # 10.0.0.0/8 alone is around both
    assert is_kept(*rules, host=PUBLIC) or rules in (block("2000::/3"),) or ":" in rules[0]["target"]


def test_without_a_way_to_everybody_neighbours_are_all_there_is() -> None:
    networks = {prefix: devices for prefix, devices in PUBLIC.networks.items() if prefix != "0.0.0.0/0"}
    apart = replace(PUBLIC, networks=networks)
    assert not is_kept(*block("10.1.0.0/16", "10.2.0.0/24", "8.8.4.0/24"), host=apart)
    assert is_kept(*block("10.1.0.0/16", "10.2.0.0/24", "8.8.4.0/24"), host=PUBLIC)


def test_of_a_gateway_whose_networks_are_not_known_private_ones_are_all_that_counts() -> None:
    unknown = replace(PRIVATE, networks={})
    assert not is_kept(*RFC1918, host=unknown)
    assert not is_kept(*block("fc00::/8", "fd00::/8"), host=unknown)
    assert is_kept(*block("10.0.0.0/8", "172.16.0.0/12"), host=unknown)
    assert is_kept(*RFC1918, host=replace(unknown, own=("8.8.4.1", OWN)))


def test_networks_behind_other_devices_stay_open() -> None:
    assert is_kept(*block("10.1.0.0/16", "10.2.0.0/24", interface="wan"))
    assert is_kept(*[{**each, "interface": "wan"} for each in RFC1918])


def test_link_local_neighbours_count_where_there_are_no_others() -> None:
    alone = replace(PRIVATE, own=("10.1.0.1", "fe80::1"), networks={"10.1.0.0/16": ("lan",)})
    assert not is_kept(*block("fe80::/10"), host=alone)
    assert is_kept(*block("fe80::/10"))


@pytest.mark.parametrize(
    "cuts", [(0, 65536), (0, 30000, 65536), (0, 20000, 40000, 65536), (0, 22, 23, 8750, 8751, 65536)]
)
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_nor_is_all_that_is_forwarded_closed_by_parts(cuts: tuple[int, ...], protocol: str) -> None:
    parts = [f"{low}-{high - 1}" for low, high in pairwise(cuts) if high - low > 1]
    assert not is_kept(*({"target": "0.0.0.0/0", "protocol": protocol, "ports": part} for part in parts))


def test_what_says_why_names_the_way() -> None:
    havens = Havens([PRIVATE], NOW)
    closed = havens.find_closure([rule(1, **to_ssh(source_ports="0-32767"))], [
        rule(1, **to_ssh(source_ports="0-32767")), rule(2, **to_ssh(source_ports="32768-65535")),
    ])  # fmt: skip
    assert closed is not None
    assert "would let nobody connect to port 22 of gw1 at 10.1.0.1 any more" in closed[1]
    closed = havens.find_closure([], [rule(1, target="10.0.0.0/8")])
    assert closed is not None
    assert "would close gw1 to every IPv4 network that it is attached to" in closed[1]


def test_many_rules_that_leave_a_gateway_open_are_judged_in_proportion() -> None:
    """Not each by each other, which for eight times as many rules would be sixty-four times the work."""
    assert judge_seconds(4000) < 20 * judge_seconds(500)


def judge_seconds(number: int) -> float:
    """How long this process computes for so many rules of one port each, and one more; the shortest of some tries."""
    many = [rule(port, target="0.0.0.0/0", protocol="tcp", ports=[port]) for port in range(9000, 9000 + number)]
    more = [*many, rule(1, target="0.0.0.0/0", protocol="udp", ports=[7])]
    spent = []
    for _ in range(5):
        began = process_time()
        assert Havens([PRIVATE], NOW).find_closure(many, more) is None
        spent.append(process_time() - began)
    return min(spent)


@pytest.mark.parametrize("way", ["from", "to"])
@pytest.mark.parametrize("per", ["peer", "target", "/9", "/12", "/16"])
@pytest.mark.parametrize("rate", ["1 connections", "1 connections/min", "1 packets/s", "16 kbit/s"])
def test_a_limit_that_many_share_must_leave_more_than_that_of_a_host(way: str, per: str, rate: str) -> None:
    ssh = {"protocol": "tcp", "ports": [22]} if way == "from" else {"protocol": "tcp", "source_ports": [22]}
    parts = ["0.0.0.0/2", "64.0.0.0/2", "128.0.0.0/2", "192.0.0.0/3"]
    for selector in (ssh, {}):
        limit = {"action": "drop", "rate": rate, "per": per, "direction": way, **selector}
        assert not is_kept(*block(*parts, **limit), host=PUBLIC)
        assert not is_kept(*block("2000::/4", "3000::/4", **limit), host=PUBLIC) or per[0] == "/"


@pytest.mark.parametrize(("per", "most"), [("/8", 10), ("/9", 9), ("/16", 4), ("/20", 3), ("target", 21)])
def test_what_it_must_leave_grows_with_those_who_share_it(per: str, most: int) -> None:
    limit = {"target": "0.0.0.0/0", "action": "drop", "per": per}
    assert is_kept({**limit, "rate": f"{most + 1} packets/s"}, host=PUBLIC)
    assert not is_kept({**limit, "rate": f"{most * 9 // 10 or 1} packets/s"}, host=PUBLIC)


def test_a_gateway_that_has_told_of_its_api_alone_is_managed_by_ssh_as_well() -> None:
    for ports in ((), (8750,), (22, 8750)):
        assert not is_kept(to_ssh(), host=replace(PRIVATE, management=ports))


@pytest.mark.parametrize("direction", ["from", "to"])
def test_shaping_to_as_good_as_nothing_closes_as_a_limit_does_but_for_a_cap(direction: str) -> None:
    """Beside a cap, what the gateway needs to be managed has classes of its own."""
    starved = {"target": "0.0.0.0/0", "action": "shape", "rate": "8 kbit/s", "per": "target", "direction": direction}
    ssh = {"ports": [22]} if direction == "from" else {"source_ports": [22]}
    assert is_kept(starved)
    assert is_kept({**starved, "interface": "wan"})
    assert not is_kept({**starved, "protocol": "tcp"})
    assert not is_kept({**starved, "protocol": "tcp", **ssh})
    assert not is_kept(*({**starved, "target": half} for half in ("0.0.0.0/1", "128.0.0.0/1")))
    assert not is_kept({**starved, "per": "/16"})
    assert is_kept({**starved, "protocol": "tcp", "rate": "1 Mbit/s"})
    assert is_kept({**starved, "protocol": "tcp", "ports": [80], "source_ports": None})
