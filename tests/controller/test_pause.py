"""A teardown that was ended before it was done leaves limits that nobody looks after: the controller takes them out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from netlimit import controller as controllers
from netlimit import pause
from netlimit.controller import Controller
from netlimit.errors import KernelError
from netlimit.teardown import tear_down
from tests.controller.conftest import Site
from tests.controller.test_overdue import Elapsed

BLOCKED = "10.0.0.1"


@pytest.fixture(autouse=True)
def elapsed(monkeypatch: pytest.MonkeyPatch) -> Elapsed:
    elapsed = Elapsed()
    monkeypatch.setattr(controllers, "Pause", partial(pause.Pause, clock=elapsed))
    return elapsed


@pytest.fixture
def torn(site: Site) -> Site:
    """A teardown was killed as soon as it had paused the gateway."""
    site.add(target=BLOCKED, action="block")
    site.controller.tick()
    site.store.pause("gw", True)
    return site


def holds_something(site: Site) -> bool:
    held = site.kernel.structure()
    return bool(held.sets or held.chains)


def test_what_a_teardown_has_left_is_taken_out_once_it_has_had_its_time(torn: Site, elapsed: Elapsed) -> None:
    torn.controller.tick()
    elapsed.pass_by(pause.TEARDOWN_SECONDS - 0.1)
    torn.controller.tick()
    assert torn.send(BLOCKED) == ["drop"]
    elapsed.pass_by(0.2)
    torn.controller.tick()
    assert torn.send(BLOCKED) == ["accept"]
    assert not holds_something(torn)
    assert torn.store.paused("gw")


def test_a_controller_that_starts_takes_it_out_too(torn: Site, elapsed: Elapsed) -> None:
    torn.restart().tick()
    elapsed.pass_by(pause.TEARDOWN_SECONDS)
    torn.controller.tick()
    assert not holds_something(torn)


def test_nothing_is_said_of_a_teardown_that_was_done(
    torn: Site, elapsed: Elapsed, caplog: pytest.LogCaptureFixture
) -> None:
    tear_down(torn.kernel, {})
    torn.controller.tick()
    elapsed.pass_by(pause.TEARDOWN_SECONDS)
    with caplog.at_level(logging.WARNING):
        torn.controller.tick()
    assert not caplog.records


def test_what_goes_on_while_the_turn_to_write_is_waited_for_stays(
    torn: Site, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn.controller.tick()

    @contextmanager
    def wait_for_apply() -> Iterator[None]:
        torn.store.pause("gw", False)
        yield

    monkeypatch.setattr(torn.kernel, "exclusive", wait_for_apply)
    elapsed.pass_by(pause.TEARDOWN_SECONDS)
    torn.controller.tick()
    assert torn.send(BLOCKED) == ["drop"]


def test_what_the_kernel_refuses_is_told_and_tried_again(
    torn: Site, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Controller, "_back_off", lambda self, retry, stopped: retry)
    monkeypatch.setattr(Controller, "_wait", lambda self: None)
    torn.controller.tick()

    def refuse(_step: object) -> None:
        raise KernelError("write tables", "another program has held /run/xtables.lock for 10 seconds")

    elapsed.pass_by(pause.TEARDOWN_SECONDS)
    with monkeypatch.context() as refusing:
        refusing.setattr(torn.kernel, "apply", refuse)
        run(torn)
    (status,) = torn.store.hosts()
    assert "/run/xtables.lock" in (status.last_error or "")
    run(torn)
    assert not holds_something(torn)
    assert torn.store.hosts()[0].last_error is None


def run(site: Site) -> None:
    """One round of the loop."""
    left = iter(range(1))
    site.controller.run(lambda: next(left, None) is None)
