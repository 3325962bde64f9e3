"""`netlimit gateway`: who has reported, and forgetting one that is gone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from netlimit.records import HostStatus
from netlimit.store import Store
from tests.cli.running import Netlimit


def test_a_gateway_that_was_renamed_is_shown_as_gone_and_forgotten(served: Netlimit) -> None:
    store = Store(served.environment["NETLIMIT_DATABASE_URL"])
    store.report(HostStatus("old", "iptables"), datetime.now(UTC) - timedelta(hours=2))
    store.close()
    served.do("rule", "add", "10.1.2.3", "--action", "block", "--name", "everywhere")
    assert served.ask("rule", "show", "everywhere")["status"]["state"] == "applied"
    served.do("rule", "add", "10.1.2.4", "--action", "block", "--name", "there", "--host", "old", "--no-wait")
    table = [line.split() for line in served.do("gateway", "list").splitlines()]
    assert [(line[0], line[2], line[3], line[4]) for line in table if line[0] == "old"] == [("old", "0", "1", "gone")]
    assert "gone" in served.do("status")
    assert "`netlimit gateway forget old`" in served.do("status")

    assert "is not gone: its controller has reported" in served.refuse("gateway", "forget", "gw1")
    told = served.do("gateway", "forget", "old")
    assert told.startswith("Forgot the gateway old.\nRules still name old, and wait for a gateway of that name: ")
    assert [each["name"] for each in served.ask("gateway", "list")["items"]] == ["gw1"]
    assert "There is no gateway named 'old'; known are gw1." in served.refuse("gateway", "forget", "old")
