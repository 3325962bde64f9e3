"""What the testbed starts, with its imports done already: they took longer than many a packet of the tests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import IO

from scripts.testbed.namespaces import Namespace
from scripts.testbed.service import MODULE, Service
from scripts.testbed.streams import TRAFFIC, Stream
from tests import warm


def hurry() -> None:
    """From now on, start traffic and services so."""
    Stream.launch = staticmethod(launch_traffic)
    Service.launch = staticmethod(launch_service)


def launch_traffic(namespace: Namespace, argv: Sequence[str]) -> warm.Started:
    (stdin, given), (told, stdout), (said, stderr) = (os.pipe() for _ in range(3))
    with open(stdin, "rb") as reads, open(stdout, "wb") as prints, open(stderr, "wb") as says:
        process = warm.start(
            *(TRAFFIC, *argv),
            env=os.environ,
            namespace=namespace.name,
            stdin=reads,
            stdout=prints,
            stderr=says,
            imported=(TRAFFIC,),
        )
    process.stdin, process.stdout, process.stderr = open(given, "w"), open(told), open(said)  # noqa: SIM115
    namespace.started.append(process)
    return process


def launch_service(namespace: Namespace, argv: Sequence[str], env: Mapping[str, str], log: IO[str]) -> warm.Started:
    with open(os.devnull) as nothing:
        process = warm.start(
            *(MODULE, *argv),
            env={**os.environ, **env},
            namespace=namespace.name,
            stdin=nothing,
            stdout=log,
            stderr=log,
            imported=warm.API,
        )
    namespace.started.append(process)
    return process
