"""Taking everything of netlimit's out of the kernel."""

from __future__ import annotations

from collections.abc import Mapping

from netlimit.kernel.base import Kernel, observe
from netlimit.plan import Plan, diff
from netlimit.state import State
from netlimit.tree import SavedRoot


def tear_down(kernel: Kernel, saved: Mapping[str, SavedRoot] | None) -> tuple[Plan, Plan]:
    """Remove all of ours, and put back the root qdiscs of others; the steps that were taken, and those that would still
    be left to take (none, if all went well). Raises KernelError."""
    with kernel.exclusive():
        steps = diff(State(), observe(kernel), put_back=saved)
        for step in steps.steps:
            kernel.apply(step)
        return steps, diff(State(), observe(kernel))
