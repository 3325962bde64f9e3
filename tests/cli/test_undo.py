"""Undoing on the command line: what it prints, as text and as JSON, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import closing
from dataclasses import replace

import pytest

from netlimit.kernel.lock import is_locked
from netlimit.records import Outcome
from netlimit.store import Store
from tests.cli.running import Netlimit, until


def test_it_returns_to_a_revision(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s", "--name", "one")
    first = served.ask("revisions", "--limit", "1")[0]
    assert (first["action"], first["actor"], first["rules"], first["returned_to"]) == ("add", "bootstrap", 1, None)
    served.do("rule", "edit", "one", "--rate", "5 packets/s")
    served.do("rule", "add", "10.1.2.4", "--action", "block", "--name", "two")
    last = first["revision"] + 2
    changed, added = served.ask("diff", str(first["revision"]))
    assert (changed["kind"], changed["fields"]) == (
        "changed",
        {"rate": {"before": "200 packets/s", "after": "5 packets/s"}},
    )
    assert (added["kind"], added["fields"]["name"]) == ("added", {"before": None, "after": "two"})
    printed = served.do("diff", str(last), str(first["revision"])).splitlines()
    assert printed[1:] == [
        "    rate: 5 packets/s -> 200 packets/s",
        f"- rule {added['rule']} (two): block from 10.1.2.4 any",
    ]
    said = served.do("rollback", str(first["revision"]))
    assert said == f"Revision {first['revision']} is back, as revision {last + 1}: the kernel holds it.\n"
    assert f"rollback to {first['revision']}, 2 rules" in served.do("revisions")
    assert served.do("diff", str(first["revision"])) == "The rules are the same.\n"
    again = served.ask("rollback", str(first["revision"]))
    assert again == {"returned_to": first["revision"], "revision": last + 1, "applied": "applied", "warnings": []}


def test_what_was_forced_is_brought_back_only_by_force(served: Netlimit) -> None:
    assert "nearly every IPv4 address" in served.refuse("rule", "add", "0.0.0.0/0", "--action", "block")
    forced = served.ask("rule", "add", "10.1.2.5", "--action", "block", "--name", "five", "--force")
    assert forced["forced_by"] == "bootstrap"
    revision = served.ask("revisions", "--limit", "1")[0]["revision"]
    exported = served.do("rule", "export", "--ndjson")
    assert '"forced_by": "bootstrap"' in exported
    served.do("rule", "remove", "five")
    assert "was forced by bootstrap" in served.refuse("rollback", str(revision))
    served.do("rollback", str(revision), "--force")
    assert served.ask("rule", "show", "five")["forced_by"] == "bootstrap"
    assert "was forced by bootstrap" in served.refuse("rule", "edit", "five", "--protocol", "tcp")
    served.do("rule", "edit", "five", "--unset", "forced_by")
    assert served.ask("rule", "edit", "five", "--protocol", "tcp")["forced_by"] is None
    served.do("rule", "remove", "five", "--force")


def test_a_window_is_confirmed_or_abandoned(served: Netlimit) -> None:
    before = served.ask("revisions", "--limit", "1")[0]["revision"]
    assert served.ask("apply", "--confirm", "5m")["confirm_within"] == 300
    assert "has opened a window of confirmation already" in served.refuse("apply", "--confirm", "60s")
    confirmed = served.ask("confirm")
    assert (confirmed["base"], confirmed["outcome"]) == (before, "confirmed")
    assert "was confirmed" in served.refuse("confirm")
    served.do("apply", "--confirm", "60s")
    served.do("rule", "add", "10.1.2.4", "--action", "block")
    assert served.do("rollback") == f"Revision {before} is back, as revision {before + 2}: the kernel holds it.\n"
    assert served.ask("rule", "list")["items"] == []


def test_who_confirms_hears_whose_window_it_was_and_can_say_which(served: Netlimit) -> None:
    late = served.ask("apply", "--confirm", "5m")["opened_at"]
    served.do("rollback")
    opened = served.ask("apply", "--confirm", "5m")["opened_at"]
    assert "root on gw1 has opened another one since" in served.refuse("confirm", "--opened-at", late)
    said = served.do("confirm", "--opened-at", opened)
    assert re.search(r"^Confirmed: .* root on gw1 had opened the window at \d\d:\d\d:\d\d UTC\.\n$", said)
    assert served.run("confirm", "--opened-at", "soon").returncode == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to take away")
def test_who_may_not_look_at_the_kernel_confirms_all_the_same(netlimit: Netlimit) -> None:
    """Root in a container, say: the window is confirmed, so that is what is said."""
    netlimit.do("db", "upgrade")
    with closing(Store(netlimit.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.open_window(600, "test", store.now())
        without = ("setpriv", "--bounding-set", "-net_admin,-net_raw", "--inh-caps", "-net_admin,-net_raw")
        weak = replace(netlimit, environment={**netlimit.environment, "NETLIMIT_BACKEND": "iptables"}, before=without)
        done = weak.run("confirm")
        window = store.window()
    assert done.returncode == 0, done
    assert "Confirmed: " in done.stdout
    assert "The copy of the applied rules stays as it was" in done.stderr
    assert window is not None
    assert window.outcome is Outcome.CONFIRMED


def test_changes_tell_of_an_open_window(served: Netlimit) -> None:
    served.do("rule", "add", "10.1.2.8", "--action", "block", "--name", "before")
    revision = served.ask("revisions", "--limit", "1")[0]["revision"]
    served.do("apply", "--confirm", "1h")
    said = r"A window of confirmation is open until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, opened by root on gw1: "
    said += r"unless it is confirmed, this change is undone\.\n$"
    assert re.search(said, served.do("rule", "add", "10.1.2.4", "--action", "block", "--name", "four"))
    assert re.search(said, served.do("rule", "edit", "four", "--disable"))
    assert re.search(said, served.do("rule", "import", "-", given='[{"target": "10.1.2.5", "action": "block"}]'))
    assert re.search(r"^Removed rule four\. " + said, served.do("rule", "remove", "four"))
    assert len(served.ask("rule", "remove", "before")["warnings"]) == 1
    assert re.search(said, served.do("rollback", str(revision)))
    assert "window" not in served.do("rollback")
    served.do("rule", "remove", "before")


def test_without_a_revision_or_a_window_it_is_used_wrongly(netlimit: Netlimit) -> None:
    netlimit.do("db", "upgrade")
    done = netlimit.run("rollback")
    assert done.returncode == 2
    assert "Say which revision" in done.stderr.replace("\n", " ")
    assert "There is no revision 7 yet; the newest is 0." in netlimit.refuse("rollback", "7")
    assert "There is no revision 7 yet" in netlimit.refuse("diff", "7")
    assert "none has been" in netlimit.refuse("confirm")
    assert netlimit.ask("revisions") == []


@pytest.mark.parametrize("length", ["0s", "25h", "soon", "-1", "1.5s"])
def test_a_length_that_is_none_is_refused(netlimit: Netlimit, length: str) -> None:
    done = netlimit.run("apply", f"--confirm={length}")
    assert done.returncode == 2
    assert "is no length of a window" in done.stderr


@pytest.mark.parametrize("ahead", [7200, -7200])
def test_a_guard_whose_clock_is_wrong_leaves_a_window_its_time(netlimit: Netlimit, ahead: int) -> None:
    netlimit.do("db", "upgrade")
    store = Store(netlimit.environment["NETLIMIT_DATABASE_URL"])
    store.open_window(3600, "test", store.now())
    guard = netlimit.start(str(ahead), "guard", program=(sys.executable, "-m", "tests.cli.ahead"))
    until(lambda: "comes back in" in guard.said(), guard.said)
    window = store.window()
    guard.end(signal.SIGKILL)
    store.close()
    assert window is not None
    assert window.outcome is None
    found = re.search(r"revision 0 comes back in (-?\d+) s", guard.said())
    assert found is not None
    assert 0 < int(found[1]) <= 3600


def test_one_guard_waits_for_the_other(netlimit: Netlimit) -> None:
    netlimit.do("db", "upgrade")
    lock = (
        netlimit.environment["NETLIMIT_DATABASE_URL"]
        .removeprefix("sqlite:///")
        .replace("netlimit.db", "controller/guard.lock")
    )
    first = netlimit.start("guard")
    until(lambda: is_locked(lock, "look"), first.said)
    second = netlimit.start("guard")
    first.end()
    until(lambda: is_locked(lock, "look"), second.said)
    assert not second.ended
    assert second.end() == 0
    assert "Traceback" not in second.said()
