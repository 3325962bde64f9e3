"""The programs of docs/client.md run, and do what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.testbed.streams import ROOT
from tests.docs.transcripts import read_fences
from tests.l7.client.script import Answer, Script
from tests.l7.redis.servers import Server

PRINTED = [
    "200\n",
    "The budget of 100000/day for 127.0.0.1, of which the request takes 200000: it never holds as much.\n",
    "200\n",
    "",
]


def test_programs_run(
    script: Script, redis: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fences = read_fences((ROOT / "docs/client.md").read_text("utf-8"))
    programs = ["\n".join(fence.lines) for fence in fences if fence.language == "python"]
    here = {"https://api.example.com": script.url, "api.example.com": "127.0.0.1", "redis://localhost:6379": redis.url}
    kept = {"Cache-Control": "max-age=60", "Date": ""}
    script.play(Answer(), Answer(), Answer(200, kept, b"things"))
    monkeypatch.chdir(tmp_path)
    for program, printed in zip(programs, PRINTED, strict=True):
        for there, instead in here.items():
            program = program.replace(there, instead)
        exec(program, {})  # noqa: S102, it is our own
        assert capsys.readouterr().out == printed
    assert [heard.path for heard in script.heard] == ["/things"] * 3
    assert (tmp_path / "private/answers.db").exists()
