"""Whether tables have changed is seen without reading them by the tool: what changes, and nothing that is counted."""

from __future__ import annotations

import pytest

from tests.kernel.worker import RemoteKernel

DIGEST = "from netlimit.kernel.tables import digest_tables; print(digest_tables({family}).hex())"
READ = "from netlimit.kernel.iptables import TableReader; print(TableReader().read({family}))"
PROGRAMS = {4: "iptables-legacy", 6: "ip6tables-legacy"}
RULE = ("OUTPUT", "-o", "lo", "-p", "udp", "-m", "udp", "--dport", "7", "-j", "ACCEPT")
CHANGES = [
    ("-A", *RULE),
    ("-I", "OUTPUT", "2", *RULE[1:]),
    ("-R", "OUTPUT", "1", *RULE[1:8], "8", "-j", "ACCEPT"),
    ("-P", "OUTPUT", "DROP"),
    ("-N", "OTHER"),
    ("-E", "NL-T", "NL-U"),
    ("-F", "OUTPUT"),
]


@pytest.mark.parametrize("family", [4, 6])
def test_a_change_is_seen_and_counting_is_none(untouched: RemoteKernel, family: int) -> None:
    program = PROGRAMS[family]
    untouched.run("ip", "link", "set", "lo", "up")
    untouched.run(program, "-N", "NL-T")
    untouched.run(program, "-A", *RULE)
    before = digest(untouched, family)
    untouched.run("python3", "-c", send("127.0.0.1" if family == 4 else "::1"))
    assert "    1 " in untouched.run(program, "-nvxL", "OUTPUT")
    assert digest(untouched, family) == before
    for change in CHANGES:
        untouched.run(program, *change)
        after = digest(untouched, family)
        assert after != before, change
        before = after


def digest(kernel: RemoteKernel, family: int) -> str:
    return kernel.run("python3", "-c", DIGEST.format(family=family))


def send(address: str) -> str:
    family = "AF_INET6" if ":" in address else "AF_INET"
    return f"import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM).sendto(b'x', ('{address}', 7))"


@pytest.mark.parametrize("family", [4, 6])
def test_a_host_that_has_no_tables_of_a_family_has_nothing_of_ours(untouched: RemoteKernel, family: int) -> None:
    """As where IPv6 is switched off, or nobody has asked for any table since the machine started."""
    hidden = 'mount -t tmpfs none "/proc/$$/net" && exec python3 -c "$1"'
    words = ("unshare", "-m", "sh", "-c", hidden, "sh")
    assert "False" in untouched.run(*words, "import os; print(os.path.exists('/proc/net/ip_tables_names'))")
    assert untouched.run(*words, READ.format(family=family)) == "({}, {})\n"


BACK_AT_ONCE = """
import subprocess
from netlimit.kernel import iptables
def change(how):
    rule = f"iptables-legacy -t mangle {how} OUTPUT -j MARK --set-mark 1"
    subprocess.run(rule.split(), check=True)
def read_and_put_back(family, only=None):
    found = read_printed(family, only)
    change("-A")
    return found
change("-A")
reader, read_printed = iptables.TableReader(), iptables.read_printed
reader.read(4)
change("-D")
iptables.read_printed = read_and_put_back
reader.read(4)
iptables.read_printed = read_printed
reader.read(4)
print(*reader.read_marks(4).lines)
"""


def test_what_goes_and_is_back_while_it_is_read_is_not_taken_for_gone(untouched: RemoteKernel) -> None:
    """Then the tables are what they were when they were last read to the end."""
    assert untouched.run("python3", "-c", BACK_AT_ONCE) == "mangle -A OUTPUT -j MARK --set-xmark 0x1/0xffffffff\n"
