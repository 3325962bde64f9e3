"""Taking everything of netlimit's out of the kernel."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from netlimit.errors import KernelError
from netlimit.kernel.base import Kernel, observe
from netlimit.plan import Plan, diff
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


def find_left(kernel: Kernel) -> Plan:
    """The steps that would take everything of ours out of the kernel. Raises KernelError."""
    return diff(State(), observe(kernel))


def restore_nothing(store: Store, kernel: Kernel, host: str) -> None:
    """A gateway had nothing of ours in its kernel before: nothing is there again, and the root qdiscs of others are.
    Raises StoreError, KernelError."""
    with kernel.exclusive():
        steps = _take_out_for(store, kernel, host)
    if steps:
        log.warning("Everything of netlimit's is out of the kernel again, as it was: %d steps.", len(steps.steps))


def finish(store: Store, kernel: Kernel, host: str) -> None:
    """Take out what a teardown of a gateway has left, unless its pause has ended meanwhile. Raises StoreError,
    KernelError."""
    with kernel.exclusive():
        if not store.paused(host):  # `netlimit apply` may have had its turn before us
            return
        steps = _take_out_for(store, kernel, host)
    if steps:
        log.warning("A teardown was ended before it was done; what it has left is out of the kernel: %d steps.",
                    len(steps.steps))  # fmt: skip


def _take_out(kernel: Kernel, saved: Mapping[str, SavedRoot] | None) -> tuple[Plan, Plan]:
    steps = diff(State(), observe(kernel), put_back=saved)
    for step in steps.steps:
        kernel.apply(step)
    return steps, find_left(kernel)


def _take_out_for(store: Store, kernel: Kernel, host: str) -> Plan:
    """Take all out, with what the store knows of others; the steps that were taken."""
    saved = store.saved_roots(host)
    steps, left = _take_out(kernel, saved)
    for device in saved:
        store.forget_root(host, device)
    if left:
        raise KernelError("tear down", f"some of netlimit's objects are still there:\n{left}")
    return steps
