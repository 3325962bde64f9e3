"""Root qdiscs of others: kept when ours take their place, and put back at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from netlimit.cli.errors import CommandError
from netlimit.errors import KernelError
from netlimit.records import Actor

if TYPE_CHECKING:
    from netlimit.kernel.base import Kernel
    from netlimit.store import Store
    from netlimit.tree import SavedRoot


@contextmanager
def taking_over(devices: Sequence[str], kernel: Kernel, store: Store, host: str, actor: Actor) -> Iterator[None]:
    """Let the pass in the block put our trees in the place of what others have on these devices.

    Raises CommandError, before the block, for a device where that cannot be, and after it for one where no rule shapes.
    """
    with kernel.exclusive():
        saved = {device: _save(device, kernel) for device in devices}
        for device, root in saved.items():
            store.save_root(host, device, root, actor)
    try:
        yield
    finally:
        # A controller that runs must not put a tree there in the same moment.
        with kernel.exclusive():
            ours = kernel.queues().trees
            left = [device for device in saved if device not in ours]
            for device in left:
                store.forget_root(host, device)
    if left:
        raise CommandError(
            f"No rule shapes on {' and '.join(left)}, so what is there stays. Add the rule first, then take over."
        )


def _save(device: str, kernel: Kernel) -> SavedRoot:
    if device not in kernel.queues().foreign:
        known = kernel.topology().devices
        if device not in known:
            raise CommandError(f"There is no device {device} here; there are {', '.join(sorted(known)) or 'none'}.")
        raise CommandError(f"Nobody else has put a qdisc on {device}: there is nothing to take over.")
    try:
        return kernel.save_root(device)
    except KernelError as error:
        raise CommandError(f"{device} cannot be taken over: {error.reason}") from None
