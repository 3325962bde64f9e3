"""A controller that is not root: two capabilities, nothing that listens, and every limit that leaves by a device."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.kernel.capabilities import LIBRARY
from netlimit.records import State
from netlimit.store import read_revision
from scripts.testbed.namespaces import CLIENT, SERVER, WAN, Lab
from scripts.testbed.streams import receive, send
from tests.e2e.gateway import COMMAND, Gateway
from tests.warm import ROOT

USER = "nobody"
TWO = f"{1 << 12 | 1 << 13:016x}"
"""CAP_NET_ADMIN and CAP_NET_RAW."""
PLACE = " && ".join(
    (
        "mkdir -p /run/netlimit",
        "mount -t tmpfs -o mode=750 none /run/netlimit",
        "mount -t bpf -o mode=700 bpf /sys/fs/bpf",
    )
)
"""A directory for locks of one's own, in the mount namespace of one process alone; and programs that are pinned where
only root may look, as systemd does."""
START = f"{PLACE} && exec {shlex.join([sys.executable, *COMMAND, 'controller', '--user', USER])}"


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A place that the controller's user may pass, unlike pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="netlimit-"))
    os.chown(made, 0, pwd.getpwnam(USER).pw_gid)
    made.chmod(0o2770)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def controller(lab: Lab, directory: Path) -> Iterator[Gateway]:
    gateway = Gateway(lab, directory)
    lab.gateway.run("chgrp", "-R", str(pwd.getpwnam(USER).pw_gid), str(directory))
    gateway.launch("-c", f"import os; os.execvp('sh', ['sh', '-c', {START!r}])")
    gateway.wait_until_applied()
    yield gateway
    gateway.close()


def read_status(lab: Lab) -> dict[str, str]:
    """What the kernel says of the controller (proc_pid_status(5))."""
    return dict(re.findall(r"^(\w+):\s*(.*)$", Path(f"/proc/{lab.gateway.started[0].pid}/status").read_text(), re.M))


def test_it_has_two_capabilities_and_can_have_no_others(lab: Lab, gateway: Gateway) -> None:
    status = read_status(lab)
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {TWO}
    assert status["NoNewPrivs"] == "1"
    assert set(status["Uid"].split()) == {str(pwd.getpwnam(USER).pw_uid)}
    assert set(status["Groups"].split()) == {str(pwd.getpwnam(USER).pw_gid)}


def test_nothing_listens(lab: Lab, gateway: Gateway) -> None:
    """The controller is alone in its namespace, so whatever listens there is its own."""
    assert lab.gateway.run("ss", "--no-header", "--listening", "--tcp", "--udp", "--unix", "--sctp").stdout == ""


def test_it_limits_real_packets(lab: Lab, gateway: Gateway) -> None:
    gateway.put({"target": "10.1.0.0/16", "rate": "100 packets/s", "per": "host"})
    with receive(lab.server) as receiver:
        send(lab.client, SERVER, rate=1000, seconds=1)
        receiver.stop()
    assert 100 <= receiver.report().delivered().packets <= 150


def test_it_repairs_what_others_change(lab: Lab, gateway: Gateway) -> None:
    gateway.put({"target": "10.1.0.0/16", "rate": "100 packets/s", "per": "host"})
    lab.gateway.run("iptables-legacy", "-t", "mangle", "-F", "FORWARD")
    gateway.wait(
        lambda: "NL-FORWARD" in lab.gateway.run("iptables-legacy", "-t", "mangle", "-S", "FORWARD").stdout,
        "the jump to be there again",
    )


def test_it_shapes_hosts_by_the_program_that_root_has_pinned(lab: Lab, gateway: Gateway) -> None:
    gateway.put({"target": SERVER, "direction": "to", "action": "shape", "rate": "10 Mbit/s"})
    assert gateway.class_of(SERVER)
    assert "nl_lead" in lab.gateway.run("tc", "filter", "show", "dev", "wan").stdout
    assert "nl_out" in lab.gateway.run("tc", "filter", "show", "dev", "wan", "egress").stdout


def test_where_that_program_is_gone_what_needs_it_says_so_and_all_else_is_held(lab: Lab, gateway: Gateway) -> None:
    """A device on which it is in place already goes on, too."""
    shape = {"direction": "to", "action": "shape", "rate": "10 Mbit/s"}
    gateway.put({"target": SERVER, **shape})
    run_inside(lab, "umount", "/run/netlimit/bpf")
    (wide,) = gateway.add({"target": "10.1.0.0/16", "per": "host", **shape})
    ping_client(lab)
    said = gateway.wait_for_state(wide, State.ERROR)
    assert said.startswith("What leaves by lan is not shaped: the program that leads packets to classes cannot be ")
    assert "`netlimit prepare`" in said
    (capped,) = gateway.add({"target": "0.0.0.0/0", "per": "target", "interface": "lan", **shape})
    assert gateway.state(capped) == (State.ERROR, said)
    (another,) = gateway.add({"target": SERVER, "action": "block", "protocol": "tcp"})
    assert gateway.state(another) == (State.APPLIED, "")
    lab.gateway.run("iptables-legacy", "-t", "raw", "-F", "PREROUTING")
    gateway.wait(
        lambda: "NL-" in lab.gateway.run("iptables-legacy", "-t", "raw", "-S", "PREROUTING").stdout, "a repair"
    )
    assert gateway.class_of(SERVER)
    assert gateway.classes("lan") == {}
    copied = gateway.log.parent / "controller"
    gateway.wait(lambda: read_revision(copied) == gateway.store.revision(), "the copy to be of this revision")
    prepare_inside(lab, gateway)
    for rule in (wide, capped):
        gateway.wait_for_state(rule, State.APPLIED)
    ping_client(lab)
    gateway.wait(lambda: bool(gateway.class_of(CLIENT)), "a class of the host")


def ping_client(lab: Lab) -> None:
    lab.server.run("ping", "-c", "1", "-W", "1", CLIENT, check=False)


def run_inside(lab: Lab, *command: str, env: dict[str, str] | None = None) -> None:
    """Run a command where the controller sees the same files."""
    inside = ("nsenter", "--target", str(lab.gateway.started[0].pid), "--mount")
    lab.gateway.run(*inside, *command, env=env, cwd=ROOT)


def prepare_inside(lab: Lab, gateway: Gateway) -> None:
    settings = {"NETLIMIT_BACKEND": "iptables", "NETLIMIT_STATE_DIRECTORY": f"{gateway.log.parent}/controller"}
    run_inside(lab, sys.executable, *COMMAND, "prepare", "--user", USER, env=settings)


def test_what_takes_more_than_that_is_an_error_that_says_so(gateway: Gateway) -> None:
    (rule,) = gateway.add({"target": WAN, "direction": "to", "action": "shape", "rate": "10 Mbit/s"})
    state, message = gateway.state(rule)
    assert state is State.ERROR
    assert "it has not CAP_BPF and CAP_SYS_ADMIN" in message


def test_one_from_whom_the_kernel_hides_its_tables_says_so_and_goes_on_when_it_may_see_them(
    lab: Lab, gateway: Gateway
) -> None:
    """As when their module is loaded anew. Nothing is taken for gone meanwhile, and nobody has to start it again."""
    gateway.put({"target": "10.1.0.0/16", "rate": "100 packets/s", "per": "host"})
    before = list_tables(lab)
    lab.gateway.run("chown", "root", "/proc/net/ip6_tables_names")
    gateway.wait(lambda: "only root may read" in (gateway.store.hosts()[0].last_error or ""), "it to be told")
    assert "/proc/net/ip6_tables_names at this moment; `netlimit prepare`" in gateway.log.read_text()
    assert list_tables(lab) == before
    prepare_inside(lab, gateway)
    gateway.put({"target": SERVER, "action": "block", "protocol": "tcp"})


def list_tables(lab: Lab) -> list[str]:
    """What stands in the tables, without what has been counted."""
    tools = ("iptables-legacy-save", "ip6tables-legacy-save")
    return [line for tool in tools for line in lab.gateway.run(tool).stdout.splitlines() if line.startswith("-A")]


def test_what_it_has_put_there_stays_where_what_root_has_found_is_gone(lab: Lab, gateway: Gateway) -> None:
    """It asks again and again, for one rule cannot be enforced."""
    gateway.put({"target": "10.1.0.0/16", "rate": "100 packets/s", "per": "host"})
    gateway.add({"target": WAN, "direction": "to", "action": "shape", "rate": "10 Mbit/s"})
    lost, aside = "/run/netlimit/capabilities.json", "/run/netlimit/aside"
    run_inside(lab, "mv", lost, aside)
    try:
        gateway.wait(lambda: "could not be found out" in gateway.log.read_text(), "it to be asked for")
        (another,) = gateway.add({"target": SERVER, "action": "block", "protocol": "tcp"})
        assert gateway.state(another) == (State.APPLIED, "")
        assert "NL-" in lab.gateway.run("iptables-legacy", "-t", "raw", "-S").stdout
    finally:
        run_inside(lab, "mv", aside, lost)


def test_a_host_is_prepared_though_its_disk_is_read_only(lab: Lab, directory: Path) -> None:
    """As at a boot after an error of the disk. What belongs to the controller already is fine; the rest is told."""
    state = directory / "sealed"
    command = shlex.join([sys.executable, *COMMAND, "prepare", "--user", USER])
    settings = {"NETLIMIT_BACKEND": "iptables", "NETLIMIT_STATE_DIRECTORY": str(state)}
    sealed = f"mount --bind {state} {state} && mount -o remount,ro,bind {state}"
    script = f"{PLACE} && {command} && {sealed} && {command} && ls /run/netlimit"
    done = lab.gateway.run("sh", "-c", script, env=settings, cwd=ROOT)
    assert "capabilities.json" in done.stdout
    assert "cannot be given" not in done.stderr
    os.chown(state, 0, 0)
    done = lab.gateway.run("sh", "-c", f"{PLACE} && {sealed} && {command} && ls /run/netlimit", env=settings, cwd=ROOT)
    assert "capabilities.json" in done.stdout
    assert f"{state} cannot be given to {USER}: {state}: Read-only file system." in done.stderr


def test_a_host_stays_prepared_where_nothing_can_be_left_any_more(lab: Lab, directory: Path) -> None:
    """/run is memory that others fill, too. A unit that fails to prepare would not start again."""
    command = shlex.join([sys.executable, *COMMAND, "prepare", "--user", USER])
    settings = {"NETLIMIT_BACKEND": "iptables", "NETLIMIT_STATE_DIRECTORY": str(directory / "full")}
    place = "/run/netlimit"
    fill = f"mount -o remount,size=256k {place} && ! head -c 500000 /dev/zero > {place}/fill"
    script = f"{PLACE} && {command} && {fill} && {command} && cat {place}/capabilities.json"
    done = lab.gateway.run("sh", "-c", script, env=settings, cwd=ROOT)
    assert "iptables" in json.loads(done.stdout)
    said = f"{place}/capabilities.json cannot be written: No space left on device"
    assert f"{said}. What was found before stays." in done.stderr
    script = f"{PLACE} && {fill}; {command}; echo $?"
    done = lab.gateway.run("sh", "-c", script, env=settings, cwd=ROOT)
    assert done.stdout.split()[-1] == "1", "a host of which nothing was found"
    assert said in done.stderr


@pytest.mark.parametrize(("options", "ingress"), [((), "it has not CAP_BPF"), (("--bpf",), None)])
def test_what_root_prepares_is_for_the_controller_alone(
    lab: Lab, directory: Path, options: tuple[str, ...], ingress: str | None
) -> None:
    """And with two capabilities more, that one can do everything that root can."""
    command = shlex.join([sys.executable, *COMMAND, "prepare", "--user", USER, *options])
    settings = {"NETLIMIT_BACKEND": "iptables", "NETLIMIT_STATE_DIRECTORY": str(directory / "other")}
    names = "/run/netlimit /run/netlimit/* /run/netlimit/bpf/nl*"
    script = f"{PLACE} && {command} && stat -c '%a %U %n' {names} && cat /run/netlimit/capabilities.json"
    *files, found = lab.gateway.run("sh", "-c", script, env=settings, cwd=ROOT).stdout.splitlines()
    assert files == [
        "750 root /run/netlimit",
        "750 root /run/netlimit/bpf",
        "640 root /run/netlimit/capabilities.json",
        "640 root /run/netlimit/ssh-ports",
        "640 root /run/netlimit/bpf/nl_lead",
        "640 root /run/netlimit/bpf/nl_out",
    ]
    dispensable = ("fq_codel", LIBRARY)
    missing = {name: reason for name, reason in json.loads(found).items() if reason and name not in dispensable}
    assert list(missing) == (["ifb"] if ingress else [])
    assert ingress is None or ingress in missing["ifb"]


def test_what_is_prepared_where_the_controller_does_not_see_it_is_not_taken_for_there(
    lab: Lab, directory: Path
) -> None:
    """As by a command of a unit's: what is mounted in its namespace is gone with it. Root, who could load the program
    himself, asks whether the controller can."""
    code = "from netlimit.kernel.capabilities import probe; print(probe().capabilities['bpf'])"
    ask = shlex.join([sys.executable, "-c", code])
    ask_as_user = f"setpriv --reuid {USER} --regid {pwd.getpwnam(USER).pw_gid} --clear-groups {ask}"
    command = shlex.join([sys.executable, *COMMAND, "prepare", "--user", USER])
    settings = {"NETLIMIT_BACKEND": "iptables", "NETLIMIT_STATE_DIRECTORY": str(directory / "apart")}
    script = f"{PLACE} && unshare --mount {command} && {ask} && {ask_as_user} && {command} && {ask} && {ask_as_user}"
    first = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")  # the shell is process 1, as whom all else sees
    done = lab.gateway.run(*first, "sh", "-c", script, env=settings, cwd=ROOT)
    *before, by_root, by_user = done.stdout.splitlines()
    assert len(before) == 2
    for said in before:
        assert said.startswith("Nothing can be shaped here: the program that leads packets to classes cannot be opened")
    assert (by_root, by_user) == ("None", "None")
    assert done.stderr.count("/run/netlimit/bpf is mounted in a mount namespace of its own") == 1


def test_who_prepares_a_host_waits_for_another_who_does(lab: Lab, directory: Path) -> None:
    """systemd starts the controller and the guard at once, and on a busy host that takes a while."""
    command = shlex.join([sys.executable, *COMMAND, "prepare", "--user", USER])
    settings = {"NETLIMIT_BACKEND": "iptables", "NETLIMIT_STATE_DIRECTORY": str(directory / "twice")}
    another = "flock /run/netlimit/prepare.lock sh -c 'sleep 8; touch /run/netlimit/done' & sleep 0.3"
    script = f"{PLACE}; {another}; {command} && ls /run/netlimit"
    found = lab.gateway.run("sh", "-c", script, env=settings, cwd=ROOT).stdout.split()
    assert {"done", "capabilities.json"} <= set(found)


def test_what_root_has_found_stays_where_it_finds_nothing_out(lab: Lab, directory: Path) -> None:
    """A moment without descriptors, in which nothing can be tried, must not be taken for a host without iptables."""
    code = f"""
import resource
from netlimit.cli import preparing
from netlimit.cli.main import app
from netlimit.kernel.capabilities import FINDINGS
words = ["prepare", "--user", {USER!r}]
app(words, standalone_mode=False)
before = FINDINGS.read_text()
preparing.ASK_SECONDS = 0.0
resource.setrlimit(resource.RLIMIT_NOFILE, (14, 1024))
app(words, standalone_mode=False)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
assert FINDINGS.read_text() == before, FINDINGS.read_text()
FINDINGS.unlink()
resource.setrlimit(resource.RLIMIT_NOFILE, (14, 1024))
app(words, standalone_mode=False)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
print(FINDINGS.read_text())
"""
    settings = {"NETLIMIT_BACKEND": "iptables", "NETLIMIT_STATE_DIRECTORY": str(directory / "short")}
    script = f"{PLACE} && {shlex.join([sys.executable, '-c', code])} 2>&1"
    *told, found = lab.gateway.run("sh", "-c", script, env=settings, cwd=ROOT).stdout.splitlines()
    assert any("could not be found out" in line and "what was found before stays" in line for line in told)
    assert any("could not be found out" in line and "not known: iptables" in line for line in told)
    assert all(isinstance(said, dict) for said in json.loads(found).values() if said)
