"""Code in a network namespace of its own, in which all of 10.0.0.0/8 is at hand: clients have any addresses there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable

_NEWNET = 0x40000000


def run_apart(body: Callable[[], None]) -> None:
    """Run something, and the threads and programs that it starts, in a namespace that ends with them."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            for words in ("link set lo up", "addr add 10.0.0.1/8 dev lo"):
                subprocess.run(["ip", *words.split()], check=True)
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
