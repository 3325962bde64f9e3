"""Two writers put the same into a table: python-iptables, and the host's own tool where the library cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from netlimit.errors import KernelError
from netlimit.kernel import libiptc, restore
from netlimit.kernel.base import observe
from netlimit.kernel.capabilities import LIBRARY
from netlimit.kernel.iptables import choose_writer
from netlimit.plan import SwitchTable, WriteSets, WriteTree, diff
from netlimit.state import (
    ChainId,
    Entry,
    Has,
    InSet,
    IpSet,
    Jump,
    MapMark,
    Reject,
    State,
    Structure,
    Verdict,
    chain_rule,
)
from tests.kernel.conftest import wipe
from tests.kernel.test_conformance import RULES, compiled, enforce, in_six
from tests.kernel.worker import RemoteKernel

MASK = 0xFF000000
"""Their environments; the usual one is python-iptables where it can say what we say, which is not so on Debian 13."""
SPECIMENS = """
from netlimit.kernel import iptables, libiptc, restore
from netlimit.kernel.specimens import CHAIN, OTHER, list_specimens
from netlimit.kernel.tables import digest_tables
from netlimit.plan import SwitchTable
for family in (4, 6):
    for table, rule in list_specimens(family):
        step = SwitchTable(family, table, {OTHER: (), CHAIN: (rule,)}, (), {})
        iptables.switch_table(step, restore)
        digest = digest_tables(family)
        lost = iptables.try_writer(libiptc, step)
        print(family, table, rule.text, lost or digest_tables(family) == digest)
"""
CHANGED = """
import os, subprocess
from netlimit.kernel import iptables, restore, tools
from netlimit.plan import SwitchTable
from netlimit.state import Jump, Verdict, chain_rule
moments = []
def change(*words):
    free = {**os.environ, "XTABLES_LOCKFILE": "/dev/null"}  # as one that takes no lock
    subprocess.run(["iptables-legacy", "-t", "mangle", *words], env=free, check=True)
class Late(tools.Dialogue):
    def tell(self, text):
        if not moments:  # before the child has read the table, and after we have
            moments.append("before")
            change("-I", "FORWARD", "-s", "192.0.2.1", "-j", "DROP")
        super().tell(text)
    def finish(self, text):
        if len(moments) == 1:  # between its reading and its writing
            moments.append("between")
            change("-I", "FORWARD", "-s", "192.0.2.2", "-j", "DROP")
        return super().finish(text)
restore.Dialogue = Late
rules = {"NL-T": (chain_rule(Verdict("DROP")),)}
iptables.switch_table(SwitchTable(4, "mangle", rules, (), {"FORWARD": (chain_rule(Jump("NL-T")),)}), restore)
print(moments)
"""
PAUSED = """
import time
from netlimit.kernel import iptables, restore
from netlimit.plan import SwitchTable
from netlimit.state import Verdict, chain_rule
digest = restore.digest_tables
def read_slowly(*words):
    time.sleep(1.5)  # a table of ten thousands of rules, or a host that is busy
    return digest(*words)
restore.digest_tables = read_slowly
iptables.switch_table(SwitchTable(4, "mangle", {"NL-T": (chain_rule(Verdict("DROP")),)}, (), {}), restore)
"""
MODULAR = """
import errno, sys
from netlimit.kernel import iptables, libiptc, restore, tables
from netlimit.plan import SwitchTable
from netlimit.state import Verdict, chain_rule
ask = tables._ask
def refuse(descriptor, level, question, name, *rest):
    family = 4 if level == tables._FAMILIES[4].level else 6
    if name not in tables.list_tables(family):
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")
    return ask(descriptor, level, question, name, *rest)
tables._ask = refuse
rules = {"NL-T": (chain_rule(Verdict("DROP")),)}
for family, table, writer in ((4, "mangle", restore), (4, "raw", libiptc), (6, "mangle", libiptc), (6, "raw", restore)):
    iptables.switch_table(SwitchTable(family, table, rules, (), {}), writer)
"""
HOOK = ChainId(4, "mangle", "FORWARD")
HOSTILE = 'a"b\n-A FORWARD -j NL-FEIGNED\n-A NL-T -j ACCEPT\nCOMMIT'


def test_each_form_of_rule_is_written_bit_for_bit_alike(untouched: RemoteKernel) -> None:
    """Where python-iptables cannot say it, the probe has found that out, and its refusal has left what was there."""
    for name, family in (("nl-probe", "inet"), ("nl-probe6", "inet6")):
        untouched.run("ipset", "create", name, "hash:net", "family", family, "skbinfo", "counters")
    lines = untouched.run(sys.executable, "-c", SPECIMENS).splitlines()
    assert len(lines) > 50
    different = [line for line in lines if not line.endswith("True")]
    assert bool(different) == bool(untouched.probe().capabilities[LIBRARY])
    assert [line for line in different if line.endswith("False")] == []


def test_all_rules_side_by_side_come_and_go(workers: dict[str, RemoteKernel]) -> None:
    """What one has written, the other finds as it would have written it, and takes away."""
    compilation = compiled(*RULES.values(), *map(in_six, RULES.values()))
    try:
        enforce(workers["restore"], compilation)
        assert observe(workers["usual"]) == compilation.state
        for rule_id in range(1, len(RULES), 4):
            compilation.drop(rule_id)
        enforce(workers["usual"], compilation)
        enforce(workers["restore"], compilation)
        assert observe(workers["restore"]) == compilation.state
        for step in diff(State(), observe(workers["restore"])).steps:
            workers["restore"].apply(step)
        assert observe(workers["restore"]) == State()
    finally:
        wipe(workers["restore"])


def test_doing_what_is_done_already_is_no_error(workers: dict[str, RemoteKernel]) -> None:
    kernel, compilation = workers["restore"], compiled(*RULES.values())
    try:
        plan = diff(compilation.state, State(), compilation.transition(Structure()))
        for step in (*plan.steps, *plan.steps):
            kernel.apply(step)
        assert observe(kernel) == compilation.state
        kernel.apply(SwitchTable(4, "mangle", {}, ("NL-NOTHING",), {"FORWARD": compilation.structure.hooks[HOOK]}))
        assert observe(kernel) == compilation.state
    finally:
        wipe(kernel)


def refused(kernel: RemoteKernel, step: SwitchTable) -> str:
    before = kernel.run("iptables-legacy-save")
    with pytest.raises(KernelError) as error:
        kernel.apply(step)
    after = kernel.run("iptables-legacy-save")
    assert [line for line in after.splitlines() if line.startswith((":NL", "-A"))] == [
        line for line in before.splitlines() if line.startswith((":NL", "-A"))
    ]
    return error.value.reason


def test_a_refusal_names_the_rule_and_leaves_all_as_it_was(workers: dict[str, RemoteKernel]) -> None:
    kernel = workers["restore"]
    ours = {"NL-T": (chain_rule(Verdict("RETURN")),)}
    hook = {"FORWARD": (chain_rule(Jump("NL-T")),)}
    try:
        kernel.apply(SwitchTable(4, "mangle", ours, (), hook))
        kernel.apply(WriteSets(create=(IpSet("nl-m", 4, marks=True),)))
        missing = (chain_rule(Verdict("DROP")), chain_rule(Verdict("DROP"), InSet("nl-missing", "src")))
        reason = refused(kernel, SwitchTable(4, "mangle", {"NL-T": missing}, (), {"FORWARD": ()}))
        assert reason == ("Set nl-missing doesn't exist. (in: -A NL-T -m set --match-set nl-missing src -j DROP)")
        jump = {"FORWARD": (chain_rule(Jump("NL-MISSING")),)}
        assert "NL-MISSING" in refused(kernel, SwitchTable(4, "mangle", {}, (), jump))
        reject = {"NL-T": (chain_rule(Reject("icmp-port-unreachable")),)}
        assert "refuses" in refused(kernel, SwitchTable(4, "mangle", reject, (), {}))
        maps = {"NL-T": (chain_rule(MapMark("nl-m", "src")),)}
        assert "refuses" in refused(kernel, SwitchTable(4, "filter", maps, (), {}))
        assert refused(kernel, SwitchTable(4, "mangle", {}, ("NL-T",), {})) == "it refuses this (in: -X NL-T)"
    finally:
        wipe(kernel)


def test_rules_of_others_and_what_they_counted_stay(writing: RemoteKernel) -> None:
    """Also those with a comment that looks like rules of ours."""
    foreign = (
        ("OUTPUT", "-d", "127.0.0.1", "-p", "udp", "-m", "comment", "--comment", HOSTILE),
        ("FORWARD", "-m", "comment", "--comment", HOSTILE, "-j", "ACCEPT"),
        ("FORWARD", "-s", "192.0.2.1", "-j", "DROP"),
    )
    for rule in foreign:
        writing.run("iptables-legacy", "-t", "mangle", "-A", *rule)
    send = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(bytes(100), ('127.0.0.1', 9))"
    writing.run(sys.executable, "-c", send)
    before = counted(writing)
    assert any(line.startswith("[1:128] -A OUTPUT") for line in before)
    rules = {"NL-T": (chain_rule(Verdict("DROP")),)}
    hook = {"FORWARD": (chain_rule(Jump("NL-T")),)}
    for _ in range(2):
        writing.apply(SwitchTable(4, "mangle", rules, (), hook))
        writing.run("iptables-legacy", "-t", "mangle", "-I", "FORWARD", "-s", "192.0.2.3", "-j", "DROP")
        writing.apply(SwitchTable(4, "mangle", rules, (), hook))
        writing.run("iptables-legacy", "-t", "mangle", "-D", "FORWARD", "-s", "192.0.2.3", "-j", "DROP")
    assert writing.run("iptables-legacy", "-t", "mangle", "-S", "FORWARD", "1").strip() == "-A FORWARD -j NL-T"
    structure = writing.structure()
    assert {where.name for where in structure.chains} == {"NL-T"}
    assert {where.name: rules for where, rules in structure.hooks.items()} == hook
    writing.apply(SwitchTable(4, "mangle", {}, ("NL-T",), {"FORWARD": ()}))
    assert counted(writing) == before


def counted(kernel: RemoteKernel) -> list[str]:
    text = kernel.run("iptables-legacy-save", "-c", "-t", "mangle")
    return [line for line in text.splitlines() if not line.startswith(("#", ":"))]


def test_what_another_changes_meanwhile_is_not_lost(untouched: RemoteKernel) -> None:
    """Before the child has read the table, and between that and the commit."""
    assert untouched.run(sys.executable, "-c", CHANGED) == "['before', 'between']\n"
    assert untouched.run("iptables-legacy", "-t", "mangle", "-S", "FORWARD").splitlines()[1:] == [
        "-A FORWARD -j NL-T",
        "-A FORWARD -s 192.0.2.2/32 -j DROP",
        "-A FORWARD -s 192.0.2.1/32 -j DROP",
    ]


def test_a_pause_before_the_rest_is_told_is_not_taken_for_its_end(untouched: RemoteKernel) -> None:
    untouched.run(sys.executable, "-c", PAUSED)
    assert untouched.run("iptables-legacy", "-t", "mangle", "-S", "NL-T").splitlines()[1:] == ["-A NL-T -j DROP"]


def test_a_table_that_nobody_has_asked_for_since_the_machine_started_is_loaded(untouched: RemoteKernel) -> None:
    """As where iptables is made of modules: the kernel does not know what it is asked about before they are there."""
    untouched.run(sys.executable, "-c", MODULAR)
    assert {(where.family, where.table) for where in untouched.structure().chains} == {
        (family, table) for family in (4, 6) for table in ("mangle", "raw")
    }


# -- a library that knows other structures than those of this host's iptables ---------------------------------------

FORGETFUL = """
import iptc.xtables
def look_up(self, entries, name):
    return entries[0] if entries[0].name == name else None
iptc.xtables.xtables._option_lookup = look_up
"""


@pytest.fixture
def estranged(namespace: str, tmp_path: Path) -> Iterator[RemoteKernel]:
    """A kernel whose python-iptables finds only the first option of an extension, as with iptables 1.8.11."""
    (tmp_path / "sitecustomize.py").write_text(FORGETFUL)
    path = f"{tmp_path}:{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}"
    kernel = RemoteKernel(namespace, {"PYTHONPATH": path})
    yield kernel
    wipe(kernel)
    kernel.close()


def test_what_the_library_cannot_say_is_said_all_the_same(estranged: RemoteKernel) -> None:
    found = estranged.probe().capabilities
    missing = {name: reason for name, reason in found.items() if reason and name != "fq_codel"}
    assert set(missing) == {LIBRARY}, "the host lacks nothing"
    reason = str(missing[LIBRARY])
    assert reason.startswith("python-iptables 1.2.0 cannot say ")
    assert all(name in reason for name in ("hashlimit", "connlimit", "multiport"))
    assert "no such parameter" in reason
    assert reason.endswith("netlimit writes through iptables-legacy-restore instead.")
    compilation = compiled(*RULES.values(), *map(in_six, RULES.values()))
    enforce(estranged, compilation)
    assert observe(estranged) == compilation.state


def test_who_has_not_probed_finds_the_writer_all_the_same(estranged: RemoteKernel) -> None:
    compilation = compiled(RULES["packets"])
    enforce(estranged, compilation)
    assert observe(estranged) == compilation.state


@pytest.mark.parametrize(("rules", "writer"), [(99, libiptc), (100, restore)])
def test_a_step_of_many_rules_goes_in_through_the_tool(rules: int, writer: object) -> None:
    """The library takes milliseconds for each: thousands of them would take a minute."""
    step = SwitchTable(4, "mangle", {"NL-T": (chain_rule(Verdict("DROP")),) * rules}, (), {})
    assert choose_writer(step, libiptc) is writer


EVIL = "2001:db8::1%x\n-A FORWARD -j DROP\nadd nl-words 2001:db8::66"


def test_what_would_end_a_line_is_left_out_alone(writing: RemoteKernel) -> None:
    """Nothing of that gets so far; it must be neither obeyed, nor keep others from being written."""
    ipset, here = IpSet("nl-words", 6), "2001:db8::9"
    writing.apply(WriteSets(create=(ipset,), add={ipset.name: {EVIL: Entry(), "a b": Entry(), here: Entry()}}))
    assert list(writing.readings([ipset.name])[ipset.name]) == [here]
    writing.apply(WriteSets(remove={ipset.name: (EVIL, here)}))
    assert writing.readings([ipset.name]) == {ipset.name: {}}
    rules = tuple(chain_rule(Verdict("DROP"), Has("src", key)) for key in (here, EVIL))
    writing.apply(SwitchTable(6, "mangle", {"NL-T": rules}, (), {}))
    assert [line for line in writing.run("ip6tables-legacy-save").splitlines() if line.startswith("-A")] == [
        f"-A NL-T -s {here}/128 -j DROP"
    ]
    with suppress(KernelError):
        writing.apply(WriteTree("near\nqdisc add dev lo root pfifo", 0x6E00, gone=(0x6E000001,)))
    assert "pfifo" not in writing.run("tc", "qdisc", "show", "dev", "lo")
