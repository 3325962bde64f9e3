"""Random rule sets in the real kernel: it holds what it is given, and the kernel in memory holds the same."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from netlimit.kernel.base import observe
from tests.kernel.conftest import wipe
from tests.kernel.worker import RemoteKernel
from tests.unit.histories import Change, bring, changes, plan_for, settled
from tests.unit.test_make_before_break import rules


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes())
def test_the_real_kernel_goes_the_same_way_as_the_one_in_memory(linux: RemoteKernel, change: Change) -> None:
    follow(linux, change)


REJECTING: dict[str, object] = {"id": 1, "target": "10.9.0.9", "rate": "1 packets/min", "action": "reject"}
WIDE = {**REJECTING, "id": 2, "target": "10.7.7.7", "direction": "to", "rate": "1000 packets/s"}
BLOCK = {"id": 3, "target": "10.9.0.8", "direction": "to", "action": "block"}


@pytest.mark.parametrize("held", [(), (BLOCK,)])
def test_where_mangle_has_to_clear_marks_before_its_chain_does(
    linux: RemoteKernel, held: tuple[dict[str, object], ...]
) -> None:
    follow(linux, Change(rules(REJECTING, *held), rules(REJECTING, *held, WIDE)))


def follow(linux: RemoteKernel, change: Change) -> None:
    compilation, memory = settled(change.before)
    for step in plan_for(compilation, linux).steps:
        linux.apply(step)
    assert observe(linux) == observe(memory)
    bring(compilation, change.after)
    for step in plan_for(compilation, memory).steps:
        memory.apply(step)
        linux.apply(step)
        assert observe(linux) == observe(memory)
    assert observe(linux) == compilation.state
    wipe(linux)
