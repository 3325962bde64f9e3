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
