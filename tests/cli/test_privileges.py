"""What the API's process may do, and who may read what netlimit makes."""

from __future__ import annotations

import pwd
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.running import Netlimit

AS_NOBODY = (
    "import pwd, subprocess, sys; from netlimit.cli.privileges import become; become(pwd.getpwnam('nobody')); "
    "sys.exit(subprocess.run(sys.argv[1:]).returncode)"
)


def test_the_api_has_no_capabilities_and_can_have_none(root: None, netlimit: Netlimit) -> None:
    server = replace(netlimit, cold=True).serve()
    (api,) = [child for child, user in server.children.items() if user == pwd.getpwnam("nobody").pw_uid]
    status = dict(re.findall(r"^(\w+):\s*(.*)$", Path(f"/proc/{api}/status").read_text(), re.MULTILINE))
    server.end()
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    "command",
    [
        ("ip", "link", "add", "type", "dummy"),
        ("ipset", "create", "nl-none", "hash:ip"),
        ("iptables-legacy", "-w", "-A", "OUTPUT", "-j", "RETURN"),
        ("tc", "qdisc", "add", "dev", "lo", "root", "pfifo"),
    ],
)
def test_who_has_become_such_a_user_cannot_reach_the_kernel(gateway: Netlimit, command: tuple[str, ...]) -> None:
    done = subprocess.run(
        gateway.within(sys.executable, "-c", AS_NOBODY, *command), capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert re.search("not permitted|must be root|Permission denied", done.stderr), done.stderr


def test_nothing_that_is_made_is_for_everybody(root: None, gateway: Netlimit, directory: Path) -> None:
    """Whatever the umask of who starts it."""
    careless = replace(gateway, before=("sh", "-c", 'umask 0; exec "$@"', "sh"))
    server = careless.serve()
    careless.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s")
    found = {path: path.lstat() for path in (directory / "database").rglob("*")}
    locks = [path for path in Path("/run/netlimit").rglob("*") if path.is_file()]
    modes = {path.name: stat.S_IMODE(each.st_mode) for path, each in found.items()}
    open_locks = [path for path in locks if path.exists() and stat.S_IMODE(path.lstat().st_mode) & 0o7]
    server.end()
    assert modes["netlimit.db"] == 0o660
    assert modes["admin.token"] == 0o600
    assert modes["controller"] & 0o777 == 0o700
    assert "applied.db" in modes
    assert not {name: oct(mode) for name, mode in modes.items() if mode & 0o7}
    assert not open_locks
