"""What this host can do, and the sentence for what it cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.kernel.capabilities import NAMES
from tests.kernel.worker import RemoteKernel

MASK = 0xFF000000


def state(kernel: RemoteKernel) -> list[str]:
    """All rules, chains and sets; tables that were once looked at stay, empty."""
    text = kernel.run("iptables-legacy-save") + kernel.run("ip6tables-legacy-save") + kernel.run("ipset", "save")
    return [line for line in text.splitlines() if re.match(r"-A|create|add|:\S+ -", line)]


def test_everything_that_netlimit_needs_is_here(linux: RemoteKernel) -> None:
    facts = linux.probe(MASK)
    assert set(facts.capabilities) == {*NAMES, "marks"}
    missing = {name for name, reason in facts.capabilities.items() if reason}
    assert missing <= {"fq_codel"}  # a pfifo does as well
    assert facts.hz in (100, 250, 300, 1000)


def test_probing_leaves_no_trace(linux: RemoteKernel) -> None:
    linux.run("iptables-legacy", "-N", "OTHER")
    linux.run("ipset", "create", "other", "hash:ip")
    before = state(linux)
    assert len(before) == 2
    linux.probe(MASK)
    assert state(linux) == before


def test_packets_that_are_merged_are_noted(linux: RemoteKernel) -> None:
    linux.run("ethtool", "-K", "near", "gro", "on")
    assert any(note.startswith("near merges packets") and "gro off" in note for note in linux.probe(MASK).notes)
    linux.run("ethtool", "-K", "near", "gro", "off")
    assert not any(note.startswith("near ") for note in linux.probe(MASK).notes)


@pytest.fixture
def without(tmp_path: Path, namespace: str) -> Iterator[dict[str, RemoteKernel]]:
    """Kernels to which iptables extensions are missing, by the name of the extension."""
    made: dict[str, RemoteKernel] = {}

    class Missing(dict[str, RemoteKernel]):
        def __missing__(self, name: str) -> RemoteKernel:
            directory = tmp_path / name
            directory.mkdir()
            for path in extensions().iterdir():
                if path.stem.partition("_")[2] != name:
                    (directory / path.name).symlink_to(path)
            made[name] = RemoteKernel(namespace, {"XTABLES_LIBDIR": str(directory)})
            return made[name]

    yield Missing()
    for kernel in made.values():
        kernel.close()


def extensions() -> Path:
    found = next(Path("/usr/lib").glob("**/xtables/libxt_hashlimit.so"), None)
    if found is None:
        pytest.fail("There are no iptables extensions under /usr/lib: install the package iptables.")
    return found.parent


@pytest.mark.parametrize("name", ["hashlimit", "connlimit", "multiport"])
def test_a_missing_extension_has_a_reason_and_the_others_stay(
    linux: RemoteKernel, without: dict[str, RemoteKernel], name: str
) -> None:
    capabilities = without[name].probe(MASK).capabilities
    missing = {capability: reason for capability, reason in capabilities.items() if reason}
    assert set(missing) - {"fq_codel"} == {name, f"{name}6"}
    assert f"This host has no {name} for iptables" in str(missing[name])
    assert f"This host has no {name} for ip6tables" in str(missing[f"{name}6"])
    assert f"modprobe xt_{name}" in str(missing[name])


OVERLAPS = [
    (("ip", "rule", "add", "fwmark", "0x1000000/0xff000000", "table", "100"), "ip rule"),
    (("ip", "-6", "rule", "add", "fwmark", "0x80000000/0x80000000", "table", "100"), "ip rule"),
    (
        ("iptables-legacy", "-t", "mangle", "-A", "OUTPUT", "-j", "MARK", "--set-xmark", "0x2000000/0x2000000"),
        "iptables",
    ),
    (("ip6tables-legacy", "-t", "mangle", "-A", "OUTPUT", "-j", "MARK", "--or-mark", "0x4000000"), "iptables"),
    (("iptables-legacy", "-A", "OUTPUT", "-m", "mark", "--mark", "0x8000000/0x8000000", "-j", "ACCEPT"), "iptables"),
]


@pytest.mark.parametrize(("command", "owner"), OVERLAPS)
def test_bits_of_the_mark_that_others_use_are_refused(
    linux: RemoteKernel, command: tuple[str, ...], owner: str
) -> None:
    linux.run(*command)
    try:
        reason = linux.probe(MASK).capabilities["marks"]
        elsewhere = linux.probe(0x00FF0000).capabilities["marks"]
    finally:
        if "rule" in command:
            linux.run(*("del" if word == "add" else word for word in command))
    assert reason is not None
    assert owner in reason
    assert "NETLIMIT_MARK_MASK 0xff000000 covers" in reason
    assert reason.endswith("Set a mask that is free, such as 0x00ff0000.")
    assert elsewhere is None


@pytest.mark.parametrize(
    "command",
    [
        ("ip", "rule", "add", "fwmark", "0x1/0xff", "table", "100"),
        ("iptables-legacy", "-t", "mangle", "-A", "OUTPUT", "-j", "MARK", "--set-xmark", "0x1/0xffff"),
        ("iptables-legacy", "-A", "OUTPUT", "-m", "mark", "--mark", "0x0/0xff00", "-j", "ACCEPT"),
    ],
)
def test_bits_that_nobody_shares_are_fine(linux: RemoteKernel, command: tuple[str, ...]) -> None:
    linux.run(*command)
    try:
        assert linux.probe(MASK).capabilities["marks"] is None
    finally:
        if "rule" in command:
            linux.run(*("del" if word == "add" else word for word in command))


def test_without_root_there_is_a_reason_for_everything() -> None:
    """Asked of a process that has given its rights away."""
    code = (
        "import json, os; from netlimit.kernel.capabilities import _try_rules\n"
        "os.setgid(65534); os.setuid(65534); print(json.dumps(_try_rules()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    found = json.loads(done.stdout)
    assert set(found) == {*NAMES}
    assert all("needs root" in reason for reason in found.values())
