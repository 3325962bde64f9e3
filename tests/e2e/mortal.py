"""A controller that kills itself before a certain step: `python -m tests.e2e.mortal 3` takes three and dies."""

from __future__ import annotations

import os
import signal
import sys

from netlimit.cli.parts import make_controller
from netlimit.kernel.linux import LinuxKernel
from netlimit.plan import Step
from netlimit.settings import load_settings
from netlimit.store import Store


class MortalKernel(LinuxKernel):
    """Dies in place of the step with this number, counted from 0."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last

    def apply(self, step: Step) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        super().apply(step)


if __name__ == "__main__":
    settings = load_settings(None)
    store = Store(settings.database_url)
    make_controller(settings, store, MortalKernel(int(sys.argv[1]))).run(lambda: False)
