"""One controller, and one who writes, in a network namespace: whatever files, users and process ids they see, and
whatever strangers do."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from netlimit.kernel import membership

CONTAINER = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c")
OWN_RUN = 'mount -t tmpfs none /run && mount -t proc none /proc && exec "$@"'
HOLD = """
import sys, time
from netlimit.kernel.linux import LinuxKernel
kernel = LinuxKernel()
with getattr(kernel, sys.argv[1])():
    print("held", flush=True)
    time.sleep(60)
"""
COUNT = """
import sys
from pathlib import Path
from netlimit.kernel.linux import LinuxKernel
kernel = LinuxKernel()
for _ in range(50):
    with kernel.exclusive():
        counter = Path(sys.argv[1])
        counter.write_text(str(int(counter.read_text()) + 1))
"""
STRANGER = """
import socket, struct, time
refused, held = 0, []
for bit in range(32):
    for port in (0, 1 << bit):
        held.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 10))
        try:
            held[-1].bind((port, 1 << bit))
        except PermissionError:
            refused += 1
            held[-1].bind((port, 0))
def config(group, attributes=b""):
    asking = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
    held.append(asking)
    body = struct.pack("!BBH", 0, 0, group) + attributes
    asking.send(struct.pack("=IHHII", 16 + len(body), 4 << 8 | 1, 5, 1, 0) + body)
    return -struct.unpack_from("=i", asking.recv(4096), 16)[0]
for group in (0x6E6C, 0x6E6D):
    for command in (1, 2, 3, 4):
        refused += config(group, struct.pack("=HHBxxx", 5, 1, command)) == 1
print(refused, flush=True)
time.sleep(60)
"""
CROWD = """
import resource, socket, time
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = []
for number in range(min(most - 50, 15_000)):
    held.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, (0, 10, 12)[number % 3]))
    held[-1].bind((0, 0))
print("crowded", flush=True)
time.sleep(60)
"""
TIMED = """
import time
from netlimit.kernel.linux import LinuxKernel
kernel, before = LinuxKernel(), time.thread_time()
for _ in range(5):
    with kernel.exclusive():
        assert not kernel.controlled()
print(time.thread_time() - before)
"""
IN_GROUPS = """
import sys, time
from netlimit.kernel import membership
held = membership.try_join(int(sys.argv[1]), "be it")
print("held" if held else "taken", membership.has_members(1, "look"), membership.has_members(2, "look"), flush=True)
time.sleep(60 if len(sys.argv) < 3 else 0)
"""
AS_NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
AS_ROOT_OF_ITS_OWN = (*AS_NOBODY, "unshare", "--user", "--map-root-user")


@pytest.fixture
def namespace(root: None) -> Iterator[str]:
    name = f"nl-g-{os.getpid()}-{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said its first word; it is killed in the end."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hold(namespace: str, what: str, *within: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace, *within, sys.executable, "-c", HOLD, what)


def say(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("claim", ["sole", "exclusive"])
def test_a_container_with_a_run_directory_and_process_ids_of_its_own_is_seen(namespace: str, claim: str) -> None:
    with started(*hold(namespace, claim, *CONTAINER, OWN_RUN, "sh")) as first:
        assert say(first) == "held"
        script = f"from netlimit.kernel.linux import LinuxKernel as K\nfrom netlimit.kernel import linux\n\
linux._PATIENCE = 0.3\nwith K().{claim}(): print('held')"
        second = subprocess.run(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "held" not in second.stdout
        word = "another controller runs here already" if claim == "sole" else "another process of netlimit"
        assert word in second.stderr


@pytest.mark.parametrize("who", [AS_NOBODY, AS_ROOT_OF_ITS_OWN], ids=["nobody", "root of a user namespace"])
def test_a_stranger_neither_keeps_a_controller_out_nor_passes_for_one(namespace: str, who: tuple[str, ...]) -> None:
    """He joins no group of either kind, whatever ports he takes; stopped, he answers nobody, and is not asked."""
    squat = ("ip", "netns", "exec", namespace, *who, "/usr/bin/python3", "-c", STRANGER)
    with ExitStack() as running:
        stranger = running.enter_context(started(*squat))
        assert say(stranger) == "72"
        stranger.send_signal(signal.SIGSTOP)
        ask = "from netlimit.kernel.linux import LinuxKernel as K\nprint(K().controlled())"
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", ask], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "False"
        for claim in ("sole", "exclusive"):
            assert say(running.enter_context(started(*hold(namespace, claim)))) == "held"


def test_who_is_killed_holds_nothing_and_who_is_stopped_does(namespace: str) -> None:
    with started(*hold(namespace, "sole")) as first:
        assert say(first) == "held"
        first.send_signal(signal.SIGSTOP)
        with started(*hold(namespace, "sole")) as second:
            assert say(second) == ""
        first.kill()
        first.wait(60)
        with started(*hold(namespace, "sole")) as third:
            assert say(third) == "held"


def test_another_network_namespace_has_a_controller_of_its_own(namespace: str) -> None:
    with started(*hold(namespace, "sole")) as first:
        assert say(first) == "held"
        with started("unshare", "--net", sys.executable, "-c", HOLD, "sole") as second:
            assert say(second) == "held"


def test_no_count_is_lost_between_processes(namespace: str, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", COUNT, str(counter)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert counter.read_text() == "200"


def test_who_may_not_claim_is_told_what_it_takes(namespace: str) -> None:
    script = "from netlimit.kernel.claim import *\n"
    script += "import os; os.setuid(65534)\nwith claimed(Claim.CONTROLLER, 'be it', 1, 'taken'): pass"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "CAP_NET_ADMIN" in done.stderr


def test_a_stranger_with_thousands_of_sockets_delays_no_claim(namespace: str) -> None:
    """Measured in processor time of the one who asks, which no load of the machine changes."""
    within = ("ip", "netns", "exec", namespace)
    with started(*within, *AS_NOBODY, "/usr/bin/python3", "-c", CROWD) as crowd:
        assert say(crowd) == "crowded"
        done = subprocess.run([*within, sys.executable, "-c", TIMED], capture_output=True, text=True, check=True)
        assert float(done.stdout) < 0.1


def test_a_kernel_without_groups_of_logs_has_others(namespace: str) -> None:
    """Two claims that do not meet, each held by one; who reads them does so for a limited time."""
    within = ("ip", "netns", "exec", namespace, sys.executable, "-c", IN_GROUPS)
    with started(*within, "1") as first, ExitStack() as running:
        assert say(first) == "held True False"
        assert say(running.enter_context(started(*within, "1", "once"))) == "taken True False"
        assert say(running.enter_context(started(*within, "2", "once"))) == "held True True"


def test_the_reading_of_members_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LONGEST_READING", 0.0)
    monkeypatch.setattr(membership, "_CHUNK", 16)
    assert not membership.has_members(1, "look")


WATCH = """
import sys, time
from netlimit.kernel import holders
from netlimit.kernel.claim import Claim
holders.STOPPED_SECONDS, seconds, holders.IDLE_SECONDS = map(float, sys.argv[1:])
watch, end, said = holders.HolderWatch(Claim.WRITER), time.monotonic() + seconds, None
while said is None and time.monotonic() < end:
    said = watch.end_hanging()
    time.sleep(0.05)
print(said)
"""
WORK = """
import subprocess
from netlimit.kernel.linux import LinuxKernel
with LinuxKernel().exclusive():
    worker = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    print("held", flush=True)
    worker.wait()
"""
NEVER = "1000"


def watch(namespace: str, stopped: str, seconds: str, idle: str, *within: str) -> str:
    """What one says who looks for a writer that hangs."""
    command = ("ip", "netns", "exec", namespace, *within, sys.executable, "-c", WATCH, stopped, seconds, idle)
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd()).stdout.strip()


def test_a_writer_that_is_stopped_is_ended(namespace: str) -> None:
    with started(*hold(namespace, "exclusive")) as first:
        assert say(first) == "held"
        assert watch(namespace, "0.1", "1", NEVER) == "None"  # it sleeps, and that is no fault yet
        first.send_signal(signal.SIGSTOP)
        said = watch(namespace, "0.3", "60", NEVER)
        assert f"Process {first.pid} (" in said
        assert "was stopped for" in said
        assert first.wait(60) == -signal.SIGKILL
        with started(*hold(namespace, "exclusive")) as second:
            assert say(second) == "held"


def test_one_that_does_nothing_is_ended_and_one_whose_tool_works_is_not(namespace: str) -> None:
    with started(*hold(namespace, "exclusive")) as idle:
        assert say(idle) == "held"
        assert "did nothing for" in watch(namespace, NEVER, "60", "1")
        assert idle.wait(60) == -signal.SIGKILL
    with started("ip", "netns", "exec", namespace, sys.executable, "-c", WORK) as busy:
        assert say(busy) == "held"
        try:
            assert watch(namespace, NEVER, "12", "5") == "None"
        finally:
            subprocess.run(["pkill", "-KILL", "-P", str(busy.pid)], check=True)


def test_who_is_not_root_ends_nobody_else(namespace: str) -> None:
    with started(*hold(namespace, "exclusive")) as first:
        assert say(first) == "held"
        first.send_signal(signal.SIGSTOP)
        assert watch(namespace, "0.1", "1", "0.1", *AS_NOBODY) == "None"
        assert first.poll() is None


AS_CONTROLLER = """
import ctypes, pwd
import netlimit.kernel.linux
from netlimit.cli.privileges import NETWORK, become
become(pwd.getpwnam("nobody"), NETWORK)
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, as execve(2) does it
"""


def test_the_guard_of_a_controller_without_root_ends_that_one_where_root_lets_it_see_who_writes(namespace: str) -> None:
    within = ("ip", "netns", "exec", namespace, sys.executable, "-c")
    let = "from netlimit.kernel import proc_files; proc_files.let_read(proc_files.holders.LOGS, 65534)"
    with started(*within, AS_CONTROLLER + HOLD, "exclusive") as first:
        assert say(first) == "held"
        first.send_signal(signal.SIGSTOP)
        blind = subprocess.run(
            [*within, f"{AS_CONTROLLER}import logging\nlogging.basicConfig()\n{WATCH}", "0.1", "1", "0.1"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert blind.stdout == "None\n"
        assert blind.stderr.count("only root may read /proc/thread-self/net/netfilter/nfnetlink_log") == 1
        subprocess.run([*within, let], check=True)
        seeing = subprocess.run(
            [*within, AS_CONTROLLER + WATCH, "0.3", "60", NEVER], capture_output=True, text=True, check=True
        )
        assert f"Process {first.pid} (" in seeing.stdout
        assert first.wait(60) == -signal.SIGKILL


def test_a_stranger_who_holds_nothing_is_left_alone(namespace: str) -> None:
    with started(*hold(namespace, "sole")) as controller:
        assert say(controller) == "held"
        controller.send_signal(signal.SIGSTOP)
        assert watch(namespace, "0.1", "1", "0.1") == "None"
        assert controller.poll() is None
