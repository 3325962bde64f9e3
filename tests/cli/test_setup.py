"""scripts/setup, where others' files could be taken for its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def test_an_environment_that_others_may_have_is_left_as_it_is(tmp_path: Path) -> None:
    """The packages of another checkout, to which the link leads, would be gone."""
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(CHECKOUT / name, tmp_path)
    shutil.copytree(CHECKOUT / "scripts", tmp_path / "scripts")
    others = tmp_path / "others"
    others.mkdir()
    (others / "kept").touch()
    (tmp_path / ".venv").symlink_to(others)
    done = subprocess.run([tmp_path / "scripts/setup"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert ".venv is a link" in done.stderr
    assert [each.name for each in others.iterdir()] == ["kept"]
