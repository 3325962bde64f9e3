"""What is shaped under the units, by a controller that is not root."""

from __future__ import annotations

import json

from tests.systemd.gateway import CLIENT, OTHER, ping, run, wait


def test_each_host_is_shaped_by_itself_and_so_is_a_whole_device(client: str) -> None:
    """By the program that root has pinned, as far as the controller sees it there: without it such rules hold until the
    first host appears."""
    words = ("--wait", "60", "--json")
    shaped = ("--direction", "to", "--action", "shape", "--interface", "lan")
    added = (
        ("10.99.0.0/24", "--per", "host", "--rate", "10 Mbit/s", *shaped),
        ("0.0.0.0/0", "--per", "target", "--rate", "50 Mbit/s", *shaped),
        ("10.99.0.9", "--action", "block"),
    )
    rules = [json.loads(run("netlimit", "rule", "add", *each, *words)) for each in added]
    try:
        for address in (CLIENT, OTHER):
            assert ping(client, address) == 5
            wait(f"ipset save | grep '^add nl-q.* {address} .*skbprio 7'", f"a class for {address} in a child HTB")
        assert "nl-lead" in run("tc", "filter", "show", "dev", "lan")
        run("iptables-legacy", "-w", "-t", "raw", "-F", "PREROUTING")
        wait("iptables-legacy -w -t raw -S PREROUTING | grep NL-", "a repair")
        said = json.loads(run("netlimit", "status", "--json"))
        assert (said["last_error"], said["rules"]["error"], said["rules"]["degraded"]) == (None, 0, 0), said
    finally:
        for rule in rules:
            run("netlimit", "rule", "remove", str(rule["id"]))
