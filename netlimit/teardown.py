"""Taking everything of netlimit's out of the kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from netlimit.errors import KernelError
from netlimit.kernel.base import Kernel, observe
from netlimit.plan import Plan, WriteIngress, WriteTree, diff
from netlimit.state import State
from netlimit.tree import SavedRoot

if TYPE_CHECKING:  # for the types alone: the store is handed over
    from netlimit.store import Store

log = logging.getLogger(__name__)


def tear_down(kernel: Kernel, saved: Mapping[str, SavedRoot] | None) -> tuple[Plan, Plan]:
    """Remove all of ours, and put back the root qdiscs of others; the steps that were taken, and those that would still
    be left to take (none, if all went well). Raises KernelError."""
    with kernel.exclusive():
        return _take_out(kernel, saved)


def _take_out(kernel: Kernel, saved: Mapping[str, SavedRoot] | None) -> tuple[Plan, Plan]:
    steps = _find_steps(kernel, saved)
    for step in steps.steps:
        kernel.apply(step)
    return steps, find_left(kernel)


def find_left(kernel: Kernel) -> Plan:
    """The steps that would take everything of ours out of the kernel. Raises KernelError."""
    return _find_steps(kernel, None)


def _find_steps(kernel: Kernel, saved: Mapping[str, SavedRoot] | None) -> Plan:
    """Nothing comes after them, so that no clsact is kept, either."""
    found = observe(kernel)
    steps = [step for step in diff(State(), found, put_back=saved).steps if not isinstance(step, WriteIngress)]
    whole = WriteIngress(drop=True, whole=True)
    return Plan((whole, *steps) if found.programs or kernel.kept_clsacts() else tuple(steps))


def restore_nothing(store: Store, kernel: Kernel, host: str, still: Callable[[], bool] | None = None) -> None:
    """A gateway had nothing of ours in its kernel before: nothing is there again, and the root qdiscs of others are.
    Unless that is not `still` wanted, once nobody else writes: an `apply` may have ended the pause. Raises StoreError,
    KernelError."""
    with kernel.exclusive():
        if still is not None and not still():
            return
        steps, left = _take_out(kernel, store.saved_roots(host))
        # Before anybody else writes, and no other: an `apply --take-over` may have saved what it has yet to replace.
        for device in _list_put_back(steps):
            store.forget_root(host, device)
    if steps:
        log.warning("Everything of netlimit's is out of the kernel again, as it was: %d steps.", len(steps.steps))
    if left:
        raise KernelError("tear down", f"some of netlimit's objects are still there:\n{left}")


def _list_put_back(plan: Plan) -> list[str]:
    """The devices on which others have their root qdisc again."""
    trees = (step for step in plan.steps if isinstance(step, WriteTree))
    return [step.device for step in trees if step.drop and step.put_back is not None]
