"""A server that lags takes the place of the one that was asked before: numbers of revisions go back, and on again with
something else under them. Whoever knows the former has what the new one says soon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit import outage
from netlimit.controller import Controller, Setup
from netlimit.errors import Slow
from netlimit.forgotten import PREFIX
from netlimit.kernel.fake import FakeKernel
from netlimit.l7.assignments import Assignments
from netlimit.l7.document import parse_document
from netlimit.l7.sources import Sources
from netlimit.origins import TOKENS
from netlimit.records import HostStatus
from netlimit.rules import Rule, parse_rule
from netlimit.store import Store, open_replica
from tests.databases import Postgres

NOW = datetime.now(UTC)
"""The same on both servers: nothing is told from the time."""


class Pair:
    """A primary, and a replica that has all of it up to the moment at which this was made."""

    def __init__(self, server: Postgres, first: str) -> None:
        self.asked = Store(server.url(first))
        add(self.asked, "10.0.0.1")
        put(self.asked, "auth", 1)
        self.asked.close()
        self.name = f"lagging{next(server.numbers)}"
        server.run("postgres", f"CREATE DATABASE {self.name} TEMPLATE {first}")
        self.lagging = Store(server.url(self.name))

    def fail_over(self) -> None:
        """What was asked of the one is asked of the other, by the same process."""
        self.asked._database, self.lagging._database = self.lagging._database, self.asked._database


@pytest.fixture
def pair(postgres: Postgres, postgres_url: str, migrated: str) -> Iterator[Pair]:
    pair = Pair(postgres, migrated)
    yield pair
    pair.asked.close()
    pair.lagging.close()
    postgres.drop_database(pair.name)


def add(store: Store, target: str) -> Rule:
    return store.add([parse_rule({"target": target, "action": "block"}, NOW)], "test", NOW)[0]


def put(store: Store, domain: str, number: int) -> None:
    text = f"domain: {domain}\ndescriptors:\n- key: path\n  rate_limit: {{unit: second, requests_per_unit: {number}}}\n"
    store.put_limits(domain, text, "application/yaml", "test", NOW)


@pytest.mark.parametrize("more", [0, 1, 2], ids=["goes back", "same number", "goes on"])
def test_a_controller_and_its_copy_hold_what_the_new_server_says(
    pair: Pair, more: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And it tells what is out of force since."""
    replica = open_replica(tmp_path / "controller", "gw")
    controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"), replica=replica)
    add(pair.asked, "10.0.0.2")
    controller.sync()
    assert set(controller._compiled.fragments) == {1, 2}

    targets = ["10.0.0.1/32", *(f"10.0.0.{9 + number}/32" for number in range(more))]
    for target in targets[1:]:
        add(pair.lagging, target)
    pair.fail_over()
    controller.sync()
    assert sorted(str(each.target) for each in controller._store.load("gw")[1]) == sorted(targets)
    held = {key for fragment in controller._compiled.fragments.values() for key in fragment.keys}
    assert held == {target.removesuffix("/32") for target in targets}
    assert sorted(str(each.target) for each in replica.load("gw")[1]) == sorted(targets)
    (told,) = [note for note in controller._status.notes if note.startswith(PREFIX)]
    assert f"revision 2 is lost there (it is at {1 + more})" in told
    assert "Out of force are: rule 2: block from 10.0.0.2 any." in told
    assert told.count("In force are instead, or again: rule 2: block from 10.0.0.9 any") == bool(more)
    assert caplog.text.count("lost rule 2: block from 10.0.0.2 any") == caplog.text.count("is lost there") == 1
    add(pair.asked, "10.0.0.99")
    controller.sync()
    controller._load_all()
    assert controller._losses == (told,)
    assert told in controller._status.notes
    replica.close()


def test_what_was_removed_and_is_back_is_told(pair: Pair, tmp_path: Path) -> None:
    """By a controller that starts then, too."""
    with closing(open_replica(tmp_path / "controller", "gw")) as replica:
        pair.asked.remove(1, "test", NOW)
        add(pair.asked, "10.0.0.2")
        Controller(pair.asked, FakeKernel(), Setup("gw", "fake"), replica=replica).sync()
        pair.fail_over()
        controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"), replica=replica)
        controller.sync()
        (told,) = controller._losses
        assert "Out of force are: rule 2: block from 10.0.0.2 any." in told
        assert "In force are instead, or again: rule 1: block from 10.0.0.1 any." in told


def test_what_is_lost_of_other_gateways_is_not_told(pair: Pair, tmp_path: Path) -> None:
    with closing(open_replica(tmp_path / "controller", "gw")) as replica:
        controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"), replica=replica)
        elsewhere = parse_rule({"target": "10.0.0.2", "action": "block", "hosts": ["gw2"]}, NOW)
        pair.asked.add([elsewhere], "test", NOW)
        controller.sync()
        pair.fail_over()
        controller.sync()
        assert controller._losses == ()
        assert replica.revision() == 1


def test_a_slow_server_that_takes_the_place_tells_what_is_lost_too(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told beside, and nothing is loaded anew."""
    with closing(open_replica(tmp_path / "controller", "gw")) as replica:
        controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"), replica=replica)
        add(pair.asked, "10.0.0.2")
        controller.sync()
        monkeypatch.setattr(outage, "QUICK_SECONDS", -1.0)
        controller._lose_database(Slow("The database answers too slowly."), 0.0)
        pair.fail_over()
        end = time.monotonic() + 60
        while not controller._losses:
            assert time.monotonic() < end
            controller.tick()
        assert "Out of force are: rule 2: block from 10.0.0.2 any." in controller._losses[0]
        assert set(controller._compiled.fragments) == {1}
        controller._outage.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("more", [0, 1, 2], ids=["goes back", "same number", "goes on"])
def test_no_rule_of_the_new_server_counts_as_applied_for_what_the_former_had(pair: Pair, more: int) -> None:
    """A controller tells how it stands before it has read anything anew."""
    controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"))
    add(pair.asked, "10.0.0.2")
    controller.sync()
    assert pair.asked.hosts()[0].applied_revision == 2

    for number in range(more):
        add(pair.lagging, f"10.0.0.{9 + number}")
    pair.fail_over()
    controller._try_database()
    assert pair.asked.hosts()[0].applied_revision == 0
    controller._report()
    assert pair.asked.hosts()[0].applied_revision == 0
    controller.sync()
    assert pair.asked.hosts()[0].applied_revision == 1 + more


def test_who_learns_the_stamp_of_what_is_applied_tells_it(pair: Pair) -> None:
    """Whoever has started from the copy knows a number alone."""
    controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"))
    controller.sync()
    controller._report(stamp=0)
    assert pair.asked.hosts()[0].applied_revision == 0
    controller.sync()
    controller._report()
    assert pair.asked.hosts()[0].applied_revision == 1


def test_an_earlier_revision_of_the_same_server_counts_as_applied(pair: Pair) -> None:
    controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"))
    controller.sync()
    add(pair.asked, "10.0.0.2")
    controller._report()
    assert pair.asked.hosts()[0].applied_revision == 1


@pytest.mark.parametrize("more", [0, 1, 2], ids=["goes back", "same number", "goes on"])
def test_the_limiter_has_the_documents_of_the_new_server(pair: Pair, more: int) -> None:
    sources = Sources(database=pair.asked)
    put(pair.asked, "auth", 77)
    sources.refresh()
    assert "77" in str(sources._rows.good["auth"].root)  # type: ignore[union-attr]

    for number in range(more):
        put(pair.lagging, "auth", 5 + number)
    pair.fail_over()
    sources.refresh()
    assert sources._rows.good["auth"] == read_anew(pair.asked)  # type: ignore[union-attr]


@pytest.mark.parametrize("more", [0, 1, 2, 3], ids=["goes back", "same number", "goes on", "goes beyond"])
def test_the_limiter_tells_which_documents_are_lost_until_they_are_put_anew(
    pair: Pair, more: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes by what the new server has all the same."""
    sources = Sources(database=pair.asked)
    put(pair.asked, "auth", 77)
    put(pair.asked, "login", 5)
    sources.start()

    for number in range(more):
        put(pair.lagging, f"more{number}", 6)
    pair.fail_over()
    sources.refresh()
    assert "login" not in sources.rules.domains
    (told,) = sources.troubles
    assert "Gone, so that all passes which no file limits, are those of: 'login'." in told
    assert "Others than before are those of: 'auth'." in told
    back = ["more0", "more1"][:more]  # as far as revisions tell
    said = f"In force again, or besides, are those of: {', '.join(map(repr, back))}."
    assert (said in told) == bool(back)
    assert "'more2'" not in told
    assert "`netlimit limits put`" in told
    assert TOKENS in told
    errors = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert errors == [told]
    (login,) = [each for each in caplog.messages if each.startswith("Lost limits of the domain 'login': ")]
    lost = parse_document(login.split(": ", 1)[1], is_json=True)

    caplog.clear()
    put(pair.asked, "more9", 6)
    sources.refresh()
    assert (sources.troubles, caplog.records) == ((told,), [])
    pair.asked.put_limits("login", login.split(": ", 1)[1], "application/json", "test", NOW)
    sources.refresh()
    assert sources._rows.good["login"].root == lost.root  # type: ignore[union-attr]
    assert "'login'" not in " ".join(sources.troubles)
    assert "Others than before are those of: 'auth'." in " ".join(sources.troubles)
    put(pair.asked, "auth", 77)
    for domain in back:
        pair.asked.remove_limits(domain, "test", NOW)
    sources.refresh()
    assert sources.troubles == ()
    assert [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")] == []


def test_the_limiter_tells_what_is_in_force_again(pair: Pair) -> None:
    """It was removed, and the server has not heard of it."""
    sources = Sources(database=pair.asked)
    put(pair.asked, "login", 5)
    pair.asked.remove_limits("auth", "test", NOW)
    sources.start()
    pair.fail_over()
    sources.refresh()
    (told,) = sources.troubles
    assert "In force again, or besides, are those of: 'auth'." in told
    pair.asked.remove_limits("auth", "test", NOW)
    put(pair.asked, "login", 5)
    sources.refresh()
    assert sources.troubles == ()


def test_the_limiter_tells_nothing_where_no_document_is_lost(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    sources = Sources(database=pair.asked)
    sources.start()
    add(pair.asked, "10.0.0.2")
    pair.fail_over()
    sources.refresh()
    put(pair.asked, "auth", 7)
    put(pair.asked, "login", 7)
    pair.asked.remove_limits("login", "test", NOW)
    sources.refresh()
    assert sources.troubles == ()
    assert [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")] == []


def test_a_controller_tells_what_is_lost_besides_rules(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """A token that was revoked is good again; nobody would look without being told."""
    pair.asked.add_token("leaked", "hash", "admin", NOW, None, None, "test")
    controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"))
    controller.tick()
    controller._due["heartbeat"] = 0.0
    controller.tick()
    assert controller._losses == ()

    pair.fail_over()
    for _ in range(2):
        controller._due["heartbeat"] = 0.0
        controller.tick()
    (told,) = [note for note in pair.asked.hosts()[0].notes if note.startswith(PREFIX)]
    assert controller._losses == (told,)
    assert TOKENS in told
    assert caplog.text.count(told) == 1


def test_what_is_lost_while_a_gateway_is_paused_is_told_then_and_afterwards(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"))
    for store in (pair.lagging, pair.asked):
        store.report(HostStatus(host="gw", backend="fake"))
        store.pause("gw", True)
    put(pair.asked, "auth", 2)
    controller.tick()
    assert pair.asked.hosts()[0].paused

    def tell() -> list[str]:
        controller._due["heartbeat"] = 0.0
        controller.tick()
        return [note for note in pair.asked.hosts()[0].notes if note.startswith(PREFIX)]

    assert tell() == []
    pair.fail_over()
    tell()
    (told,) = tell()
    assert tell() == [told], "once"
    assert caplog.text.count(told) == caplog.text.count("Paused by teardown") == 1
    pair.asked.pause("gw", False)
    assert tell() == [told]
    assert not pair.asked.hosts()[0].paused
    pair.asked.pause("gw", True)
    tell()
    assert controller._losses == (), "a teardown that comes afterwards ends it, as ever"


def test_a_loss_of_rules_is_not_told_once_more_for_what_else_is_lost(pair: Pair, tmp_path: Path) -> None:
    with closing(open_replica(tmp_path / "controller", "gw")) as replica:
        controller = Controller(pair.asked, FakeKernel(), Setup("gw", "fake"), replica=replica)
        add(pair.asked, "10.0.0.2")
        controller.tick()
        pair.fail_over()
        for _ in range(2):
            controller._due["heartbeat"] = 0.0
            controller.tick()
        (told,) = controller._losses
        assert "Out of force are: rule 2" in told
        assert TOKENS in told


def read_anew(store: Store) -> object:
    fresh = Sources(database=store)
    fresh.refresh()
    return fresh._rows.good["auth"]  # type: ignore[union-attr]


@pytest.mark.parametrize("more", [0, 1, 2], ids=["goes back", "same number", "goes on"])
def test_the_limiter_enforces_the_rules_of_the_new_server(pair: Pair, more: int) -> None:
    for store in (pair.asked, pair.lagging):
        store.report(HostStatus(host="gw", backend="l7"))
    pair.asked.assign("gw", {1: 1, 2: 2, 3: 3}, ())
    serial = pair.asked.assigned("gw").serial
    assignments = Assignments(pair.asked, "gw")
    add(pair.asked, "10.0.0.2")
    assignments.refresh()
    assert set(assignments._known) == {1, 2}

    targets = {"10.0.0.1/32", *(f"10.0.0.{9 + number}/32" for number in range(more))}
    for target in sorted(targets)[1:]:
        add(pair.lagging, target)
    pair.lagging.assign("gw", {1: 1, 2: 2, 3: 3}, ())
    pair.fail_over()
    assert serial != pair.asked.assigned("gw").serial
    assignments.refresh()
    assert {str(rule.target) for rule in assignments._known.values()} == targets
