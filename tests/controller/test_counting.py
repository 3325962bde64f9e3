"""What is counted belongs to one rule, and nothing of it is lost or counted twice when rules change."""

from netlimit.rules import Rule, parse_rule
from tests.controller.conftest import Site
from tests.databases import DATABASES

OVER = DATABASES


def _change(site: Site, rule: Rule, **fields: object) -> None:
    site.store.replace(rule.id, parse_rule(fields, site.clock()), "test", site.clock())
    site.controller.sync()


def _counted(site: Site, rule: Rule) -> tuple[int, int]:
    site.controller._count([rule.id])
    total = site.store.counters(rule.id)["gw"].total
    return total.matched_packets, total.dropped_packets


def test_a_changed_rate_loses_no_count(site: Site) -> None:
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.send("10.0.0.1", times=8)
    _change(site, rule, target="10.0.0.1", rate="3 packets/s")
    site.send("10.0.0.1", times=20)
    assert _counted(site, rule) == (28, 3 + 17)
    _change(site, rule, target="10.0.0.1", rate="3 packets/s", comment="as it was")
    site.send("10.0.0.1", times=2)
    assert _counted(site, rule) == (30, 22)


def test_a_limit_of_another_kind_goes_on_counting(site: Site) -> None:
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.send("10.0.0.1", times=8)
    _change(site, rule, target="10.0.0.1", rate="5 packets/s", per="target")
    site.send("10.0.0.1", times=9)
    assert _counted(site, rule) == (17, 3 + 4)


def test_a_new_rule_does_not_take_over_what_another_has_counted(site: Site) -> None:
    former = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.send("10.0.0.1", times=8)
    off = parse_rule({"target": "10.0.0.1", "rate": "5 packets/s", "enabled": False}, site.clock())
    site.store.replace(former.id, off, "test", site.clock())
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.send("10.0.0.1", times=3)
    assert _counted(site, rule) == (3, 3)


def test_a_rule_that_was_off_for_a_while_goes_on_counting(site: Site) -> None:
    """Its bucket is as it was: it has not had the time to fill."""
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.send("10.0.0.1", times=8)
    _change(site, rule, target="10.0.0.1", rate="5 packets/s", enabled=False)
    _change(site, rule, target="10.0.0.1", rate="5 packets/s")
    site.send("10.0.0.1", times=9)
    assert _counted(site, rule) == (17, 3 + 9)
