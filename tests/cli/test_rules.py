"""`netlimit rule …`."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.cli.running import PROGRAM, Netlimit


def test_every_option_arrives(served: Netlimit) -> None:
    rule = served.ask(
        "rule",
        "add",
        "10.1.0.0/16",
        *("--rate", "200 packets/s", "--per", "/24", "--direction", "to", "--protocol", "udp"),
        *("--port", "53", "--port", "8000-8100", "--source-port", "123", "--interface", "eth0", "--burst", "50"),
        *("--action", "reject", "--ttl", "10m", "--name", "office", "--label", "a=b", "--label", "c=", "--host", "gw1"),
        *("--comment", "why", "--on-failure", "open", "--disabled"),
    )
    wanted = {
        "target": "10.1.0.0/16",
        "per": "/24",
        "direction": "to",
        "protocol": "udp",
        "ports": [53, "8000-8100"],
        "source_ports": [123],
        "interface": "eth0",
        "burst": 50,
        "action": "reject",
        "name": "office",
        "labels": {"a": "b", "c": ""},
        "hosts": ["gw1"],
        "comment": "why",
        "on_failure": "open",
        "enabled": False,
    }
    assert {field: rule[field] for field in wanted} == wanted
    assert rule["rate"]["text"] == "200 packets/s"
    assert rule["expires_at"] is not None
    assert rule["status"]["state"] == "disabled"


def test_edit_changes_what_is_named(served: Netlimit) -> None:
    added = served.do(
        "rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--name", "one", "--ttl", "1h", "--label", "a=b"
    )
    end = datetime.fromisoformat(served.ask("rule", "show", "one")["expires_at"])
    assert f" It ends at {end.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC." in added
    said = served.do("rule", "edit", "one", "--rate", "20 Mbit/s", "--label", "c=d", "--unset", "expires_at")
    assert said.startswith("Changed rule ")
    assert said.endswith("(one): drop 10.1.2.3 from 20 Mbit/s per host: applied by iptables.\n")
    rule = served.ask("rule", "show", "one")
    assert (rule["labels"], rule["expires_at"], rule["enabled"]) == ({"a": "b", "c": "d"}, None, True)
    assert served.ask("rule", "edit", "one", "--disable")["status"]["state"] == "disabled"
    assert served.ask("rule", "edit", "one", "--enable", "--no-wait")["enabled"]


def test_a_dry_run_shows_what_a_rule_would_do(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--name", "office")
    said = served.do("rule", "add", "10.1.2.3", "--rate", "7777 packets/s", "--dry-run").splitlines()
    assert said[:2] == ["Nothing is kept. If it were:", "gw1: applied by fake."]
    assert said[2].strip().startswith("The new rule comes into force: at most 7777 packets/s from 10.1.2.3;")
    assert any("takes the place of rule" in line for line in said)
    assert any(line.strip().startswith("ipset add nl-") for line in said)
    assert said[-1].startswith("The kernel would really hold 7812.")
    draft = served.ask("rule", "edit", "office", "--rate", "300 packets/s", "--dry-run")
    assert "changes from 200 packets/s to 300 packets/s" in draft["preview"]["words"][0]
    assert served.ask("rule", "show", "office")["rate"]["text"] == "200 packets/s"
    assert "is limited already" in served.refuse(
        "rule", "add", "10.1.0.0/16", "--rate", "1 packets/s", "--per", "host", "--dry-run"
    )


def test_list_filters(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--label", "a=b")
    served.do("rule", "add", "192.0.2.0/24", "--action", "block", "--name", "bad", "--wait", "60")
    names = {
        ("--contains", "10.1.2.3"): [None],
        ("--target", "192.0.2.0/24"): ["bad"],
        ("--label", "a=b"): [None],
        ("--action", "block"): ["bad"],
        ("--state", "error"): [],
    }
    for options, expected in names.items():
        assert [rule["name"] for rule in served.ask("rule", "list", *options)["items"]] == expected
    listed = [line.split() for line in served.do("rule", "list").splitlines()]
    assert [line[1:] for line in listed[2:]] == [
        ["10.1.0.0/16", "from", "200", "packets/s", "per", "host", "drop", "applied"],
        ["bad", "192.0.2.0/24", "from", "block", "applied"],
    ]
    assert "and 1 more; --limit shows them." in served.do("rule", "list", "--limit", "1")


def test_a_list_fits_a_terminal(served: Netlimit) -> None:
    served.do("rule", "add", "2001:db8:1234:5678::/64", "--rate", "10 connections/s", "--per", "target")
    wide = served.run("rule", "list", COLUMNS="80").stdout
    assert max(map(len, wide.splitlines())) <= 80
    assert "\x1b" not in wide


def test_show_is_for_people(served: Netlimit) -> None:
    comment = ("--comment", "[bold]why[/bold]")
    served.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--name", "one", *comment, "--wait", "60")
    fields = dict(line.split(maxsplit=1) for line in served.do("rule", "show", "one").splitlines())
    assert fields["state"].strip() == "applied by iptables"
    assert fields["comment"].strip() == "[bold]why[/bold]"
    assert "burst" not in fields


def test_a_terminal_that_cannot_show_a_letter_ends_nothing(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.2.3", "--rate", "5 packets/s", "--name", "costly", "--comment", "für 5 €")
    old = replace(served, before=("env", "PYTHONIOENCODING=latin-1"))
    done = subprocess.run(
        old.within(*PROGRAM, "rule", "show", "costly"), capture_output=True, check=False, env=dict(old.environment)
    )
    assert (done.returncode, b"f\xfcr 5 \\u20ac" in done.stdout) == (0, True), done


def test_remove_many(served: Netlimit) -> None:
    for name in ("one", "two", "three"):
        served.do("rule", "add", "10.1.2.3", "--name", name, "--rate", "1 packets/s", "--interface", name, "--no-wait")
    assert served.do("rule", "remove", "one") == "Removed rule one.\n"
    assert served.ask("rule", "remove", "two", "three") == {"removed": ["two", "three"], "warnings": []}
    assert served.ask("rule", "list")["total"] == 0


def test_what_is_exported_can_be_imported(served: Netlimit, tmp_path: Path) -> None:
    served.do("rule", "add", "10.1.0.0/16", "--rate", "20 Mbit/s", "--per", "host", "--name", "one", "--label", "a=b")
    served.do("rule", "add", "192.0.2.1", "--action", "block", "--comment", "höflich")
    for option in ("--json", "--ndjson"):
        exported = served.do("rule", "export", option)
        before = served.ask("rule", "list")["items"]
        served.do("rule", "remove", *(str(rule["id"]) for rule in before), "--no-wait")
        (tmp_path / "rules").write_text(exported)
        added = served.ask("rule", "import", str(tmp_path / "rules"), "--wait", "60")
        assert (added["added"], added["state"]) == (2, "applied")
        after = served.ask("rule", "list")["items"]
        same = [field for field in before[0] if field not in ("id", "revision", "created_at", "updated_at", "status")]
        assert [[rule[field] for field in same] for rule in after] == [
            [rule[field] for field in same] for rule in before
        ]


def test_an_export_of_nothing_is_json(served: Netlimit) -> None:
    assert json.loads(served.do("rule", "export")) == []


def test_import_reads_stdin_and_reports_every_line(served: Netlimit) -> None:
    lines = ['{"target": "10.1.2.3"}', '{"target": "10.1.2.4", "rate": "1 packets/s"}', '{"target": "10.1.2.3/8"}']
    said = served.refuse("rule", "import", "-", given="\n".join(lines)).splitlines()
    assert said[0] == "netlimit: 2 lines are wrong, and nothing was kept."
    assert said[1].startswith('Line 1: The action "drop" needs a rate')
    assert said[2].startswith("Line 3: The target '10.1.2.3/8' has host bits set")
    assert served.do("rule", "import", "-", given=lines[1]).startswith("Added 1 rule at revision")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["add", "10.1.2.3/24"], "has host bits set; did you mean 10.1.2.0/24"),
        (["add", "10.1.2.3"], 'The action "drop" needs a rate'),
        (["show", "nosuch"], "There is no rule named 'nosuch'"),
        (["show", "../status"], "There is no"),
        (["remove", "4711"], "There is no rule of id 4711"),
        (["edit", "nosuch", "--rate", "1 packets/s"], "There is no rule named 'nosuch'"),
        (["import", "/nosuch/file"], "/nosuch/file: No such file or directory."),
    ],
)
def test_refusals_are_sentences(served: Netlimit, arguments: list[str], sentence: str) -> None:
    said = served.refuse("rule", *arguments)
    assert said.startswith("netlimit: ")
    assert sentence in said
    assert said.count("\n") == 1


def test_a_conflict_names_the_other_rule(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.2.3", "--rate", "1 packets/s", "--name", "one")
    assert "(one); change that one" in served.refuse("rule", "add", "10.1.2.3", "--rate", "2 packets/s")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nosuch"],
        ["add"],
        ["add", "10.1.2.3", "--nosuch"],
        ["add", "10.1.2.3", "--label", "x"],
        ["add", "10.1.2.3", "--wait", "61"],
        ["edit", "one"],
        ["edit", "one", "--unset", "target"],
        ["list", "--state", "fine"],
        ["export", "--json", "--ndjson"],
    ],
)
def test_wrong_use_is_2(netlimit: Netlimit, arguments: list[str]) -> None:
    done = netlimit.run("rule", *arguments)
    assert done.returncode == 2
    assert "Usage: " in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
