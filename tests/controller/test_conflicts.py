"""The controller says of a host what keeps rules from holding, and no more once it is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netlimit import controller
from netlimit.conflicts import Fill, HostReport
from netlimit.records import State
from tests.controller.conftest import Site


def test_what_is_serious_is_noted_while_it_is_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for pace in ("SURVEY_SECONDS", "PROBE_SHARE"):
        monkeypatch.setattr(controller, pace, 0.0)
    monkeypatch.setattr(controller, "HEARTBEAT_SECONDS", 0.0)
    site.kernel.report = HostReport(connections=Fill(99, 100), synchronized=False)
    site.controller.tick()
    (note,) = notes(site)
    assert note.startswith("The connection table is nearly full (99 of 100)")
    site.kernel.report = HostReport(synchronized=False)
    site.controller.tick()
    assert notes(site) == ()


NAT = (("-A PREROUTING -d 10.2.0.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.2:80",),)
PUBLISHED = HostReport(nat=NAT, own=frozenset(["10.2.0.1"]), listening=frozenset([("10.2.0.1", 80), ("10.2.0.1", 22)]))
PLACE = "10.2.0.1,tcp:80,10.2.0.1"


def test_who_listens_at_a_port_that_leads_to_others_is_known_while_he_does(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pace in ("SURVEY_SECONDS", "PROBE_SHARE", "HEARTBEAT_SECONDS"):
        monkeypatch.setattr(controller, pace, 0.0)

    def known(report: HostReport | None = None) -> list[str]:
        site.kernel.report = report or site.kernel.report
        site.controller.tick()
        return list(site.kernel.elements["nl-led4"])

    site.kernel.report = PUBLISHED
    site.controller.tick()
    assert "nl-led4" not in site.kernel.elements, "no limit asks for it"
    site.add(target="10.1.0.2", direction="to", protocol="tcp", rate="2 connections")
    assert known() == [PLACE]
    written = len(site.kernel.applied)
    assert (known(), len(site.kernel.applied)) == ([PLACE], written)
    assert known(replace(PUBLISHED, nat=())) == []
    assert known(PUBLISHED) == [PLACE]
    assert known(HostReport(unknown=("the rules of nftables",))) == [PLACE], "nobody knows better"
    other = frozenset([("10.2.0.1", 22)])
    assert known(HostReport(unknown=("the rules of nftables",), listening=other)) == []
    site.restart()
    site.kernel.report = PUBLISHED
    assert known() == [PLACE]


def test_what_has_not_changed_is_not_read_once_more(site: Site) -> None:
    """Of 48,000 rules of others that took seconds, at each look."""
    premises = site.controller._premises
    site.kernel.report = PUBLISHED
    premises.look_for_conflicts()
    before = premises.published, premises.given, premises.spoiled
    text = tuple("".join(rule) for rule in PUBLISHED.nat[0])
    site.kernel.report = replace(PUBLISHED, nat=(text,), connections=Fill(99, 100))
    premises.look_for_conflicts()
    assert premises.published is before[0]
    assert premises.given is before[1]
    site.kernel.report = replace(PUBLISHED, nat=())
    premises.look_for_conflicts()
    assert premises.published is not before[0]
    assert not premises.published


def test_what_is_missing_is_put_back_before_the_first_survey(site: Site) -> None:
    """Which may take long where others have very much."""
    site.add(target="10.1.0.2", action="block")
    site.controller.tick()
    site.restart()
    site.kernel.chains.clear()
    site.kernel.hooks.clear()
    survey, blocked = site.kernel.survey, []

    def look(thorough: bool = True) -> HostReport:
        blocked.append(site.send("10.1.0.2"))
        return survey(thorough)

    site.kernel.survey = look  # type: ignore[method-assign]
    site.controller.tick()
    assert blocked == [["drop"]]


def test_what_was_told_of_a_rule_stands_until_the_first_survey(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.kernel.report = HostReport(legacy=("-A PREROUTING -j TEE --gateway 10.9.0.1",))
    rule = site.add(target="10.1.0.2", direction="to", rate="9 packets/s")
    for _ in range(3):
        site.controller.tick()
    told = site.store.marked("gw")[rule.id]
    assert told.state is State.DEGRADED
    site.restart()
    survey, states = site.kernel.survey, []

    def look(thorough: bool = True) -> HostReport:
        states.append(site.store.marked("gw").get(rule.id))
        return survey(thorough)

    monkeypatch.setattr(site.kernel, "survey", look)
    site.controller.tick()
    assert states == [told]
    site.controller.tick()
    assert site.store.marked("gw")[rule.id] == told


def notes(site: Site) -> tuple[str, ...]:
    """What is noted, but for the clock of a site, which the tests drive."""
    (status,) = site.store.hosts()
    return tuple(note for note in status.notes if not note.startswith("The clock of this gateway"))
