"""A set that others use cannot go: it is emptied where that takes a limit out of force and nothing else, and told."""

from __future__ import annotations

import pytest

from netlimit.kernel.base import observe
from netlimit.state import State
from tests.kernel.test_used_by_others import bring, make_state
from tests.kernel.worker import RemoteKernel

RULES: tuple[dict[str, object], ...] = (
    {"target": "10.1.0.2", "rate": "50 packets/s"},
    {"target": "10.1.0.3", "action": "block"},
    {"target": "10.1.0.4", "action": "allow"},
)
REMEDY = "iptables-nft-save -t mangle | grep -v NL- | iptables-nft-restore"


def find_kinds(linux: RemoteKernel, entries: bool) -> set[str]:
    """The kinds of our sets (the letter behind the prefix) that have entries, or none."""
    names = [name for name in linux.run("ipset", "list", "-n").split() if name[3:5] in ("a4", "b4", "l4")]
    full = {name for name in names if "add " in linux.run("ipset", "save", name)}
    return {name[3] for name in (full if entries else set(names) - full)}


def test_limits_of_a_copy_are_emptied_and_what_it_lets_pass_is_not(linux: RemoteKernel) -> None:
    bring(linux, make_state(*RULES))
    linux.run("sh", "-c", "iptables-legacy-save -t mangle | iptables-nft-restore")
    try:
        bring(linux, State())
        assert observe(linux) == State()
        assert find_kinds(linux, entries=False) == {"b", "l"}
        assert find_kinds(linux, entries=True) == {"a"}
        (said,) = linux.held()
        assert REMEDY in said
        assert "nl-l4-" in said
        linux.run("sh", "-c", REMEDY)
        bring(linux, make_state())
        assert linux.held() == ()
        assert linux.run("ipset", "list", "-n") == ""
    finally:
        linux.run("nft", "flush", "ruleset")


@pytest.mark.parametrize("tool", ["iptables-legacy", "iptables-nft"])
@pytest.mark.parametrize("inverted", [(), ("!",)])
def test_a_set_that_a_rule_of_somebody_uses_stays_as_it_is(
    linux: RemoteKernel, tool: str, inverted: tuple[str, ...]
) -> None:
    """Emptied, a rule that drops what is not in it would drop everything."""
    bring(linux, make_state(*RULES))
    name = next(name for name in observe(linux).structure.sets if name.startswith("nl-b4-"))
    rule = ("FORWARD", "-m", "set", *inverted, "--match-set", name, "src", "-j", "DROP")
    linux.run("sh", "-c", "iptables-legacy-save -t mangle | iptables-nft-restore")
    linux.run(tool, "-t", "filter", "-A", *rule)
    try:
        bring(linux, State())
        assert "b" in find_kinds(linux, entries=True)
        own = next(said for said in linux.held() if tool in said and REMEDY not in said)
        assert name in own
        linux.run("sh", "-c", REMEDY)
        (command,) = (each for each in own.split("`") if each.startswith(tool))
        linux.run(*command.split())
        bring(linux, make_state())
        assert linux.run("ipset", "list", "-n") == ""
    finally:
        linux.run("nft", "flush", "ruleset")
        linux.run("iptables-legacy", "-t", "filter", "-F", "FORWARD")


def test_a_new_process_finds_what_is_held_and_counts_it_as_gone(linux: RemoteKernel) -> None:
    """As `doctor` after a teardown."""
    linux.run("ipset", "create", "nl-safe4", "hash:net")
    linux.run("ipset", "create", "nl-list", "list:set")
    linux.run("ipset", "add", "nl-list", "nl-safe4")
    try:
        assert linux.structure().sets
        (said,) = linux.held()
        assert "nl-safe4" in said
        assert not linux.structure().sets
    finally:
        linux.run("ipset", "destroy", "nl-list")


def test_what_chains_of_ours_use_is_not_held(linux: RemoteKernel) -> None:
    wanted = make_state(*RULES)
    bring(linux, wanted)
    assert linux.held() == ()
    assert observe(linux) == wanted
