"""To whom the command line shows its token: to the API, and to nobody who has taken its port meanwhile."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from netlimit.cli import listeners
from netlimit.cli.listeners import ListenerError, StrangerError, Witness
from netlimit.kernel.sockets import ESTABLISHED, LISTENING, Socket
from tests.cli.running import Netlimit, settings_in, until
from tests.cli.strangers import NAMELESS, stranger

TOKEN = "nl_AAAAAAAAAAAAA_0123456789012345678901234567890123456789012"


@pytest.fixture
def netlimit(directory: Path) -> Netlimit:
    """With an admin's token in a file, as the first start leaves one."""
    place = Netlimit(settings_in(directory))
    place.do("db", "upgrade")
    file = directory / "database" / "admin.token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return place


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1"])  # noqa: S104
@pytest.mark.parametrize("settings", [{}, {"NETLIMIT_TOKEN": TOKEN}])
def test_a_stranger_is_told_nothing(root: None, netlimit: Netlimit, host: str, settings: dict[str, str]) -> None:
    port = netlimit.environment["NETLIMIT_LISTEN"].rpartition(":")[2]
    url = f"http://[::1]:{port}" if host == "::1" else f"http://127.0.0.1:{port}"
    with stranger(netlimit, host) as there:
        said = netlimit.refuse("rule", "list", NETLIMIT_URL=url, **settings)
        assert there.heard() == b""
    assert f"uid {NAMELESS}" in said
    assert f"ss -ltnp 'sport = :{port}'" in said


def test_a_stranger_with_a_name_is_named(root: None, netlimit: Netlimit) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    with stranger(netlimit, "127.0.0.1", nobody):
        assert f"the user nobody (uid {nobody})" in netlimit.refuse("rule", "list")


def test_a_stranger_at_an_address_of_this_host_is_told_nothing(root: None, gateway: Netlimit) -> None:
    """Not of loopback: whoever listens there is as near."""
    subprocess.run(["ip", "-n", gateway.namespace, "address", "add", "192.0.2.1/24", "dev", "lo"], check=True)
    port = gateway.environment["NETLIMIT_LISTEN"].rpartition(":")[2]
    with stranger(gateway, "0.0.0.0") as there:  # noqa: S104
        said = gateway.refuse("rule", "list", NETLIMIT_URL=f"http://192.0.2.1:{port}", NETLIMIT_TOKEN=TOKEN)
        assert there.heard() == b""
    assert f"uid {NAMELESS}" in said


def test_doctor_names_a_stranger(root: None, netlimit: Netlimit) -> None:
    with stranger(netlimit, "127.0.0.1") as there:
        done = netlimit.run("doctor", "--json")
        assert there.heard() == b""
    assert done.returncode == 1
    (found,) = [each for each in json.loads(done.stdout)["findings"] if each["name"] == "stranger in the API's place"]
    assert found["severity"] == "serious"
    assert f"uid {NAMELESS}" in json.dumps(found)


def test_what_one_listens_for_oneself_is_one_s_own(root: None, netlimit: Netlimit, directory: Path) -> None:
    """A forward to an API elsewhere, say; and it is seen without being root."""
    settings = {**netlimit.environment, "NETLIMIT_TOKEN": TOKEN, "NETLIMIT_DATABASE_URL": "sqlite:////nowhere/at.db"}
    user = f"--reuid={NAMELESS}", f"--regid={NAMELESS}", "--clear-groups"
    mine = replace(netlimit, environment=settings, before=("setpriv", *user))
    with stranger(netlimit, "127.0.0.1") as there:
        mine.run("rule", "list")
        assert TOKEN.encode() in there.heard()
    with stranger(netlimit, "127.0.0.1", NAMELESS + 1):
        assert f"uid {NAMELESS + 1}" in mine.refuse("rule", "list")


def test_who_has_the_token_s_file_runs_the_api(root: None, netlimit: Netlimit, directory: Path) -> None:
    """Unless anybody could have put it there."""
    file = directory / "database" / "admin.token"
    os.chown(file, NAMELESS, NAMELESS)
    with stranger(netlimit, "127.0.0.1") as there:
        netlimit.run("rule", "list", NETLIMIT_TOKEN=TOKEN)
        assert TOKEN.encode() in there.heard()
        there.file.write_bytes(b"")
        file.parent.chmod(0o1777)
        netlimit.refuse("rule", "list", NETLIMIT_TOKEN=TOKEN)
        assert there.heard() == b""


def test_who_listens_no_more_once_he_has_been_reached_is_found_by_the_connection(
    root: None, netlimit: Netlimit
) -> None:
    port = int(netlimit.environment["NETLIMIT_LISTEN"].rpartition(":")[2])
    witness = Witness(frozenset({0}))
    witness.look(port)
    with (
        stranger(netlimit, "127.0.0.1", once=True) as there,
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        assert there.says.readline() == "listens no more\n"
        with pytest.raises(StrangerError, match=f"uid {NAMELESS}"):
            witness.check(connection)


def test_who_has_gone_for_the_api_meanwhile_is_found_by_the_connection(root: None, netlimit: Netlimit) -> None:
    port = int(netlimit.environment["NETLIMIT_LISTEN"].rpartition(":")[2])
    witness = Witness(frozenset({0}))
    witness.look(port)
    with (
        stranger(netlimit, "127.0.0.1", once=True) as there,
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        assert there.says.readline() == "listens no more\n"
        with socket.create_server(("127.0.0.1", port)), pytest.raises(StrangerError, match=f"uid {NAMELESS}"):
            witness.check(connection)


def test_a_listener_that_has_not_accepted_yet_is_as_good() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        witness = Witness(frozenset({os.geteuid()}))
        witness.look(server.getsockname()[1])
        with socket.create_connection(server.getsockname()) as connection:
            witness.check(connection)


def test_another_namespace_that_root_leads_to_is_reached(root: None, gateway: Netlimit) -> None:
    """As a published port of a container: here is neither a listener nor the other end."""
    name, port = gateway.namespace, gateway.environment["NETLIMIT_LISTEN"].rpartition(":")[2]
    inside = f"{name}-in"
    run: Callable[..., object] = lambda *command: subprocess.run(command, check=True)  # noqa: E731
    run("ip", "netns", "add", inside)
    try:
        run("ip", "-n", name, "link", "add", "out", "type", "veth", "peer", "name", "in", "netns", inside)
        for place, device, address in ((name, "out", "192.0.2.1/24"), (inside, "in", "192.0.2.2/24")):
            run("ip", "-n", place, "address", "add", address, "dev", device)
            run("ip", "-n", place, "link", "set", device, "up")
        led = f"iptables-legacy -w -t nat -A OUTPUT -d 192.0.2.1 -p tcp --dport {port} -j DNAT --to 192.0.2.2:{port}"
        run("ip", "netns", "exec", name, *led.split())
        with stranger(replace(gateway, namespace=inside), "192.0.2.2") as there:
            gateway.run("rule", "list", NETLIMIT_URL=f"http://192.0.2.1:{port}", NETLIMIT_TOKEN=TOKEN)
            assert TOKEN.encode() in there.heard()
    finally:
        run("ip", "netns", "del", inside)


def test_what_cannot_be_read_is_told_and_not_waved_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not answer, as in some sandboxes."""

    def refuse(states: object, port: int = 0) -> Iterator[Socket]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(listeners, "read_sockets", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        witness = Witness(frozenset({os.geteuid()}))
        witness.look(server.getsockname()[1])
        with (
            socket.create_connection(server.getsockname()) as connection,
            pytest.raises(ListenerError, match="Operation not permitted"),
        ):
            witness.check(connection)


def _listener(address: str, owner: int = 0, inode: int = 1) -> Socket:
    return Socket(LISTENING, address, 8750, "0.0.0.0", 0, owner, inode)  # noqa: S104


@pytest.mark.parametrize(
    ("addresses", "reached"),
    [
        (["127.0.0.1", "0.0.0.0", "::"], ["127.0.0.1"]),  # noqa: S104
        (["0.0.0.0", "::", "192.0.2.1"], ["0.0.0.0"]),  # noqa: S104
        (["::", "::1"], ["::"]),
        (["127.0.0.1", "127.0.0.1"], ["127.0.0.1", "127.0.0.1"]),
        (["192.0.2.1", "::1"], []),
    ],
)
def test_the_nearest_listeners_are_reached(addresses: list[str], reached: list[str]) -> None:
    all_of_them = [_listener(address, inode=number) for number, address in enumerate(addresses)]
    found = listeners.find_reached(all_of_them, "127.0.0.1")
    assert sorted(each.near for each in found) == reached


def test_one_stranger_among_several_listeners_is_too_many() -> None:
    both = [_listener("127.0.0.1", 0, 1), _listener("127.0.0.1", NAMELESS, 2)]
    assert listeners.judge(both, both, None, "127.0.0.1", frozenset({0})) == both[1]
    assert listeners.judge(both, both, None, "127.0.0.1", frozenset({0, NAMELESS})) is None


def test_a_listener_that_came_meanwhile_vouches_for_nobody() -> None:
    """The other end of the connection tells whose it is; while nobody has accepted it, it is nobody's."""
    before, after = [_listener("127.0.0.1", 0, 1)], [_listener("127.0.0.1", 0, 2)]
    served = Socket(ESTABLISHED, "127.0.0.1", 8750, "127.0.0.1", 5000, 0, 3)
    assert listeners.judge(before, after, served, "127.0.0.1", frozenset({0})) is None
    with pytest.raises(ListenerError, match="again"):
        listeners.judge(before, after, served._replace(inode=0), "127.0.0.1", frozenset({0}))


def test_the_api_itself_is_told_the_token(root: None, netlimit: Netlimit) -> None:
    """Root's listener, at which another user accepts."""
    server = Netlimit({**netlimit.environment, "NETLIMIT_BOOTSTRAP_TOKEN": TOKEN}).start(
        "serve", "--api-user", "nobody"
    )
    until(lambda: server.ended or not netlimit.run("status").returncode, server.said)
    assert not server.ended, server.said()
    server.end()
