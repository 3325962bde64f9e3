"""However many come that count as safe, other rules are applied, and what others change is repaired."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from netlimit.kernel.base import Addresses
from tests.controller.conftest import Site

MANY = [f"10.{n >> 8}.{n & 255}.1" for n in range(500)] + [f"2001:db8:{n:x}::1" for n in range(500)]


def come(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have many clients of the API, and many SSH sessions, all at once."""
    where = site.kernel.addresses()
    monkeypatch.setattr(site.kernel, "addresses", lambda: Addresses(where.own, tuple(MANY), where.doors))
    clients = {each.replace("1", "2", 1): 0.0 for each in MANY}
    monkeypatch.setattr(site.store, "clients", lambda host: clients)


@pytest.mark.parametrize("size", [8, 64, 300])
def test_many_who_are_safe_keep_no_rule_from_being_applied(
    small_site: Callable[[int], Site], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    site = small_site(size)
    site.add(target="192.0.2.77", action="allow")
    site.controller.sync()
    come(site, monkeypatch)
    site.controller._protect()
    site.add(target="203.0.113.7", action="block")
    site.add(target="2001:db9::7", action="block")
    site.add(target="192.0.2.78", action="allow")
    site.controller.tick()
    assert site.store.exceptional([1, 2, 3, 4]) == {}
    for family, who in ((4, "203.0.113.7"), (6, "2001:db9::7")):
        there = "203.0.113.1" if family == 4 else "2001:db8:ffff::1"
        assert site.send(who, there) == ["drop"]
        assert len(site.kernel.elements[f"nl-safe{family}"]) <= max(1, size // 2) + 1
        assert len(site.kernel.elements[f"nl-exempt{family}-from"]) <= size
    assert any("left out" in note for note in site.store.hosts()[0].notes)
    site.kernel.hooks.clear()
    site.controller._due["structure"] = 0.0
    site.controller.tick()
    assert not site.controller.plan()
    assert site.send("203.0.113.7") == ["drop"]


def test_what_is_allowed_leaves_room_for_who_will_be_safe(
    small_site: Callable[[int], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = small_site(64)
    rules = [site.add(target=f"172.16.0.{n}", action="allow") for n in range(64)]
    site.controller.sync()
    refused = site.store.exceptional([rule.id for rule in rules])
    assert 1 <= len(refused) <= 8
    come(site, monkeypatch)
    site.controller._protect()
    site.controller.tick()
    assert not site.controller.plan()
    assert len(site.kernel.elements["nl-safe4"]) == 8
    assert len(site.kernel.elements["nl-exempt4-from"]) == 64
    assert "192.0.2.9" in site.kernel.elements["nl-safe4"], "the surest come first"
    assert any("have no room for" in note for note in site.store.hosts()[0].notes)


def test_who_had_no_room_is_let_in_once_there_is_some(
    small_site: Callable[[int], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next pass, though nobody has come or gone; before rules that wait for room too."""
    site = small_site(64)
    rules = [site.add(target=f"172.16.0.{n}", action="allow") for n in range(64)]
    site.controller.sync()
    come(site, monkeypatch)
    site.controller._protect()
    site.controller.tick()
    assert len(site.kernel.elements["nl-safe4"]) == 8
    left_out = next(note for note in site.store.hosts()[0].notes if "have no room for" in note)
    for rule in rules[:10]:
        site.store.remove(rule.id, "test", site.clock())
    site.controller.sync()
    assert len(site.kernel.elements["nl-safe4"]) == 18
    assert len(site.kernel.elements["nl-exempt4-from"]) == 64
    assert not site.controller.plan()
    told = next(note for note in site.store.hosts()[0].notes if "have no room for" in note)
    assert told != left_out
    for rule in rules[10:60]:
        site.store.remove(rule.id, "test", site.clock())
    site.controller.sync()
    assert len(site.kernel.elements["nl-safe4"]) > 30
    assert not any("have no room for" in note for note in site.store.hosts()[0].notes)
    assert not site.controller.plan()
