"""Errors that nobody expected: they are logged, counted, told, and followed by the next pass; limits are in force all
the same."""

import logging
from collections.abc import Callable

import pytest

from netlimit.controller import Controller
from netlimit.errors import KernelError
from netlimit.premises import Premises
from netlimit.records import Counts, Repair, RuleCounters
from tests.controller.conftest import Site


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "_back_off", lambda self, retry, stopped: retry)
    monkeypatch.setattr(Controller, "_wait", lambda self: None)


def run(site: Site, passes: int) -> None:
    """So many rounds of the loop."""
    left = iter(range(passes))
    site.controller.run(lambda: next(left, None) is None)


def passed(site: Site, address: str) -> int:
    return site.send(address, times=20).count("accept")


def break_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    real = getattr(owner, name)

    def fail(*_args: object, **_names: object) -> None:
        monkeypatch.setattr(owner, name, real)
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(owner, name, fail)


def break_for_good(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    def fail(*_args: object, **_names: object) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(owner, name, fail)


def refuse(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    def fail(*_args: object, **_names: object) -> None:
        raise KernelError("look", "no")

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("method", ["structure", "readings", "exclusive", "apply", "queues", "topology"])
@pytest.mark.parametrize("when", ["at first", "later"])
def test_one_error_ends_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, when: str
) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    if when == "later":
        run(site, 2)
        site.add(target="10.0.0.2", rate="4 packets/s")
        site.controller._due.update(dict.fromkeys(site.controller._due, 0.0))
    break_once(monkeypatch, site.kernel, method)
    run(site, 3)
    assert passed(site, "10.0.0.1") == 3
    assert passed(site, "10.0.0.2") == (4 if when == "later" else 20)


def test_an_error_is_logged_with_its_trace_counted_and_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    break_for_good(monkeypatch, site.kernel, "structure")
    with caplog.at_level(logging.ERROR):
        run(site, 3)
    (status,) = site.store.hosts()
    assert status.faults == 3
    assert "UnicodeDecodeError" in (status.last_error or "")
    assert not status.paused
    told = [record for record in caplog.records if "A fault of netlimit's own" in record.getMessage()]
    assert len(told) == 1  # the same is not told over and over
    assert told[0].exc_info
    monkeypatch.undo()
    site.controller.tick()
    assert passed(site, "10.0.0.1") == 3
    assert site.store.hosts()[0].last_error is None


@pytest.mark.parametrize("method", ["structure", "exclusive"])
@pytest.mark.parametrize("report", ["report", "hosts"])
def test_an_error_while_an_error_is_reported_ends_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, method: str, report: str
) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    break_for_good(monkeypatch, site.store, report)
    break_for_good(monkeypatch, site.kernel, method)
    run(site, 2)
    monkeypatch.undo()
    run(site, 2)
    assert passed(site, "10.0.0.1") == 3
    assert site.store.hosts()[0].last_error is None


@pytest.mark.parametrize("broken", ["_mark", "_premises"])
def test_an_error_while_an_error_is_heeded_ends_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    run(site, 1)
    monkeypatch.setattr("netlimit.controller.BLIND_SECONDS", 0.0)
    refuse(monkeypatch, site.kernel, "structure")
    site.controller._due["structure"] = 0.0
    owner, name = (site.controller._premises, "forget") if broken == "_premises" else (site.controller, broken)
    break_once(monkeypatch, owner, name)
    run(site, 2)
    assert site.controller._mishaps.count == 1
    monkeypatch.undo()
    run(site, 2)
    assert passed(site, "10.0.0.1") == 3


@pytest.mark.parametrize("method", ["report", "repaired", "count"])
def test_what_cannot_be_told_is_in_the_way_of_nothing(site: Site, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    run(site, 1)
    if method != "repaired":
        break_for_good(monkeypatch, site.store, method)
    site.controller._telling.repair(Repair("chains", "\ud800" if method == "repaired" else "-", 0.0, site.clock()))
    site.controller._telling.count([RuleCounters(1, Counts(), Counts(), site.clock(), site.clock())])
    site.controller._due["heartbeat"] = 0.0
    site.add(target="10.0.0.2", rate="4 packets/s")
    run(site, 1)
    assert passed(site, "10.0.0.2") == 4
    assert site.controller._mishaps.count
    monkeypatch.undo()
    site.controller._due["heartbeat"] = 0.0
    run(site, 1)
    assert site.store.hosts()[0].faults == site.controller._mishaps.count


@pytest.mark.parametrize(
    "wreck",
    [
        lambda site, patch: break_for_good(patch, site.kernel, "survey"),
        lambda site, patch: break_for_good(patch, site.kernel, "addresses"),
        lambda site, patch: break_for_good(patch, site.controller, "_answer"),
        lambda site, patch: break_for_good(patch, site.controller, "_greet"),
        lambda site, patch: break_for_good(patch, site.controller, "_probe_again"),
    ],
    ids=["survey", "addresses", "questions", "newcomers", "probe"],
)
def test_what_only_advises_may_fail_for_good(
    site: Site, monkeypatch: pytest.MonkeyPatch, wreck: Callable[[Site, pytest.MonkeyPatch], None]
) -> None:
    wreck(site, monkeypatch)
    site.store.ask("gw", "counters", {"rules": []})
    site.add(target="10.0.0.1", rate="3 packets/s")
    run(site, 2)
    assert passed(site, "10.0.0.1") == 3
    site.add(target="10.0.0.2", rate="4 packets/s")
    run(site, 1)
    assert passed(site, "10.0.0.2") == 4


@pytest.mark.parametrize("method", ["survey", "addresses"])
def test_what_is_not_known_of_the_host_is_told(site: Site, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    break_for_good(monkeypatch, site.kernel, method)
    run(site, 2)
    assert any("UnicodeDecodeError" in note for note in site.store.hosts()[0].notes)


def test_after_an_error_a_teardown_pauses_as_before(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    run(site, 1)
    break_once(monkeypatch, site.controller, "_check_drift")
    run(site, 1)
    assert not site.controller._status.paused
    site.store.pause("gw", True)
    run(site, 1)
    assert site.controller._status.paused
    site.store.pause("gw", False)
    run(site, 1)
    assert passed(site, "10.0.0.1") == 3


def test_the_safe_stay_safe_while_addresses_cannot_be_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run(site, 1)
    before = site.controller._premises.facts.own
    break_for_good(monkeypatch, site.kernel, "addresses")
    site.controller._premises.find_safe({}, 0.0)
    assert site.controller._premises.facts.own == before
    assert isinstance(site.controller._premises, Premises)
