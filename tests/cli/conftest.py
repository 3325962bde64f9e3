"""Fixtures of the command line's tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.running import Netlimit, settings_in


@pytest.fixture(scope="session")
def make_directory() -> Iterator[Callable[[], Path]]:
    """Makes directories that the API's user may pass, unlike pytest's own."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="netlimit-")))
        made[-1].chmod(0o755)
        return made[-1]

    yield make
    for directory in made:
        shutil.rmtree(directory)


@pytest.fixture
def directory(make_directory: Callable[[], Path]) -> Path:
    return make_directory()


@pytest.fixture
def netlimit(directory: Path) -> Iterator[Netlimit]:
    """A place of its own, where nothing runs yet."""
    place = Netlimit(settings_in(directory))
    yield place
    place.end_all()


@pytest.fixture(scope="session")
def shared(make_directory: Callable[[], Path]) -> Iterator[Netlimit]:
    place = Netlimit(settings_in(make_directory()))
    server = place.serve()
    yield place
    server.end()


@pytest.fixture
def served(shared: Netlimit) -> Netlimit:
    """A place where `netlimit serve` runs, without rules."""
    for rule in shared.ask("rule", "list")["items"]:
        shared.do("rule", "remove", str(rule["id"]), "--no-wait")
    return shared


@pytest.fixture
def make_clone(root: None) -> Iterator[Callable[[Netlimit, Path], Netlimit]]:
    """Makes gateways that go by the name and the database of another, in namespaces and directories of their own."""
    made: list[Netlimit] = []

    def make(gateway: Netlimit, directory: Path) -> Netlimit:
        name = directory.name
        subprocess.run(["ip", "netns", "add", name], check=True)
        own = {"NETLIMIT_STATE_DIRECTORY": str(directory / "controller"), "LOG": str(directory / "log")}
        made.append(replace(gateway, environment={**gateway.environment, **own}, namespace=name, started=[]))
        return made[-1]

    yield make
    for each in made:
        each.end_all()
        subprocess.run(["ip", "netns", "del", each.namespace], check=True)


@pytest.fixture
def gateway(root: None, directory: Path) -> Iterator[Netlimit]:
    """A network namespace with the real kernel in it."""
    name = directory.name
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    settings = settings_in(directory, NETLIMIT_BACKEND="iptables")
    place = Netlimit(settings, name)
    yield place
    place.end_all()
    subprocess.run(["ip", "netns", "del", name], check=True)
