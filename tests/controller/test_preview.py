"""A rule that is only tried: compiled atop of those in force, explained, and forgotten."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from api.representation import write_input
from netlimit.rules import Rule, parse_rule
from netlimit.store import Store
from netlimit.tree import Device, Route, Topology
from tests.controller.conftest import Clock, Site
from tests.unit.strategies import rule_sets, rules

ROUTES = Topology(
    {"lan": Device(2, True), "wan": Device(3, True)},
    (Route("10.0.0.0/8", ("lan",), connected=True), Route("0.0.0.0/0", ("wan",)), Route("::/0", ("wan",))),
)
SHAPES: tuple[dict[str, object], ...] = (
    {"target": "10.1.0.0/16", "per": "target", "rate": "10 Mbit/s"},
    {"target": "10.1.0.0/16", "per": "host", "rate": "1 Mbit/s"},
    {"target": "10.1.0.2", "rate": "2 Mbit/s"},
    {"target": "0.0.0.0/0", "per": "target", "rate": "50 Mbit/s", "interface": "lan"},
)


def try_rule(site: Site, rule_id: int = 0, **fields: object) -> dict[str, Any]:
    """What the controller answers the API."""
    rule = parse_rule(fields, site.clock())
    asked = site.store.ask("gw", "preview", {"rule": write_input(rule), "id": rule_id})
    site.answer_question()
    answer = site.store.answered(asked)
    assert answer is not None
    return answer


def test_a_new_rule_is_told_in_words_and_steps_and_kept_by_nobody(site: Site) -> None:
    site.add(target="10.1.0.0/16", rate="100 packets/s", per="host", name="office")
    site.controller.sync()
    answer = try_rule(site, target="10.1.0.5", rate="5 packets/s")
    assert (answer["state"], answer["enforced_by"], answer["message"]) == ("applied", "fake", None)
    assert answer["words"][0] == (
        "The new rule comes into force: at most 5 packets/s from 10.1.0.5; what exceeds is dropped."
    )
    assert answer["relations"] == [
        "For 10.1.0.5, the new rule takes the place of rule 1 (office) (10.1.0.0/16): of one kind the more specific "
        "target wins."
    ]
    assert [line for line in answer["steps"] if line.startswith("ipset add nl-l4")]
    assert site.store.revision() == 1
    assert not site.controller.plan()
    site.add(target="10.1.0.5", rate="5 packets/s")
    steps = list(site.controller.plan().lines())
    assert steps == answer["steps"], "what comes is what was said"


def test_a_rule_that_would_be_replaced_says_from_what_to_what(site: Site) -> None:
    site.kernel.routes = ROUTES
    site.add(target="10.1.0.0/16", rate="100 packets/s", per="host", name="office")
    site.add(target="10.1.0.5", rate="5 Mbit/s", action="shape", direction="to")
    site.controller.sync()
    answer = try_rule(site, 1, target="10.1.0.0/16", rate="300 packets/s", per="host", name="office")
    assert answer["words"][0].startswith("Rule 1 (office) changes from 100 packets/s to 300 packets/s: ")
    answer = try_rule(site, 2, target="10.1.0.5", rate="6 Mbit/s", action="shape", direction="to")
    assert answer["words"] == [
        "Rule 2 changes from 5 Mbit/s to 6 Mbit/s: at most 6 Mbit/s to 10.1.0.5; what exceeds waits in a queue.",
        "On lan, queues of netlimit: 1 changed.",
    ]
    answer = try_rule(site, 1, target="10.1.0.0/16", rate="300 packets/s", per="host", name="office", enabled=False)
    assert (answer["state"], answer["words"][0][:27]) == ("disabled", "Rule 1 (office) is lifted: ")


def test_why_a_rule_could_not_be_enforced(site: Site) -> None:
    site.kernel.facts = site.kernel.facts._replace(capabilities={"connlimit": "this host has no connlimit."})
    site.controller.sync()
    answer = try_rule(site, target="10.1.0.5", rate="5 connections")
    assert (answer["state"], answer["enforced_by"]) == ("error", None)
    assert answer["message"].startswith("this host has no connlimit. A limiter could enforce it on HTTP requests, but")
    assert answer["words"] == answer["steps"] == []


def test_budgets_nest_and_allow_exempts(site: Site) -> None:
    site.add(target="10.0.0.0/8", rate="1000 packets/s", per="target", name="all")
    site.add(target="10.1.0.9", action="allow")
    site.add(target="10.1.0.0/24", rate="5 connections/s", per="target")
    site.controller.sync()
    answer = try_rule(site, target="10.1.0.0/16", rate="100 packets/s", per="target")
    assert answer["relations"] == [
        "The new rule nests in rule 1 (all) (10.0.0.0/8): a packet must pass both.",
        "Rule 2 exempts from the new rule for 10.1.0.9, as far as both speak of the same traffic.",
    ]


def test_what_is_safe_is_told(site: Site) -> None:
    site.kernel.routes = Topology(gateways=("192.0.2.1",))
    site.controller.sync()
    answer = try_rule(site, target="192.0.2.0/24", rate="100 packets/s", per="host")
    assert answer["relations"] == [
        "192.0.2.9/32 is safe, and not touched by it.",
        "It does not touch what this host itself exchanges with 192.0.2.1/32.",
    ]


def test_another_rule_that_would_lose_its_place_is_named(site: Site) -> None:
    site.kernel.routes = ROUTES
    site.add(target="10.1.0.0/16", rate="1 Mbit/s", per="host", action="shape", direction="to", hosts=["other"])
    site.add(target="10.1.0.0/16", rate="1 Mbit/s", per="/24", action="shape", direction="to")
    site.controller.sync()
    answer = try_rule(site, 1, target="10.1.0.0/16", rate="1 Mbit/s", per="host", action="shape", direction="to")
    assert any(text.startswith("Rule 2 could not be enforced any more: On lan a packet") for text in answer["words"])
    assert site.store.exceptional([2]) == {}


def test_a_paused_gateway_says_so(site: Site) -> None:
    site.store.pause("gw", True)
    site.controller.tick()
    assert "netlimit apply" in try_rule(site, target="10.1.0.5", rate="5 packets/s")["error"]


@contextmanager
def _new_site(fresh_file: Path) -> Iterator[Site]:
    with (
        TemporaryDirectory() as directory,
        closing(Store(f"sqlite:///{shutil.copy(fresh_file, directory)}")) as store,  # also where Hypothesis gives up
    ):
        site = Site(store)
        site.kernel.routes = ROUTES
        yield site


@settings(max_examples=25)
@given(st.data(), rule_sets(6), st.lists(st.sampled_from(SHAPES), unique_by=str, max_size=3))
def test_nothing_is_changed_by_trying(
    fresh_file: Path, data: st.DataObject, kept: list[Rule], shaped: list[dict[str, object]]
) -> None:
    with _new_site(fresh_file) as site:
        site.store.add(kept, "test", site.clock())
        for fields in shaped:
            site.add(**fields, action="shape", direction="to")
        site.controller.tick()
        known = [each.rule for each in site.store.select()[0]]
        for _ in range(3):
            before = _picture(site)
            draft = data.draw(rules() | st.sampled_from(SHAPES).map(_as_shape))
            replaced = data.draw(st.sampled_from([0, *(rule.id for rule in known)]))
            answer = try_rule(site, replaced, **write_input(draft))
            assert _picture(site) == before
            assert bool(answer["words"]) >= bool(answer["steps"])
            assert not site.controller.plan()
            site.kernel.applied.clear()
            site.controller.tick()
            assert site.kernel.applied == []


def _as_shape(fields: dict[str, object]) -> Rule:
    return parse_rule({**fields, "action": "shape", "direction": "to"}, Clock.moment)


def _picture(site: Site) -> object:
    """All that a controller, a store and a kernel know, as it is now."""
    compiled = site.controller._compiled
    return deepcopy(
        (
            str(compiled.state),
            compiled.numbers.kept,
            compiled.numbers.used,
            compiled.problems,
            compiled.touched,
            compiled.touched_classes,
            compiled.owners,
            compiled.changed,
            site.controller._in_step,
            site.controller._roster._looks,
            site.kernel.elements,
            site.kernel.chains,
            site.kernel.trees,
            site.store.revision(),
            site.store.audit(),
            site.store.numbering("gw"),
            site.store.marked("gw"),
        )
    )
