"""One rule takes the place of another at the same address, and a single pass brings both changes."""

from netlimit.controller import Controller, Setup
from netlimit.rules import Rule, parse_rule
from tests.controller.conftest import Site
from tests.databases import DATABASES

OVER = DATABASES


def _change(site: Site, rule: Rule, **fields: object) -> None:
    site.store.replace(rule.id, parse_rule(fields, site.clock()), "test", site.clock())


def _passed(site: Site, address: str) -> int:
    return site.send(address, times=20).count("accept")


def test_a_rule_that_comes_as_another_ends_is_enforced(site: Site) -> None:
    site.add(target="10.0.0.1", rate="5 packets/s", ttl="10s")
    site.controller.sync()
    site.clock.pass_by(seconds=10)
    site.add(target="10.0.0.1", rate="3 packets/s")
    site.controller.sync()
    assert _passed(site, "10.0.0.1") == 3


def test_a_rule_that_comes_as_another_is_switched_off_is_enforced(site: Site) -> None:
    former = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    _change(site, former, target="10.0.0.1", rate="5 packets/s", enabled=False)
    site.add(target="10.0.0.1", rate="3 packets/s")
    _change(site, former, target="10.0.0.1", rate="5 packets/s", enabled=False, comment="was too slow")
    site.controller.sync()
    assert _passed(site, "10.0.0.1") == 3


def test_two_rules_that_change_places_are_both_enforced(site: Site) -> None:
    first, second = (site.add(target=f"10.0.0.{host}", rate=f"{2 + host} packets/s") for host in (1, 2))
    site.controller.sync()
    _change(site, first, target="10.0.0.3", rate="3 packets/s")
    _change(site, second, target="10.0.0.1", rate="4 packets/s")
    _change(site, first, target="10.0.0.2", rate="3 packets/s")
    site.controller.sync()
    assert (_passed(site, "10.0.0.1"), _passed(site, "10.0.0.2")) == (4, 3)
    assert not site.controller.plan()


def test_what_waits_for_room_comes_when_another_ends(site: Site) -> None:
    """By itself, and though another of the same kind stays."""
    site.controller = Controller(site.store, site.kernel, Setup("gw", "fake", set_size=8), site.clock)
    ending = [site.add(target=f"10.0.0.{host}", rate="5 packets/s", ttl="10s") for host in (1, 2)]
    others = [site.add(target=f"10.0.0.{host}", rate="5 packets/s").id for host in range(3, 12)]
    site.controller.sync()
    assert len(site.store.exceptional(others)) == len(ending) + 1
    site.clock.pass_by(seconds=10)
    site.controller.sync()
    assert len(site.store.exceptional(others)) == 1
    assert sum(_passed(site, f"10.0.0.{host}") == 5 for host in range(3, 12)) == 8
