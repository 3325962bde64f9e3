"""Owners and modes are changed in one module alone, by descriptor: what is kept elsewhere would be forgotten there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUSTODY = ROOT / "netlimit/custody.py"
CHANGES = re.compile("(l|f)?ch(own|mod)|(set|remove)xattr")
COMMANDS = re.compile(r"(?:^|[\s;&|(`])(?:ch(?:own|mod|grp)|install\s[^\n]*\s-[a-z]*[og])\s[^\n]*")
"""In a shell: also `install` with an owner or a group."""
SOURCES = [path for folder in ("netlimit", "api") for path in sorted((ROOT / folder).rglob("*.py")) if path != CUSTODY]
SCRIPTS = [
    path
    for path in sorted((ROOT / "scripts").iterdir())
    if path.is_file() and (path.suffix == ".bash" or path.name in ("install", "uninstall"))
]


def find_changes(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=name):  # by getattr, as a command
                if CHANGES.fullmatch(str(name)):
                    yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_module_but_one_changes_owners_or_modes() -> None:
    assert len(SOURCES) > 200
    found = [f"{path.relative_to(ROOT)}:{each}" for path in SOURCES for each in find_changes(path.read_text("utf-8"))]
    assert found == []
    assert list(find_changes(CUSTODY.read_text("utf-8")))


@pytest.mark.parametrize(
    "text",
    ["os.chown(path, 0, 0)", "path.chmod(0o600)", "os.fchmod(1, 2)", "change = os.lchown", "from os import fchown",
     "getattr(os, 'chmod')(path, 1)", "os.setxattr(1, 'x', b'')", "subprocess.run(['chown', 'a', path])"],
)  # fmt: skip
def test_who_does_is_found(text: str) -> None:
    assert list(find_changes(text))


def list_commands(text: str) -> list[str]:
    lines = [line.partition(" #")[0] for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [found.strip(" ;&|(`") for line in lines for found in COMMANDS.findall(line)]


def test_no_script_changes_them_by_path() -> None:
    assert {"install", "uninstall", "debian.bash"} <= {path.name for path in SCRIPTS}
    assert [each for path in SCRIPTS for each in list_commands(path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "line", ["chown a:b /x", "  chmod 644 /x", "true && chgrp g /x", "install -d -o a -m 700 /x", "echo; (chmod +x y)"]
)
def test_which_does_is_found(line: str) -> None:
    assert list_commands(line)
    assert not list_commands(f"# {line}")
