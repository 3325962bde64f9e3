"""A host that does not tell what it can do, for a reason that may pass: no working limit goes for it."""

from __future__ import annotations

import pytest

from netlimit.kernel.base import Unanswered
from netlimit.plan import Step
from netlimit.records import State
from tests.controller.conftest import Site
from tests.databases import DATABASES

OVER = DATABASES[:1]
SHORTAGE = "`iptables-legacy-save` cannot be started at this moment (Too many open files)"
NAMES = ("iptables", "ip6tables", "ipset", "hashlimit", "mangle", "raw", "htb", "bpf")
HANGS = "The probe did not end within 60 seconds."
CLIENT = "10.1.0.50"


def be_short(site: Site) -> None:
    set_capabilities(site, dict.fromkeys(NAMES, Unanswered(SHORTAGE)))


def set_capabilities(site: Site, said: dict[str, str | None]) -> None:
    site.kernel.facts = site.kernel.facts._replace(capabilities=said)
    site.controller._due["probe"] = 0.0


def written(site: Site) -> list[Step]:
    steps, site.kernel.applied = site.kernel.applied, []
    return steps


@pytest.fixture
def limited(site: Site) -> Site:
    site.add(target=CLIENT, action="block")
    site.add(target="10.1.0.51", rate="1 packets/min")
    site.controller.sync()
    assert written(site)
    return site


def test_a_controller_that_starts_then_takes_nothing_out_of_the_kernel(limited: Site) -> None:
    limited.restart()
    be_short(limited)
    limited.controller.tick()
    assert written(limited) == []
    assert limited.store.marked("gw") == {}
    (status,) = limited.store.hosts()
    assert any("Too many open files" in note and "could not be found out" in note for note in status.notes)


def test_one_that_runs_goes_by_what_it_knew(limited: Site) -> None:
    lacking = limited.add(target="10.1.0.52", rate="2 packets/min", per="host")
    limited.restart()
    set_capabilities(limited, {"hashlimit": "This host has no hashlimit."})
    limited.controller.tick()
    assert limited.store.marked("gw")[lacking.id].state is State.ERROR
    written(limited)
    be_short(limited)
    limited.controller.tick()
    assert written(limited) == []
    assert limited.controller._premises.unanswered
    assert lacking.id in limited.store.marked("gw")
    assert "no hashlimit" in limited.store.marked("gw")[lacking.id].message


def test_it_is_asked_again_until_it_answers(limited: Site) -> None:
    limited.restart()
    be_short(limited)
    limited.controller.tick()
    set_capabilities(limited, {"hashlimit": "This host has no hashlimit."})
    limited.controller.tick()
    assert {each.state for each in limited.store.marked("gw").values()} == {State.ERROR}
    assert len(limited.store.marked("gw")) == 1
    set_capabilities(limited, {})
    limited.controller.tick()
    assert limited.store.marked("gw") == {}
    assert not any("found out" in note for note in limited.controller._premises.notes)


def test_what_no_rule_needs_stops_no_other(site: Site) -> None:
    """A tool that hangs for good: what would need it is in error, where nothing is held that could be lost."""
    metered = site.add(target="10.1.0.52", rate="2 packets/min", per="host")
    blocked = site.add(target=CLIENT, action="block")
    set_capabilities(site, {"hashlimit": Unanswered(HANGS)})
    site.controller.tick()
    assert site.send(CLIENT) == ["drop"]
    assert site.store.marked("gw").keys() == {metered.id}
    set_capabilities(site, {"hashlimit": Unanswered(HANGS)})
    site.store.remove(blocked.id, "test", site.clock())
    site.controller.tick()
    assert site.send(CLIENT) != ["drop"]
