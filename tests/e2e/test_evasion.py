"""Whatever a packet is made of, a rule that names its sender or its receiver holds it (docs/evasion.md)."""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from scripts.testbed.namespaces import (
    CLIENT,
    CLIENT6,
    CLIENT_MAC,
    LAN,
    LAN6,
    LAN_MAC,
    SERVER,
    SERVER6,
    WAN,
    WAN6,
    Lab,
    Namespace,
)
from tests import warm
from tests.e2e.evasion import kinds4, kinds6, wire
from tests.e2e.evasion.headers import PORT, Ends
from tests.e2e.evasion.kinds import Kind
from tests.e2e.evasion.page import COLUMNS, OWN_WAYS, Cell, Column, Row, check_page
from tests.e2e.gateway import Gateway

KINDS = {4: kinds4.KINDS, 6: kinds6.KINDS}
_SAMPLE = {4: Ends(CLIENT, SERVER, 0), 6: Ends(CLIENT6, SERVER6, 0)}
WAYS = ("forwarded", *OWN_WAYS)
TIMEOUT = 60
JOINING = f"""
import socket, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for group in ("224.0.0.5", "224.0.0.18", "239.1.2.3"):
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(group) + socket.inet_aton("{LAN}"))
time.sleep(600)
"""
"""The gateway takes part in these groups, as one with VRRP and OSPF does; the lab ends it."""


def _subnet(family: int, end: str, column: int) -> str:
    """The senders, or the receivers, that rules of a column name."""
    if family == 4:
        return f"10.{3 if end == 'source' else 4}.{column}.0/24"
    return f"fd00:{'a' if end == 'source' else 'b'}:0:{column:x}::/112"


def _address(family: int, end: str, column: int, number: int) -> str:
    return str(ipaddress.ip_network(_subnet(family, end, column))[number])


def _rules(family: int, column: int, fields: dict[str, object]) -> Iterator[dict[str, object]]:
    for end, direction in (("source", "from"), ("destination", "to")):
        rule = {"target": _subnet(family, end, column), "direction": direction, **fields}
        if "ports" not in fields:
            yield rule
        else:
            yield from ({**rule, "protocol": protocol} for protocol in ("tcp", "udp"))


class Trial:
    """One family's packets, on all ways, against the rules of one column after the other."""

    def __init__(self, lab: Lab, family: int) -> None:
        self.lab = lab
        self.family = family
        self.kinds = KINDS[family]
        self.server, self.lan, self.wan = (SERVER, LAN, WAN) if family == 4 else (SERVER6, LAN6, WAN6)

    def sender(self, way: str, column: int, number: int) -> str:
        """Who sends the packets of a cell. On its way to the gateway each has another sender than when forwarded."""
        if way == "from the gateway":
            return self.wan
        return _address(self.family, "source", column, 1 + number + (128 if way == "to the gateway" else 0))

    def receiver(self, way: str, column: int, number: int, kind: Kind) -> str:
        """Who is to get them. With `from` rules the server; where the gateway sends, only the receiver is named."""
        if kind.destination:
            return kind.destination
        if way == "to the gateway":
            return self.lan
        return self.server if way == "forwarded" else _address(self.family, "destination", column, 1 + number)

    def run(self, columns: list[int]) -> dict[tuple[int, str, int], int]:
        """How many datagrams came through, by kind, way and column (`to` rules, forwarded: the way "to")."""
        cells = self._cells(columns)
        addresses = sorted({source for source, _ in cells.values()})
        self._watch(addresses)
        counter = self.lab.server.popen(*self._program("count", "eth0"), stdin=PIPE, stdout=PIPE, cwd=warm.ROOT)
        assert counter.stdout is not None
        assert counter.stdout.readline() == "ready\n"
        frames, raw = [], []
        for (kind, way, column), (source, destination) in cells.items():
            for number in range(COLUMNS[column].sent):
                packets = self.kinds[kind].build(Ends(source, destination, number))
                if way == "from the gateway":
                    raw += packets
                else:
                    frames += [wire.frame(packet, LAN_MAC, CLIENT_MAC) for packet in packets]
        self._send(self.lab.client, frames, "send", "eth0")
        self._send(self.lab.gateway, raw, "raw", str(self.family))
        out, _ = counter.communicate(timeout=TIMEOUT)
        arrived = {(source, target): number for source, target, number in json.loads(out)}
        here = self._read_watch()
        return {
            cell: here.get(ends[0], 0) if cell[1] == "to the gateway" else arrived.get(ends, 0)
            for cell, ends in cells.items()
        }

    def _cells(self, columns: list[int]) -> dict[tuple[int, str, int], tuple[str, str]]:
        cells = {}
        for column in columns:
            for number, kind in enumerate(self.kinds):
                for way in WAYS:
                    if kind.destination and way != "to the gateway":
                        continue
                    ends = self.sender(way, column, number), self.receiver(way, column, number, kind)
                    cells[number, way, column] = ends
                if not kind.destination:
                    sender = CLIENT if self.family == 4 else CLIENT6
                    receiver = _address(self.family, "destination", column, 129 + number - 1)
                    cells[number, "to", column] = sender, receiver
        return cells

    def _program(self, *words: str) -> tuple[str, ...]:
        return sys.executable, "-m", "tests.e2e.evasion.wire", *words

    def _send(self, namespace: Namespace, packets: list[bytes], *words: str) -> None:
        namespace.run(*self._program(*words), input=wire.pack(packets), cwd=warm.ROOT, timeout=TIMEOUT)

    def _watch(self, addresses: list[str]) -> None:
        """Count by sender what gets to the gateway itself, behind all of netlimit's chains that drop."""
        name, family = f"watched{self.family}", "inet" if self.family == 4 else "inet6"
        program = "iptables-legacy" if self.family == 4 else "ip6tables-legacy"
        lines = [f"create {name} hash:ip family {family} counters maxelem 65536", f"flush {name}"]
        lines += [f"add {name} {address}" for address in addresses]
        self.lab.gateway.run("ipset", "-exist", "restore", input="\n".join(lines) + "\n")
        rule = ("INPUT", "-m", "set", "--match-set", name, "src")
        if self.lab.gateway.run(program, "-w", "-C", *rule, check=False).returncode:
            self.lab.gateway.run(program, "-w", "-A", *rule)

    def _read_watch(self) -> dict[str, int]:
        lines = self.lab.gateway.run("ipset", "save", f"watched{self.family}").stdout.splitlines()
        words = [line.split() for line in lines if line.startswith("add")]
        return {each[2]: int(each[4]) for each in words}


@pytest.fixture
def gateway(lab: Lab, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway behind which the senders and the receivers are."""
    lab.gateway.ip(
        f"route replace 10.3.0.0/16 via {CLIENT}",
        f"route replace 10.4.0.0/16 via {SERVER}",
        f"route replace fd00:a::/32 via {CLIENT6}",
        f"route replace fd00:b::/32 via {SERVER6}",
    )
    lab.gateway.popen(sys.executable, "-c", JOINING)
    gateway = Gateway(lab, tmp_path)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.close()


@pytest.mark.parametrize("family", [4, 6])
def test_whatever_a_packet_is_made_of_the_rule_that_names_it_holds(gateway: Gateway, family: int) -> None:
    trial = Trial(gateway.lab, family)
    tracking = [number for number, column in enumerate(COLUMNS) if column.tracks]
    others = [number for number in range(len(COLUMNS)) if number not in tracking]
    # Connections last: whoever counts them has the kernel track them, and put fragments together for everybody.
    seen = {}
    for columns in (others, tracking):
        gateway.put(*(rule for n in columns if COLUMNS[n].fields for rule in _rules(family, n, COLUMNS[n].fields)))
        seen |= trial.run(columns)
    rows = [Row(kind.name, tuple(_judge(seen, number, kind))) for number, kind in enumerate(trial.kinds)]
    faults = [f"{row.name}: {cell}" for row in rows for cell in row.cells if cell.fault]
    assert not faults, "\n".join(faults)
    check_page(family, rows)


def _judge(seen: dict[tuple[int, str, int], int], number: int, kind: Kind) -> Iterator[Cell]:
    control = {way: seen[number, way, 0] for way in (*WAYS, "to") if (number, way, 0) in seen}
    for index, column in enumerate(COLUMNS[1:], 1):
        passed = {way: seen[number, way, index] for way, free in control.items() if free}
        size = max(map(len, kind.build(_SAMPLE[6 if kind in kinds6.KINDS else 4])))
        yield Cell(column.name, passed, control, _excuse(kind, column), kind.spared, column.most(size), column.sent)


def _excuse(kind: Kind, column: Column) -> str:
    """Why packets of this kind are none of the column's business."""
    if column.tracks and not kind.opens:
        return "opens none of its own"
    if "ports" in column.fields and not kind.protocol:
        return "bears no ports"
    return ""


assert PORT == 53, "the rules of the page name it"
