"""Whose addresses netlimit protects by itself."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.kernel import sessions
from netlimit.kernel.sockets import ESTABLISHED, Socket
from scripts.testbed.namespaces import CLIENT, LAN, SERVER, WAN, Lab, Namespace, close_pipes
from scripts.testbed.streams import listen
from tests.e2e.visitors import Sshd, Visitor

READ = (
    "from netlimit.kernel.addresses import read_own; from netlimit.kernel.sessions import read_sessions; "
    "peers, doors, _ = read_sessions(); print(*read_own(), '|', *peers, '|', *sorted({each.port for each in doors}))"
)
SOCKETS = """
import sys
from netlimit.kernel import sockets
def refuse(asked):
    raise FileNotFoundError
if sys.argv[1]:
    sockets._read_answers = refuse
found = sockets.read_sockets([sockets.ESTABLISHED, sockets.LISTENING])
print(*sorted(each._replace(group=0) for each in found), sep="\\n")  # files do not tell groups
"""
NAMED = "printf sshd > /proc/$BASHPID/comm; "
SESSION = f"exec -a '{{title}}' bash -c '{NAMED}exec 3<>/dev/tcp/{SERVER}/9000; sleep 20; true'"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab, listen(lab.server, 9000):
        yield lab


def read(namespace: Namespace) -> tuple[list[str], list[str], list[str]]:
    own, peers, ports = namespace.run(sys.executable, "-c", READ).stdout.split("|")
    return own.split(), peers.split(), ports.split()


def connect_as(lab: Lab, parent: str, title: str) -> subprocess.Popen[str]:
    """A connection of a process with this title, whose parent has that one."""
    named = NAMED if parent.startswith("sshd") else ""
    inner = f"{named}( {SESSION.format(title=title)} ); true"
    return lab.gateway.popen("bash", "-c", 'exec -a "$0" bash -c "$1"', parent, inner)


def wait_for(lab: Lab, wanted: list[str], seconds: float = 60) -> list[str]:
    end = time.monotonic() + seconds
    while (found := read(lab.gateway)[1]) != wanted and time.monotonic() < end:
        time.sleep(0.1)
    return found


def test_own_addresses_are_those_of_every_device(lab: Lab) -> None:
    assert WAN in read(lab.gateway)[0]


def test_who_is_logged_in_by_ssh_is_a_peer(lab: Lab) -> None:
    session = connect_as(lab, "sshd: /usr/sbin/sshd -D [listener]", "sshd: root@pts/0")
    try:
        assert wait_for(lab, [SERVER]) == [SERVER]
    finally:
        session.kill()


@pytest.mark.parametrize(
    ("parent", "title"),
    [
        ("sshd: /usr/sbin/sshd -D [listener]", "sshd: [accepted]"),
        ("sshd: /usr/sbin/sshd -D [listener]", "sshd: root [net]"),
        ("sshd: /usr/sbin/sshd -D [listener]", "sshd: user@domain.example [priv]"),
        ("bash", "sshd: root@pts/0"),
    ],
)
def test_a_connection_alone_protects_nobody(lab: Lab, parent: str, title: str) -> None:
    session = connect_as(lab, parent, title)
    try:
        for _ in range(5):
            time.sleep(0.1)
            assert read(lab.gateway)[1] == []
    finally:
        session.kill()


def test_the_ports_are_those_on_which_root_s_sshd_listens(lab: Lab) -> None:
    assert read(lab.gateway)[2] == []
    with Sshd(lab.gateway, 2222), Visitor(lab.client, LAN, 2222) as visitor:
        assert read(lab.gateway)[1:] == ([], ["2222"])
        visitor.say("login")
        assert wait_for(lab, [CLIENT]) == [CLIENT]


def test_where_a_session_forwards_to_is_no_peer(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the connections that one process has, those to the port of sshd count; of one that still waits for a proof,
    none."""
    process = tmp_path / "7"
    process.mkdir()
    title = process / "cmdline"
    title.write_bytes(b"sshd: admin@pts/0\0")
    monkeypatch.setattr(sessions, "_PROC", str(tmp_path))
    monkeypatch.setattr(sessions, "_find_sockets", lambda asked: iter([1, 2] if asked == process else []))
    session = Socket(ESTABLISHED, "192.0.2.1", 22, "198.51.100.7", 50000, 0, 1)
    forwarded = Socket(ESTABLISHED, "192.0.2.1", 40000, "203.0.113.5", 443, 1000, 2)
    assert list(sessions._find_peers(process, [session, forwarded], {22})) == ["198.51.100.7"]
    title.write_bytes(b"sshd: admin [net]\0")
    assert list(sessions._find_peers(process, [session, forwarded], {22})) == []


def test_systemd_tells_who_is_logged_in_where_no_process_may_be_looked_into(tmp_path: Path) -> None:
    for name, text in {
        "1": "UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=active\nREMOTE_HOST=198.51.100.7\n",
        "2": "UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=closing\nREMOTE_HOST=198.51.100.8\n",
        "3": "UID=0\nREMOTE=0\nSERVICE=login\nSTATE=active\n",
        "4": "UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=online\nREMOTE_HOST=fe80::1%eth0\n",
        "5": "UID=0\nREMOTE=1\nSERVICE=sshd\nSTATE=online\nREMOTE_HOST=admin.example\n",
        "1.ref": "",
    }.items():
        (tmp_path / name).write_text(text)
    assert sessions._read_logins(tmp_path) == ({"198.51.100.7", "fe80::1"}, {"admin.example"})
    assert sessions._read_logins(tmp_path / "missing") == (set(), set())


def test_the_ports_of_sshd_s_configuration(tmp_path: Path) -> None:
    assert sessions._list_configured(tmp_path, [tmp_path / "units"]) == set()
    (tmp_path / "sshd_config").write_text("#Port 22\nPort 2222\nAddressFamily any\n")
    (tmp_path / "sshd_config.d").mkdir()
    (tmp_path / "sshd_config.d" / "more.conf").write_text("port 2200\n")
    assert sessions._list_configured(tmp_path, [tmp_path / "units"]) == {2222, 2200}
    for name, text in {
        "ssh.socket": "[Socket]\nListenStream=22\n", "ssh.socket.d/override.conf": "ListenStream=\nListenStream=2022\n",
        "generator/ssh.socket.d/addresses.conf": "ListenStream=10.1.0.1:2023\nListenStream=[::]:2024\n",
    }.items():  # fmt: skip
        path = tmp_path / "units" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert sessions._list_configured(tmp_path, [tmp_path / "units"]) == {22, 2022, 2023, 2024, 2200, 2222}


def test_the_ports_that_root_has_left(tmp_path: Path) -> None:
    left = tmp_path / "ssh-ports"
    assert sessions._read_left(left) == set()
    for text, ports in {"2200 2222": {2200, 2222}, "": set(), "odd": set()}.items():
        left.write_text(text)
        assert sessions._read_left(left) == ports


def test_where_no_sshd_is_seen_root_s_listener_on_its_port_is_its_own(lab: Lab) -> None:
    """systemd listens for it, and starts it for each connection; or it runs in another container."""
    listens = (
        "import os, socket, sys; os.setuid(int(sys.argv[1])); server = socket.create_server(('', 22)); "
        "print(flush=True); input()"
    )
    for user, wanted in ((0, ["22"]), (65534, [])):
        lab.gateway.run("sysctl", "-qw", "net.ipv4.ip_unprivileged_port_start=0")
        process = lab.gateway.popen(
            sys.executable, "-c", listens, str(user), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
            assert read(lab.gateway)[2] == wanted
        finally:
            process.kill()
            process.wait(60)
            close_pipes(process)


def test_a_connection_that_a_user_opened_is_no_session(lab: Lab) -> None:
    """Titles can be feigned, and a parent of root's is had by any program with the set-user-ID bit."""
    asks = (
        "import os, socket; print(file=open('/proc/self/comm', 'w'), end='sshd'); os.setuid(65534); "
        f"s = socket.create_connection(('{SERVER}', 9000)); input()"
    )
    inner = f"{NAMED}exec -a 'sshd: evil@pts/0' {sys.executable} -c \"{asks}\""
    outer = ["bash", "-c", 'exec -a "$0" bash -c "$1"', "sshd", f"( {inner} ); true"]
    session = lab.gateway.popen(*outer, stdin=subprocess.PIPE)
    try:
        for _ in range(10):
            time.sleep(0.1)
            assert read(lab.gateway)[1] == []
    finally:
        session.kill()


@pytest.mark.parametrize("orphan", [False, True])
def test_the_memory_of_a_user_s_process_is_not_read(monkeypatch: pytest.MonkeyPatch, orphan: bool) -> None:
    """Its title may have megabytes, lie on a file system of his that never answers, or behind a thousand threads that
    change their memory; his orphans, too, which in a container are children of root's sshd."""
    name = "print(file=open('/proc/self/comm', 'w'), end='sshd')"
    asks = f"import os; {name}; os.setuid(65534); print(os.getpid(), flush=True); input()"
    command = [f"sshd: evil@pts/0{'x' * 100_000}", "-c", asks]
    if orphan:
        # By nothing that Python has to find first: by such a name it may look in another's place.
        parent = f"import os; {name}; os.fork() or os.execv({sys.executable!r}, {command}); os.wait()"
        command = ["sshd", "-c", parent]
    process = subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    read: list[tuple[str, str]] = []
    start = sessions._read_start
    monkeypatch.setattr(sessions, "_read_start", lambda *asked: (read.append(asked), start(*asked))[1])
    try:
        assert process.stdout is not None
        number = process.stdout.readline().decode().strip()
        sessions.read_sessions()
        assert {file for asked, file in read if asked == number} == {"comm", "status"}
        assert len(start(number, "cmdline")) <= 4096
    finally:
        process.communicate(b"\n", 60)


def test_a_program_that_a_user_starts_with_root_s_rights_is_no_sshd() -> None:
    """By a link of that name to one with the set-user-ID bit; with all the descriptors that he has left open in it."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        program = Path(directory, "sshd")
        program.symlink_to(shutil.which("su") or "")
        process = subprocess.Popen(
            [program, "root"], user=65534, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            end = time.monotonic() + 60
            while (found := sessions._read_process(str(process.pid))) is None and time.monotonic() < end:
                time.sleep(0.01)
            assert found is not None
            assert found.user == 65534
            assert Path(f"/proc/{process.pid}") not in [each for kind in sessions._find_processes() for each in kind]
        finally:
            process.kill()
            process.wait(60)
            close_pipes(process)


def test_a_kernel_without_sock_diag_tells_the_same_sockets_in_files(lab: Lab) -> None:
    with Sshd(lab.gateway, 2222), Visitor(lab.client, LAN, 2222) as visitor:
        visitor.say("login")
        assert wait_for(lab, [CLIENT]) == [CLIENT]
        end = time.monotonic() + 60
        told, filed = list[str](), [""]
        while filed != told and time.monotonic() < end:  # what others have left closes between the two
            told, filed = (lab.gateway.run(sys.executable, "-c", SOCKETS, way).stdout.splitlines() for way in ("", "-"))
    assert len(told) >= 2
    assert filed == told
