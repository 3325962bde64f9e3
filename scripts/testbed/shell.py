"""The command line of scripts/lab: a lab to walk about in, or to run a command against."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

from scripts.testbed.errors import LabError
from scripts.testbed.namespaces import Lab

# Seconds; Python misses a signal that arrives just before it goes to sleep, until it wakes.
WAKE = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/lab",
        description="Builds client, gateway and server as network namespaces, and removes them at the end. "
        "Without a command it shows how to enter them and waits for Ctrl-C; a command runs with their names in "
        "NL_CLIENT, NL_GATEWAY and NL_SERVER, and its exit status is passed on.",
    )
    parser.add_argument("--nat", action="store_true", help="the gateway masquerades the client's IPv4 network")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="what to run, on this host, beside it")
    options = parser.parse_args()
    try:
        with Lab(nat=options.nat) as lab:
            status = _run(lab, options.command) if options.command else _wait(lab)
    except (LabError, OSError) as error:
        sys.exit(f"scripts/lab: {error}")
    sys.exit(status)


def _run(lab: Lab, command: list[str]) -> int:
    names = {f"NL_{n.role.upper()}": n.name for n in lab.namespaces}
    # Ctrl-C is for the command; this program only waits, and tidies up when the command has ended. A handler,
    # since SIG_IGN would be inherited.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    with subprocess.Popen(command, env={**os.environ, **names}) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(WAKE)
        except BaseException:
            process.terminate()
            raise
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _wait(lab: Lab) -> int:
    # A shell starts background jobs with Ctrl-C ignored; sent by hand, it shall work there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(lab.topology())
    print("\nCtrl-C removes it.", flush=True)
    try:
        while True:
            time.sleep(WAKE)
    except KeyboardInterrupt:
        print()
        return 0
