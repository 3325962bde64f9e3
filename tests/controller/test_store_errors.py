"""The database fails at one call, and is back at the next: the kernel must come to hold what the rules say."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from netlimit.errors import StoreError
from netlimit.kernel.base import Addresses
from netlimit.rules import Rule
from netlimit.store import Store
from tests.controller.conftest import Site

Fail = Callable[[str], None]


@pytest.fixture
def fail(site: Site, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Let the next call of a method of the store fail."""

    def fail_next(method: str) -> None:
        real = getattr(site.store, method)

        def refuse(*_args: object, **_names: object) -> None:
            monkeypatch.setattr(site.store, method, real)
            raise StoreError("The database is away.")

        monkeypatch.setattr(site.store, method, refuse)

    return fail_next


def _passed(site: Site, address: str) -> int:
    return site.send(address, times=20).count("accept")


@pytest.mark.parametrize("method", ["numbering", "marked", "raw_counters", "load_stamped"])
def test_a_load_that_fails_takes_no_limit_away(site: Site, fail: Fail, method: str) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    site.controller.sync()
    site.store.number("gw", {("another", "process"): 0}, ())
    site.add(target="10.0.0.2", rate="4 packets/s")
    fail(method)
    with pytest.raises(StoreError):
        site.controller.sync()
    site.controller.sync()
    assert (_passed(site, "10.0.0.1"), _passed(site, "10.0.0.2")) == (3, 4)


def test_a_load_that_breaks_off_takes_no_limit_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in (1, 2):
        site.add(target=f"10.0.0.{host}", rate="3 packets/s")
    site.controller.sync()
    real = Store.load_stamped

    def load(store: Store, host: str) -> tuple[int, int, Iterator[Rule]]:
        monkeypatch.setattr(Store, "load_stamped", real)
        revision, stamp, rules = real(store, host)

        def broken() -> Iterator[Rule]:
            yield next(rules)
            raise StoreError("The database is away.")

        return revision, stamp, broken()

    monkeypatch.setattr(Store, "load_stamped", load)
    site.restart()
    with pytest.raises(StoreError):
        site.controller.sync()
    site.controller.sync()
    assert (_passed(site, "10.0.0.1"), _passed(site, "10.0.0.2")) == (3, 3)


def test_an_end_is_not_forgotten(site: Site, fail: Fail) -> None:
    site.add(target="10.0.0.1", action="block", ttl="60d")
    site.controller.sync()
    site.clock.pass_by(days=40)
    fail("changes")
    with pytest.raises(StoreError):
        site.controller.sync()
    site.controller.sync()
    site.clock.pass_by(days=21)
    site.controller.sync()
    assert site.send("10.0.0.1") == ["accept"]


def test_a_rule_that_names_a_newly_safe_address_goes_on(site: Site, fail: Fail) -> None:
    site.add(target="198.51.100.7", action="block", forced_by="root")
    site.controller.tick()
    site.kernel.where = Addresses((), ("198.51.100.7",))
    fail("find_some")
    with pytest.raises(StoreError):
        site.controller._protect()
    site.controller.sync()
    assert site.send("198.51.100.7") == ["drop"]


def test_a_number_that_could_not_be_forgotten_is_not_given_twice(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = site.add(target="10.0.0.1", rate="3 packets/s")
    site.add(target="10.0.0.9", rate="1 packets/s")
    site.controller.sync()
    site.store.remove(first.id, "test", site.clock())
    monkeypatch.setattr(site.store, "number", _refuse)
    with pytest.raises(StoreError):
        site.controller.sync()
    monkeypatch.undo()
    site.add(target="10.0.0.2", rate="4 packets/s")
    site.controller.sync()
    site.add(target="10.0.0.1", rate="3 packets/s")
    site.controller.sync()
    site.restart().sync()
    assert [_passed(site, f"10.0.0.{host}") for host in (1, 2, 9)] == [3, 4, 1]


def test_what_is_wrong_with_a_rule_is_told_once_the_database_is_back(site: Site, fail: Fail) -> None:
    site.kernel.facts = site.kernel.facts._replace(capabilities={"connlimit": "this host has no connlimit."})
    rule = site.add(target="10.0.0.1", rate="5 connections")
    fail("mark")
    with pytest.raises(StoreError):
        site.controller.sync()
    site.controller.sync()
    assert rule.id in site.store.exceptional([rule.id])


def test_a_paused_controller_rests(site: Site) -> None:
    site.add(target="10.0.0.1", action="block", ttl="10s")
    site.controller.tick()
    site.store.pause("gw", True)
    site.controller._due = dict.fromkeys(site.controller._due, 0.0)
    site.clock.pass_by(seconds=11)
    site.controller.tick()
    assert site.controller._rest() > 0.1


def test_what_another_process_applied_meanwhile_is_not_undone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    running = site.controller
    running.sync()
    other = site.restart()
    real = site.kernel.exclusive

    @contextmanager
    def exclusive(*_: float) -> Iterator[None]:
        monkeypatch.setattr(site.kernel, "exclusive", real)
        site.add(target="10.0.0.2", rate="3 packets/s")
        running.sync()
        yield

    monkeypatch.setattr(site.kernel, "exclusive", exclusive)
    other.sync()
    assert _passed(site, "10.0.0.2") == 3
    assert site.store.hosts()[0].applied_revision == site.store.revision()


def _refuse(*_args: object) -> None:
    raise StoreError("The database is away.")
