"""Undoing by REST: revisions, and the window of confirmation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import httpx
import pytest

from netlimit.copying import Copying
from netlimit.errors import StoreError
from netlimit.records import Actor, HostStatus
from netlimit.store import Replica, Store, guards, weight
from tests.api.server import Controller, connect

RULE = {"name": "one", "target": "10.0.0.1", "rate": "100 packets/s", "per": "host"}
OTHER = {"name": "other", "target": "10.0.0.2", "action": "block"}


@pytest.fixture
def guarded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "ALIVE", timedelta(hours=1))  # however long a test takes
    store.guarded("gw1")


@pytest.fixture
def changed(client: httpx.Client) -> httpx.Client:
    """Revision 1 adds a rule, 2 changes it, 3 adds another, 4 removes the first."""
    client.post("/rules", json=RULE)
    client.patch("/rules/one", json={"rate": "5 packets/s", "labels": {"site": "office"}})
    client.post("/rules", json=OTHER)
    client.delete("/rules/one")
    return client


def names(client: httpx.Client) -> list[str]:
    return [rule["name"] for rule in client.get("/rules").json()["items"]]


def test_revisions_are_listed_page_by_page(changed: httpx.Client) -> None:
    first = changed.get("/revisions", params={"limit": 3}).json()
    assert [(each["revision"], each["action"], each["rules"]) for each in first["items"]] == [
        (4, "remove", 1),
        (3, "add", 1),
        (2, "replace", 1),
    ]
    (last,) = changed.get("/revisions", params={"cursor": first["next"]}).json()["items"]
    assert last == changed.get("/revisions/1").json()
    assert (last["actor"], last["address"], last["returned_to"]) == ("admin", "127.0.0.1", None)
    assert changed.get("/revisions", params={"limit": 4}).json()["next"] is None


def test_a_difference_names_the_fields(changed: httpx.Client) -> None:
    assert changed.get("/revisions/1/diff/3").json() == {
        "from": 1,
        "to": 3,
        "added": 1,
        "removed": 0,
        "changed": 1,
        "items": [
            {
                "rule": 1,
                "name": "one",
                "kind": "changed",
                "before": {"rate": "100 packets/s", "labels": None},
                "after": {"rate": "5 packets/s", "labels": {"site": "office"}},
            },
            {
                "rule": 2,
                "name": "other",
                "kind": "added",
                "before": None,
                "after": changed.get("/revisions/0/diff/3").json()["items"][1]["after"],
            },
        ],
        "next": None,
    }
    page = changed.get("/revisions/3/diff/0", params={"limit": 1}).json()
    assert (page["removed"], [each["rule"] for each in page["items"]]) == (2, [1])
    following = changed.get("/revisions/3/diff/0", params={"limit": 1, "cursor": page["next"]}).json()
    assert ([each["rule"] for each in following["items"]], following["next"]) == ([2], None)


def test_a_rollback_waits_for_the_kernel(changed: httpx.Client, controller: Controller) -> None:
    controller.start()
    answer = changed.post("/revisions/2/rollback", headers={"Prefer": "wait=60"})
    assert answer.json() == {"returned_to": 2, "revision": 5, "warnings": []}
    assert answer.headers["Preference-Applied"] == "wait=60"
    assert changed.get("/status").json()["applied_revision"] == 5
    assert names(changed) == ["one"]
    assert changed.post("/revisions/5/rollback").json()["revision"] == 5
    assert changed.get("/revisions/5").json()["returned_to"] == 2


@pytest.mark.usefixtures("guarded")
def test_what_takes_too_long_is_undone_by_admins_alone(
    client: httpx.Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight, "MOST_SECONDS", 0.01)
    batch = [{"target": f"10.1.{number >> 8}.{number & 255}", "action": "block"} for number in range(300)]
    with connect(url, "operator") as operator:
        assert operator.post("/rules/bulk", json=batch).status_code == 201
        refused = operator.post("/revisions/0/rollback")
        assert refused.status_code == 403
        assert "Have an admin, or root, return there" in refused.json()["detail"]
        assert client.post("/revisions/0/rollback").status_code == 200
        assert operator.post("/confirmation", json={"seconds": 60}).status_code == 201
        refused = operator.post("/rules/bulk", json=batch)
        assert refused.status_code == 403
        assert "Confirm the window or await its end first" in refused.json()["detail"]
        assert client.post("/rules/bulk", json=batch).status_code == 201
        assert operator.delete("/confirmation").status_code == 403
        assert operator.put("/confirmation").status_code == 200
    assert client.get("/rules", params={"limit": 1}).json()["total"] == 300


@pytest.mark.parametrize(
    ("method", "path", "sentence"),
    [
        ("GET", "/revisions/9", "There is no revision 9 yet; the newest is 4."),
        ("GET", "/revisions/9/diff/1", "There is no revision 9 yet"),
        ("GET", "/revisions/1/diff/9", "There is no revision 9 yet"),
        ("POST", "/revisions/9/rollback", "There is no revision 9 yet"),
        ("GET", "/revisions/0", "Who made revision 0 is not known any more"),
    ],
)
def test_a_revision_that_is_not_known_is_404(changed: httpx.Client, method: str, path: str, sentence: str) -> None:
    answer = changed.request(method, path)
    assert (answer.status_code, answer.json()["detail"][: len(sentence)]) == (404, sentence)


@pytest.mark.usefixtures("guarded")
def test_a_window_is_opened_and_confirmed(client: httpx.Client, store: Store) -> None:
    assert client.get("/confirmation").status_code == 404
    answer = client.post("/confirmation", json={"seconds": 3600})
    window = answer.json()
    assert (answer.status_code, window["open"], window["base"], window["guards"]) == (201, True, 0, ["gw1"])
    assert 3500 < window["left"] <= 3600
    client.post("/rules", json=RULE)
    assert client.get("/confirmation").json()["open"]
    ended = client.put("/confirmation").json()
    assert (ended["open"], ended["outcome"], ended["revision"], ended["left"]) == (False, "confirmed", 1, 0)
    assert client.get("/confirmation").json() == ended
    assert names(client) == ["one"]
    entries = [(each["action"], each["actor"], each["address"]) for each in client.get("/audit").json()["items"]]
    assert entries[0] == ("confirm-window", "admin", "127.0.0.1")
    assert entries[2] == ("open-window", "admin", "127.0.0.1")


@pytest.mark.usefixtures("guarded")
def test_no_window_is_opened_that_a_copy_could_not_bring_back(client: httpx.Client, store: Store) -> None:
    copying = Copying(None, _fail)
    copying.follow(store)
    store.report(HostStatus("gw2", "fake", notes=copying.warnings))
    answer = client.post("/confirmation", json={"seconds": 3600})
    assert (answer.status_code, answer.json()["detail"]) == (
        503,
        "The copy of the applied rules cannot be written on gw2, so it may lack what a window of confirmation would "
        "bring back, and no window is opened. Make room on its disk first (`netlimit status` says what is wrong), or "
        "do without.",
    )
    store.report(HostStatus("gw2", "fake"))
    assert client.post("/confirmation", json={"seconds": 3600}).status_code == 201


def _fail() -> Replica:
    raise StoreError("It is full.")


@pytest.mark.usefixtures("guarded")
def test_answers_to_changes_tell_of_an_open_window(client: httpx.Client) -> None:
    window = client.post("/confirmation", json={"seconds": 86400}).json()
    until = window["deadline"][:19].replace("T", " ")
    told = (
        f"A window of confirmation is open until {until} UTC, opened by admin: unless it is confirmed, this change is "
    )
    told += "undone."
    merge = {"Content-Type": "application/merge-patch+json"}
    assert client.post("/rules", json=RULE).json()["warnings"] == [told]
    assert client.post("/rules", params={"dry_run": True}, json=OTHER).json()["warnings"] == [told]
    assert client.patch("/rules/one", content='{"comment": "x"}', headers=merge).json()["warnings"] == [told]
    assert client.put("/rules/one", json=RULE).json()["warnings"] == [told]
    assert client.post("/rules/bulk", json=[OTHER]).json()["warnings"] == [told]
    assert client.delete("/rules/one").headers["Warning"] == f'299 netlimit "{told}"'
    assert client.post("/revisions/1/rollback").json()["warnings"] == [told]
    assert "warnings" not in client.get("/rules/one").json()
    client.put("/confirmation")
    assert client.patch("/rules/one", content='{"comment": "x"}', headers=merge).json()["warnings"] == []
    assert "Warning" not in client.delete("/rules/one").headers


@pytest.mark.usefixtures("guarded")
def test_changes_of_limits_tell_that_no_window_undoes_them(client: httpx.Client) -> None:
    client.post("/confirmation", json={"seconds": 86400})
    document = {"domain": "shop", "descriptors": [{"key": "k", "rate_limit": {"unit": "day", "requests_per_unit": 1}}]}
    (warning,) = client.put("/limits/shop", json=document).json()["warnings"]
    assert (warning["field"], warning["line"]) == ("", None)
    assert warning["detail"].endswith("it undoes changes of rules alone, and these limits stay as they are now.")
    assert client.put("/limits/shop", params={"dry_run": True}, json=document).json()["warnings"] == []
    assert f'"{warning["detail"]}"' in client.delete("/limits/shop").headers["Warning"]
    client.put("/confirmation")
    assert client.put("/limits/shop", json=document).json()["warnings"] == []
    assert "Warning" not in client.delete("/limits/shop").headers


@pytest.mark.usefixtures("guarded")
def test_a_window_is_abandoned(client: httpx.Client) -> None:
    client.post("/confirmation", json={"seconds": 60})
    client.post("/rules", json=RULE)
    ended = client.delete("/confirmation").json()
    assert (ended["outcome"], ended["revision"]) == ("abandoned", 2)
    assert names(client) == []
    assert client.put("/confirmation").status_code == client.delete("/confirmation").status_code == 409


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("opener", ["operator", "admin"])
def test_only_an_admin_brings_back_what_was_forced(url: str, client: httpx.Client, opener: str) -> None:
    client.post("/rules", params={"force": True}, json=OTHER)
    with connect(url, "operator") as operator:
        (operator if opener == "operator" else client).post("/confirmation", json={"seconds": 60})
        assert client.delete("/rules/other").status_code == 204
        operator.post("/rules", json=RULE)
        refused = operator.delete("/confirmation")
        assert refused.status_code == 409
        assert "Only an admin can abandon this window" in refused.json()["detail"]
        assert "was forced by admin" in refused.json()["detail"]
        assert names(client) == ["one"]
        assert client.get("/confirmation").json()["open"]
    assert client.delete("/confirmation").status_code == 200
    assert names(client) == ["other"]
    assert client.get("/rules/other").json()["forced_by"] == "admin"


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("opener", ["operator", "admin"])
def test_what_was_forced_comes_back_by_itself_if_an_admin_has_opened_the_window(
    url: str, client: httpx.Client, store: Store, opener: str
) -> None:
    client.post("/rules", params={"force": True}, json=OTHER)
    with connect(url, opener) as somebody:
        somebody.post("/confirmation", json={"seconds": 60})
    client.delete("/rules/other")
    window = store.window()
    assert window is not None
    store.expire(window, Actor("guard"), datetime.now(UTC))
    assert names(client) == (["other"] if opener == "admin" else [])


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("abandons", [False, True])
def test_what_an_admin_has_changed_and_is_in_force_stays_in_an_operators_window(
    url: str, client: httpx.Client, store: Store, abandons: bool
) -> None:
    forced = {"name": "forced", "target": "10.0.0.2", "rate": "10 packets/s"}
    force = {"force": True}
    client.post("/rules", params=force, json=forced)
    with connect(url, "operator") as operator:
        operator.post("/confirmation", json={"seconds": 60})
        assert client.put("/rules/forced", params=force, json=forced | {"rate": "20 packets/s"}).status_code == 200
        operator.post("/rules", json=RULE)
        window = store.window()
        assert window is not None
        if abandons:
            assert operator.delete("/confirmation").status_code == 200
        else:
            store.expire(window, Actor("guard"), datetime.now(UTC))
    (rule,) = client.get("/rules").json()["items"]
    assert (rule["rate"]["text"], rule["enabled"], rule["forced_by"]) == ("20 packets/s", True, "admin")


@pytest.mark.usefixtures("guarded")
def test_who_confirms_too_late_hears_so(client: httpx.Client, store: Store) -> None:
    client.post("/confirmation", json={"seconds": 60})
    window = store.window()
    assert window is not None
    store.expire(window, Actor("guard"), datetime.now(UTC))
    answer = client.put("/confirmation")
    assert answer.status_code == 409
    assert "it was not confirmed in time, so that revision 0 came back" in answer.json()["detail"]


@pytest.mark.usefixtures("guarded")
def test_who_says_which_window_he_means_ends_nobody_elses(client: httpx.Client, store: Store) -> None:
    """A request that is sent again after its window has ended, and another was opened."""
    late = client.post("/confirmation", json={"seconds": 60}).json()["opened_at"]
    window = store.window()
    assert window is not None
    store.expire(window, Actor("guard"), datetime.now(UTC))
    opened = client.post("/confirmation", json={"seconds": 60}).json()["opened_at"]
    for method in ("PUT", "DELETE"):
        answer = client.request(method, "/confirmation", params={"opened_at": late})
        assert answer.status_code == 409
        assert "admin has opened another one since" in answer.json()["detail"]
    assert client.get("/confirmation").json()["open"]
    ended = client.put("/confirmation", params={"opened_at": opened}).json()
    assert (ended["outcome"], ended["opened_at"], ended["actor"]) == ("confirmed", opened, "admin")
    again = client.put("/confirmation", params={"opened_at": opened})
    assert (again.status_code, again.json()) == (200, ended), "the first answer may have been lost on the way"
    for answer in (client.put("/confirmation"), client.delete("/confirmation", params={"opened_at": opened})):
        assert (answer.status_code, "was confirmed" in answer.json()["detail"]) == (409, True)
    for params in ({"opened_at": "soon"}, {"other": "1"}):
        assert client.put("/confirmation", params=params).status_code == 422


@pytest.mark.usefixtures("guarded")
def test_there_is_one_window(client: httpx.Client) -> None:
    client.post("/confirmation", json={"seconds": 60})
    answer = client.post("/confirmation", json={"seconds": 60})
    assert answer.status_code == 409
    assert "admin has opened a window of confirmation already" in answer.json()["detail"]


def test_without_a_guard_there_is_no_window(client: httpx.Client) -> None:
    answer = client.post("/confirmation", json={"seconds": 60})
    assert answer.status_code == 503
    assert "No gateway has a guard" in answer.json()["detail"]
    assert client.get("/confirmation").status_code == 404


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({}, "seconds"),
        ({"seconds": 9}, "seconds"),
        ({"seconds": 86401}, "seconds"),
        ({"seconds": "60"}, "seconds"),
        ({"seconds": True}, "seconds"),
        ({"seconds": 60.5}, "seconds"),
        ({"seconds": 60, "second": 1}, "second"),
    ],
)
def test_a_length_that_is_wrong_is_named(client: httpx.Client, sent: dict[str, object], field: str) -> None:
    answer = client.post("/confirmation", json=sent)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


@pytest.mark.usefixtures("guarded")
def test_viewers_look_and_operators_undo(url: str, changed: httpx.Client) -> None:
    undoing = (("POST", "/confirmation"), ("PUT", "/confirmation"), ("DELETE", "/confirmation"))
    with connect(url, "viewer") as viewer, connect(url, "operator") as operator:
        for method, path in (*undoing, ("POST", "/revisions/1/rollback")):
            assert viewer.request(method, path, json={"seconds": 60}).status_code == 403
        for path in ("/revisions", "/revisions/1", "/revisions/1/diff/2"):
            assert viewer.get(path).status_code == 200
        assert operator.post("/confirmation", json={"seconds": 60}).status_code == 201
        assert viewer.get("/confirmation").status_code == 200
        assert operator.post("/revisions/1/rollback").status_code == 200
        assert operator.put("/confirmation").status_code == 200
