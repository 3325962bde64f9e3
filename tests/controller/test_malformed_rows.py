"""Rows that somebody has written by hand, or another version: that rule is in error, with what is wrong; all others
hold, and nothing ends."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Integer, create_engine, text
from sqlalchemy.engine import Engine

from api.representation import write_kept
from api.standing import judge
from netlimit.addresses import read_plain
from netlimit.errors import NetlimitError
from netlimit.malformed import Malformed
from netlimit.records import Counts as CountsOf
from netlimit.records import HostStatus, Outcome, RuleCounters, State
from netlimit.store.replica import Replica, take_snapshot
from netlimit.store.tables import Id, metadata
from netlimit.tree import SavedRoot
from tests.controller.conftest import Site

WRONG = {
    "target": ["garbage", "10.0.0.1/8", "10.0.0.1/99", ""],
    "action": ["garbage", "shape", "block"],
    "direction": ["sideways"],
    "protocol": ["garbage"],
    "ports": ["1-x", "99999", "9-1", "80"],
    "source_ports": ["x"],
    "interface": ["eth0 -j ACCEPT", ""],
    "rate": ["garbage", "0 packets/s", None],
    "burst": [-1, 0, 1_000_001],
    "per": ["garbage", "/99", None],
    "ceil": ["garbage"],
    "on_failure": ["never"],
    "expires_at": [2**62],
    "labels": ["{", '{"a": 1}', "[[1]]"],
}
UNTYPED = {
    "burst": "garbage",
    "revision": "x",
    "enabled": "garbage",
    "expires_at": "x",
    "comment": b"\xff",
    "name": b"x",
}
"""What SQLite keeps too, for it asks nobody what a column is for."""


def write(engine: Engine, statement: str, **values: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement), values)


@pytest.fixture
def engine(site: Site) -> Iterator[Engine]:
    engine = create_engine(site.store._database.url)
    yield engine
    engine.dispose()


def cases() -> list[tuple[str, object]]:
    return [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize(("column", "value"), cases())
def test_a_rule_that_cannot_be_read_is_in_error_and_all_others_hold(
    site: Site, engine: Engine, column: str, value: object
) -> None:
    spoil(site, engine, column, value)


@pytest.mark.parametrize("column", UNTYPED)
def test_nor_does_what_only_sqlite_keeps(site: Site, engine: Engine, column: str) -> None:
    spoil(site, engine, column, UNTYPED[column])


def spoil(site: Site, engine: Engine, column: str, value: object) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    bad = site.add(target="10.0.0.2", rate="5 packets/s", name="bad")
    write(engine, f"UPDATE rules SET {column} = :value WHERE id = {bad.id}", value=value)  # noqa: S608  our own names
    site.restart().sync()
    assert site.send("10.0.0.1", times=20).count("accept") == 3
    state = site.store.marked("gw")[bad.id]
    assert state.state is State.ERROR
    assert f"Replace rule {bad.id}, or delete it" in state.message
    kept = site.store.find(bad.id)
    assert kept is not None
    assert isinstance(kept.rule, Malformed)
    standing = judge(kept.rule, site.store.hosts(), {}, site.clock())
    assert write_kept(kept, standing)["status"]["state"] == "error"  # type: ignore[index]
    assert site.store.select()[1] == 2
    site.add(target="10.0.0.3", rate="4 packets/s")
    site.controller.sync()
    assert site.send("10.0.0.3", times=20).count("accept") == 4
    site.controller.plan()
    site.controller.account()
    site.store.remove(bad.id, "test", site.clock())
    site.controller.sync()
    assert site.store.marked("gw") == {}
    site.store.rollback(3, "test", site.clock())  # it comes back as it was
    site.controller.sync()
    if column in WRONG:
        assert site.store.marked("gw")[bad.id].state is State.ERROR
    site.store.replace(bad.id, bad, "test", site.clock())
    site.controller.sync()
    assert site.store.marked("gw") == {}
    assert site.send("10.0.0.2", times=20).count("accept") == 5


def test_the_number_of_what_no_kernel_can_be_told_is_forgotten(site: Site, engine: Engine) -> None:
    """A former version took such a burst: the rule may have gone since, but not what its rate was numbered for."""
    site.add(target="10.0.0.1", rate="3 packets/s")
    bad = site.add(target="10.0.0.2", rate="50 packets/s", burst=1_000_000)
    site.restart().sync()
    was, is_now = "1000000", "1000001"
    write(engine, "UPDATE numbers SET profile = replace(profile, :was, :now)", was=was, now=is_now)
    write(engine, "UPDATE rules SET burst = 1000001 WHERE burst = 1000000")
    site.restart().sync()
    assert site.store.marked("gw")[bad.id].state is State.ERROR
    site.store.remove(bad.id, "test", site.clock())
    site.add(target="10.0.0.3", rate="4 packets/s")
    site.restart().sync()
    assert site.store.marked("gw") == {}
    assert site.send("10.0.0.1", times=20).count("accept") == 3
    assert site.send("10.0.0.3", times=20).count("accept") == 4
    with engine.connect() as connection:
        kept = " ".join(connection.execute(text("SELECT profile FROM numbers")).scalars())
    assert is_now not in kept


def test_the_copy_and_the_snapshot_of_a_gateway_hold_it_too(site: Site, engine: Engine, tmp_path: Path) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    bad = site.add(target="10.0.0.2", rate="5 packets/s")
    write(engine, f"UPDATE rules SET target = 'garbage' WHERE id = {bad.id}")  # noqa: S608
    replica = Replica(tmp_path / "applied.db", "gw")
    replica.upgrade()
    assert replica.follow(site.store)
    held = {rule.id: rule for rule in replica.load("gw")[1]}
    assert isinstance(held[bad.id], Malformed)
    assert held[bad.id].fields["target"] == "garbage"
    assert len(take_snapshot(site.store, "gw", site.store.revision(), False).rules) == 2
    replica.close()


def fill(site: Site) -> None:
    """A row in every table."""
    store, now = site.store, site.clock()
    first = site.add(target="10.0.0.1", rate="3 packets/s", name="one", labels={"a": "b"}, hosts=["gw"])
    store.replace(first.id, first, "test", now)
    store.remove(site.add(target="10.0.0.9", rate="9 packets/s").id, "test", now)
    site.controller.sync()
    store.pause("other", True)
    store.count("gw", [RuleCounters(first.id, CountsOf(), CountsOf(), now, now)])
    store.count_requests("gw", {first.id: CountsOf(1, 1)}, now)
    store.assign("gw", {first.id: 1}, ())
    store.number("gw", {("g", "p"): 3}, ())
    store.save_root("gw", "eth0", SavedRoot(1, "htb", "00"))
    store.ask("gw", "counters", {"rules": []})
    store.add_token("t", "hash", "operator", now)
    store.open_window(600, "test", now)
    store.guarded("gw")
    store.repaired("gw", "chains", "found", 0.1, now)
    store.saw_client("gw", "192.0.2.7")
    store.put_limits("d", "{}", "application/json", "test", now)


def use(site: Site) -> None:
    """Everything that reads rows. What raises says so as netlimit does."""
    store = site.store
    asks = (
        lambda: store.hosts(),
        lambda: store.window(),
        lambda: store.audit(),
        lambda: store.revisions(),
        lambda: store.rules_at(1),
        lambda: store.difference(1, 2),
        lambda: store.tokens(),
        lambda: store.marked("gw"),
        lambda: store.exceptional_counts(),
        lambda: store.total_counters(),
        lambda: store.named_counters(10),
        lambda: store.questions("gw"),
        lambda: store.limits(),
        lambda: store.repairs("gw", 10),
        lambda: store.guards(),
        lambda: store.limiters("gw"),
        lambda: store.select(),
    )
    for ask in asks:
        try:
            ask()
        except NetlimitError:
            pass
        except AttributeError as error:
            if "'Store'" not in str(error):
                raise


def columns() -> list[tuple[str, str]]:
    return [
        (table.name, column.name)
        for table in metadata.sorted_tables
        for column in table.columns
        if table.name not in ("rules", "clock", "rule_hosts") and column.type is not Id and not column.foreign_keys
        and not (column.primary_key and isinstance(column.type, Integer))
    ]  # fmt: skip


def test_no_other_row_ends_a_controller_or_a_reader(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column after the other, in every table, with bytes, words and numbers."""
    fill(site)
    path = site.store._database.path
    assert path is not None
    spoiled = 0
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(":memory:")) as pristine:
        live.backup(pristine)
        for number, (table, column) in enumerate(columns()):
            for value in ((b"\xff\x00", "[1]"), ("garbage", -1))[number % 2]:
                try:
                    live.execute(f"UPDATE {table} SET {column} = ?", (value,))  # noqa: S608
                    live.commit()
                except sqlite3.Error:  # a unique key, or a trigger of the audit
                    live.rollback()
                    continue
                spoiled += 1
                look(site, monkeypatch, (table, column, value))
                pristine.backup(live)
    assert spoiled > 100


def look(site: Site, monkeypatch: pytest.MonkeyPatch, what: object) -> None:
    controller = site.restart()
    left = iter(range(1))
    monkeypatch.setattr(controller, "_back_off", lambda retry, stopped: retry)
    monkeypatch.setattr(controller, "_wait", lambda: None)
    controller.run(lambda: next(left, None) is None)
    assert controller._mishaps.count == 0, what
    site.clock.pass_by(seconds=60)
    assert site.send("10.0.0.1", times=20).count("accept") <= 3, what
    use(site)


ODD = [
    "10.77.0.1/24",
    "2001:db8:9::1%zone",
    "2001:db8::1%x\nadd nl-safe4 10.0.0.0/8",
    "2001:db8::/64%x",
    "010.1.1.1",
    "10.1.1.1/33",
    "1.2.3",
    "16909060",
    " 10.1.1.1",
    "10.1.1.1\n",
    "10.1.1.1\0",
    "10.1.1.1/ 32",
    "\uff11\uff10.1.1.1",
    "10.1.1.\u0661",
    "\ud800",
    "::ffff:10.1.0.9/1",
    "1" * 100_000,
    "2001:db8::1%" + "x" * 100_000,
    "",
    "/",
    "/24",
    "garbage",
]
"""Texts that some library takes for an address, and the kernel's tools do not; and what is none at all."""
MEANT = {"::ffff:10.1.0.9": "10.1.0.9", "2001:DB8:0::9": "2001:db8::9"}
"""And those that are one, written in another way."""


@pytest.mark.parametrize("text", [*ODD, *MEANT])
def test_addresses_are_read_as_the_kernel_takes_them(text: str) -> None:
    assert read_plain(text) == MEANT.get(text)


@pytest.mark.parametrize("value", [None, 7, 1.5, True, b"10.1.1.1", ["10.1.1.1"]])
def test_what_is_no_text_is_no_address(value: object) -> None:
    assert read_plain(value) is None


def put(site: Site, table: str, **values: object) -> None:
    """A row as somebody else may write it."""
    path = site.store._database.path
    assert path is not None
    with closing(sqlite3.connect(path)) as connection, connection:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        connection.execute(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))  # noqa: S608


def say_client(site: Site, text: str) -> None:
    shown = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    moment = int(site.clock().timestamp() * 1e6)
    put(site, "clients", host="gw", address=shown, seen_at=moment, since=moment, token="t", role="admin")


def say_host(site: Site, host: str, **said: object) -> None:
    """The report of a gateway, with something else in the place of some of its documents."""
    site.store.report(HostStatus(host, "fake"))
    path = site.store._database.path
    assert path is not None
    with closing(sqlite3.connect(path)) as connection, connection:
        for name, value in said.items():
            connection.execute(f"UPDATE hosts SET {name} = ? WHERE host = ?", (json.dumps(value), host))  # noqa: S608


def say_everything(site: Site, host: str, text: str) -> None:
    moment = site.clock().timestamp()
    say_host(
        site, host, own=[text], safe=[text], peers=[text], local=[text],
        safe_reasons={text: ["SSH session", moment]}, networks={text: ["lan"]},
    )  # fmt: skip


PLACES = {
    "a client": say_client,
    "another gateway": lambda site, text: say_everything(site, "other", text),
    "this gateway": lambda site, text: say_everything(site, "gw", text),
}


@pytest.mark.parametrize("text", ODD)
def test_one_text_that_is_no_address_keeps_no_rule_from_holding(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setattr("netlimit.store.unread._told", set())
    site.add(target="10.0.0.1", rate="3 packets/s")
    site.controller.sync()
    site.store.open_window(1, "test", site.clock())
    site.add(target="10.0.0.2", action="block")
    for place in PLACES:
        PLACES[place](site, text)
        look(site, monkeypatch, (place, text))
    assert "It is as if it had not been said" in caplog.text
    assert site.send("10.0.0.2") == ["drop"]
    assert are_plain(site)
    window = site.store.window()
    assert window is not None
    expired = site.store.expire(window, "test", site.clock())
    assert expired is not None
    assert expired.outcome is Outcome.EXPIRED
    look(site, monkeypatch, text)
    assert site.send("10.0.0.2") == ["accept"]
    assert site.store.duties("gw", -1, 0) is not None
    site.store.saw_client("gw", "192.0.2.7")
    assert [*site.store.clients("gw")] == ["192.0.2.7"], "what was none has gone"


def are_plain(site: Site) -> bool:
    """Whether all that goes into sets and rules is as the kernel takes it."""
    facts = site.controller._premises.facts
    described = site.controller._premises.describe()
    told = [*facts.peers, *facts.own, *map(str, facts.safe), *described["safe"], *described["peers"]]  # type: ignore[misc]
    return all(read_plain(each) == each for each in told)


@pytest.mark.parametrize("text", MEANT)
def test_what_is_written_in_another_way_is_who_is_meant(site: Site, text: str) -> None:
    say_host(site, "other", own=[text])
    site.controller.sync()
    site.controller.run(iter([False, True]).__next__)
    assert site.controller._premises.facts.peers == {MEANT[text]}


NUMBERS = [10**400, 1.5, -1, 2**63, 1e308, float("nan"), float("inf"), True, "7", [7], {}]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda each: str(each)[:12])
def test_no_number_in_a_report_ends_a_controller(site: Site, monkeypatch: pytest.MonkeyPatch, number: object) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    for host in ("gw", "other"):
        say_host(
            site, host, safe=["192.0.2.66"], safe_reasons={"192.0.2.66": ["SSH session", number]},
            management=[number], repairs={"sets": number}, applying={"0.1": number, "sum": number},
        )  # fmt: skip
    look(site, monkeypatch, number)
    told = [[each.management, each.repairs, each.applying, each.safe_reasons] for each in site.store.hosts()]
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize(
    ("column", "value"),
    [("seconds", 2**62), ("seconds", -(2**62)), ("opened_at", 253402300799999999), ("base", 2**62), ("base", -5)],
)
def test_no_number_in_a_window_ends_a_controller(
    site: Site, engine: Engine, monkeypatch: pytest.MonkeyPatch, column: str, value: int
) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    site.store.open_window(60, "test", site.clock())
    write(engine, f"UPDATE windows SET {column} = :value", value=value)  # noqa: S608
    look(site, monkeypatch, (column, value))
    window = site.store.window()
    assert window is not None
    assert window.deadline


@pytest.mark.parametrize(
    ("column", "value"),
    [("handle", -1), ("handle", 2**40), ("kind", "fq\ncodel"), ("kind", ""), ("options", "0"), ("options", "00 00")],
)
def test_a_root_that_no_kernel_can_have_is_not_put_back(site: Site, engine: Engine, column: str, value: object) -> None:
    site.store.save_root("gw", "eth0", SavedRoot(1, "htb", "00"))
    assert site.store.saved_roots("gw")
    write(engine, f"UPDATE saved_roots SET {column} = :value", value=value)  # noqa: S608
    assert site.store.saved_roots("gw") == {}


MORE_WRONG = {
    "target": ["10.0.0.1/\uff18", "10.0.0.1/+32", "10.0.0.1/3_2", " 10.0.0.1/32", "::1%lo/128", "10.0.0.1/32\n", "1/8"],
    "interface": ["eth0\n", "\uff45th0", "e" * 100],
    "ports": ["\uff18\uff10", "8_0", " 80"],
    "rate": ["\uff13 packets/s", "1" + "0" * 5000 + " packets/s", "3 packets/s\n-j ACCEPT"],
    "per": ["/\uff12\uff14"],
    "burst": [2**62],
    "labels": ['[["a", [1]]]', '[["a", 1]]', "[[" * 5000, '[["a", "\\ud800"]]', "{}"],
    "hosts": ["gw,", ",gw", "gw\n"],
    "name": ["a\nb", "x" * 100_000],
    "comment": ["a\nb\0"],
}


@pytest.mark.parametrize(("column", "value"), [(name, value) for name, some in MORE_WRONG.items() for value in some])
def test_no_text_in_a_rule_keeps_others_from_holding(
    site: Site, monkeypatch: pytest.MonkeyPatch, column: str, value: object
) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    bad = site.add(target="10.0.0.2", rate="5 packets/s", name="bad", protocol="tcp")
    path = site.store._database.path
    assert path is not None
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE rules SET {column} = ? WHERE id = ?", (value, bad.id))  # noqa: S608
    look(site, monkeypatch, (column, value))
    site.clock.pass_by(seconds=60)
    assert site.send("10.0.0.1", times=20).count("accept") == 3
    for rule in site.store.rules_at(site.store.revision()):
        hash(rule.rule.labels)
    judged = site.store.find(bad.id)
    assert judged is not None
    write_kept(judged, judge(judged.rule, site.store.hosts(), {}, site.clock()))
