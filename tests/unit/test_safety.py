"""The safe set: who is in it, why, and for how long."""

from __future__ import annotations

import threading

import pytest

from netlimit.records import SafeReason
from netlimit.safety import REMEMBERED_SECONDS, Lookup, SafeSet, find_servers

NOW = 1_800_000_000.0


def why(safe: SafeSet) -> dict[str, str]:
    return {network: reason.text for network, reason in safe.reasons.items()}


def test_everybody_is_in_it_with_the_reason() -> None:
    safe = SafeSet(["192.0.2.0/24"], {"203.0.113.5": "database host"})
    safe.update(NOW, ["198.51.100.7"], ["10.2.0.1"], ["198.51.100.8"])
    assert why(safe) == {
        "192.0.2.0/24": "settings",
        "198.51.100.7": "SSH session",
        "198.51.100.8": "API client",
        "10.2.0.1": "default gateway",
        "203.0.113.5": "database host",
    }


def test_who_has_left_is_remembered_for_a_while() -> None:
    safe = SafeSet(["192.0.2.1"])
    safe.update(NOW, ["198.51.100.7"], [], [])
    safe.update(NOW + REMEMBERED_SECONDS - 1, [], [], [])
    assert why(safe) == {"192.0.2.1": "settings", "198.51.100.7": "SSH session"}
    safe.update(NOW + REMEMBERED_SECONDS, [], [], [])
    assert why(safe) == {"192.0.2.1": "settings"}


def test_a_new_process_recalls_what_the_old_one_knew() -> None:
    old = SafeSet(["192.0.2.1"])
    old.update(NOW, ["198.51.100.7"], [], [])
    new = SafeSet(["192.0.2.2"])
    new.recall(old.reasons)
    assert why(new) == {"192.0.2.2": "settings", "198.51.100.7": "SSH session"}, "settings are not remembered"
    new.update(NOW + REMEMBERED_SECONDS, [], [], [])
    assert why(new) == {"192.0.2.2": "settings"}


def test_the_settings_outlast_every_other_reason() -> None:
    safe = SafeSet(["192.0.2.1"])
    safe.update(NOW, ["192.0.2.1"], [], [])
    assert safe.reasons == {"192.0.2.1": SafeReason("settings")}


@pytest.mark.parametrize(
    ("database", "counters", "hosts"),
    [
        ("sqlite:////var/lib/netlimit/netlimit.db", "memory://", {}),
        (
            "postgresql+psycopg://user:p%40ss@db.example:5432/netlimit",
            "redis://:secret@192.0.2.9:6379/0",
            {"db.example": "database host", "192.0.2.9": "counter store (Redis) host"},
        ),
        ("postgresql+psycopg://user@[2001:db8::5]/netlimit", "memory://", {"2001:db8::5": "database host"}),
        ("postgresql+psycopg:///netlimit?host=/run/postgresql", "memory://", {}),
        (
            "postgresql+psycopg://user@/netlimit?host=a:5432&host=[2001:db8::5]:5432",
            "memory://",
            {"a": "database host", "2001:db8::5": "database host"},
        ),
        ("postgresql+psycopg://[nonsense", "redis://", {}),
    ],
)
def test_the_hosts_that_urls_name(database: str, counters: str, hosts: dict[str, str]) -> None:
    assert find_servers(database, counters) == hosts


def test_a_name_is_looked_up_and_the_old_answer_stays_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str]] = [["203.0.113.5", "127.0.0.1"]]

    def resolve(name: str) -> list[str]:
        if not answers:
            raise OSError("no answer")
        return answers.pop()

    monkeypatch.setattr("netlimit.safety.LOOK_UP_SECONDS", 0.0)
    lookup = Lookup({"db.example": "database host"}, resolve)
    for _ in range(3):
        assert lookup.addresses() == {"203.0.113.5": "database host"}


def test_a_resolver_that_does_not_answer_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.safety.FIRST_LOOK_UP_SECONDS", 0.01)
    silent = threading.Event()
    started = []

    def resolve(name: str) -> list[str]:
        started.append(name)
        silent.wait(10)
        return ["203.0.113.5"]

    lookup = Lookup({"db.example": "database host", "192.0.2.9": "counter store (Redis) host"}, resolve)
    for _ in range(3):
        assert lookup.addresses() == {"192.0.2.9": "counter store (Redis) host"}
    assert started == ["db.example"], "one question at a time"
    silent.set()
