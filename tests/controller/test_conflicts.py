"""The controller says of a host what keeps rules from holding, and no more once it is gone."""

from __future__ import annotations

import pytest

from netlimit import controller
from netlimit.conflicts import Fill, HostReport
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


def notes(site: Site) -> tuple[str, ...]:
    """What is noted, but for the clock of a site, which the tests drive."""
    (status,) = site.store.hosts()
    return tuple(note for note in status.notes if not note.startswith("The clock of this gateway"))
