"""A root qdisc of somebody else makes way for ours, and is there again afterwards, on the real kernel."""

from __future__ import annotations

import os
import shlex

import pytest

from tests.cli.running import Netlimit, until
from tests.cli.test_host import look, snapshot

SHAPE = ("--direction", "to", "--interface", "wan", "--action", "shape", "--name", "cap")


@pytest.fixture
def uplink(gateway: Netlimit) -> Netlimit:
    """A gateway with one device, `wan`."""
    for command in (
        "sysctl -qw net.ipv6.conf.default.disable_ipv6=1",
        "ip link add wan type veth peer name peer",
        "ip address add 192.0.2.1/24 dev wan",
        "ip link set wan up",
        "ip link set peer up",
    ):
        look(gateway, *command.split())
    return gateway


def put(gateway: Netlimit, qdisc: str) -> str:
    """Put a root qdisc on `wan`, as somebody else would; what tc then shows."""
    look(gateway, *f"tc qdisc replace dev wan root handle 1: {qdisc}".split())
    return look(gateway, "tc", "qdisc", "show", "dev", "wan")


def add_cap(gateway: Netlimit) -> dict[str, str]:
    """A rule for all that leaves by `wan`; how it stands."""
    rule = gateway.ask("rule", "add", "0.0.0.0/0", "--rate", "50 Mbit/s", "--per", "target", *SHAPE, "--wait", "60")
    return dict(rule["status"])


@pytest.mark.parametrize("qdisc", ["pfifo limit 77", "tbf rate 10mbit burst 20kb limit 30kb"])
def test_teardown_puts_back_what_was_taken_over(uplink: Netlimit, qdisc: str) -> None:
    shown = put(uplink, qdisc)
    before = snapshot(uplink)
    server = uplink.serve()
    status = add_cap(uplink)
    assert status["state"] == "error"
    assert "netlimit apply --take-over wan" in status["message"]
    assert look(uplink, "tc", "qdisc", "show", "dev", "wan") == shown

    assert uplink.do("apply", "--take-over", "wan").endswith("1 rule in force here.\n")
    until(lambda: uplink.ask("rule", "show", "cap")["status"]["enforced_by"] == "tc")
    assert "6e0" in look(uplink, "tc", "qdisc", "show", "dev", "wan")
    assert uplink.do("plan") == "Nothing to do.\n"

    uplink.do("teardown")
    assert look(uplink, "tc", "qdisc", "show", "dev", "wan") == shown
    assert snapshot(uplink) == before
    said = uplink.do("apply")
    assert "which netlimit leaves alone" in said, "it was put back, and is theirs again"
    assert said.endswith("0 rules in force here, 1 in error.\n")
    server.end()
    uplink.do("teardown")


def test_the_last_rule_that_goes_puts_it_back(uplink: Netlimit) -> None:
    shown = put(uplink, "pfifo limit 77")
    server = uplink.serve()
    add_cap(uplink)
    uplink.do("apply", "--take-over", "wan")
    until(lambda: uplink.ask("rule", "show", "cap")["status"]["enforced_by"] == "tc")
    uplink.do("rule", "remove", "cap")  # perhaps before the controller has seen what `apply` has done beside it
    until(lambda: look(uplink, "tc", "qdisc", "show", "dev", "wan") == shown)
    assert add_cap(uplink)["state"] == "error"
    server.end()
    uplink.do("teardown")


@pytest.mark.parametrize(
    ("qdisc", "said"),
    [
        ("htb default 1", "wan cannot be taken over: htb 1: keeps more than can be read and put back."),
        (None, "Nobody else has put a qdisc on wan: there is nothing to take over."),
        ("gone", "There is no device eth7 here; there are peer, wan."),
    ],
)
def test_what_cannot_be_taken_over(uplink: Netlimit, qdisc: str | None, said: str) -> None:
    uplink.do("db", "upgrade")
    if qdisc not in (None, "gone"):
        put(uplink, str(qdisc))
    before = snapshot(uplink)
    device = "eth7" if qdisc == "gone" else "wan"
    assert said in uplink.refuse("apply", "--take-over", device)
    assert snapshot(uplink) == before


def test_what_is_taken_over_has_no_window(uplink: Netlimit) -> None:
    """Nobody would put it back when the window ends."""
    uplink.do("db", "upgrade")
    before = snapshot(uplink)
    done = uplink.run("apply", "--take-over", "wan", "--confirm", "60s")
    assert (done.returncode, "`netlimit teardown` puts it back" in done.stderr) == (2, True)
    assert snapshot(uplink) == before


def test_where_no_rule_shapes_nothing_is_taken_over(uplink: Netlimit) -> None:
    uplink.do("db", "upgrade")
    put(uplink, "pfifo limit 77")
    before = snapshot(uplink)
    said = uplink.refuse("apply", "--take-over", "wan")
    assert said == ("netlimit: No rule shapes on wan, so what is there stays. Add the rule first, then take over.\n")
    assert snapshot(uplink) == before
    server = uplink.serve()
    assert add_cap(uplink)["state"] == "error", "nothing was kept that would let a later pass take it over"
    server.end()


def test_teardown_says_what_only_the_database_knew(uplink: Netlimit) -> None:
    put(uplink, "pfifo limit 77")
    server = uplink.serve()
    add_cap(uplink)
    uplink.do("apply", "--take-over", "wan")
    server.end()
    database = uplink.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite://")
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(database + suffix):
            os.remove(database + suffix)
    done = uplink.run("teardown")
    assert done.returncode == 0, done
    assert "What others had on wan before `netlimit apply --take-over`" in done.stderr
    assert "6e0" not in look(uplink, *shlex.split("tc qdisc show dev wan"))


def test_teardown_takes_away_what_shapes_incoming_traffic(uplink: Netlimit) -> None:
    before = snapshot(uplink)
    server = uplink.serve()
    rule = uplink.ask("rule", "add", "192.0.2.1", "--rate", "5 Mbit/s", "--direction", "to", "--action", "shape")
    assert rule["status"]["enforced_by"] == "tc", rule
    assert "nl-in" in look(uplink, "ip", "link")
    uplink.do("teardown")
    server.end()
    assert snapshot(uplink) == before
    assert "nl-in" not in look(uplink, "ip", "link")
