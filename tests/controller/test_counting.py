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


def _end(site: Site, seconds: float) -> None:
    """The controller wakes in time before the end of a rule, and once it is over."""
    site.clock.pass_by(seconds=seconds - 0.2)
    site.controller._keep_up()
    site.clock.pass_by(seconds=0.25)
    site.controller._keep_up()


def test_a_rule_that_ends_keeps_what_it_has_counted(site: Site) -> None:
    site.clock.pass_by(seconds=0.4)
    limit, block = (
        site.add(target="10.0.0.1", rate="5 packets/s", ttl="9s"),
        site.add(target="10.0.0.2", action="block", ttl="9s"),
    )
    site.controller.tick()
    site.send("10.0.0.1", times=8)
    site.send("10.0.0.2", times=6)
    _end(site, 9)
    found = {rule.id: site.store.counters(rule.id)["gw"].total for rule in (limit, block)}
    assert (found[limit.id].matched_packets, found[limit.id].dropped_packets) == (8, 3)
    assert (found[block.id].matched_packets, found[block.id].dropped_packets) == (6, 6)
    assert not site.kernel.sets


def test_what_comes_until_the_very_end_of_a_rule_is_counted(site: Site) -> None:
    """Its entry stays in the kernel for another moment, and what counts is read when the controller takes it away."""
    site.clock.pass_by(seconds=0.4)
    rule = site.add(target="10.0.0.1", action="block", ttl="9s")
    site.controller.tick()
    site.send("10.0.0.1", times=8)
    site.clock.pass_by(seconds=8.9)
    site.controller._keep_up()
    site.send("10.0.0.1", times=5)
    site.clock.pass_by(seconds=0.15)
    site.controller._keep_up()
    assert site.store.counters(rule.id)["gw"].total.matched_packets == 13


def test_a_rule_that_the_kernel_has_ended_before_the_controller_came_has_been_read(site: Site) -> None:
    rule = site.add(target="10.0.0.1", action="block", ttl="9s")
    site.controller.tick()
    site.send("10.0.0.1", times=8)
    _end(site, 9)
    assert site.store.counters(rule.id)["gw"].total.matched_packets == 8


def test_a_rule_that_ended_and_comes_back_goes_on_counting(site: Site) -> None:
    rule = site.add(target="10.0.0.1", action="block", ttl="9s")
    site.controller.tick()
    site.send("10.0.0.1", times=8)
    _end(site, 9)
    _change(site, rule, target="10.0.0.1", action="block", ttl="9s")
    site.send("10.0.0.1", times=20)
    _end(site, 9)
    assert site.store.counters(rule.id)["gw"].total.matched_packets == 28


def test_an_end_that_comes_near_or_is_put_off_by_a_clock_that_is_set_loses_no_count(site: Site) -> None:
    """The entry is written anew, and counts from nothing."""
    rule = site.add(target="10.0.0.1", action="block", ttl="60d")
    site.controller.tick()
    site.send("10.0.0.1", times=8)
    site.clock.pass_by(days=40)
    site.controller.tick()
    site.send("10.0.0.1", times=3)
    site.clock.pass_by(days=1)
    site.controller.tick()
    site.send("10.0.0.1", times=2)
    assert _counted(site, rule) == (13, 13)


def test_what_is_lifted_without_a_database_has_been_read(site: Site) -> None:
    rule = site.add(target="10.0.0.1", action="block", on_failure="open")
    site.controller.tick()
    site.send("10.0.0.1", times=8)
    site.controller.relax()
    assert site.store.counters(rule.id)["gw"].total.matched_packets == 8
