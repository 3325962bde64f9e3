"""Random rule sets in the real kernel: it holds what it is given, and the kernel in memory holds the same."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from netlimit.kernel.base import observe
from tests.kernel.conftest import wipe
from tests.kernel.worker import RemoteKernel
from tests.unit.histories import Change, bring, changes, plan_for, settled


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes())
def test_the_real_kernel_goes_the_same_way_as_the_one_in_memory(linux: RemoteKernel, change: Change) -> None:
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
