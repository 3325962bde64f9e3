"""What the kernel shows to root alone and the controller has to read: which tables iptables has, who holds a claim.

No capability opens these files of /proc, but root may give them to a user. He can do no more with them than read: the
kernel takes nothing there from anybody. They are those of a network namespace, and last as long as it does, or until
their module goes: then the next are root's alone again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from netlimit.custody import give, opened
from netlimit.errors import KernelError
from netlimit.kernel import holders, tables
from netlimit.kernel.claim import Claim, is_claimed
from netlimit.kernel.tools import run

_MODULES = {names: Path(names).name.removesuffix("_names") for names in tables.NAMES}
FILES = (*tables.NAMES, holders.LOGS)


def load_modules() -> None:
    """Have the modules loaded whose files these are, as far as there are such: a file that came later would be root's
    alone. Raises nothing."""
    for names, module in _MODULES.items():
        if not Path(names).exists():
            with suppress(KernelError):
                run("modprobe", "--quiet", module)
    with suppress(KernelError):  # this has the kernel load the module of logs
        is_claimed(Claim.CONTROLLER, "prepare this host")


def let_read(path: str, user: int) -> None:
    """Let a user (id) read one of them, if it is there, in the network namespace of this process. Raises OSError."""
    with suppress(FileNotFoundError), opened(path) as file:
        give(file, user, -1, of=(os.fstat(file).st_uid,))  # in /proc only root gives any away
