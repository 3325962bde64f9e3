"""What this host can do, and the sentence for what it cannot."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from netlimit.errors import KernelError
from netlimit.kernel import capabilities
from netlimit.kernel.base import Unanswered
from netlimit.kernel.capabilities import LIBRARY, NAMES
from netlimit.plan import WriteTree
from netlimit.records import DISPENSABLE
from netlimit.tree import FIRST_ROOT, INGRESS_DEVICE, Tree
from tests.kernel.worker import RemoteKernel


def state(kernel: RemoteKernel) -> list[str]:
    """All rules, chains and sets; tables that were once looked at stay, empty."""
    text = kernel.run("iptables-legacy-save") + kernel.run("ip6tables-legacy-save") + kernel.run("ipset", "save")
    return [line for line in text.splitlines() if re.match(r"-A|create|add|:\S+ -", line)]


def test_everything_that_netlimit_needs_is_here(linux: RemoteKernel) -> None:
    facts = linux.probe()
    assert set(facts.capabilities) == set(NAMES)
    missing = {name for name, reason in facts.capabilities.items() if reason}
    assert missing <= DISPENSABLE  # a pfifo does as well
    assert facts.hz in (100, 250, 300, 1000)


def test_probing_leaves_no_trace(linux: RemoteKernel) -> None:
    linux.run("iptables-legacy", "-N", "OTHER")
    linux.run("ipset", "create", "other", "hash:ip")
    before = state(linux)
    assert len(before) == 2
    linux.probe()
    assert state(linux) == before


def test_packets_that_are_merged_are_noted(linux: RemoteKernel) -> None:
    linux.run("ethtool", "-K", "near", "gro", "on")
    assert any(note.startswith("near merges packets") and "-K near gro off" in note for note in linux.probe().notes)
    linux.run("ethtool", "-K", "near", "gro", "off")
    assert not any("near" in note for note in linux.probe().notes)


def test_a_thousand_devices_that_merge_packets_are_one_note_and_ours_is_none(linux: RemoteKernel) -> None:
    """As on a concentrator. What we send through our own device again is not merged there."""
    for name in ("nl-in", *(f"ppp{number}" for number in range(20))):
        linux.run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-far")
        linux.run("ethtool", "-K", name, "gro", "on")
        linux.run("ethtool", "-K", f"{name}-far", "gro", "off")
    (note,) = (note for note in linux.probe().notes if "GRO" in note)
    linux.run("ip", "link", "del", "nl-in")
    assert note.startswith("ppp0, ppp1, ppp10 and 17 more merge packets")
    assert "nl-in" not in note


def test_a_device_of_somebody_else_with_the_name_of_ours_is_told_and_left_alone(linux: RemoteKernel) -> None:
    linux.run("ip", "link", "add", "nl-in", "type", "veth", "peer", "name", "nl-in-far")
    try:
        found = linux.probe().capabilities
        assert "none of netlimit's" in str(found["ifb"])
        assert (found["htb"], found["bpf"]) == (None, None)
        tree = Tree(FIRST_ROOT)
        with pytest.raises(KernelError, match="none of netlimit's"):
            linux.apply(WriteTree(INGRESS_DEVICE, tree.handle, tree))
        linux.run("tc", "qdisc", "add", "dev", "nl-in", "root", "handle", "6e05:", "htb", "default", "fffe")
        linux.apply(WriteTree(INGRESS_DEVICE, tree.handle, drop=True))
        assert "htb" not in linux.run("tc", "qdisc", "show", "dev", "nl-in")
    finally:
        linux.run("ip", "link", "del", "nl-in")
    assert linux.probe().capabilities["ifb"] is None


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
    capabilities = without[name].probe().capabilities
    missing = {capability: reason for capability, reason in capabilities.items() if reason}
    assert set(missing) - DISPENSABLE == {name, f"{name}6"}
    assert f"This host has no {name} for iptables" in str(missing[name])
    assert f"This host has no {name} for ip6tables" in str(missing[f"{name}6"])
    assert f"modprobe xt_{name}" in str(missing[name])


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


def test_who_allows_no_network_namespaces_is_told_of_the_sysctl() -> None:
    found = capabilities._tell_no_namespace(errno.ENOSPC)
    assert all(isinstance(reason, Unanswered) and "user.max_net_namespaces" in reason for reason in found.values())
    assert not any(isinstance(reason, Unanswered) for reason in capabilities._tell_no_namespace(errno.EPERM).values())


def test_probing_waits_for_nobody_who_holds_the_tables(linux: RemoteKernel) -> None:
    with Path("/run/xtables.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = {name for name, reason in linux.probe().capabilities.items() if reason}
    assert missing <= DISPENSABLE


@pytest.mark.parametrize("deaths", [0, 2, 3])
def test_a_probe_that_dies_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deaths: int) -> None:
    """Else all limits would go for it when a controller starts."""

    def die(_: object) -> dict[str, str | None]:
        attempt = len(list(tmp_path.iterdir()))
        (tmp_path / str(attempt)).touch()
        if attempt < deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return dict.fromkeys(NAMES)

    monkeypatch.setattr(capabilities, "_probe_here", die)
    found = capabilities._try_in_child()
    assert len(list(tmp_path.iterdir())) == min(deaths + 1, 3)
    assert set(found) == set(NAMES)
    assert set(found.values()) == ({None} if deaths < 3 else {"the probe of this host ended without an answer"})


class Trap:
    """Makes a file wherever it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.place,)


def test_of_a_child_only_text_is_taken(root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has given rights away by then, and whoever has it in hand may say anything."""
    sprung = tmp_path / "sprung"
    monkeypatch.setattr(capabilities, "_answer", lambda asked, give_up: asked.send(Trap(sprung)))
    found = capabilities._try_in_child()
    assert set(found.values()) == {"the probe of this host ended without an answer"}
    assert not sprung.exists()


PROBE = """
import resource, sys
from netlimit.kernel import capabilities
if int(sys.argv[2]):
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()
limit = int(sys.argv[1])
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
found = capabilities._try_rules()
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
print(capabilities.print_findings(found))
"""


@pytest.mark.parametrize("threads", ["0", "1"])
@pytest.mark.parametrize("descriptors", [3, 4, 6, 8, 10, 12, 14, 18, 22, 26])
def test_a_shortage_is_no_answer(root: None, descriptors: int, threads: str) -> None:
    """With too few descriptors it may fail anywhere: in a library, a tool, a socket, or before the first of them."""
    command = [sys.executable, "-c", PROBE, str(descriptors), threads]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd())
    found = capabilities.read_findings(done.stdout.splitlines()[-1])
    assert set(found) == set(NAMES)
    missing = {name for name, reason in found.items() if reason and not isinstance(reason, Unanswered)}
    assert missing <= DISPENSABLE, found


def test_of_the_library_nothing_is_known_where_the_tools_could_not_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a controller would write through it on a host where it lacks half of what is said."""
    monkeypatch.setattr(capabilities, "_find_shortage", lambda: "no room")
    found = capabilities._doubt({"iptables": "it does not start", LIBRARY: None, "raw": None})
    assert isinstance(found[LIBRARY], Unanswered)
    assert found["raw"] is None
    assert capabilities.keep_answers(found, {LIBRARY: "it cannot say hashlimit"})[LIBRARY] == "it cannot say hashlimit"


def test_findings_are_read_as_they_were_written() -> None:
    found = {"htb": None, "bpf": "This host has no eBPF.", "ifb": Unanswered("it did not end")}
    again = capabilities.read_findings(capabilities.print_findings(found))
    assert again == found
    assert [type(each) for each in again.values()] == [type(None), str, Unanswered]
    assert capabilities.keep_answers(again, {"ifb": None, "bpf": None}) == {**found, "ifb": None}
