"""What belongs to others stays as it is, and ours comes back to its place."""

from __future__ import annotations

import fcntl
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from netlimit.compile import Compilation
from netlimit.errors import KernelError
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.plan import SwitchTable, WriteSets, diff
from netlimit.rules import parse_rule
from netlimit.state import ChainId, Entry, IpSet, Jump, State, Verdict, chain_rule
from tests.kernel.conftest import HERE, HERE6
from tests.kernel.test_conformance import RULES, compiled, enforce, in_six
from tests.kernel.worker import RemoteKernel
from tests.unit.strategies import NOW

FOREIGN = """
*raw
-A PREROUTING -p udp -m udp --dport 5 -j DROP
COMMIT
*mangle
:OTHER - [0:0]
-A FORWARD -m comment --comment "a word NL-FORWARD in it" -j OTHER
-A FORWARD -m comment --comment "it is \\"no\\" -j NL-FORWARD of ours" -j OTHER
-A FORWARD -m mark --mark 0x1/0x1 -j OTHER
-A OTHER -m set --match-set other src -j RETURN
-A PREROUTING -p tcp -m conntrack --ctstate INVALID -j DROP
COMMIT
*filter
:NLX - [0:0]
-A INPUT -i lo -j ACCEPT
-A FORWARD -p tcp -m multiport --dports 1,2,3 -m hashlimit --hashlimit-above 7/sec --hashlimit-burst 5 \
--hashlimit-mode srcip --hashlimit-name other -j DROP
COMMIT
"""


@pytest.fixture
def neighbours(linux: RemoteKernel) -> None:
    linux.run("ipset", "create", "other", "hash:ip")
    linux.run("ipset", "add", "other", "192.0.2.1")
    linux.run("ipset", "create", "nlx", "hash:ip")
    linux.run("iptables-legacy-restore", stdin=FOREIGN)
    linux.run(
        "ip6tables-legacy-restore", stdin=FOREIGN.replace("-A OTHER -m set --match-set other src -j RETURN\n", "")
    )


def snapshot(kernel: RemoteKernel) -> list[str]:
    """Every rule and set on the host that is not ours, in order."""
    text = kernel.run("iptables-legacy-save") + kernel.run("ip6tables-legacy-save") + kernel.run("ipset", "save")
    text = re.sub(r"\[\d+:\d+\]", "", text)
    ours = re.compile(r"^#|^:NL-|^-A NL-|-[jg] NL-\S+$|^(create|add) nl-|^\*|^COMMIT|^:[A-Z]+ ACCEPT")
    return [line for line in text.splitlines() if not ours.search(line)]


def test_foreign_rules_sets_and_chains_stay(linux: RemoteKernel, neighbours: None) -> None:
    before = snapshot(linux)
    assert len(before) > 12
    compilation = compiled(*RULES.values(), *map(in_six, RULES.values()))
    enforce(linux, compilation)
    assert snapshot(linux) == before
    assert observe(linux) == compilation.state
    for step in diff(State(), observe(linux)).steps:
        linux.apply(step)
    assert snapshot(linux) == before
    left = linux.run("iptables-legacy-save") + linux.run("ip6tables-legacy-save") + linux.run("ipset", "save")
    assert "NL-" not in re.sub(r'--comment ".*?NL-FORWARD [^"]*"', "", left)
    assert "nl-" not in left


@pytest.mark.parametrize("program", ["iptables-legacy", "ip6tables-legacy"])
@pytest.mark.parametrize("hook", ["INPUT", "FORWARD"])
@pytest.mark.parametrize("place", ["-I", "-A"])
def test_rules_of_ours_that_lost_their_place_come_back_to_it(
    linux: RemoteKernel, program: str, hook: str, place: str
) -> None:
    rules = [{"target": "10.1.0.0/16", "per": "target", "rate": "5 packets/s", "direction": d} for d in ("from", "to")]
    compilation = compiled(*rules, *map(in_six, rules))
    enforce(linux, compilation)
    linux.run(program, "-t", "mangle", place, hook, "-p", "udp", "-m", "udp", "--dport", "7", "-j", "ACCEPT")
    before = snapshot(linux)
    assert (linux.structure() == compilation.structure) == (place == "-A"), "behind ours is no drift, before it is"
    enforce(linux, compilation)
    assert linux.structure() == compilation.structure
    assert snapshot(linux) == before
    first = linux.run(program, "-t", "mangle", "-S", hook).splitlines()[1]
    assert first == f"-A {hook} -j NL-{hook}"


def test_a_jump_of_ours_that_stands_twice_is_drift(linux: RemoteKernel) -> None:
    compilation = compiled({"target": "10.1.0.2", "rate": "5 packets/s", "direction": "to"})
    enforce(linux, compilation)
    linux.run("iptables-legacy", "-t", "mangle", "-A", "FORWARD", "-j", "NL-FORWARD")
    assert linux.structure() != compilation.structure
    enforce(linux, compilation)
    assert linux.run("iptables-legacy", "-t", "mangle", "-S", "FORWARD").count("NL-FORWARD") == 1


@pytest.mark.parametrize(
    "damage",
    [
        ("iptables-legacy", "-t", "mangle", "-F"),
        ("iptables-legacy", "-t", "mangle", "-D", "FORWARD", "1"),
        ("iptables-legacy", "-t", "mangle", "-A", "NL-FORWARD", "-j", "RETURN"),
        ("iptables-legacy", "-t", "mangle", "-I", "NL-FORWARD", "-j", "ACCEPT"),
        ("iptables-legacy", "-t", "raw", "-F", "PREROUTING"),
        ("ipset", "flush"),
    ],
)
def test_whatever_is_taken_away_is_seen_and_comes_back(linux: RemoteKernel, damage: tuple[str, ...]) -> None:
    compilation = compiled(RULES["peers"], {"target": "10.9.0.0/16", "action": "block"})
    enforce(linux, compilation)
    linux.run(*damage)
    assert diff(compilation.state, observe(linux))
    enforce(linux, compilation)
    assert observe(linux) == compilation.state


def test_a_full_flush_is_repaired(linux: RemoteKernel) -> None:
    compilation = compiled(*RULES.values())
    enforce(linux, compilation)
    for table in ("raw", "mangle", "filter", "security"):
        linux.run("iptables-legacy", "-t", table, "-F")
        linux.run("iptables-legacy", "-t", table, "-X")
    linux.run("ipset", "destroy")
    assert observe(linux) == State()
    enforce(linux, compilation)
    assert observe(linux) == compilation.state


def test_a_foreign_set_under_our_name_without_counters(linux: RemoteKernel) -> None:
    """Somebody restored an old dump: the set can be read, and is replaced."""
    compilation = compiled({"target": "10.1.0.0/24", "action": "block"})
    name = compilation.sets_of(1)[0]
    linux.run("ipset", "create", name, "hash:net")
    linux.run("ipset", "add", name, "10.9.9.9")
    enforce(linux, compilation)
    assert observe(linux) == compilation.state


def test_a_swap_that_was_cut_off_is_no_obstacle(linux: RemoteKernel) -> None:
    """Killed between `create` and `swap`, a set of another kind is left under the name that is needed again."""
    linux.run("ipset", "create", "nl-swap", "hash:net", "counters")
    linux.run("ipset", "add", "nl-swap", "10.8.8.8")
    compilation = compiled({"target": "10.1.0.0/24", "action": "block"})
    name = compilation.sets_of(1)[0]
    linux.run("ipset", "create", name, "hash:net")
    enforce(linux, compilation)
    assert observe(linux) == compilation.state


BLOCK, LIMIT = {"target": "10.1.0.0/24", "action": "block"}, {"target": "10.1.1.1", "rate": "9 packets/s"}
KINDS = ["hash:ip", "hash:net family inet6", "bitmap:port range 1-99", "list:set"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_of_somebody_else_under_our_name_stays_and_keeps_no_other_rule(linux: RemoteKernel, kind: str) -> None:
    name = compiled(BLOCK).sets_of(1)[0]
    linux.run("ipset", "create", name, *kind.split())
    compilation = Compilation(Facts(capabilities=linux.probe().capabilities))
    for number, fields in enumerate((BLOCK, LIMIT), 1):
        compilation.put(replace(parse_rule(fields, NOW), id=number))
    said = f"There is a set {name} that is none of netlimit's ({kind.split()[0]}"
    assert compilation.problems.keys() == {1}
    assert said in compilation.problems[1]
    enforce(linux, compilation)
    assert observe(linux) == compilation.state
    assert any(said in each for each in linux.leftovers())
    for step in diff(State(), observe(linux)).steps:
        linux.apply(step)
    assert linux.run("ipset", "list", "-n").split() == [name]
    linux.run("ipset", "rename", name, "theirs")
    assert linux.probe().capabilities.get(name) is None
    assert observe(linux) == State()
    assert linux.leftovers() == ()


@pytest.mark.parametrize("name", ["nl-safe4", "nl-exempt4-from", "nl-off4"])
def test_where_it_has_the_name_of_what_all_rules_share_those_of_the_family_are_told(
    linux: RemoteKernel, name: str
) -> None:
    linux.run("ipset", "create", name, "list:set")
    found = linux.probe().capabilities
    assert f"There is a set {name} that is none" in (found["iptables"] or "")
    assert found["ip6tables"] is None


def test_a_set_of_a_type_that_none_of_ours_has_is_left_alone(linux: RemoteKernel) -> None:
    linux.run("ipset", "create", "nl-zzz", "list:set")
    enforce(linux, compiled(LIMIT))
    assert "nl-zzz" in linux.run("ipset", "list", "-n").split()
    assert any("There is a set nl-zzz that is none" in each for each in linux.leftovers())


def test_rules_for_ipv6_are_not_looked_for_in_ipv4(linux: RemoteKernel) -> None:
    linux.apply(SwitchTable(6, "mangle", {"NL-T": (chain_rule(Verdict("RETURN")),)}, (), {}))
    assert list(linux.structure().chains) == [ChainId(6, "mangle", "NL-T")]
    assert "NL-T" not in linux.run("iptables-legacy-save")


def test_the_addresses_of_this_host_are_its_own(linux: RemoteKernel) -> None:
    own = linux.addresses().own
    assert {HERE, HERE6, "127.0.0.1", "::1"} <= set(own)


def test_iptables_of_others_is_waited_for(linux: RemoteKernel) -> None:
    """libiptc takes no lock; a commit without it would undo what another program does at the same time."""
    with Path("/run/xtables.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.4, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        begin = time.monotonic()
        linux.apply(SwitchTable(4, "mangle", {"NL-T": (chain_rule(Verdict("RETURN")),)}, (), {}))
        assert time.monotonic() - begin > 0.3


def test_a_refusal_says_what_was_asked_and_what_the_kernel_said(linux: RemoteKernel) -> None:
    linux.apply(WriteSets(create=(IpSet("nl-x", 4),)))
    with pytest.raises(KernelError) as error:
        linux.apply(WriteSets(add={"nl-x": {"fd00::1": Entry()}}))
    assert "nl-x fd00::1" in error.value.step
    assert error.value.reason


JUMP = {"NL-T": (chain_rule(Verdict("RETURN")),), "NL-U": (chain_rule(Jump("NL-T")),)}


@pytest.mark.parametrize(("family", "program"), [(4, "iptables-legacy"), (6, "ip6tables-legacy")])
def test_what_others_changed_meanwhile_stays_changed(untouched: RemoteKernel, family: int, program: str) -> None:
    """python-iptables keeps tables open that it only looked into; written back, they undo what others did."""
    first, second = (("OUTPUT", "-p", "udp", "-m", "udp", "--dport", port, "-j", "ACCEPT") for port in "56")
    untouched.run(program, "-A", *first)
    untouched.apply(SwitchTable(family, "mangle", JUMP, (), {}))
    untouched.run(program, "-D", *first)
    untouched.run(program, "-A", *second)
    untouched.apply(SwitchTable(family, "filter", JUMP, (), {}))
    assert [line for line in untouched.run(program, "-S").splitlines() if "dport" in line] == [
        "-A OUTPUT -p udp -m udp --dport 6 -j ACCEPT"
    ]


@pytest.mark.parametrize("family", [4, 6])
def test_tables_that_are_not_needed_are_not_touched(untouched: RemoteKernel, family: int) -> None:
    """Looking into `nat` brings connection tracking to a host that had none."""
    untouched.apply(SwitchTable(family, "mangle", JUMP, (), {}))
    names = untouched.run("cat", "/proc/net/ip_tables_names", "/proc/net/ip6_tables_names").split()
    assert names == ["mangle"]
