"""Sets and rules of others whose names hold ends of lines, and lines that look like ours: what is ours is read as it
is, and written all the same."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from netlimit.compile import Compilation
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.marks import Bits, MarkUse, Write
from netlimit.plan import diff
from netlimit.rules import parse_rule
from netlimit.state import State, show_entry
from scripts.testbed.lock import wait_for_lock
from tests.kernel.worker import RemoteKernel
from tests.unit.strategies import NOW

RULES: list[dict[str, object]] = [
    {"target": "10.1.0.2", "rate": "9 packets/s"},
    {"target": "10.1.0.3", "action": "block"},
    {"target": "10.1.0.4", "direction": "to", "rate": "7 packets/s", "action": "reject"},
    {"target": "fd00:1::2", "rate": "9 packets/s"},
]


def make_state(*rules: dict[str, object]) -> State:
    compilation = Compilation(Facts())
    for number, fields in enumerate(rules, 1):
        assert compilation.put(replace(parse_rule(fields, NOW), id=number)) is None
    return compilation.state


def bring(linux: RemoteKernel, wanted: State) -> None:
    """As the controller does it: what is refused is refused."""
    for step in diff(wanted, observe(linux)).steps:
        linux.apply(step)


def check(linux: RemoteKernel) -> None:
    """What stands there is read as it is; a change and a repair go in at the first attempt, and all comes out again."""
    fewer, more = make_state(*RULES[:1], RULES[3]), make_state(*RULES)
    assert observe(linux) == fewer
    assert linux.leftovers() == ()
    bring(linux, more)
    assert observe(linux) == more
    linux.run("iptables-legacy", "-t", "mangle", "-F", "NL-FORWARD")
    assert observe(linux) != more
    bring(linux, more)
    assert observe(linux) == more
    bring(linux, fewer)
    assert observe(linux) == fewer
    bring(linux, State())
    assert observe(linux) == State()
    assert linux.leftovers() == ()
    bring(linux, fewer)


@pytest.fixture
def limited(linux: RemoteKernel) -> RemoteKernel:
    """A kernel in which some limits are."""
    bring(linux, make_state(*RULES[:1], RULES[3]))
    return linux


USED = next(name for name in make_state(*RULES).structure.sets if name.startswith("nl-l4-"))


@pytest.mark.parametrize(
    "name",
    [
        b"x\n\nName: " + USED.encode(),
        b"x\n\nName: nl-a",
        b"nl-b\nName: nl-a",
        b"nl-\xff",
        b'nl-a "b" <c>',
        b"nl-\x1b[2J",
        b"x\ncreate nl-a hash:ip",
    ],
)
def test_names_of_foreign_sets_are_none_of_ours(limited: RemoteKernel, name: bytes) -> None:
    run_bytes(limited, "ipset", "create", name, "hash:ip")
    try:
        check(limited)
        assert limited.counts([USED, "nl-a"]) == {USED: 1}
        assert "how full sets are" not in " ".join(limited.survey().unknown)
        assert set(limited.survey().sets) <= set(limited.structure().sets)
    finally:
        run_bytes(limited, "ipset", "destroy", name)  # it is still there


def test_a_set_of_our_name_with_comments_is_replaced(limited: RemoteKernel) -> None:
    wanted = make_state(*RULES)
    name = next(name for name in wanted.structure.sets if name.startswith("nl-b4-"))
    shown = str(wanted.structure.sets[name]).split()
    limited.run("ipset", "create", *shown, "comment")
    comment = f"x\nadd {name} 10.7.7.7 timeout never\nadd {name}"
    limited.run("ipset", "add", name, "10.9.9.9", "comment", comment)
    bring(limited, wanted)
    assert observe(limited) == wanted
    assert "comment" not in limited.run("ipset", "save", name)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("nl-b4-", "nomatch"), ("nl-l4-", "nomatch"), ("nl-l4-", "skbqueue 3"), ("nl-l4-", "skbprio 1:2")],
)
def test_an_entry_with_what_we_did_not_write_is_drift(limited: RemoteKernel, kind: str, extra: str) -> None:
    wanted = make_state(*RULES)
    name = next(name for name in wanted.structure.sets if name.startswith(kind))
    bring(limited, wanted)
    key, entry = next(iter(wanted.entries[name].items()))
    limited.run("ipset", "add", "-exist", name, *show_entry(key, entry).split(), "timeout", "0", *extra.split())
    assert observe(limited) != wanted
    bring(limited, wanted)
    assert observe(limited) == wanted
    assert extra not in limited.run("ipset", "save", name)


def test_an_entry_that_spares_a_part_of_another_goes(limited: RemoteKernel) -> None:
    wanted = make_state(*RULES)
    name = next(name for name in wanted.structure.sets if name.startswith("nl-b4-"))
    bring(limited, wanted)
    limited.run("ipset", "add", name, "10.1.0.0/25", "nomatch")
    bring(limited, wanted)
    assert observe(limited) == wanted
    assert "nomatch" not in limited.run("ipset", "save", name)


def test_a_set_of_our_name_that_does_not_count_is_replaced(limited: RemoteKernel) -> None:
    wanted = make_state(*RULES)
    name = next(name for name in wanted.structure.sets if name.startswith("nl-b4-"))
    limited.run("ipset", "create", *str(wanted.structure.sets[name]).replace(" counters", "").split())
    bring(limited, wanted)
    assert observe(limited) == wanted
    assert "packets" in limited.run("ipset", "save", name)


FORGED = (
    "x\n*raw\n:NL-ODD - [0:0]\n-A NL-ODD -j DROP\n-A PREROUTING -j NL-ODD\nCOMMIT\n"
    "*mangle\n-A OUTPUT -j MARK --set-mark 9"
)
LATER = "x\nCOMMIT\n# a\n\n*filter\n:NL-ODD - [0:0]"
LEADS = "x -j NL-PREROUTING"
HOSTILE = {
    "hashlimit, another table": ["-m", "hashlimit", "--hashlimit-name", "x\n*raw", "--hashlimit-upto", "9/s"],
    "hashlimit, much more": ["-m", "hashlimit", "--hashlimit-name", FORGED, "--hashlimit-upto", "9/s"],
    "hashlimit, the end": ["-m", "hashlimit", "--hashlimit-name", LATER, "--hashlimit-upto", "9/s"],
    "hashlimit, leading to us": ["-m", "hashlimit", "--hashlimit-name", LEADS, "--hashlimit-upto", "9/s"],
    "recent": ["-m", "recent", "--name", "x\n*raw", "--set"],
    "recent, a rule": ["-m", "recent", "--name", "x\n-A NL-PREROUTING -j DROP", "--set"],
    "recent, a chain": ["-m", "recent", "--name", "x\n:NL-ODD - [0:0]", "--set"],
    "interface": ["-i", "x\n*raw"],
    "interface, a jump": ["-i", "x -j NL-INPUT"],
    "comment": ["-m", "comment", "--comment", FORGED],
    "string": ["-m", "string", "--algo", "bm", "--string", "x\n*raw"],
    "physdev": ["-m", "physdev", "--physdev-in", "x\n*raw"],
    "set": ["-m", "set", "--match-set", "x\n*raw", "src"],
    "set, a jump": ["-m", "set", "--match-set", "x -j NL-INPUT", "src"],
    "cgroup": ["-m", "cgroup", "--path", "x\n*raw"],
}
PLACES = [("mangle", "INPUT"), ("mangle", "PREROUTING"), ("filter", "INPUT")]
MANGLE = ("iptables-legacy", "-t", "mangle")


@pytest.mark.parametrize("what", HOSTILE)
def test_what_rules_of_others_name_is_none_of_ours(limited: RemoteKernel, what: str) -> None:
    words = HOSTILE[what]
    if "--match-set" in words:
        limited.run("ipset", "create", words[3], "hash:ip")
    places = [(tool, *place) for tool in ("iptables-legacy", "ip6tables-legacy") for place in PLACES]
    stands = sum(
        add_rule(limited, tool, "-t", table, "-A", chain, *words, "-j", "ACCEPT") for tool, table, chain in places
    )
    if not stands:
        pytest.skip("this host has no such match")
    check(limited)
    report = limited.survey()
    assert report.unknown == ()
    foreign = [line for line in report.legacy if line.endswith("-j ACCEPT")]
    assert len(foreign) == stands
    assert all(each.isprintable() for each in foreign)
    found = look_for_marks(limited)
    assert (found.uses, found.unread) == ((), ())


def test_a_rule_of_others_among_ours_goes_whatever_it_names(limited: RemoteKernel) -> None:
    wanted = make_state(*RULES[:1], RULES[3])
    recent = ("-m", "recent", "--name", "x\n*raw", "--set")
    for words in (("-A", "NL-FORWARD", *recent), ("-I", "FORWARD", *recent, "-j", "NL-FORWARD")):
        limited.run(*MANGLE, *words)
        found = observe(limited)
        assert found != wanted
        assert "x\\n*raw" in str(found)
        bring(limited, wanted)
        assert observe(limited) == wanted
        assert "*raw\n*raw" not in limited.run("iptables-legacy-save", "-t", "mangle")


def test_more_ends_of_lines_than_anybody_asks_for(limited: RemoteKernel) -> None:
    """What is ours, the first there, is read all the same; what of others concerns marks is said to be unknown."""
    marking = "-j MARK --set-mark 0x7"
    lines = [f"-A INPUT -i x{number}y {marking}" for number in range(300)]
    script = "\n".join(["*mangle", *lines, "COMMIT", ""])
    limited.run("iptables-legacy-restore", "--noflush", stdin=script)
    for number in range(300):
        limited.run(*MANGLE, "-R", "INPUT", str(number + 2), "-i", f"x\n{number}", *marking.split())
    check(limited)
    assert any("IPv4" in each for each in look_for_marks(limited).unread)
    assert any("the rules of others" in each for each in limited.survey().unknown)


@pytest.mark.parametrize("beside", ["", "x\n*raw"])
def test_marks_of_others_are_those_that_they_write(limited: RemoteKernel, beside: str) -> None:
    forged = "x -j MARK --set-mark 0xffffffff"
    for name in (forged, f"y\n-A INPUT {forged}") if beside else (forged,):
        limited.run(*MANGLE, "-A", "INPUT", "-m", "recent", "--name", name, "--set", "-j", "ACCEPT")
    assert look_for_marks(limited).uses == ()
    limited.run(*MANGLE, "-A", "INPUT", "-m", "recent", "--name", forged, "--set", "-j", "MARK", "--set-mark", "0x7")
    limited.run(*MANGLE, "-N", "THEIRS")
    limited.run(*MANGLE, "-A", "THEIRS", "-m", "mark", "--mark", "0x8/0x8", "-j", "ACCEPT")
    found = look_for_marks(limited)
    assert found.unread == ()
    assert sorted(type(each).__name__ for each in found.uses) == ["Read", "Write"]
    assert [each.value for each in found.uses if isinstance(each, Write)] == [Bits(0x7, packet=0)]
    assert all("0x7" in each.owner or "0x8" in each.owner for each in found.uses)


def test_chains_that_only_begin_as_ours_do_are_left(limited: RemoteKernel) -> None:
    names = (b"NL-\xff", b'NL-a"b', b"NL-\x1b[7m")
    for name in names:
        run_bytes(limited, *MANGLE, "-N", name)
        run_bytes(limited, *MANGLE, "-A", "PREROUTING", "-j", name)
    check(limited)
    for name in names:
        run_bytes(limited, *MANGLE, "-D", "PREROUTING", "-j", name)  # it is still there
        run_bytes(limited, *MANGLE, "-X", name)


def test_a_rule_that_the_tool_cannot_print_hides_none_of_ours(untouched: RemoteKernel, tmp_path: Path) -> None:
    """Another program has written it, with an extension that the tools of this host lack."""
    untouched.run(*MANGLE, "-A", "INPUT", "-m", "recent", "--name", "x", "--set", "-j", "ACCEPT")
    for path in find_extensions().iterdir():
        if path.name != "libxt_recent.so":
            (tmp_path / path.name).symlink_to(path)
    lacking = RemoteKernel(untouched.namespace, {"XTABLES_LIBDIR": str(tmp_path)})
    try:
        bring(lacking, make_state(*RULES[:1], RULES[3]))
        check(lacking)
        assert any("the rules of others" in each for each in lacking.survey().unknown)
    finally:
        lacking.close()


def look_for_marks(linux: RemoteKernel) -> MarkUse:
    linux.structure()
    return linux.marks()


def find_extensions() -> Path:
    return next(path.parent for path in Path("/usr").glob("lib*/**/xtables/libxt_recent.so"))


def add_rule(linux: RemoteKernel, *words: str) -> bool:
    """Whether this host has such rules."""
    command = ["ip", "netns", "exec", linux.namespace, *wait_for_lock(words)]
    done = subprocess.run(command, capture_output=True, check=False)
    return not done.returncode


def run_bytes(linux: RemoteKernel, *words: str | bytes) -> None:
    subprocess.run(["ip", "netns", "exec", linux.namespace, *words], check=True)
