"""While something is not as it was applied and cannot be put right, or is undone over and over, the rules concerned are
not applied; they are again when peace is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from netlimit import controller
from netlimit.controller import Controller
from netlimit.drift import CALM_SECONDS, LAST_REST, MOST_REPAIRS
from netlimit.errors import KernelError, Occupied
from netlimit.kernel import base, lock
from netlimit.kernel.lock import locked
from netlimit.plan import Step
from netlimit.records import State
from netlimit.rules import Rule
from tests.controller.conftest import Site
from tests.controller.test_drift import look
from tests.controller.test_mishaps import run
from tests.unit.shapes import HOME


@pytest.fixture
def rules(site: Site) -> tuple[Rule, Rule, Rule, Rule]:
    """One that is blocked (raw), one that is limited (mangle), one of IPv6, and one that is shaped."""
    site.kernel.routes = HOME
    made = (
        site.add(target="10.0.0.1", action="block"),
        site.add(target="10.0.0.2", rate="5 packets/s"),
        site.add(target="fd00::1", rate="5 packets/s"),
        site.add(target="10.0.0.3", action="shape", rate="5 Mbit/s", direction="to"),
    )
    look(site)
    return made


def fight(site: Site, undo: object) -> None:
    for _ in range(MOST_REPAIRS + 2):
        undo()  # type: ignore[operator]
        for _ in range(20):  # all sets are looked at in turn
            look(site)


def states(site: Site) -> dict[int, State]:
    return {rule_id: each.state for rule_id, each in site.store.marked("gw").items() if each.state is State.ERROR}


def end(site: Site, kind: str) -> None:
    times = site.controller._repairs._times[kind]
    times[-1] -= CALM_SECONDS + LAST_REST
    for _ in range(20):
        look(site)
    times[-1] -= CALM_SECONDS + LAST_REST * 2
    look(site)


def test_a_fight_over_chains_of_one_table_concerns_the_rules_in_it(
    site: Site, rules: tuple[Rule, Rule, Rule, Rule]
) -> None:
    def undo() -> None:
        for chain in [each for each in site.kernel.chains if (each.family, each.table) == (4, "mangle")]:
            del site.kernel.chains[chain]

    fight(site, undo)
    assert states(site) == {rules[0].id: State.ERROR, rules[1].id: State.ERROR}, "the block stands there, too"
    assert "undoes the chains of netlimit over and over" in site.store.marked("gw")[rules[1].id].message
    assert site.controller.standing() == (2, 2)
    end(site, "chains")
    assert states(site) == {}
    assert site.controller.standing() == (4, 0)


def test_a_fight_over_an_entry_concerns_its_rule_alone(site: Site, rules: tuple[Rule, Rule, Rule, Rule]) -> None:
    def undo() -> None:
        for held in site.kernel.elements.values():
            held.pop("10.0.0.1", None)

    fight(site, undo)
    assert states(site) == {rules[0].id: State.ERROR}
    end(site, "entries")
    assert states(site) == {}


def test_a_fight_over_queues_concerns_what_is_shaped(site: Site, rules: tuple[Rule, Rule, Rule, Rule]) -> None:
    fight(site, site.kernel.trees.clear)
    assert states(site) == {rules[3].id: State.ERROR}


def test_what_comes_while_there_is_a_fight_is_not_in_error(site: Site, rules: tuple[Rule, Rule, Rule, Rule]) -> None:
    fight(site, lambda: [held.pop("10.0.0.1", None) for held in site.kernel.elements.values()])
    new = site.add(target="10.0.0.9", action="block")
    look(site)
    assert new.id not in states(site)
    site.store.remove(rules[0].id, "test", site.clock())
    look(site)
    assert states(site) == {}


def test_while_the_kernel_cannot_be_asked_no_rule_is_said_to_hold(
    site: Site, rules: tuple[Rule, Rule, Rule, Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody takes out meanwhile, nobody sees."""
    monkeypatch.setattr(Controller, "_back_off", lambda self, retry, stopped: retry)
    monkeypatch.setattr(Controller, "_wait", lambda self: None)
    monkeypatch.setattr(controller, "BLIND_SECONDS", 0.0)

    def refuse(*_: object, **__: object) -> None:
        raise KernelError("ipset save nl-open4", "it ended with status 1")

    with monkeypatch.context() as broken:
        for name in ("structure", "readings"):
            broken.setattr(site.kernel, name, refuse)
        site.kernel.hooks.clear()
        site.kernel.chains.clear()
        site.controller._due = dict.fromkeys(site.controller._due, 0.0)
        run(site, 2)
        marked = site.store.marked("gw")
        assert {marked[rule.id].state for rule in rules} == {State.DEGRADED}
        assert "ipset save nl-open4" in marked[rules[0].id].message
        assert site.controller.standing()[0] == 0
    run(site, 2)
    assert site.store.marked("gw") == {}
    assert site.send("10.0.0.1") == ["drop"]


def test_the_time_for_which_a_pass_waits_for_a_lock_counts(
    site: Site, rules: tuple[Rule, Rule, Rule, Rule], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is taken out while a pass waits, nobody sees until it ends; and whoever waited goes on at once."""
    rests: list[float] = []
    monkeypatch.setattr(Controller, "_back_off", lambda self, retry, stopped: rests.append(retry) or 2 * retry)
    monkeypatch.setattr(Controller, "_wait", lambda self: None)
    monkeypatch.setattr(controller, "BLIND_SECONDS", 0.2)
    path, real = str(tmp_path / "lock"), site.kernel.apply

    def wait_for_turn(step: Step) -> None:
        with locked(path, "write tables", patience=0.3):
            real(step)

    monkeypatch.setattr(site.kernel, "apply", wait_for_turn)
    site.add(target="10.0.0.9", action="block")
    with locked(path, "look, and ask a name server about each address"):
        run(site, 1)
        assert {site.store.marked("gw")[rule.id].state for rule in rules} == {State.DEGRADED}
        run(site, 2)
    assert rests == [controller._FIRST_RETRY] * 3
    run(site, 1)
    assert site.store.marked("gw") == {}
    assert site.send("10.0.0.9") == ["drop"]


def test_rules_that_change_do_not_wait_for_the_end_of_a_rest(site: Site) -> None:
    """One device that refuses its queues must not keep a block from coming for half a minute."""
    site.controller.sync()
    site.controller._watch = site.store.watch()
    site.controller._watch.changed()
    looks = count()
    rest = 1.5
    site.store.note("apply", "test", site.clock())  # no rule has changed
    assert site.controller._back_off(rest, lambda: next(looks) >= 20) == 2 * rest
    assert next(looks) >= 20
    site.add(target="10.0.0.9", action="block")
    looks = count()
    site.controller._back_off(60.0, lambda: next(looks) >= 200)
    assert next(looks) < 200
    looks = count()
    site.store.note("apply", "test", site.clock())
    site.controller._back_off(1.0, lambda: next(looks) >= 15)
    assert next(looks) >= 15, "the attempt has loaded nothing, and is not made over and over"
    site.controller._stop_watching()


def test_another_writer_is_waited_for_no_longer_than_one_may_be_blind(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a command that somebody has stopped (Ctrl-Z): what is taken out meanwhile nobody sees. A command waits
    longer, for it does nothing else."""
    monkeypatch.setattr(Controller, "_back_off", lambda self, retry, stopped: retry)
    waited: list[float] = []

    @contextmanager
    def wait(patience: float = base.TURN_SECONDS) -> Iterator[None]:
        waited.append(patience)
        raise Occupied("write to the kernel", "another process of netlimit has been writing")
        yield

    monkeypatch.setattr(site.kernel, "exclusive", wait)
    site.add(target="10.0.0.9", action="block")
    with pytest.raises(Occupied):
        site.controller.sync()
    assert waited == [base.TURN_SECONDS]
    waited.clear()
    run(site, 2)
    assert waited
    assert max(waited) <= controller.BLIND_SECONDS


def test_the_lock_of_iptables_is_waited_for_no_longer_than_one_may_be_blind() -> None:
    assert lock.SECONDS <= controller.BLIND_SECONDS


def test_while_the_kernel_refuses_a_repair_the_rules_are_in_error(
    site: Site, rules: tuple[Rule, Rule, Rule, Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Controller, "_back_off", lambda self, retry, stopped: retry)
    monkeypatch.setattr(Controller, "_wait", lambda self: None)
    for chain in [each for each in site.kernel.chains if (each.family, each.table) == (4, "raw")]:
        del site.kernel.chains[chain]
    for _ in range(3):
        site.kernel.fail_at(0)
        site.controller._due = dict.fromkeys(site.controller._due, 0.0)
        run(site, 1)
    assert states(site) == {rules[0].id: State.ERROR}
    assert "cannot be put right" in site.store.marked("gw")[rules[0].id].message
    run(site, 2)
    assert states(site) == {}
    assert site.send("10.0.0.1") == ["drop"]
