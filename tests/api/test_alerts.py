"""The alerts in docs/prometheus: promtool understands and tests them, and they ask for metrics that there are."""

from __future__ import annotations

import re
import subprocess

import pytest

from scripts.testbed.streams import ROOT

ALERTS = ROOT / "docs/prometheus"
_SUFFIXES = re.compile(r"_(bucket|count|sum)$")


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", "--lint=all", "--lint-fatal", "netlimit.rules.yml"), ("test", "rules", "netlimit.test.yml")],
    ids=["check", "test"],
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=ALERTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_says_what_to_do_and_asks_for_what_there_is() -> None:
    rules, tests = ((ALERTS / name).read_text("utf-8") for name in ("netlimit.rules.yml", "netlimit.test.yml"))
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(alerts) == rules.count("summary:") == rules.count("description:") == rules.count("severity:")
    assert not [alert for alert in alerts if f'alertname="{alert}"' not in tests]
    pages = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("monitoring.md", "limiter.md"))
    described = set(re.findall(r"^\| `(\w+)", pages, re.MULTILINE))
    asked = {_SUFFIXES.sub("", name) for name in re.findall(r"netlimit_\w+", rules)}
    assert asked <= described
