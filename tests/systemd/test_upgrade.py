"""scripts/install over an installed gateway, and scripts/uninstall: what holds meanwhile, and what is left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.systemd.gateway import CLIENT, OTHER, ask, ping, pinging, run, wait, wait_for_ports

STARTED = ("controller", "guard", "api")
SETTINGS = Path("/etc/netlimit/netlimit.toml")
ENVIRONMENT = sys.prefix
"""With another netlimit, so that all has to change over to it: there is no network to make an environment by."""
TABLES = [(tool, table) for tool in ("iptables-legacy", "ip6tables-legacy") for table in ("mangle", "filter")]
TEST_UNIT = "netlimit-command.service"
"""By which scripts/vm runs the tests."""
OURS = ("-N NL-", "-j NL-", "nl-", "qdisc htb")


def list_kernel() -> str:
    """All that may be ours in the kernel."""
    said = [run(tool, "-w", "-t", table, "-S") for tool, table in TABLES]
    return "\n".join((*said, run("ipset", "list", "-n"), run("tc", "qdisc", "show", "dev", "lan")))


def test_an_upgrade_under_traffic_lets_nothing_through_and_loses_nothing(client: str, blocked: str) -> None:
    before = {unit: ask(unit, "MainPID") for unit in STARTED}
    former = Path("/opt/netlimit/bin").resolve()
    with pinging(client, blocked) as refused, pinging(client, OTHER) as allowed:
        run("scripts/install", "--venv", ENVIRONMENT)
        wait_for_ports("api")
        wait("netlimit status | grep applied", "the controller of the new netlimit")
    assert refused.answered == 0
    assert allowed.answered >= allowed.sent - 2
    for unit in STARTED:
        assert ask(unit, "ActiveState") == "active", unit
        assert ask(unit, "MainPID") != before[unit], unit
        assert ask(unit, "NRestarts") == "0", unit
    assert Path("/opt/netlimit/bin").resolve() == Path(ENVIRONMENT, "bin")
    assert not former.exists(), "nothing runs in the former environment"
    assert run("systemctl", "--failed", "--no-legend", "--plain").count("netlimit") == 0


def test_the_copy_of_an_earlier_version_is_moved_while_nobody_writes_there(client: str, blocked: str) -> None:
    """The units cannot, to whom each path that they may write is a mount of its own."""
    former, present = Path("/var/lib/netlimit/controller"), Path("/var/lib/netlimit-controller")
    units = [f"netlimit-{unit}" for unit in STARTED]
    run("systemctl", "stop", *units)
    present.rename(former)
    run("systemctl", "start", *units)
    wait_for_ports("api")
    assert (former / "applied.db").exists()
    assert not present.exists(), "or this test tests nothing"
    kept = (former / "applied.db").stat().st_ino
    with pinging(client, blocked) as refused:
        run("scripts/install", "--venv", ENVIRONMENT)
        wait_for_ports("api")
        wait("netlimit status | grep applied", "the controller of the new netlimit")
    assert refused.answered == 0
    assert (present / "applied.db").stat().st_ino == kept
    assert not former.exists()
    for unit in STARTED:
        assert ask(unit, "ActiveState") == "active", unit
    assert json.loads(run("netlimit", "apply", "--last", "--json"))["revision"]


def test_what_is_made_in_a_window_of_confirmation_is_in_force_all_through_an_upgrade(client: str) -> None:
    """The copy for a boot has it not. The guard does not end by itself: systemd kills it soon, and the next goes on."""
    run("netlimit", "apply", "--confirm", "1h")
    run("netlimit", "rule", "add", OTHER, "--action", "block", "--wait", "60")
    assert ping(client, OTHER) == 0
    with pinging(client, OTHER) as refused:
        run("scripts/install", "--venv", ENVIRONMENT)
        wait_for_ports("api")
        wait("netlimit status | grep applied", "the controller of the new netlimit")
    assert refused.answered == 0
    with pinging(client, OTHER) as refused:
        before, began = ask("guard", "MainPID"), time.monotonic()
        run("systemctl", "restart", "netlimit-guard")
        assert time.monotonic() - began < 80  # an emulated machine is slow; it was 90 seconds and more
        assert ask("guard", "MainPID") != before
    assert refused.answered == 0
    run("netlimit", "rollback")
    wait(f"ip netns exec {client} ping -q -I {OTHER} -c 1 -W 1 10.99.0.1", "what was before the window")


def test_an_uninstallation_whose_teardown_fails_leaves_all_as_it_was(client: str, blocked: str) -> None:
    before = {unit: ask(unit, "MainPID") for unit in STARTED}
    written = SETTINGS.read_bytes()
    SETTINGS.write_text("database_url = [")
    try:
        done = subprocess.run(
            "scripts/uninstall", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    finally:
        SETTINGS.write_bytes(written)
    assert done.returncode == 1, done.stdout
    assert "the limits are still in the kernel, and netlimit is still installed" in done.stderr
    assert {unit: ask(unit, "MainPID") for unit in STARTED} == before
    for unit in (*STARTED, "restore"):
        assert ask(unit, "UnitFileState") == "enabled", unit
    assert ping(client, blocked) == 0


def test_what_is_uninstalled_limits_nobody_and_starts_again_where_it_ended(client: str) -> None:
    run("netlimit", "rule", "add", CLIENT, "--action", "block", "--wait", "60", "--json")
    shaped = ("10.99.0.0/24", "--per", "host", "--action", "shape", "--rate", "50 Mbit/s", "--direction", "to")
    run("netlimit", "rule", "add", *shaped, "--interface", "lan", "--wait", "60", "--json")
    assert ping(client, CLIENT) == 0
    held = list_kernel()
    for ours in OURS:
        assert ours in held, ours
    shutil.copy("scripts/uninstall", "/root/uninstall")
    with pinging(client, OTHER) as allowed:
        run("/root/uninstall")
    assert allowed.answered >= allowed.sent - 2
    left = list_kernel()
    for ours in OURS:
        assert ours not in left, ours
    assert ping(client, CLIENT) == 5
    for path in ("/opt/netlimit", "/run/netlimit", "/usr/local/bin/netlimit", "/etc/udev/rules.d/90-netlimit.rules"):
        assert not Path(path).exists(), path
    assert {path.name for path in Path("/etc/systemd/system").rglob("*netlimit-*")} <= {TEST_UNIT}
    known = run("systemctl", "list-units", "--all", "--no-legend", "--plain", "*netlimit-*")
    assert {line.split()[0] for line in known.splitlines()} <= {TEST_UNIT}
    assert Path("/var/lib/netlimit/netlimit.db").exists()

    run("scripts/install", "--venv", ENVIRONMENT)
    wait_for_ports("api")
    run("netlimit", "apply")
    wait(f"! ip netns exec {client} ping -q -I {CLIENT} -c 1 -W 1 10.99.0.1", "the block that the database has")
    rules = json.loads(run("netlimit", "rule", "list", "--json"))["items"]
    assert {rule["target"] for rule in rules} >= {CLIENT, "10.99.0.0/24"}
    assert ping(client, OTHER) == 5


def test_a_purge_leaves_nothing(client: str) -> None:
    run("/root/uninstall", "--purge")
    for path in ("/opt/netlimit", "/run/netlimit", "/etc/netlimit", *Path("/var/lib").glob("netlimit*")):
        assert not Path(path).exists(), path
    assert "netlimit" not in Path("/etc/passwd").read_text()
    assert "NL-" not in list_kernel()
    assert ping(client, CLIENT) == 5
