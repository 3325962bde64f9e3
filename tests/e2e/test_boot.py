"""A machine that starts anew: the limits are there before its network is, and before its database."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from netlimit.rules import parse_rule
from netlimit.store import Store
from scripts.testbed.namespaces import Namespace, remove_leftovers
from tests import warm
from tests.e2e.gateway import COMMAND, HOST, MODULE, PATIENCE
from tests.warm import ROOT

RULES = (
    {"target": "10.1.0.0/16", "rate": "100 packets/s", "per": "host"},
    {"target": "10.9.9.9", "action": "block"},
    {"target": "10.2.0.2", "direction": "to", "action": "shape", "rate": "10 Mbit/s"},
    {"target": "10.2.0.0/24", "direction": "to", "action": "shape", "rate": "50 Mbit/s", "per": "target"},
)
UNIT = ROOT / "packaging/systemd/netlimit-devices.service"
OTHERS = "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -i tun0 -j ACCEPT\nCOMMIT\n"
"""What a distribution loads at boot: all that the table held before is gone."""
DEVICES = {"lan": "10.1.0.1/16", "wan": "10.2.0.1/16"}


class Machine:
    """A gateway that can be switched off: its kernel forgets everything, its disk nothing."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self.database = disk / "netlimit.db"
        self.log = disk / "log"
        self._boots = 0
        self.network = self._boot()

    def _boot(self) -> Namespace:
        self._boots += 1
        network = Namespace(f"nl-g-{os.getpid()}-boot{self._boots}", "gateway")
        subprocess.run(["ip", "netns", "add", network.name], check=True)
        network.ip("link set lo up")
        return network

    def reboot(self) -> None:
        """Forget all that the kernel held; there are no devices yet."""
        self.switch_off()
        self.network = self._boot()

    def switch_off(self) -> None:
        self.network.end_processes()
        subprocess.run(["ip", "netns", "del", self.network.name], check=True)

    def plug_in(self, device: str) -> None:
        """A device appears, with its address."""
        self.network.ip(
            f"link add {device} type veth peer name {device}-far",
            *(f"link set {each} up" for each in (device, f"{device}-far")),
            f"addr add {DEVICES[device]} dev {device}",
        )

    def netlimit(self, *words: str, host: str = HOST) -> str:
        settings = {**os.environ, **self._settings, "NETLIMIT_HOST": host}
        done = warm.run(MODULE, *words, env=settings, namespace=self.network.name)
        assert done.returncode == 0, done
        return done.stdout

    def run(self, *words: str, host: str = HOST) -> str:
        return self.network.run(*words, cwd=ROOT, env=self._settings | {"NETLIMIT_HOST": host}).stdout

    def queues(self, device: str) -> list[str]:
        return self.network.run("tc", "class", "show", "dev", device).stdout.splitlines()

    def start_controller(self) -> warm.Started:
        """Start it; it has looked at everything when this returns."""
        before = self.log.read_text().count("Keeping the rules") if self.log.exists() else 0
        place: dict[str, Any] = {"env": {**os.environ, **self._settings}, "namespace": self.network.name}
        with self.log.open("a") as log, open(os.devnull) as nothing:
            process = warm.start(MODULE, "controller", **place, stdin=nothing, stdout=log, stderr=log)
        self.network.started.append(process)
        wait(lambda: self.log.read_text().count("Keeping the rules") > before, self.log.read_text)
        return process

    def held(self) -> list[str]:
        """What the kernel holds of ours: rules, sets, and classes."""
        rules = self.network.run("iptables-legacy-save").stdout.splitlines()
        sets = self.network.run("ipset", "list", "-n").stdout.splitlines()
        there = [device for device in DEVICES if self.network.run("ip", "link", "show", device, check=False).stdout]
        classes = [line for device in there for line in self.queues(device)]
        ours = [line for line in rules if "NL-" in line and not line.startswith(":")]
        return sorted([*ours, *sets, *classes])

    @property
    def _settings(self) -> dict[str, str]:
        return {
            "NETLIMIT_DATABASE_URL": f"sqlite:///{self.database}",
            "NETLIMIT_STATE_DIRECTORY": str(self._disk / "controller"),
            "NETLIMIT_HOST": HOST,
            "NETLIMIT_BACKEND": "iptables",
        }


def wait(condition: Callable[[], object], say: Callable[[], str]) -> None:
    """Wait for something that must come soon."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, say()
        time.sleep(0.02)


@pytest.fixture
def machine(root: None, tmp_path: Path) -> Iterator[Machine]:
    remove_leftovers()
    machine = Machine(tmp_path)
    yield machine
    machine.switch_off()


def test_what_was_applied_last_is_there_at_every_moment_of_a_boot(machine: Machine, tmp_path: Path) -> None:
    for device in DEVICES:
        machine.plug_in(device)
    store = Store(f"sqlite:///{machine.database}")
    store.upgrade()
    now = datetime.now(UTC)
    store.add([parse_rule(fields, now) for fields in RULES], "test", now)
    controller = machine.start_controller()
    wait(lambda: any(each.applied_revision == 1 for each in store.hosts()), machine.log.read_text)
    assert store.marked(HOST) == {}
    wait(lambda: "is applied" in machine.log.read_text(), machine.log.read_text)
    controller.terminate()
    controller.wait(60)
    store.close()
    full = machine.held()

    machine.reboot()
    hidden = [path.rename(f"{path}.away") for path in tmp_path.glob("netlimit.db*")]
    said = machine.netlimit("apply", "--last")
    assert "Revision 1 is back: 2 rules in force here, 2 in error." in said
    early = machine.held()
    assert any("hashlimit" in line for line in early)
    assert any("nl-b4" in line for line in early)

    machine.network.run("iptables-legacy-restore", input=OTHERS)
    assert not any("hashlimit" in line for line in machine.held())
    machine.netlimit("apply", "--last")
    assert machine.held() == early
    assert "-A PREROUTING -i tun0 -j ACCEPT" in machine.network.run("iptables-legacy-save", "-t", "mangle").stdout

    machine.plug_in("lan")
    machine.netlimit("apply", "--last")
    assert not any("class htb" in line for line in machine.held())
    machine.plug_in("wan")
    machine.netlimit("apply", "--last")
    assert [forget(line) for line in machine.held()] == [forget(line) for line in full]

    for path in hidden:
        path.rename(str(path).removesuffix(".away"))
    assert machine.netlimit("plan").strip() == "Nothing to do."
    said, now = machine.log.read_text(), datetime.now(UTC)
    machine.start_controller()
    wait(lambda: any(each.seen_at and each.seen_at > now for each in store.hosts()), machine.log.read_text)
    time.sleep(1.2)  # it looks for drift once a second
    store.close()
    assert not re.search("applied|Drift", machine.log.read_text().removeprefix(said))
    assert [forget(line) for line in machine.held()] == [forget(line) for line in full]


def test_what_is_shaped_that_ends_here_waits_for_a_device_and_all_else_does_not(machine: Machine) -> None:
    """Before the network is up nothing comes in by which it could come."""
    machine.plug_in("lan")
    store = Store(f"sqlite:///{machine.database}")
    store.upgrade()
    now, shaped = datetime.now(UTC), {"direction": "from", "action": "shape", "rate": "2 Mbit/s"}
    rules = ({"target": "10.1.0.0/24", "per": "host", **shaped}, {"target": "10.9.9.9", "action": "block"})
    store.add([parse_rule(fields, now) for fields in rules], "test", now)
    store.close()
    machine.netlimit("apply")
    machine.reboot()
    machine.network.ip("link set lo down", "link add lan type veth peer name lan-far")
    assert "Revision 1 is back" in machine.netlimit("apply", "--last")
    assert any("nl-b4" in line for line in machine.held())
    assert show_programs(machine, "lan") == ""
    machine.netlimit("apply", "--last")
    machine.network.ip("link set lan up", "link set lan-far up", f"addr add {DEVICES['lan']} dev lan")
    machine.netlimit("apply", "--last")
    assert "nl-in" in show_programs(machine, "lan")
    assert machine.netlimit("plan").strip() == "Nothing to do."


def show_programs(machine: Machine, device: str) -> str:
    return machine.network.run("tc", "filter", "show", "dev", device, "ingress").stdout


def test_devices_that_appear_while_others_are_seen_to_have_their_queues_too(machine: Machine, tmp_path: Path) -> None:
    """systemd starts the unit that does it once, however often udev asks for it."""
    machine.plug_in("lan")
    store = Store(f"sqlite:///{machine.database}")
    store.upgrade()
    now = datetime.now(UTC)
    caps = ({"target": "0.0.0.0/0", "per": "target", "interface": each} for each in DEVICES)
    store.add([parse_rule({"action": "shape", "rate": "9 Mbit/s", **cap}, now) for cap in caps], "test", now)
    store.close()
    machine.netlimit("apply")
    machine.reboot()
    machine.plug_in("lan")
    late = "ip link add wan type veth peer name wan-far && ip link set wan-far up && ip link set wan up"
    program = tmp_path / "netlimit"
    program.write_text(f"""#!/bin/sh
echo >>{tmp_path}/times
{shlex.join([sys.executable, *COMMAND])} "$@" || exit
[ -e /sys/class/net/wan ] || {{ {late}; }}
""")
    program.chmod(0o755)
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    words = shlex.split(line.replace("/opt/netlimit/bin/netlimit", str(program)).replace("$$", "$"))
    machine.run(*words)
    assert all(any("class htb" in line for line in machine.queues(device)) for device in DEVICES), machine.held()
    asked = (tmp_path / "times").read_text().count("\n")
    machine.run(*words)
    assert (asked, (tmp_path / "times").read_text().count("\n")) == (2, 3), "and no more often than needed"


def forget(line: str) -> str:
    """Handles that the kernel gives to leaves by itself."""
    return re.sub(r"leaf [0-9a-f]{4}: prio", "leaf prio", line)


def test_a_machine_that_has_not_its_name_yet_knows_what_was_its_own(machine: Machine) -> None:
    """The name may come with the network, and rules and the pause are kept by it."""
    store = Store(f"sqlite:///{machine.database}")
    store.upgrade()
    now = datetime.now(UTC)
    store.add([parse_rule({"target": "10.9.9.9", "action": "block", "hosts": [HOST]}, now)], "test", now)
    store.close()
    machine.netlimit("apply")
    machine.reboot()
    assert "1 rule in force here" in machine.netlimit("apply", "--last", host="localhost")
    assert any("nl-b4" in line for line in machine.held())
    machine.netlimit("teardown")
    machine.reboot()
    assert "Paused by teardown" in machine.netlimit("apply", "--last", host="localhost")
    assert machine.held() == []
    machine.netlimit("apply")
    assert any("nl-b4" in line for line in machine.held())


def test_a_disk_that_can_only_be_read_puts_back_what_was_applied_last(machine: Machine, tmp_path: Path) -> None:
    store = Store(f"sqlite:///{machine.database}")
    store.upgrade()
    now = datetime.now(UTC)
    store.add([parse_rule({"target": "10.9.9.9", "action": "block"}, now)], "test", now)
    store.close()
    machine.netlimit("apply")
    subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
        machine.reboot()
        assert "1 rule in force here" in machine.netlimit("apply", "--last")
        assert any("nl-b4" in line for line in machine.held())
    finally:
        subprocess.run(["umount", tmp_path], check=True)
