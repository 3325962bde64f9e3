"""A controller with two capabilities, which may look into no process, and not into sshd's configuration, spares the
connections to sshd all the same."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.testbed.namespaces import CLIENT, LAN, Lab
from tests.e2e.gateway import COMMAND, Gateway
from tests.e2e.visitors import MOUNT_GROUPS, Groups, Sshd, Visitor

USER, PORT, OTHER = "nobody", 2222, 2022
START = (
    f"{MOUNT_GROUPS}; mkdir -p /run/netlimit /etc/ssh && mount -t tmpfs -o mode=750 none /run/netlimit && "
    f"mount -t tmpfs none /etc/ssh && install -m 600 /dev/null /etc/ssh/sshd_config && "
    f"exec {shlex.join([sys.executable, *COMMAND, 'controller', '--user', USER])}"
)
"""With places of its own, and a configuration that only root may read."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A place that the controller's user may pass, unlike pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="netlimit-"))
    os.chown(made, 0, pwd.getpwnam(USER).pw_gid)
    made.chmod(0o2770)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def unseeing(lab: Lab, directory: Path, stack: ExitStack) -> Gateway:
    """A gateway whose controller has not been started."""
    gateway = Gateway(lab, directory)
    stack.callback(gateway.close)
    lab.gateway.run("chgrp", "-R", str(pwd.getpwnam(USER).pw_gid), str(directory))
    return gateway


def start(gateway: Gateway) -> None:
    gateway.launch("-c", f"import os; os.execvp('sh', ['sh', '-c', {START!r}])")
    gateway.wait_until_applied()


def check_spared(lab: Lab, gateway: Gateway) -> None:
    """Whether an open connection outlasts a block of the very address."""
    gateway.wait(lambda: PORT in gateway.store.hosts()[0].management, "the port of sshd to be known")
    with Visitor(lab.client, LAN, PORT) as visitor:
        assert visitor.say("hello")
        gateway.put({"target": CLIENT, "action": "block"})
        assert visitor.say("still here")
        with Visitor(lab.client, LAN, PORT) as another:
            assert not another.connected


def test_one_that_has_a_control_group_of_its_own(lab: Lab, unseeing: Gateway, stack: ExitStack) -> None:
    """It starts after the controller, so that root has found nothing."""
    group = stack.enter_context(Groups()).make("ssh.service")
    start(unseeing)
    stack.enter_context(Sshd(lab.gateway, PORT, group=group))
    check_spared(lab, unseeing)


def test_one_that_root_has_found_before(lab: Lab, unseeing: Gateway, stack: ExitStack) -> None:
    """It shares its control group with everybody."""
    stack.enter_context(Sshd(lab.gateway, PORT))
    start(unseeing)
    check_spared(lab, unseeing)


def test_one_that_root_has_found_beside_another(lab: Lab, unseeing: Gateway, stack: ExitStack) -> None:
    """As an upgrade of the system starts it from a shell, should that of the unit end."""
    group = stack.enter_context(Groups()).make("ssh.service")
    stack.enter_context(Sshd(lab.gateway, OTHER, group=group))
    stack.enter_context(Sshd(lab.gateway, PORT))
    start(unseeing)
    check_spared(lab, unseeing)


def test_of_one_that_nobody_has_found_it_is_told(lab: Lab, unseeing: Gateway, stack: ExitStack) -> None:
    start(unseeing)
    stack.enter_context(Sshd(lab.gateway, PORT))
    unseeing.wait(lambda: any("sshd runs" in note for note in unseeing.store.hosts()[0].notes), "it to be told")
    assert "sshd runs" in unseeing.log.read_text()
