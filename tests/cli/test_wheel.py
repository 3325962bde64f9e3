"""The wheel, as `pip install netlimit` puts it somewhere: for programs that want middleware and client, where there is
no compiler; and for a gateway, beside packages of others that are called `api` and `migrations` as well."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.cli.running import Netlimit, settings_in, until
from tests.warm import ROOT

SOURCES = ("netlimit", "api", "migrations", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
NOT_SHIPPED = {".pyc", ".mako", ".proto", ".lock"}
FOREIGN = "raise RuntimeError('this is the package of somebody else')\n"
LIMITED = """
import asyncio
import httpx
from netlimit.client import Transport
from netlimit.l7.middleware import RateLimit


async def application(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def ask():
    transport = httpx.ASGITransport(RateLimit(application, limit="2/hour"))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        print(*[(await client.get("/")).status_code for _ in range(3)])


asyncio.run(ask())
print(Transport(budgets={"api.example.com": ["10/second"]}).__class__.__name__)
"""
TYPED = """
from netlimit.client import Transport

reveal_type(Transport().close())
number: int = Transport()
"""


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment or None)
    assert not done.returncode, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(make_directory: Callable[[], Path]) -> Path:
    """Built of a copy: what an earlier build has left in the checkout would go into it."""
    directory = make_directory()
    for name in SOURCES:
        source, copy = ROOT / name, directory / "source" / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, directory / "source")
    run(sys.executable, "-m", "pip", *build)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, make_directory: Callable[[], Path]) -> Path:
    """A fresh environment with the wheel and what it asks for, in the versions that this checkout goes by; made without
    a compiler in reach. Others have an `api` and `migrations` there."""
    directory = make_directory()
    run(sys.executable, "-m", "venv", directory / "venv")
    lock = (ROOT / "requirements.lock").read_text()
    pinned = re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?(==\S+)", lock, re.MULTILINE)
    (directory / "constraints").write_text("".join(f"{name}{version}\n" for name, version in pinned))
    settings = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    install = ("install", "--quiet", "--constraint", directory / "constraints", wheel)
    run(directory / "venv/bin/python", "-m", "pip", *install, **{**settings, "PATH": str(directory / "venv/bin")})
    for name in ("api", "migrations"):
        package = find_packages(directory / "venv") / name
        package.mkdir()
        (package / "__init__.py").write_text(FOREIGN)
    return directory / "venv"


def find_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))


def test_all_that_is_ours_is_below_netlimit(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in ("netlimit", "api", "migrations")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in NOT_SHIPPED
    }
    assert names == {name if name.startswith("netlimit/") else f"netlimit/{name}" for name in ours}
    assert "netlimit/py.typed" in names
    told = HeaderParser().parsestr(metadata)
    assert (told["License-Expression"], len(licences)) == ("MIT", 1)
    wanted = [each for each in told.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert not any("iptables" in each for each in wanted)
    gateway = [each for each in told.get_all("Requires-Dist", []) if 'extra == "gateway"' in each]
    assert any(each.startswith("python-iptables") for each in gateway)


def test_middleware_and_client_work_without_a_compiler(environment: Path) -> None:
    assert run(environment / "bin/python", "-c", LIMITED).splitlines() == ["200 200 429", "Transport"]
    assert "Limit who may send" in run(environment / "bin/netlimit", "--help")


def test_what_only_a_gateway_has_is_named_where_it_is_missing(environment: Path) -> None:
    for command, extra in ((("serve",), "gateway"), (("db", "upgrade"), "gateway"), (("limiter",), "limiter")):
        done = subprocess.run([environment / "bin/netlimit", *command], capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
        assert f"install netlimit[{extra}]." in done.stderr


def test_types_are_there_for_who_checks_his(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(TYPED)
    options = ("--no-incremental", "--python-executable", environment / "bin/python", tmp_path / "theirs.py")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "py.typed" not in done.stdout
    assert 'Incompatible types in assignment (expression has type "Transport"' in done.stdout


def test_a_gateway_serves_beside_packages_of_the_same_names(
    environment: Path, make_directory: Callable[[], Path]
) -> None:
    """With the packages of this checkout's environment, which a gateway needs besides."""
    directory = make_directory()
    packages = find_packages(environment)
    (packages / "gateway.pth").write_text(f"{find_packages(Path(sys.prefix))}\n")  # and not what is linked there
    try:
        assert "--api-user" in run(environment / "bin/netlimit", "serve", "--help")
        program = str(environment / "bin/netlimit")
        user = ("--api-user", "nobody") if os.geteuid() == 0 else ()
        settings = {**settings_in(directory), "PYTHONPATH": str(packages)}  # theirs come first
        server = Netlimit(settings).start("serve", *user, program=(program,))
        ask = [program, "rule", "add", "10.1.2.3", "--action", "block"]

        def add() -> bool:
            return not subprocess.run(ask, env=settings, capture_output=True, check=False).returncode

        until(lambda: server.ended or add(), server.said)
        assert not server.ended, server.said()
        assert server.end() == 0
        assert "Traceback" not in server.said()
    finally:
        (packages / "gateway.pth").unlink()
