"""The window of confirmation in the database."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from netlimit.judgement import NeedsForce, refuse
from netlimit.lockout import Havens
from netlimit.rates import parse_rate
from netlimit.records import Actor, HostStatus, Outcome, Window
from netlimit.rules import Action, Direction
from netlimit.store import ConcernsOthers, NoSuchRevision, NoWindow, Store, WindowOpen
from netlimit.store.tables import guards, windows
from tests.store.examples import NOW, keep, rule

SOON = NOW + timedelta(seconds=60)
ADMIN = Actor("admin", "192.0.2.1", "request-7")


def actions(store: Store) -> list[str]:
    return [entry.action for entry in reversed(store.audit())]


def test_what_is_not_confirmed_is_undone(store: Store) -> None:
    keep(store)
    window = store.open_window(60, ADMIN, NOW)
    assert store.window() == window == Window(1, NOW, 60, "admin")
    keep(store, "10.0.0.2")
    store.remove(1, "test", NOW)
    ended = store.expire(window, "guard", SOON)
    assert ended == store.window() == Window(1, NOW, 60, "admin", (), Outcome.EXPIRED, SOON, 4)
    assert [each.rule.id for each in store.select()[0]] == [1]
    assert actions(store) == ["add", "open-window", "add", "remove", "rollback", "add", "remove", "expire-window"]
    opened = store.audit()[-2]
    assert (opened.actor, opened.address, opened.request, opened.revision) == ("admin", "192.0.2.1", "request-7", 1)
    assert opened.after == {"base": 1, "seconds": 60, "opened_by": "admin", "paused": []}


def test_what_is_confirmed_stays(store: Store) -> None:
    window = store.open_window(60, "test", NOW)
    keep(store)
    ended = store.confirm(ADMIN, SOON)
    assert (ended.outcome, ended.revision) == (Outcome.CONFIRMED, 1)
    assert store.expire(window, "guard", SOON) is None
    assert store.revision() == 1
    assert actions(store) == ["open-window", "add", "confirm-window"]
    assert store.open_window(60, "test", SOON).base == 1


def test_it_can_be_abandoned(store: Store) -> None:
    store.open_window(60, "test", NOW)
    keep(store)
    assert store.abandon("test", SOON).revision == 2
    assert store.select()[1] == 0


def test_only_the_window_that_is_meant_is_ended(store: Store) -> None:
    one = store.open_window(60, "alice", NOW)
    store.expire(one, "guard", SOON)
    other = store.open_window(300, "bob", SOON)
    keep(store)
    for end in (store.confirm, store.abandon):
        with pytest.raises(NoWindow, match=r"has ended\. bob has opened another one since, at 07:09:09 UTC"):
            end("alice", SOON, opened_at=one.opened_at)
    with pytest.raises(NoWindow, match="another one since"):
        store.resume_within(one, "gw1", "alice", SOON)
    assert store.window() == other
    assert store.confirm("bob", SOON, other.opened_at).outcome is Outcome.CONFIRMED


def test_who_means_a_window_that_was_opened_after_all_that_are_known_hears_so(store: Store) -> None:
    """The database was put back to before it."""
    earlier = store.open_window(60, "test", NOW)
    for end in (store.confirm, store.abandon):
        with pytest.raises(NoWindow, match="knows nothing of the window"):
            end("test", NOW, opened_at=earlier.opened_at + timedelta(seconds=1))
    assert store.window() == earlier


def test_a_pause_ends_only_while_its_window_is_open(store: Store) -> None:
    store.pause("gw1", True)
    window = store.open_window(60, "test", NOW, paused=["gw1"])
    store.resume_within(window, "gw1", "test", NOW)
    assert not store.paused("gw1")
    store.expire(window, "guard", SOON)
    with pytest.raises(NoWindow, match="was not confirmed in time"):
        store.resume_within(window, "gw1", "test", SOON)
    assert store.paused("gw1")
    assert actions(store)[-4:] == ["open-window", "resume", "expire-window", "pause"]


def test_who_gives_up_before_he_has_begun_undoes_what_was_changed_since_he_opened_it(store: Store) -> None:
    keep(store)
    keep(store, "10.0.0.2")
    window = store.open_window(60, "test", NOW, base=1, holder="gw1")
    keep(store, "10.0.0.3")
    ended = store.abandon("test", SOON, opened_at=window.opened_at, base=window.newest)
    assert (ended.base, ended.revision) == (2, 4)
    assert [each.rule.id for each in store.select()[0]] == [1, 2]


@pytest.mark.parametrize(("hosts", "known", "named"), [
    (["gw2"], [], "gw2"), ([], ["gw2", "gw3"], "gw2, gw3"), (["gw1", "gw3"], ["gw2"], "gw3"),
])  # fmt: skip
def test_what_others_had_before_is_not_undone_for_a_kernel_that_is_older(
    store: Store, hosts: list[str], known: list[str], named: str
) -> None:
    keep(store)
    for host in ("gw1", *known):
        store.report(HostStatus(host, "fake"))
    keep(store, "10.0.0.2", hosts=hosts)
    with pytest.raises(ConcernsOthers, match=f"has changed since concerns {named}, too"):
        store.open_window(60, "test", NOW, base=1, holder="gw1")
    assert store.window() is None


@pytest.mark.parametrize(("hosts", "known"), [([], []), (["gw1"], ["gw2"])])
def test_what_concerns_nobody_else_may_come_back(store: Store, hosts: list[str], known: list[str]) -> None:
    keep(store)
    for host in ("gw1", *known):
        store.report(HostStatus(host, "fake"))
    keep(store, "10.0.0.2", hosts=hosts)
    assert store.open_window(60, "test", NOW, base=1, holder="gw1").base == 1


def test_nothing_to_undo_makes_no_revision(store: Store) -> None:
    keep(store)
    window = store.open_window(60, "test", NOW)
    ended = store.expire(window, "guard", SOON)
    assert ended is not None
    assert ended.revision == store.revision() == 1


def test_there_is_one_at_a_time(store: Store) -> None:
    store.open_window(60, ADMIN, NOW)
    with pytest.raises(WindowOpen, match=r"admin has opened .* at 07:08:09 UTC for 60 seconds"):
        store.open_window(30, "other", NOW)


def test_who_comes_late_hears_what_has_happened(store: Store) -> None:
    with pytest.raises(NoWindow, match="none has been"):
        store.confirm("test", NOW)
    window = store.open_window(60, "test", NOW)
    store.expire(window, "guard", SOON)
    with pytest.raises(NoWindow, match="ended at 07:09:09 UTC: it was not confirmed in time, so that revision 0 came"):
        store.confirm("test", SOON)
    store.open_window(60, "test", NOW)
    store.confirm("test", NOW)
    with pytest.raises(NoWindow, match="it was confirmed"):
        store.abandon("test", SOON)


def test_of_many_guards_one_undoes_it(store: Store) -> None:
    window = store.open_window(60, "test", NOW)
    keep(store)
    with ThreadPoolExecutor(6) as pool:
        ended = list(pool.map(lambda n: store.expire(window, f"guard{n}", SOON), range(6)))
    assert sum(each is not None for each in ended) == 1
    assert store.revision() == 2
    assert actions(store).count("expire-window") == 1


def test_a_guard_that_comes_late_does_not_end_the_next_window(store: Store) -> None:
    window = store.open_window(60, "test", NOW)
    store.confirm("test", NOW)
    store.open_window(60, "test", SOON)
    assert store.expire(window, "guard", SOON) is None


def test_gateways_whose_pause_is_ended_in_it_are_paused_again_and_no_others(store: Store) -> None:
    for host in ("gw1", "gw2", "gw3"):
        store.pause(host, True)
    window = store.open_window(60, "test", NOW, paused=["gw2"])
    assert window.paused == ("gw2",)
    store.pause("gw1", False)
    store.pause("gw2", False)
    store.expire(window, "guard", SOON)
    assert [store.paused(f"gw{number}") for number in range(1, 5)] == [False, True, True, False]


def test_a_gateway_that_goes_on_for_good_is_not_paused_again(store: Store) -> None:
    for host in ("gw1", "gw2"):
        store.pause(host, True)
    window = store.open_window(60, "test", NOW, paused=["gw1", "gw2"])
    for host in ("gw1", "gw2"):
        store.pause(host, False, for_good=host == "gw1")
    released = store.window()
    assert released == replace(window, paused=("gw2",))
    store.abandon("test", SOON)
    assert (store.paused("gw1"), store.paused("gw2")) == (False, True)
    ended = store.window()
    store.pause("gw2", False, for_good=True)
    assert store.window() == ended


@pytest.mark.parametrize("end", ["expire", "abandon"])
def test_each_pause_that_its_end_brings_back_has_a_word_of_its_own(store: Store, end: str) -> None:
    """By the word of a teardown that has ended, somebody would take it for that one's."""
    store.pause("gw1", True)
    former = store.last_pause("gw1")
    store.pause("gw1", False, for_good=True)
    found = {former, None}
    for _ in range(2):
        window = store.open_window(60, "test", NOW, paused=["gw1", "gw2"])
        if end == "expire":
            store.expire(window, "guard", SOON)
        else:
            store.abandon("test", SOON)
        words = {store.last_pause("gw1"), store.last_pause("gw2")}
        assert (len(words), words & found) == (2, set())
        found |= words
        assert actions(store)[-2:] == ["pause", "pause"]
        assert store.audit()[0].actor == ("guard" if end == "expire" else "test")
    window = store.open_window(60, "test", NOW, paused=["gw1"])
    store.confirm("test", SOON)
    assert store.last_pause("gw1") in words


def test_a_pause_that_an_older_version_has_brought_back_has_no_word(store: Store) -> None:
    store.pause("gw1", True)
    store.pause("gw2", True)
    kept = store.last_pause("gw2")
    for action, paused in (("expire-window", ["gw1"]), ("confirm-window", ["gw2"]), ("open-window", ["gw2"])):
        store.note(action, "guard", SOON, after={"base": 0, "seconds": 60, "opened_by": "test", "paused": paused})
    assert (store.last_pause("gw1"), store.last_pause("gw2")) == (None, kept)
    store.pause("gw1", True)
    assert store.last_pause("gw1") is not None
    store.note("abandon-window", "guard", SOON, after={"paused": ["gw2"]})
    assert store.last_pause("gw2") is None


def test_who_does_something_while_it_is_open_is_told(store: Store) -> None:
    assert store.warn_of_window("this change") == []
    store.open_window(60, ADMIN, NOW)
    (sentence,) = store.warn_of_window("this change")
    assert sentence == (
        "A window of confirmation is open until 2030-05-06 07:09:09 UTC, opened by admin: unless it is confirmed, this "
        "change is undone."
    )
    store.confirm(ADMIN, SOON)
    assert store.warn_of_window("this change") == []


FORCED = replace(rule("10.0.0.7", action="block", name="forced"), forced_by="alice")


def change_forced(store: Store) -> None:
    """One is removed, one disabled, one made wider, one gets the name of another, and one has only a new comment."""
    others = [replace(FORCED, name=name, target=rule(f"10.0.1.{number}").target)
              for number, name in enumerate(("disabled", "wider", "named", "commented"))]  # fmt: skip
    store.add([FORCED, *others], "alice", NOW)
    keep(store)
    store.open_window(60, "test", NOW)
    store.remove(1, "alice", NOW)
    store.change(2, lambda kept: replace(kept, enabled=False), "test", NOW)
    store.change(3, lambda kept: replace(kept, direction=Direction.TO), "alice", NOW)
    limit = replace(rule("10.0.1.2", name="forced", rate="5 packets/s"), forced_by="alice")
    store.change(4, lambda kept: replace(limit, id=kept.id, revision=kept.revision), "alice", NOW)
    store.change(5, lambda kept: replace(kept, comment="why"), "test", NOW)
    store.remove(6, "test", NOW)
    store.add([rule("10.0.2.1", action="block", name="named")], "test", NOW)


def standing(store: Store) -> list[tuple[int, str | None, bool]]:
    return [(each.rule.id, each.rule.name, each.rule.enabled) for each in store.select()[0]]


def test_what_was_forced_comes_back_into_force_for_nobody_who_could_not_force_it(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    change_forced(store)
    window = store.window()
    assert window is not None
    assert store.expire(window, "guard", SOON) is not None
    assert standing(store) == [
        (2, "disabled", False),
        (3, "wider", True),
        (4, "named", True),
        (5, "commented", True),
        (6, None, True),
    ]
    back = {each.rule.id: each.rule for each in store.select()[0]}
    assert (back[3].direction, back[4].action, back[5].comment) == (Direction.TO, Action.DROP, "")
    assert {each.forced_by for each in (back[2], back[3], back[4], back[5])} == {"alice"}
    (ended,) = store.audit(1)
    assert (ended.action, ended.after) == (
        "expire-window",
        {"base": 2, "seconds": 60, "opened_by": "test", "paused": [], "withheld": [1, 2, 3, 4]},
    )
    assert "test, who has opened the window of confirmation, may not force" in caplog.text


def test_what_was_forced_comes_back_for_who_may_force(store: Store) -> None:
    store.add([FORCED], "alice", NOW)
    window = store.open_window(60, "alice", NOW, paused=["gw1"], forces=True)
    assert (store.window(), window.forces, window.paused) == (window, True, ("gw1",))
    store.pause("gw1", False, for_good=True)
    assert store.window() == replace(window, paused=())
    store.remove(1, "test", NOW)
    store.expire(window, "guard", SOON)
    assert standing(store) == [(1, "forced", True)]


def test_what_was_forced_and_is_in_force_otherwise_stays_so(store: Store) -> None:
    """Disabled, neither the limit from before would hold nor the one that an admin has chosen."""
    store.add([replace(rule("10.0.0.7", rate="10 packets/s"), forced_by="alice")], "alice", NOW)
    window = store.open_window(60, "test", NOW)
    store.change(1, lambda kept: replace(kept, rate=parse_rate("20 packets/s")), "alice", NOW)
    store.expire(window, "guard", SOON)
    (back,) = (each.rule for each in store.select()[0])
    assert (back.enabled, back.rate, back.forced_by) == (True, parse_rate("20 packets/s"), "alice")
    assert store.revision() == 2
    (ended,) = store.audit(1)
    assert ended.after is not None
    assert ended.after["withheld"] == [1]


def test_what_is_spared_by_an_allow_of_its_own_stays_so_with_it(store: Store) -> None:
    """An admin has closed the gateway in a window of an operator's, and left a door open."""
    store.add([FORCED], "alice", NOW)
    other = keep(store, "10.7.0.0/16", action="allow", name="old-door")
    window = store.open_window(60, "test", NOW)
    store.change(other.id, lambda kept: replace(kept, target=rule("10.0.0.0/8", per="target").target), "alice", NOW)
    door = keep(store, "10.1.0.0/16", action="allow", name="door")
    limit = keep(store, "10.2.0.0/16", rate="9 packets/s", per="host", name="limit")
    store.change(1, lambda kept: replace(kept, target=rule("0.0.0.0/0", per="target").target), "alice", NOW)
    store.expire(window, "guard", SOON)
    assert standing(store) == [(1, "forced", True), (other.id, "old-door", True), (door.id, "door", True)]
    assert limit.id not in {each.rule.id for each in store.select()[0]}
    assert store.select()[0][1].rule.target == rule("10.0.0.0/8", per="target").target


@pytest.mark.parametrize("changed", [False, True], ids=["never", "back and forth"])
def test_who_is_allowed_under_what_was_forced_before_stays_so(store: Store, changed: bool) -> None:
    """An admin has opened a door in what he had closed before somebody's window, of which he does not know."""
    store.add([FORCED], "alice", NOW)
    window = store.open_window(60, "test", NOW)
    door = keep(store, "10.0.0.7", action="allow", protocol="tcp", name="door")
    if changed:
        store.change(1, lambda kept: replace(kept, comment="why"), "alice", NOW)
        store.change(1, lambda kept: replace(kept, comment=""), "alice", NOW)
    store.expire(window, "guard", SOON)
    assert standing(store) == [(1, "forced", True), (door.id, "door", True)]


@pytest.mark.parametrize(
    "changes",
    [{"forced_by": None}, {"enabled": False}, {"action": Action.OBSERVE, "rate": parse_rate("9 packets/s")}],
    ids=["not forced", "disabled", "harmless"],
)
def test_who_is_allowed_where_nothing_forced_is_in_force_does_not_stay_so(
    store: Store, changes: Mapping[str, Any]
) -> None:
    store.add([replace(FORCED, **changes)], "alice", NOW)
    window = store.open_window(60, "test", NOW)
    keep(store, "10.0.0.7", action="allow", protocol="tcp", name="door")
    store.expire(window, "guard", SOON)
    assert [number for number, _, _ in standing(store)] == [1]


@pytest.mark.parametrize("changes", [{"forced_by": None}, {"action": Action.ALLOW}])
def test_what_is_in_force_but_is_forced_no_more_or_harmless_does_not_stay(
    store: Store, changes: dict[str, object]
) -> None:
    """An operator may have done that, and it is undone."""
    store.add([FORCED], "alice", NOW)
    window = store.open_window(60, "test", NOW)
    store.change(1, lambda kept: replace(kept, direction=Direction.TO, **changes), "test", NOW)  # type: ignore[arg-type]
    store.expire(window, "guard", SOON)
    (back,) = (each.rule for each in store.select()[0])
    assert (back.enabled, back.direction, back.action) == (False, Direction.FROM, Action.BLOCK)


@pytest.mark.parametrize("hosts", [(), ("gw1",), ("gw2",)])
def test_what_stays_as_it_is_leaves_others_their_names_and_what_they_limit(
    store: Store, hosts: tuple[str, ...]
) -> None:
    store.add([FORCED], "alice", NOW)
    keep(store, "10.0.0.8", action="block", name="other", hosts=["gw1"])
    window = store.open_window(60, "test", NOW)
    store.remove(2, "test", NOW)
    wide = replace(FORCED, name="other", hosts=hosts, target=rule("10.0.0.8").target)
    store.change(1, lambda kept: replace(wide, id=kept.id, revision=kept.revision), "alice", NOW)
    store.expire(window, "guard", SOON)
    assert standing(store) == [(1, "forced", hosts == ("gw2",)), (2, "other", True)]


@pytest.mark.parametrize(("marks", "forces"), [
    ([], True), ([{"forces": True}], True), ([{"forces": False}], False), ([{"forces": "no"}], False), ([7], False),
])  # fmt: skip
def test_a_window_of_a_version_that_marked_none_brings_everything_back(
    store: Store, marks: list[object], forces: bool
) -> None:
    window = store.open_window(60, "test", NOW)
    with store._database.writing() as connection:
        connection.execute(update(windows).values(paused=["gw1", *marks]))
    assert store.window() == replace(window, paused=("gw1",), forces=forces)


def test_who_abandons_it_is_not_refused_for_what_stays_in_force(store: Store) -> None:
    store.add([FORCED], "alice", NOW)
    judge = refuse(Havens([], NOW), NOW)
    for _ in range(2):
        store.open_window(60, "test", NOW)
        store.change(1, lambda kept: replace(kept, direction=Direction.TO, name="renamed"), "alice", NOW)
        keep(store, "10.0.0.8")
        store.abandon("test", NOW, judge)
        ((back,), number) = store.select()
        assert (number, back.rule.direction, back.rule.name) == (1, Direction.TO, "forced")
    store.open_window(60, "test", NOW)
    store.change(1, lambda kept: replace(kept, direction=Direction.FROM), "alice", NOW)
    store.abandon("alice", NOW)
    assert store.select()[0][0].rule.direction is Direction.TO
    store.open_window(60, "test", NOW)
    store.change(1, lambda kept: replace(kept, enabled=False), "test", NOW)
    with pytest.raises(NeedsForce, match="was forced by alice"):
        store.abandon("test", NOW, judge)


def test_who_abandons_it_is_judged(store: Store) -> None:
    store.add([FORCED], "alice", NOW)
    window = store.open_window(60, "test", NOW, paused=["gw1"])
    store.remove(1, "alice", NOW)
    with pytest.raises(NeedsForce, match="was forced by alice"):
        store.abandon("test", NOW, refuse(Havens([], NOW), NOW))
    assert (store.window(), store.paused("gw1"), store.revision()) == (window, False, 2)
    store.abandon("alice", NOW)
    assert standing(store) == [(1, "forced", True)]


def test_it_can_return_to_an_earlier_revision(store: Store) -> None:
    keep(store)
    keep(store, "10.0.0.2")
    store.open_window(60, "test", NOW, base=1)
    assert store.abandon("test", NOW).revision == 3
    assert [each.rule.id for each in store.select()[0]] == [1]
    with pytest.raises(NoSuchRevision):
        store.open_window(60, "test", NOW, base=9)


def test_the_time_left_is_never_more_than_the_window(store: Store) -> None:
    window = store.open_window(60, "test", NOW)
    assert window.left(NOW) == 60
    assert window.left(NOW + timedelta(seconds=20)) == 40
    assert window.left(NOW - timedelta(days=1)) == 60
    assert window.left(NOW + timedelta(days=1)) == 0


def test_guards_are_known_while_they_are_seen(store: Store) -> None:
    assert store.guards() == []
    store.guarded("gw2")
    store.guarded("gw1")
    assert store.guards() == ["gw1", "gw2"]
    set_back(store, "gw1", timedelta(seconds=-16))
    assert store.guards() == ["gw2"]
    store.guarded("gw1")
    store.unguarded("gw2")
    assert store.guards() == ["gw1"]


def test_a_guard_that_was_seen_by_a_clock_since_set_back_is_none(store: Store) -> None:
    store.guarded("gw1")
    set_back(store, "gw1", timedelta(hours=1))
    assert store.guards() == []
    store.guarded("gw1")
    assert store.guards() == ["gw1"]


def set_back(store: Store, host: str, ahead: timedelta) -> None:
    """Have a guard been seen by a clock that was ahead."""
    with store._database.writing() as connection:
        connection.execute(update(guards).where(guards.c.host == host).values(seen_at=datetime.now(UTC) + ahead))
