"""A rule for an interface by which no packet seems to come or go says so, and holds as soon as one does."""

from __future__ import annotations

import pytest

from netlimit import premises
from netlimit.errors import KernelError
from netlimit.kernel.base import Addresses
from netlimit.records import State
from netlimit.tree import Device, Queues, SavedRoot, Topology
from tests.controller.conftest import Site

LAN, WAN = Device(1, True), Device(2, True)
BRIDGE = Device(9, True, "bridge")


def stand(site: Site, rule_id: int) -> tuple[State | None, str]:
    """How a rule stands after the devices were looked at."""
    site.controller.tick()
    found = site.store.marked("gw").get(rule_id)
    return (found.state, found.message) if found else (None, "")


def test_a_device_that_becomes_a_port_and_is_none_any_more(site: Site) -> None:
    site.kernel.routes = Topology({"lan": LAN, "wan": WAN})
    rule = site.add(target="10.1.0.2", rate="1 packets/day", interface="lan")
    assert stand(site, rule.id) == (None, "")

    site.kernel.routes = Topology({"lan": Device(1, True, master="br0"), "wan": WAN, "br0": BRIDGE})
    state, message = stand(site, rule.id)
    assert state is State.ERROR
    assert "port of the bridge br0" in message
    (status,) = site.store.hosts()
    assert (status.desired, status.enforced) == (1, 0)

    site.kernel.routes = Topology({"lan": LAN, "wan": WAN, "br0": BRIDGE})
    assert stand(site, rule.id) == (None, "")
    assert site.send("10.1.0.2", times=3) == ["accept", "drop", "drop"]


@pytest.mark.parametrize("kind", ["bond", "team", "openvswitch"])
def test_the_slaves_of_others(site: Site, kind: str) -> None:
    site.kernel.routes = Topology({"lan": Device(1, True, master="up0"), "up0": Device(9, True, kind)})
    state, message = stand(site, site.add(target="10.1.0.2", action="block", interface="lan").id)
    assert state is State.ERROR
    assert "up0" in message


def test_loopback_is_never_touched(site: Site) -> None:
    site.kernel.routes = Topology({"lan": LAN})
    state, message = stand(site, site.add(target="127.0.0.5", rate="1 packets/day", interface="lo").id)
    assert state is State.ERROR
    assert "loopback" in message


def test_a_network_that_begins_to_end_here_and_does_no_more(site: Site) -> None:
    site.kernel.routes = Topology({"lan": LAN})
    rule = site.add(target="10.3.0.0/24", direction="to", action="block")
    assert stand(site, rule.id) == (None, "")

    site.kernel.routes = Topology({"lan": LAN}, local=("10.3.0.0/24",), ending=("10.3.0.0/24",))
    state, message = stand(site, rule.id)
    assert state is State.ERROR
    assert "All of 10.3.0.0/24 ends on this host" in message
    later = site.add(target="10.3.0.0/25", direction="to", action="block")
    assert stand(site, later.id)[0] is State.ERROR

    site.kernel.routes = Topology({"lan": LAN})
    assert stand(site, rule.id) == stand(site, later.id) == (None, "")


def test_routes_that_change_while_another_device_goes_are_followed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place was taken over once, and is there no more when it is asked for."""
    root, read = SavedRoot(1, "pfifo", "07000000"), site.kernel.queues
    site.store.save_root("gw", "ppp0", root)
    site.kernel.roots["ppp0"] = root
    site.kernel.routes = Topology({"lan": LAN})
    site.add(target="10.5.0.1", direction="to", rate="1 packets/day")
    site.controller.tick()

    def read_and_lose() -> Queues:
        found = read()
        site.kernel.roots.pop("ppp0", None)
        return found

    monkeypatch.setattr(site.kernel, "queues", read_and_lose)
    site.kernel.routes = Topology({"lan": LAN}, local=("10.5.0.1/32",), ending=("10.5.0.1/32",))
    with pytest.raises(KernelError):  # what is not followed does not pass for applied
        site.controller.sync()
    site.controller.tick()
    assert site.send("10.2.0.2", "10.5.0.1", times=3) == ["accept", "drop", "drop"]


def test_what_ends_here_no_more_is_followed_after_a_step_was_refused(site: Site) -> None:
    site.kernel.routes = Topology({"lan": LAN}, local=("10.5.0.1/32",), ending=("10.5.0.1/32",))
    site.add(target="10.5.0.1", direction="to", rate="1 packets/day")
    site.controller.tick()
    site.controller._heed_refusal(KernelError("read queues", "Interrupted"), 0.0, 0.5)
    site.kernel.routes = Topology({"lan": LAN})
    site.controller.tick()
    assert site.send("10.2.0.2", "10.5.0.1", times=3) == ["accept", "drop", "drop"]
    followed = site.controller._compiled.fragments
    site.restart().plan()
    assert followed == site.controller._compiled.fragments, "as whoever begins now"


def test_what_ends_here_by_routes_is_reported_the_widest_first(site: Site) -> None:
    many = [f"10.9.{i // 256}.{i % 256}/32" for i in range(premises.MOST_LOCAL)]
    site.kernel.where = Addresses(("10.1.0.1",), ())
    site.kernel.routes = Topology({"lan": LAN}, local=("10.1.0.1/32", *many, "10.3.0.0/24"), ending=("10.3.0.0/24",))
    site.controller.tick()
    (status,) = site.store.hosts()
    assert status.local == ("10.3.0.0/24", *many[:-1])


def test_a_device_that_is_not_there_yet(site: Site) -> None:
    site.kernel.routes = Topology({"lan": LAN})
    rule = site.add(target="10.1.0.2", rate="1 packets/day", interface="ppp0")
    state, message = stand(site, rule.id)
    assert state is State.ERROR
    assert "no device ppp0" in message
    assert "lan" in message
    site.kernel.routes = Topology({"lan": LAN, "ppp0": Device(7, True)})
    assert stand(site, rule.id) == (None, "")


def test_a_vrf_hides_its_devices_only_behind_the_routing(site: Site) -> None:
    site.kernel.routes = Topology({"lan": Device(1, True, master="red"), "red": Device(9, True, "vrf")})
    state, message = stand(site, site.add(target="10.1.0.2", rate="5 packets/s", interface="lan").id)
    assert state is State.DEGRADED
    assert "VRF red" in message


def test_what_is_shaped_on_a_port_is_told_too(site: Site) -> None:
    site.kernel.routes = Topology({"lan": Device(1, True, master="br0"), "br0": BRIDGE})
    shape = {"action": "shape", "direction": "to", "interface": "lan"}
    host = site.add(target="10.1.0.2", rate="1 Mbit/s", **shape)
    cap = site.add(target="0.0.0.0/0", rate="9 Mbit/s", per="target", **shape)
    state, message = stand(site, host.id)
    assert state is State.ERROR
    assert "port of the bridge br0" in message
    assert stand(site, cap.id) == (None, ""), "all that a port sends can be capped"
    site.kernel.routes = Topology({"lan": LAN})
    assert stand(site, host.id)[0] is not State.ERROR
