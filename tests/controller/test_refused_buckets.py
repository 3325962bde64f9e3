"""A bucket that the kernel does not take, whatever the reason, keeps no other rule from being in force."""

from __future__ import annotations

from contextlib import suppress

import pytest

from netlimit.errors import KernelError
from netlimit.records import State
from netlimit.rules import parse_rule
from tests.controller.conftest import Site

BURST = 777
"""What this kernel refuses, and nobody knew before."""


@pytest.fixture
def narrow(site: Site) -> Site:
    site.kernel.unborne.add(str(BURST))
    return site


def test_its_rule_is_in_error_and_all_others_hold(narrow: Site) -> None:
    first = narrow.add(target="10.0.0.1", rate="3 packets/s")
    bad = narrow.add(target="10.0.0.2", rate="50 packets/s", burst=BURST)
    alike = narrow.add(target="10.0.0.4", rate="50 packets/s", burst=BURST)
    narrow.controller.sync()
    told = narrow.store.marked("gw")
    assert {rule_id: each.state for rule_id, each in told.items()} == {bad.id: State.ERROR, alike.id: State.ERROR}
    assert "does not take such a bucket (out of range): use another rate, or another burst" in told[bad.id].message
    assert narrow.send("10.0.0.1", times=20).count("accept") == 3
    blocked = narrow.add(target="10.0.0.3", action="block")
    narrow.controller.sync()
    assert narrow.send("10.0.0.3", times=5).count("accept") == 0
    assert narrow.store.marked("gw").keys() == {bad.id, alike.id}
    assert {first.id, blocked.id} <= {each.rule.id for each in narrow.store.select()[0]}


def test_it_leaves_nothing_behind_when_its_rule_has_gone(narrow: Site) -> None:
    """Its number must not stand in what the kernel is told between two states."""
    bad = narrow.add(target="10.0.0.2", rate="50 packets/s", burst=BURST)
    narrow.controller.sync()
    narrow.store.remove(bad.id, "test", narrow.clock())
    narrow.add(target="10.0.0.3", rate="4 packets/s")
    narrow.controller.sync()
    assert narrow.store.marked("gw") == {}
    assert narrow.send("10.0.0.3", times=20).count("accept") == 4
    narrow.restart().sync()
    assert narrow.store.marked("gw") == {}
    assert not any(str(BURST) in profile for _, profile in narrow.store.numbering("gw"))


def test_a_rule_that_is_changed_to_such_a_rate_is_told_and_what_held_goes_on(narrow: Site) -> None:
    """The rule asks for what cannot be: it holds no longer, and others that held its former rate do."""
    one, _ = (narrow.add(target=f"10.0.0.{n}", rate="3 packets/s") for n in (1, 2))
    narrow.controller.sync()
    changed = parse_rule({"target": "10.0.0.1", "rate": "50 packets/s", "burst": BURST}, narrow.clock())
    narrow.store.change(one.id, lambda rule: changed, "test", narrow.clock())
    narrow.controller.sync()
    assert narrow.store.marked("gw")[one.id].state is State.ERROR
    assert narrow.send("10.0.0.2", times=20).count("accept") == 3


@pytest.mark.parametrize("step", range(6))
def test_where_the_kernel_refuses_for_another_reason_no_rule_is_blamed(site: Site, step: int) -> None:
    site.kernel.fail_at(step)
    site.add(target="10.0.0.1", rate="3 packets/s")
    with suppress(KernelError):
        site.controller.sync()
    site.controller.sync()
    assert site.store.marked("gw") == {}
    assert site.send("10.0.0.1", times=20).count("accept") == 3
