"""Where a table is refused, it is found out which buckets are: rules that need them must not keep the others out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from netlimit import hashlimit
from netlimit.compile import Compilation
from netlimit.errors import KernelError
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.plan import SwitchTable, diff
from netlimit.rules import parse_rule
from tests.kernel.worker import RemoteKernel
from tests.unit.strategies import NOW


@pytest.mark.parametrize("bad", [0, 1, 40])
@pytest.mark.parametrize("family", [4, 6])
def test_of_a_refused_step_the_buckets_are_found_that_are_refused(
    writing: RemoteKernel, monkeypatch: pytest.MonkeyPatch, bad: int, family: int
) -> None:
    """As of a tool that bears less than is known here."""
    monkeypatch.setattr(hashlimit, "_MOST_BURST", 2**32)
    hashlimit.fit_bucket.cache_clear()
    compilation = Compilation(Facts(mark_mask=0xFFFF0000))
    for number in range(1, 61):
        burst = 2_000_000 + number if number <= bad else number + 5
        fields = {
            "target": f"10.1.0.{number}" if family == 4 else f"fd00::{number}",
            "rate": "50 packets/s",
            "burst": burst,
        }
        assert compilation.put(replace(parse_rule(fields, NOW), id=number)) is None
    hashlimit.fit_bucket.cache_clear()
    steps = diff(compilation.state, observe(writing)).steps
    for step in steps:
        if not isinstance(step, SwitchTable):
            writing.apply(step)
    (step,) = (each for each in steps if isinstance(each, SwitchTable) and each.table == "mangle")
    before = writing.structure()
    if bad:
        with pytest.raises(KernelError, match=r"2000\d{3}"):
            writing.apply(step)
    found = writing.refused_buckets(step)
    names = compilation.name_buckets()
    assert len(found) == min(bad, 32)
    assert all(json.loads(names[name][1])[1] > 2_000_000 for name in found)
    assert writing.structure() == before, "nothing that was tried is left"
