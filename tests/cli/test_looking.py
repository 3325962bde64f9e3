"""status, counters, top, explain: how things stand, from the API."""

from __future__ import annotations

import os
import re
import threading
from contextlib import closing
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from netlimit.cli.standing import tell_safe
from netlimit.store import Store
from tests.cli.running import Netlimit, settings_in, until
from tests.ports import free_port


def test_status(served: Netlimit) -> None:
    found = served.ask("status")
    assert [host["host"] for host in found["hosts"]] == ["gw1"]
    assert found["wanted_revision"] == found["applied_revision"]
    lines = served.do("status").splitlines()
    assert lines[0] == "Rules: 0"
    assert lines[1] == f"Revision: {found['wanted_revision']} wanted, {found['wanted_revision']} applied"
    assert lines[-1].split()[:7] == ["gw1", "fake", str(found["wanted_revision"]), "0", "of", "0", "0"]


def test_status_tells_what_of_whom_no_rule_touches() -> None:
    reasons = {"192.0.2.0/24": "settings", "10.2.0.1": "default gateway", "10.3.0.1": "database host"}
    assert [*tell_safe("gw1", reasons)] == [
        "No rule touches, on gw1: 192.0.2.0/24 (settings).",
        "No rule touches what gw1 itself exchanges with: 10.2.0.1 (default gateway), 10.3.0.1 (database host).",
    ]
    assert [*tell_safe("gw1", {})] == []


def test_counters(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--name", "one")
    assert served.ask("counters", "one")["matched_packets"] == 0
    assert served.do("counters", "one")


def test_top(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--name", "one")
    frame = served.ask("top", "--every", "0.2")
    assert frame["offenders"] == []
    assert [(flow["name"], flow["dropped_packets"]) for flow in frame["rules"]] == [("one", 0)]
    printed = served.do("top", "one", "--once", "--every", "0.2")
    assert "No host loses packets to a limit." in printed
    assert "drop 10.1.2.3 from 200 packets/s per host" in printed
    assert "There is no rule named 'two'" in served.refuse("top", "two", "--once")


def test_what_is_shaped_is_shown_with_what_waits(served: Netlimit) -> None:
    limit = ("--rate", "5 Mbit/s", "--ceil", "20 Mbit/s", "--per", "host", "--direction", "to", "--action", "shape")
    added = served.do("rule", "add", "10.50.0.0/16", *limit, "--name", "guests")
    assert added.endswith("(guests): shape 10.50.0.0/16 to 5 Mbit/s up to 20 Mbit/s per host: applied by tc.\n")
    assert "applied by tc" in served.do("rule", "show", "guests")
    assert "5 Mbit/s up to 20 Mbit/s per host" in served.do("rule", "list")
    counted = served.do("counters", "guests").splitlines()
    assert [line.split()[:1] for line in counted[2:6]] == [["matched"], ["dropped"], ["delayed"], ["waiting"]]
    found = served.ask("counters", "guests")
    assert (found["delayed"], found["queued_packets"], found["queued_bytes"]) == (0, 0, 0)


def test_top_tells_limits_and_queues_apart(served: Netlimit) -> None:
    shape = ("--action", "shape", "--per", "host")
    served.do("rule", "add", "10.50.0.0/16", "--rate", "5 Mbit/s", "--direction", "to", *shape, "--name", "guests")
    served.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--name", "one")
    frame = served.ask("top", "--every", "0.2")
    assert {(flow["name"], flow["sent_bits"], flow["queued_bytes"]) for flow in frame["rules"]} == {
        ("guests", 0, 0),
        ("one", 0, 0),
    }
    lines = served.do("top", "--once", "--every", "0.2").splitlines()
    titles = [line for line in lines if line.startswith(("ID", " ID"))]
    assert ["RULE" in titles[0], "QUEUE" in titles[1], len(titles)] == [True, True, 2]
    assert "SENT Mbit/s DROPPED/s DELAYED/s WAITING BYTES" in " ".join(titles[1].split())


def test_a_rule_with_a_note_is_applied(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.2.3", "--rate", "5 Mbit/s", "--action", "shape", "--name", "one", "--wait", "60")
    (row,) = (line for line in served.do("rule", "list").splitlines() if " one " in line)
    shown = served.ask("rule", "show", "one")["status"]
    assert (shown["state"], row.endswith("applied, with a note")) == ("applied", bool(shown["message"]))


def test_explain(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--name", "office")
    packet = ("--src", "10.1.2.3", "--dst", "192.0.2.1", "--protocol", "udp", "--port", "53")
    found = served.ask("explain", *packet)
    assert (found["verdict"], [step["name"] for step in found["steps"]]) == ("limited", ["office"])
    assert served.do("explain", *packet).startswith("The packet is limited.\nhits office")
    assert "not of one family" in served.refuse("explain", "--src", "10.1.2.3", "--dst", "::2")


def test_a_token_that_is_wrong_says_what_to_set(served: Netlimit) -> None:
    said = served.refuse("status", NETLIMIT_TOKEN="wrong")
    assert "The token is not known" in said
    assert "NETLIMIT_TOKEN" in said


def test_after_a_restore_on_another_machine_it_says_what_to_run(served: Netlimit, directory: Path) -> None:
    """The database has the tokens of the former machine, and no file here has the text of one."""
    backup, new = directory / "backup", Netlimit(settings_in(directory))
    served.do("backup", str(backup))
    new.do("restore", str(backup))
    server = new.start("serve", *(("--api-user", "nobody") if os.geteuid() == 0 else ()))
    until(lambda: server.ended or "A token is needed" in new.run("status").stderr, server.said)
    said = new.refuse("status")
    assert "admin.token" not in said, "nothing has written one here"
    (advised,) = re.findall(r"`export NETLIMIT_TOKEN=\$\((.*)\)`", said)
    token = new.do(*advised.replace("NAME", "ann").split()[1:]).strip()
    assert new.run("status", NETLIMIT_TOKEN=token).returncode == 0
    stale = directory / "database/admin.token"
    stale.write_text("nl_" + "x" * 12 + "_" + "y" * 43)
    stale.chmod(0o600)
    assert f"The one in {stale} is not known to this database, as after a restore" in new.refuse("status")
    server.end()


def test_a_restore_tells_of_an_open_window_whose_end_undoes_it(served: Netlimit, tmp_path: Path) -> None:
    backup = str(tmp_path / "backup")
    served.do("rule", "add", "10.1.2.3", "--action", "block", "--no-wait")
    served.do("backup", backup)
    assert served.ask("restore", backup, "--force")["warnings"] == []
    with closing(Store(served.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.open_window(600, "test", datetime.now(UTC))
    try:
        assert served.do("restore", backup, "--force").splitlines()[-1].startswith("A window of confirmation is open")
        assert len(served.ask("restore", backup, "--force")["warnings"]) == 1
        assert "but for the limiter's documents, is undone" in served.do("restore", backup, "--force")
    finally:
        served.do("confirm")


def test_a_backup_of_an_open_window_says_so_and_so_does_its_restore(
    served: Netlimit, directory: Path, tmp_path: Path
) -> None:
    """What was changed in it comes back, though nobody has confirmed it: no window comes with it."""
    path = str(tmp_path / "backup")
    with closing(Store(served.environment["NETLIMIT_DATABASE_URL"])) as store:
        window = store.open_window(600, "ann", datetime.now(UTC))
    try:
        served.do("rule", "add", "10.1.2.3", "--action", "block", "--no-wait")
        assert "holds what nobody has confirmed" in served.do("backup", path)
    finally:
        served.do("confirm")
    assert served.ask("backup", str(tmp_path / "later"))["warnings"] == []
    (said,) = Netlimit(settings_in(directory)).ask("restore", path)["warnings"]
    assert f"that ann had opened: what changed since revision {window.base}" in said


def test_of_a_line_with_two_mistakes_there_is_one_line(served: Netlimit) -> None:
    rules = [f'{{"target": "10.1.2.{n}", "action": "block", "name": "n{n}"}}' for n in range(1, 41)]
    served.do("rule", "import", "-", "--no-wait", given="\n".join(rules))
    said = served.refuse("rule", "import", "-", given="\n".join(rules))
    assert said.startswith("netlimit: 40 lines are wrong, and nothing was kept.\nLine 1: ")
    assert served.refuse("rule", "import", "-", given=rules[0]).count("netlimit: ") == 1


def test_without_a_token_file_the_token_must_be_set(served: Netlimit, netlimit: Netlimit) -> None:
    said = served.refuse("status", NETLIMIT_DATABASE_URL=netlimit.environment["NETLIMIT_DATABASE_URL"])
    assert said.startswith("netlimit: A token is needed")
    assert "NETLIMIT_TOKEN" in said


def test_nobody_answers(netlimit: Netlimit) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = netlimit.refuse("status", NETLIMIT_URL=url)
    assert f"No API answers at {url}" in said
    assert "netlimit serve" in said


def test_somebody_else_answers(netlimit: Netlimit) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        said = netlimit.refuse("status", NETLIMIT_URL=f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
        thread.join()
    assert "is not netlimit's API" in said
