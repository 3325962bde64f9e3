"""What gets in the way of limits is made for real, found, and not found any more once it is gone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from netlimit.conflicts import find_conflicts, is_serious
from netlimit.detours import find_translations
from netlimit.kernel import survey
from netlimit.kernel.survey import are_namespaces_free
from tests.kernel.conftest import THERE
from tests.kernel.worker import RemoteKernel

HASHLIMIT = (
    *("OUTPUT", "-p", "udp", "-m", "hashlimit", "--hashlimit-above", "1/sec", "--hashlimit-mode", "srcport"),
    *("--hashlimit-name", "small", "--hashlimit-htable-size", "8", "--hashlimit-htable-max", "8", "-j", "ACCEPT"),
)
MADE: dict[str, tuple[list[str], list[str]]] = {
    "two kinds of iptables": (
        ["iptables-nft -A FORWARD -s 192.0.2.1 -j DROP"],
        ["nft flush ruleset"],
    ),
    "set size": (
        ["ipset create nl-small hash:ip maxelem 2", *(f"ipset add nl-small 192.0.2.{n}" for n in (1, 2))],
        ["ipset destroy nl-small"],
    ),
    "foreign qdisc": (["tc qdisc add dev near root handle 1: htb"], ["tc qdisc del dev near root"]),
    "hashlimit table": (
        [f"iptables-legacy -t mangle -A {' '.join(HASHLIMIT)}", "SEND"],
        [f"iptables-legacy -t mangle -D {' '.join(HASHLIMIT)}"],
    ),
    "source routes": (
        ["sysctl -q -w net.ipv4.conf.all.accept_source_route=1"],
        ["sysctl -q -w net.ipv4.conf.all.accept_source_route=0"],
    ),
    "packet priority": (
        ["iptables-nft -t mangle -A FORWARD -j CLASSIFY --set-class 0:6"],
        ["nft flush ruleset"],
    ),
    "packet priority of a set": (
        [
            "ipset create classes hash:ip skbinfo",
            "iptables-nft -t mangle -A POSTROUTING -j SET --map-set classes dst --map-prio",
        ],
        ["nft flush ruleset", "ipset destroy classes"],
    ),
    "packet priority of a set in IPv6": (
        [
            "ipset create classes hash:ip family inet6 skbinfo",
            "ip6tables-nft -t mangle -N own",
            "ip6tables-nft -t mangle -A own -j SET --map-set classes dst --map-prio --map-mark",
        ],
        ["nft flush ruleset", "ipset destroy classes"],
    ),
    "copied packets": (
        ["iptables-legacy -t mangle -A PREROUTING -i near -j TEE --gateway 192.0.2.7"],
        ["iptables-legacy -t mangle -F PREROUTING"],
    ),
    "SYNPROXY": (
        ["iptables-legacy -A FORWARD -i near -p tcp -m conntrack --ctstate UNTRACKED -j SYNPROXY --mss 1460"],
        ["iptables-legacy -F FORWARD"],
    ),
    "reset connections": (
        ["sysctl -q -w net.netfilter.nf_conntrack_tcp_timeout_close=60"],
        ["sysctl -q -w net.netfilter.nf_conntrack_tcp_timeout_close=10"],
    ),
    "bridge": (["ip link add name br0 type bridge"], ["ip link del br0"]),
}


@pytest.mark.parametrize("name", MADE)
def test_a_conflict_is_found_while_it_is_there(linux: RemoteKernel, name: str) -> None:
    begin, end = MADE[name]
    name = name.partition(" of a set")[0]
    assert name not in found(linux)
    for command in begin:
        if command == "SEND":
            send_from_many_ports(linux)
        else:
            linux.run(*command.split())
    try:
        assert name in found(linux)
    finally:
        for command in end:
            linux.run(*command.split())
    assert name not in found(linux)


def test_what_a_set_is_told_is_no_priority(linux: RemoteKernel) -> None:
    """nft prints the same of both."""
    linux.run("ipset", "create", "seen", "hash:ip", "skbinfo")
    try:
        for rule in ("--add-set seen src --exist", "--map-set seen dst --map-mark"):
            linux.run(*f"iptables-nft -t mangle -A FORWARD -j SET {rule}".split())
        assert "packet priority" not in found(linux)
    finally:
        linux.run("nft", "flush", "ruleset")
        linux.run("ipset", "destroy", "seen")


def set_handing(kernel: RemoteKernel, value: int) -> None:
    kernel.run("sysctl", "-qw", *(f"net.bridge.bridge-nf-call-{table}={value}" for table in ("iptables", "ip6tables")))


def test_a_bridge_that_hands_frames_to_iptables_by_itself_is_found(linux: RemoteKernel) -> None:
    """Beside the sysctl, which has all of them do so, each has a switch of its own."""
    set_handing(linux, 0)
    for name, option in (("br0", "nf_call_iptables"), ("br1", "nf_call_ip6tables"), ("br2", "nf_call_arptables")):
        linux.run(*f"ip link add name {name} type bridge {option} 1".split())
    try:
        assert linux.survey().bridged == {"br0": {4}, "br1": {6}, "br2": set()}
        linux.run("ip", "link", "set", "br0", "type", "bridge", "nf_call_iptables", "0")
        assert linux.survey().bridged == {"br0": set(), "br1": {6}, "br2": set()}
        set_handing(linux, 1)
        assert linux.survey().bridged == {"br0": {4, 6}, "br1": {4, 6}, "br2": {4, 6}}
    finally:
        set_handing(linux, 0)
        for name in ("br0", "br1", "br2"):
            linux.run(*f"ip link del {name}".split())


@pytest.mark.parametrize("flags", ["", "flags owner;"])
def test_a_table_is_read_that_somebody_owns(linux: RemoteKernel, flags: str) -> None:
    """firewalld owns its own unless it is told not to; nft lists such a table as no other."""
    written = f"""add table inet owned {{ {flags} }}
add chain inet owned sent {{ type nat hook output priority -90; }}
add rule inet owned sent ip daddr 198.51.100.7 dnat ip to 192.0.2.80
list ruleset
"""
    command = ["ip", "netns", "exec", linux.namespace, "nft", "-i"]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write(written)
        owner.stdin.flush()
        lines = iter(owner.stdout.readline, "")
        header = next(line for line in lines if "table inet owned" in line and "add" not in line)
        assert ("# progname nft" in header) is bool(flags)
        try:
            assert [str(each) for each in find_translations(linux.survey().nftables, ())] == ["192.0.2.80"]
        finally:
            owner.stdin.close()
            owner.wait(10)
            if not flags:
                linux.run("nft", "delete", "table", "inet", "owned")
    assert not list(find_translations(linux.survey().nftables, ()))


@pytest.mark.parametrize(
    ("settings", "free"),
    [
        ({}, False),
        ({"user/max_user_namespaces": 0}, False),
        ({"user/max_user_namespaces": 127}, True),
        ({"user/max_user_namespaces": 127, "kernel/unprivileged_userns_clone": 0}, False),
        ({"user/max_user_namespaces": 127, "kernel/unprivileged_userns_clone": 1}, True),
        ({"user/max_user_namespaces": 127, "kernel/apparmor_restrict_unprivileged_userns": 1}, False),
        ({"user/max_user_namespaces": 127, "kernel/apparmor_restrict_unprivileged_userns": 0}, True),
    ],
)
def test_who_may_make_namespaces_is_told(tmp_path: Path, settings: dict[str, int], free: bool) -> None:
    for name, value in settings.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert are_namespaces_free(tmp_path) is free


def test_legacy_rules_beside_those_of_nft_are_worse(linux: RemoteKernel) -> None:
    linux.run("iptables-nft", "-A", "FORWARD", "-s", "192.0.2.1", "-j", "DROP")
    linux.run("iptables-legacy", "-A", "FORWARD", "-s", "192.0.2.2", "-j", "DROP")
    try:
        (finding,) = (each for each in find_conflicts(linux.survey()) if each.name == "two kinds of iptables")
        assert finding.severity == "warning"
        assert "Others have rules there too (1)." in finding.what
    finally:
        linux.run("nft", "flush", "ruleset")
    assert "-A FORWARD -s 192.0.2.2/32 -j DROP" in linux.run("iptables-legacy", "-S"), "nft does not reach these"


@pytest.mark.parametrize("program", ["firewalld", "dockerd"])
def test_a_program_counts_where_it_runs(linux: RemoteKernel, tmp_path: Path, program: str) -> None:
    shutil.copy("/bin/sleep", tmp_path / program)
    elsewhere = subprocess.Popen([tmp_path / program, "60"])
    assert program.removesuffix("d").replace("firewall", "firewalld") not in found(linux)
    here = subprocess.Popen(["ip", "netns", "exec", linux.namespace, tmp_path / program, "60"])
    try:
        name = {"firewalld": "firewalld", "dockerd": "docker"}[program]
        wait_for(lambda: Path(f"/proc/{here.pid}/comm").read_text().strip() == program)
        assert name in found(linux)
    finally:
        for process in (elsewhere, here):
            process.kill()
            process.wait()
    assert name not in found(linux)


FILES = {
    "etc/nftables.conf": ("#!/usr/sbin/nft -f\n\nflush ruleset\n", "flush ruleset"),
    "etc/iptables/rules.v4": ("*mangle\n:NL-FORWARD - [0:0]\n-A FORWARD -j NL-FORWARD\nCOMMIT\n", "saved rules"),
    "etc/sysconfig/ip6tables": ("*mangle\n-A FORWARD -j NL-FORWARD\nCOMMIT\n", "saved rules"),
    "etc/iptables/ipsets": ("create nl-b4-0a hash:net family inet\nadd nl-b4-0a 10.1.0.3\n", "saved sets"),
    "etc/sysconfig/ipset": ("create nl-b4-0a hash:net family inet\n", "saved sets"),
    "etc/systemd/system/multi-user.target.wants/netfilter-persistent.service": ("[Unit]\n", "restored rules"),
}


@pytest.mark.parametrize("path", FILES)
def test_files_that_load_rules_are_found(root: None, tmp_path: Path, path: str) -> None:
    text, name = FILES[path]
    assert [each.name for each in looked_round(tmp_path)] == []
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("*filter\n-A INPUT -j ACCEPT\nCOMMIT\n" if name != "restored rules" else text)
    assert [each.name for each in looked_round(tmp_path)] == ([name] if name == "restored rules" else [])
    (tmp_path / path).write_text(text)
    (finding,) = looked_round(tmp_path)
    assert finding.name == name
    assert is_serious(finding) == (name == "saved rules")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that anybody may pass, unlike pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="netlimit-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_a_file_that_cannot_be_read_is_told(root: None, place: Path) -> None:
    """As saved rules of Debian (0640) for a controller that is not root."""
    for path, mode in (("etc/nftables.conf", 0o644), ("etc/iptables/rules.v4", 0o640)):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(FILES[path][0])
        (place / path).chmod(mode)
    code = f"""
import pwd
from pathlib import Path
from netlimit.cli.privileges import NETWORK, become
from netlimit.kernel.survey import look_round
become(pwd.getpwnam("nobody"), NETWORK)
report = look_round(250, {{}}, Path({str(place)!r}), thorough=False)
print(report.flushing, report.saved, report.unknown)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("('/etc/nftables.conf',) () ")
    assert (
        "saved rules (/etc/iptables/rules.v4: Permission denied; `netlimit doctor`, as root, reads it)" in done.stdout
    )


def test_which_multicast_groups_there_are_is_asked_for_who_is_told(linux: RemoteKernel) -> None:
    """Any user may join as many as he likes, and the kernel takes the square of that to list them."""
    assert ("224.0.0.1", "near") in linux.survey().groups
    report = linux.survey(thorough=False)
    assert (report.groups, report.unknown) == (frozenset(), ())


def test_what_takes_long_to_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_LONGEST", -1)
    (unknown,) = (each for each in survey.look_round(250, {}).unknown if "multicast" in each)
    assert unknown == (
        "which multicast addresses devices listen to (TimeoutError: /proc/net/igmp has more than can be read in -1 s)"
    )


def looked_round(root: Path) -> list:  # type: ignore[type-arg]  # of findings about files alone
    report = survey.look_round(250, {}, root, thorough=False)
    return [each for each in find_conflicts(report) if each.name in {name for _, name in FILES.values()}]


def found(kernel: RemoteKernel) -> set[str]:
    return {finding.name for finding in find_conflicts(kernel.survey())}


def send_from_many_ports(kernel: RemoteKernel) -> None:
    script = (
        "import contextlib, socket\n"
        "for port in range(40000, 40020):\n"
        "    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:\n"
        "        sock.bind(('', port))\n"
        "        with contextlib.suppress(PermissionError):\n"  # of a table that is full
        f"            sock.sendto(b'x', ('{THERE}', 9))\n"
    )
    kernel.run("python3", "-c", script)


def wait_for(come: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not come():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


JOIN = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
index = socket.if_nametoindex("near").to_bytes(4, sys.byteorder)
sock.setsockopt(0, 35, socket.inet_aton("224.0.0.18") + bytes(4) + index)  # IP_ADD_MEMBERSHIP
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_routers_say_is_named_while_somebody_listens(linux: RemoteKernel) -> None:
    assert "other routers" not in found(linux)
    command = ["ip", "netns", "exec", linux.namespace, sys.executable, "-c", JOIN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listening:
        assert listening.stdout is not None
        assert listening.stdout.readline() == b"ready\n"
        (finding,) = (each for each in find_conflicts(linux.survey()) if each.name == "other routers")
        assert "VRRP (near)" in finding.what
        assert not is_serious(finding)
        listening.communicate()
    assert "other routers" not in found(linux)
