"""The units of an installed gateway: what they start, with which rights, and what holds while they come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.systemd.gateway import PATIENCE, PORTS, ask, forget_kernel, ping, pinging, run, wait, wait_for_ports

STARTED = ("controller", "guard", "api")
BITS = {"cap_net_admin": 12, "cap_net_raw": 13}
TAKER = """
import socket, sys, time
ports, end, taken = [int(each) for each in sys.argv[2:]], time.monotonic() + float(sys.argv[1]), set()
while time.monotonic() < end:
    for port in ports:
        for option in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,)):
            with socket.socket() as place:
                for each in option:
                    place.setsockopt(socket.SOL_SOCKET, each, 1)
                try:
                    place.bind(("127.0.0.1", port))
                    place.listen()
                except OSError:
                    continue
                taken.add(port)
print(*taken)
"""
"""Somebody who takes ports wherever he can, for so many seconds; says which he got."""


def read_status(unit: str) -> dict[str, str]:
    text = Path(f"/proc/{ask(unit, 'MainPID')}/status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines())


def test_what_is_enabled_has_come_up_by_itself_and_only_once() -> None:
    for unit in STARTED:
        assert ask(unit, "ActiveState") == "active", unit
        assert ask(unit, "NRestarts") == "0", unit
    assert "netlimit" not in run("systemctl", "--failed", "--no-legend", "--plain")


def test_each_has_the_user_groups_and_capabilities_that_it_needs() -> None:
    """And no supplementary group: not root's either."""
    group = run("getent", "group", "netlimit").split(":")[2]
    for unit in STARTED:
        status, user = read_status(unit), "netlimit" if unit == "api" else "netlimit-controller"
        uid = run("id", "--user", user).strip()
        assert status["Uid"].split() == [uid] * 4, unit
        assert status["Gid"].split() == [group] * 4, unit
        assert set(status["Groups"].split()) <= {group}, unit
        wanted = 0 if unit == "api" else sum(1 << bit for bit in BITS.values())
        for name in ("CapEff", "CapPrm", "CapBnd"):
            assert int(status[name], 16) == wanted, (unit, name)
        assert status["NoNewPrivs"] == "1", unit
        assert status["Seccomp"] == "2", unit


def test_nothing_is_missing_but_what_takes_more_rights() -> None:
    """Shaping what ends here."""
    found = json.loads(Path("/run/netlimit/capabilities.json").read_text())
    dispensable = ("fq_codel", "python-iptables")
    missing = {name: said for name, said in found.items() if said and name not in dispensable}
    assert list(missing) == ["ifb"], missing
    said = run("journalctl", "--no-pager", "--unit", "netlimit-controller", "--unit", "netlimit-api")
    assert "Traceback" not in said
    assert " ERROR " not in said, said


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_who_is_blocked_stays_so_while_the_controller_comes_and_goes(client: str, blocked: str, how: str) -> None:
    before = ask("controller", "MainPID")
    with pinging(client, blocked) as pings:
        if how == "restart":
            run("systemctl", "restart", "netlimit-controller")
        else:
            os.kill(int(before), signal.SIGKILL)
        wait(f"test $(systemctl show -p MainPID --value netlimit-controller) -gt 0 -a $(systemctl show -p MainPID "
             f"--value netlimit-controller) != {before}", "another controller")  # fmt: skip
        time.sleep(10)
    assert pings.answered == 0
    assert ask("controller", "ActiveState") == "active"


def test_at_boot_what_was_applied_last_comes_back_without_controller_and_database(client: str, blocked: str) -> None:
    wait("test -e /var/lib/netlimit-controller/applied.db", "the copy for the boot")
    time.sleep(5)
    run("systemctl", "stop", *(f"netlimit-{unit}" for unit in STARTED))
    forget_kernel()
    assert ping(client, blocked) == 5
    database = Path("/var/lib/netlimit/netlimit.db")
    aside = database.with_suffix(".aside")
    database.rename(aside)
    try:
        run("systemctl", "restart", "netlimit-restore")
        assert ping(client, blocked) == 0
    finally:
        aside.rename(database)
        run("systemctl", "start", *(f"netlimit-{unit}" for unit in STARTED))
        wait_for_ports("api")


def test_a_device_that_appears_while_no_controller_runs_gets_its_queues(client: str) -> None:
    """udev starts the unit for it."""
    words = ("10.98.0.2", "--direction", "to", "--action", "shape", "--rate", "1 Mbit/s", "--interface", "late")
    rule = json.loads(run("netlimit", "rule", "add", *words, "--wait", "20", "--json", check=False))
    run("ip", "link", "add", "late", "type", "veth", "peer", "name", "other", "netns", client)
    run("ip", "link", "set", "late", "up")
    wait("tc qdisc show dev late | grep -q htb", "queues by the controller")
    time.sleep(10)  # until its copy has them
    run("systemctl", "stop", "netlimit-controller", "netlimit-guard")
    try:
        run("ip", "link", "del", "late")
        run("ip", "link", "add", "late", "type", "veth", "peer", "name", "other", "netns", client)
        run("ip", "link", "set", "late", "up")
        wait("tc qdisc show dev late | grep -q htb", "queues by the unit for devices")
    finally:
        run("systemctl", "start", "netlimit-controller", "netlimit-guard")
        run("netlimit", "rule", "remove", str(rule["id"]), "--wait", "60", check=False)
        run("ip", "link", "del", "late")


@pytest.mark.parametrize("how", ["restart", "kill"])
@pytest.mark.parametrize("unit", ["api", "limiter"])
def test_nobody_takes_the_ports_of_a_unit_that_comes_and_goes(unit: str, how: str) -> None:
    """systemd keeps the sockets, also those that do not listen."""
    run("systemctl", "start", f"netlimit-{unit}")
    wait_for_ports(unit)
    wait(f"test $(systemctl show -p NFileDescriptorStore --value netlimit-{unit}) = {len(PORTS[unit])}", "kept sockets")
    before = ask(unit, "MainPID")
    ports = [str(port) for port in PORTS[unit]]
    words = ("setpriv", "--reuid", "nobody", "--clear-groups", sys.executable, "-c", TAKER, "30", *ports)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as taker:
        time.sleep(3)
        if how == "restart":
            run("systemctl", "restart", f"netlimit-{unit}")
        else:
            os.kill(int(before), signal.SIGKILL)
        wait(f"test $(systemctl show -p MainPID --value netlimit-{unit}) != {before}", "another process")
        taken, _ = taker.communicate(timeout=PATIENCE)
    assert taken.split() == []
    wait_for_ports(unit)
    assert ask(unit, "MainPID") != before
    if unit == "limiter":
        run("systemctl", "stop", "netlimit-limiter")


@pytest.mark.parametrize("unit", ["api", "limiter"])
def test_a_unit_that_is_stopped_keeps_no_port_and_has_it_again_when_it_starts(unit: str) -> None:
    run("systemctl", "start", f"netlimit-{unit}")
    wait_for_ports(unit)
    run("systemctl", "stop", f"netlimit-{unit}")
    ports = [str(port) for port in PORTS[unit]]
    assert run(sys.executable, "-c", TAKER, "1", *ports).split() != []
    run("systemctl", "start", f"netlimit-{unit}")
    wait_for_ports(unit)
