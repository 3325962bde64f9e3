"""By which name the controller of a host goes, where its copy and the database say different things."""

from __future__ import annotations

from datetime import timedelta

import pytest

from netlimit.cli.controllers import _has_reported, _is_renamed
from netlimit.records import HostStatus


def heard(seconds: float | None, reporter: str | None = "of a controller") -> HostStatus | None:
    """A report of so many seconds ago."""
    return None if seconds is None else HostStatus("gw", "", reporter=reporter, silence=timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("present", "former", "renamed"),
    [
        (heard(1), heard(3600), True),
        (heard(1800), heard(3600), True),
        (heard(1), heard(None), True),
        (heard(1), heard(4), False),
        (heard(4), heard(1), False),
        (heard(3600), heard(60), False),
        (heard(1, None), heard(3600), False),
        (heard(None), heard(3600), False),
    ],
    ids=[
        "renamed",
        "renamed and hangs",
        "first of this name",
        "both live",
        "another gateway",
        "back",
        "command",
        "never",
    ],
)
def test_a_copy_of_another_name_counts_unless_its_controller_has_changed_its_name(
    present: HostStatus | None, former: HostStatus | None, renamed: bool
) -> None:
    assert _is_renamed(present, former) is renamed


def test_however_long_ago_it_has_reported_it_goes_by_that_name() -> None:
    assert _has_reported(heard(10**7), None)
    assert _has_reported(heard(1, None), "gw"), "of an older version"
    assert not _has_reported(heard(1, None), None)
    assert not _has_reported(None, "gw")
