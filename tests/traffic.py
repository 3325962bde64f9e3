"""Traffic of the testbed whose imports are done already: they took longer than many a packet of the tests."""

from __future__ import annotations

import os
from collections.abc import Sequence

from scripts.testbed.namespaces import Namespace
from tests import warm

MODULE = "scripts.testbed.traffic"


def launch(namespace: Namespace, argv: Sequence[str]) -> warm.Started:
    """As the testbed does."""
    (stdin, given), (told, stdout), (said, stderr) = (os.pipe() for _ in range(3))
    with open(stdin, "rb") as reads, open(stdout, "wb") as prints, open(stderr, "wb") as says:
        process = warm.start(
            *(MODULE, *argv),
            env=os.environ,
            namespace=namespace.name,
            stdin=reads,
            stdout=prints,
            stderr=says,
            imported=(MODULE,),
        )
    process.stdin, process.stdout, process.stderr = open(given, "w"), open(told), open(said)  # noqa: SIM115
    namespace.started.append(process)
    return process
