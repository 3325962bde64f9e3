"""Sets and rules of others whose names hold ends of lines, and lines that look like ours: changes and repairs go on as
if they were not there, and all is told as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from tests.e2e.gateway import HOST, Gateway

PERSISTENT = True
FORGED = "x\n*raw\n:NL-ODD - [0:0]\n-A NL-PREROUTING -j DROP"
MANGLE = ("iptables-legacy", "-t", "mangle")
RULES: dict[str, list[str]] = {
    "hashlimit": ["INPUT", "-m", "hashlimit", "--hashlimit-name", FORGED, "--hashlimit-upto", "9/s", "-j", "ACCEPT"],
    "recent": ["INPUT", "-m", "recent", "--name", "x\n*raw", "--set"],
    "an interface": ["FORWARD", "-i", "x\n*raw", "-j", "ACCEPT"],
    "what leads to us": ["FORWARD", "-m", "recent", "--name", "x -j NL-FORWARD", "--set", "-j", "RETURN"],
    "what marks": ["INPUT", "-m", "recent", "--name", "x -j MARK --set-xmark 0xffffffff", "--set"],
}
SETS = ["the set in use", "nl-a"]


@pytest.fixture
def beside(request: pytest.FixtureRequest, gateway: Gateway, lab: Lab) -> Iterator[str]:
    """Rules are in force, and then somebody names something so."""
    gateway.put(
        {"target": CLIENT, "rate": "500 packets/s"}, {"target": SERVER, "direction": "to", "rate": "500 packets/s"}
    )
    what: str = request.param
    if what in RULES:
        lab.gateway.run(*MANGLE, "-A", *RULES[what])
    else:
        used = next(name for name in gateway.kernel.structure().sets if name.startswith("nl-l4-"))
        name = f"x\n\nName: {used if what == SETS[0] else what}"
        lab.gateway.run("ipset", "create", name, "hash:ip")
    yield what
    if what in RULES:
        lab.gateway.run(*MANGLE, "-D", *RULES[what])
    else:
        lab.gateway.run("ipset", "destroy", name)


@pytest.mark.parametrize("beside", [*RULES, *SETS], indirect=True)
def test_changes_and_repairs_go_on_beside_hostile_names(gateway: Gateway, lab: Lab, beside: str) -> None:
    repairs = count_repairs(gateway)
    time.sleep(2.5)
    assert count_repairs(gateway) == repairs, "nobody fights with it"
    began = time.monotonic()
    (blocked,) = gateway.put({"target": "10.1.0.77", "direction": "to", "action": "block"})
    assert time.monotonic() - began < 20
    flushed = time.monotonic()
    lab.gateway.run(*MANGLE, "-F", "NL-FORWARD")
    gateway.wait(lambda: count_repairs(gateway) > repairs and not gateway.drift(), "the chain to be filled again")
    assert time.monotonic() - flushed < 20
    told = gateway.attempt("doctor")
    assert "Traceback" not in told.stderr
    assert all(line.isprintable() for line in told.stdout.splitlines())
    assert "marks" not in " ".join(note for status in gateway.store.hosts() for note in status.notes)
    gateway.remove(blocked)


def count_repairs(gateway: Gateway) -> int:
    return next(status.drift for status in gateway.store.hosts() if status.host == HOST)
