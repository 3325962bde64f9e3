"""The safe set: who is in it, why, and for how long."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from netlimit.clientele import MOST, MOST_OF_BLOCK, MOST_SESSIONS_OF_BLOCK
from netlimit.l7.redis.hosts import name_hosts as name_counters
from netlimit.records import SafeReason
from netlimit.safety import (
    MOST_ENDS,
    MOST_ENDS_OF_ONE,
    MOST_GATEWAYS,
    MOST_OF_NAME,
    MOST_REACHED,
    MOST_SERVERS,
    MOST_SESSIONS,
    REMEMBERED_SECONDS,
    Lookup,
    SafeSet,
    is_needed,
    name_servers,
)
from netlimit.store.engine import name_hosts as name_databases
from netlimit.tunnels import Passage

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


def test_whom_the_host_talks_with_itself_is_needed_and_nobody_else() -> None:
    safe = SafeSet(["192.0.2.0/24"], {"203.0.113.5": "database host"})
    ends = {"203.0.113.9": Passage("wg0", "198.51.100.7")}
    safe.update(NOW, ["198.51.100.7"], ["10.2.0.1"], ["198.51.100.8"], ends=ends)
    needed = {network for network, text in why(safe).items() if is_needed(text)}
    assert needed == {"10.2.0.1", "203.0.113.5", "203.0.113.9"}


def test_a_default_gateway_by_which_somebody_was_logged_in_is_remembered_as_such() -> None:
    """As all who come through a router that translates have its address."""
    safe = SafeSet(())
    safe.update(NOW, (), ["10.2.0.1"], ())
    safe.update(NOW + 5, ["10.2.0.1"], ["10.2.0.1"], ())
    assert why(safe) == {"10.2.0.1": "SSH session"}
    for later in range(10, int(REMEMBERED_SECONDS), 5):
        safe.update(NOW + later, (), ["10.2.0.1"], ())
        assert why(safe) == {"10.2.0.1": "SSH session"}
    safe.update(NOW + 5 + REMEMBERED_SECONDS, (), ["10.2.0.1"], ())
    assert safe.reasons == {"10.2.0.1": SafeReason("default gateway", NOW + 5 + REMEMBERED_SECONDS)}


def test_who_has_left_is_remembered_for_a_while() -> None:
    safe = SafeSet(["192.0.2.1"])
    safe.update(NOW, ["198.51.100.7"], [], [])
    safe.update(NOW + REMEMBERED_SECONDS - 1, [], [], [])
    assert why(safe) == {"192.0.2.1": "settings", "198.51.100.7": "SSH session"}
    safe.update(NOW + REMEMBERED_SECONDS, [], [], [])
    assert why(safe) == {"192.0.2.1": "settings"}


def test_a_client_is_safe_for_half_an_hour_from_when_he_was_last_seen() -> None:
    """However often the database names him."""
    safe = SafeSet(())
    for later in range(0, int(REMEMBERED_SECONDS), 60):
        safe.update(NOW + later, (), (), ["198.51.100.8"], ages={"198.51.100.8": float(later)})
        assert safe.reasons == {"198.51.100.8": SafeReason("API client", NOW)}
    safe.update(NOW + REMEMBERED_SECONDS - 1, (), (), ())
    assert safe.reasons == {"198.51.100.8": SafeReason("API client", NOW)}
    safe.update(NOW + REMEMBERED_SECONDS, (), (), ["198.51.100.8"], ages={"198.51.100.8": REMEMBERED_SECONDS})
    assert safe.reasons == {}


def test_a_client_who_has_been_there_for_another_reason_since_is_safe_from_then_on() -> None:
    safe = SafeSet(())
    safe.update(NOW, ["198.51.100.8"], (), ())
    safe.update(NOW + 60, (), (), ["198.51.100.8"], ages={"198.51.100.8": 1000.0})
    assert safe.reasons == {"198.51.100.8": SafeReason("SSH session", NOW)}
    safe.update(NOW + 120, (), (), ["198.51.100.8"], ages={"198.51.100.8": 0.0})
    assert safe.reasons == {"198.51.100.8": SafeReason("API client", NOW + 120)}


def test_a_client_who_was_safe_when_the_machine_went_down_is_so_from_its_start() -> None:
    safe = SafeSet(())
    safe.recall({"198.51.100.8": SafeReason("API client", NOW - 5000)})
    safe.outlast_boot(NOW)
    safe.update(NOW + 60, (), (), ["198.51.100.8"], ages={"198.51.100.8": 1000.0})
    assert safe.reasons == {"198.51.100.8": SafeReason("API client", NOW)}


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
            "postgresql+psycopg://postgres:aB3/k?Q#==@192.0.2.5/netlimit",
            "redis+cluster://:a@b@10.0.0.1:7000,[2001:db8::9]:7001/",
            {
                "192.0.2.5": "database host",
                "10.0.0.1": "counter store (Redis) host",
                "2001:db8::9": "counter store (Redis) host",
            },
        ),
        (
            "postgresql+psycopg://user@192.0.2.5,db.example/netlimit",
            "unix:///run/redis.sock?db=1",
            {"192.0.2.5": "database host", "db.example": "database host"},
        ),
        (
            "postgresql+psycopg://user@/netlimit?host=a:5432&host=b:5432",
            "redis://",
            {"a": "database host", "b": "database host"},
        ),
        (
            "postgresql+psycopg://user@db.example/netlimit?hostaddr=192.0.2.5,192.0.2.6",
            "redis://[nonsense",
            {"192.0.2.5": "database host", "192.0.2.6": "database host", "db.example": "database host"},
        ),
    ],
)
def test_the_hosts_that_urls_name(database: str, counters: str, hosts: dict[str, str]) -> None:
    """As they are opened: the name of a user, or a part of his password, is none."""
    assert name_servers(name_databases(database), name_counters(counters)) == hosts


def test_the_device_behind_an_address_of_one_link_is_left_out() -> None:
    """Else nobody could compare it, and no limit would be in force."""
    safe = SafeSet((), {"fe80::1%eth0": "database host"})
    safe.update(NOW, (), (), ())
    assert list(safe.reasons) == ["fe80::1"]


def test_a_name_that_cannot_be_asked_for_keeps_no_other_from_being_looked_up() -> None:
    def resolve(name: str) -> list[str]:
        if name == "odd":
            raise UnicodeError("label too long")
        return ["192.0.2.7"]

    lookup = Lookup({"odd": "database host", "db.example": "database host"}, resolve)
    assert lookup.addresses() == {"192.0.2.7": "database host"}


def test_where_the_database_was_reached_is_safe() -> None:
    safe = SafeSet(())
    safe.update(NOW, (), (), (), reached=dict.fromkeys(["192.0.2.7", "127.0.0.1", "::1", ""], ""))
    assert {network: why.text for network, why in safe.reasons.items()} == {"192.0.2.7": "database host"}
    safe.update(NOW + 1, (), (), (), own=["192.0.2.7"], reached={"192.0.2.7": ""})
    assert safe.reasons == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "192.0.2.1", ""])
def test_where_this_host_leads_what_goes_to_the_database_is_needed(address: str) -> None:
    safe = SafeSet(())
    safe.update(NOW, (), (), (), own=["192.0.2.1"], reached={address: "172.18.0.2"})
    assert why(safe) == {"172.18.0.2": "database host"}
    assert is_needed(why(safe)["172.18.0.2"])


def test_what_the_server_of_another_host_calls_its_own_address_makes_nobody_safe() -> None:
    """As 172.17.0.2, which each host with containers has."""
    safe = SafeSet(())
    safe.update(NOW, (), (), (), own=["192.0.2.1"], reached={"192.0.2.7": "172.17.0.2"})
    assert why(safe) == {"192.0.2.7": "database host"}


def test_an_own_address_that_a_server_says_it_has_is_not_safe() -> None:
    safe = SafeSet(())
    safe.update(NOW, (), (), (), own=["192.0.2.1"], reached={"127.0.0.1": "192.0.2.1"})
    assert safe.reasons == {}


def test_where_the_database_was_stays_safe_until_it_is_reached_again() -> None:
    """However long the host was off: a rule around it that is in force from the copy would never let it be found."""
    safe = SafeSet(())
    safe.recall({"172.18.0.2": SafeReason("database host", NOW), "198.51.100.7": SafeReason("SSH session", NOW)})
    later = NOW + 10 * REMEMBERED_SECONDS
    safe.update(later, (), (), ())
    safe.update(later + 5, (), (), ())
    assert why(safe) == {"172.18.0.2": "database host"}
    safe.update(later + 10, (), (), (), reached={"127.0.0.1": "172.18.0.3"})
    assert why(safe) == {"172.18.0.3": "database host"}


def test_where_a_database_was_that_is_a_file_now_is_forgotten() -> None:
    safe = SafeSet(())
    safe.recall({"172.18.0.2": SafeReason("database host", NOW)})
    safe.update(NOW + REMEMBERED_SECONDS, (), (), (), reached={"": ""})
    assert safe.reasons == {}


def test_the_hosts_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By which libpq goes where the URL says nothing."""
    monkeypatch.setenv("PGHOST", "192.0.2.5,192.0.2.6")
    assert name_databases("postgresql+psycopg://user@/netlimit") == ("192.0.2.5", "192.0.2.6")
    assert name_databases("postgresql+psycopg://user@10.0.0.9/netlimit") == ("10.0.0.9",)
    monkeypatch.delenv("PGHOST")
    (tmp_path / "services").write_text("[netlimit]\nhost=192.0.2.7\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    monkeypatch.setenv("PGSERVICE", "netlimit")
    assert name_databases("postgresql+psycopg://user@/netlimit") == ("192.0.2.7",)


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


def test_a_name_that_is_found_late_is_soon_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a boot, before there is a resolver."""
    asked = []

    def resolve(name: str) -> list[str]:
        asked.append(name)
        if len(asked) == 1:
            raise OSError("no resolver yet")
        return ["203.0.113.5"]

    monkeypatch.setattr("netlimit.safety.AGAIN_SECONDS", 0.0)
    lookup = Lookup({"db.example": "database host"}, resolve)
    assert lookup.addresses() == {}
    assert lookup.addresses() in ({}, {"203.0.113.5": "database host"})
    assert lookup._thread is not None
    lookup._thread.join()
    assert lookup.addresses() == {"203.0.113.5": "database host"}
    assert len(asked) == 2, "then every three minutes"


def test_a_resolver_that_does_not_answer_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.safety.FIRST_LOOK_UP_SECONDS", 0.01)
    silent = threading.Event()
    started = []

    def resolve(name: str) -> list[str]:
        started.append(name)
        silent.wait(60)
        return ["203.0.113.5"]

    lookup = Lookup({"db.example": "database host", "192.0.2.9": "counter store (Redis) host"}, resolve)
    for _ in range(3):
        assert lookup.addresses() == {"192.0.2.9": "counter store (Redis) host"}
    assert started == ["db.example"], "one question at a time"
    silent.set()


def fill(safe: SafeSet, reason: str, times: int = 20) -> None:
    """Have ever new addresses come, heartbeat after heartbeat."""
    for beat in range(times):
        many = [f"10.{beat}.{number >> 8}.{number & 255}" for number in range(300)]
        many += [f"2001:db8:{beat:x}:{number:x}::1" for number in range(300)]
        safe.update(NOW + 5 * beat, many if reason == "session" else (), (), many if reason == "client" else ())


@pytest.mark.parametrize(
    ("reason", "most"), [("session", MOST_SESSIONS), ("client", MOST)], ids=["sessions", "clients"]
)
def test_ever_new_addresses_do_not_fill_it(reason: str, most: int) -> None:
    safe = SafeSet(["192.0.2.1"])
    fill(safe, reason)
    assert len(safe.reasons) == 1 + most
    assert any("some are left out" in note for note in safe.notes)
    safe.update(NOW + REMEMBERED_SECONDS + 100, (), (), ())
    assert why(safe) == {"192.0.2.1": "settings"}
    safe.update(NOW + 2 * REMEMBERED_SECONDS + 100, (), (), ())
    assert safe.notes == ()


def test_ever_new_clients_push_out_neither_sessions_nor_servers_nor_who_was_there_before() -> None:
    safe = SafeSet((), {"203.0.113.5": "database host"})
    safe.update(NOW - 60, ["198.51.100.7"], ["10.255.0.1"], ["198.51.100.8"])
    safe.update(NOW - 30, (), ["10.255.0.1"], ["198.51.100.8"])
    for beat in range(20):
        new = [f"10.{beat}.{number >> 8}.{number & 255}" for number in range(300)]
        safe.update(NOW + 5 * beat, new, ["10.255.0.1"], ["198.51.100.8", *new])
    kept = why(safe)
    assert kept["203.0.113.5"] == "database host"
    assert kept["10.255.0.1"] == "default gateway"
    assert kept["198.51.100.8"] == "API client"


def test_a_session_that_was_there_before_stays_when_many_come() -> None:
    safe = SafeSet(())
    safe.update(NOW, ["198.51.100.7"], (), ())
    safe.update(NOW + 5, [*(f"10.0.{n >> 8}.{n & 255}" for n in range(1000)), "198.51.100.7"], (), ())
    assert "198.51.100.7" in safe.reasons
    assert len(safe.reasons) == MOST_SESSIONS


def test_one_network_of_ipv6_does_not_push_out_others() -> None:
    safe = SafeSet(())
    many = [f"2001:db8::{number:x}" for number in range(1000)]
    safe.update(NOW, [*many, "2001:db8:1::1"], (), ["2001:db8:2::1"])
    assert {"2001:db8:1::1", "2001:db8:2::1"} < safe.reasons.keys()
    assert len(safe.reasons) == MOST_SESSIONS_OF_BLOCK[48] + 2
    safe = SafeSet(())
    safe.update(NOW, (), (), [*many, "2001:db8:2::1"])
    assert len(safe.reasons) == MOST_OF_BLOCK[64] + 1


def test_all_who_have_logged_in_from_one_office_are_safe() -> None:
    safe = SafeSet(())
    office = [f"2001:db8::{number:x}" for number in range(100)]
    safe.update(NOW, office, (), ())
    assert safe.reasons.keys() == {*office}
    assert safe.notes == ()


def count_off(first: str, number: int) -> list[str]:
    return [f"{first}.{each >> 8}.{each & 255}" for each in range(number)]


def test_a_name_with_many_addresses_pushes_out_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.safety._resolve", lambda name: count_off("10.1", 600))
    safe = SafeSet((), {"db.example": "database host", "203.0.113.5": "counter store (Redis) host"})
    reached = {"10.1.2.40": ""}
    safe.update(NOW, ["198.51.100.7"], ["10.2.0.1"], ["198.51.100.8"], reached=reached)
    assert why(safe) == {
        "10.2.0.1": "default gateway",
        "198.51.100.7": "SSH session",
        "10.1.2.40": "database host",
        "203.0.113.5": "counter store (Redis) host",
        **dict.fromkeys(count_off("10.1", MOST_OF_NAME), "database host"),
        "198.51.100.8": "API client",
    }
    assert ["hosts of servers" in note for note in safe.notes] == [True]


def test_of_gateways_and_of_servers_there_are_so_many_and_who_was_there_before_stays() -> None:
    servers = dict.fromkeys(count_off("10.1", 600), "database host")
    safe = SafeSet((), servers)
    safe.update(NOW, (), ["10.2.9.9"], (), reached={"10.3.9.9": ""})
    ways, found = [*count_off("10.2", 600), "10.2.9.9"], [*count_off("10.3", 600), "10.3.9.9"]
    for beat in range(3):
        safe.update(NOW + beat, ["198.51.100.7"], ways, ["198.51.100.8"], reached=dict.fromkeys(found, ""))
        assert len(safe.reasons) == MOST_GATEWAYS + MOST_REACHED + MOST_SERVERS + 2
        assert {"10.2.9.9", "10.3.9.9", "198.51.100.7", "198.51.100.8"} < safe.reasons.keys()
    assert list(why(safe).values())[:MOST_GATEWAYS] == ["default gateway"] * MOST_GATEWAYS


@pytest.mark.parametrize("room", [8, 1024, 1048576])
def test_the_settings_leave_room_for_the_others(room: int) -> None:
    safe = SafeSet(
        [f"{10 + (n >> 16)}.{n >> 8 & 255}.{n & 255}.0/24" for n in range(70000)][: min(room, 70000)], room=room
    )
    safe.update(NOW, ["198.51.100.7"], ["203.0.113.1"], ())
    assert why(safe)["198.51.100.7"] == "SSH session"
    assert why(safe)["203.0.113.1"] == "default gateway"
    settled = sum(reason == "settings" for reason in why(safe).values())
    assert settled == {8: 6, 1024: 768, 1048576: 65536 - 1216}[room]
    assert ["networks of NETLIMIT_SAFE" in note for note in safe.notes] == [True]


def test_it_has_no_more_than_there_is_room_for_the_surest_first() -> None:
    safe = SafeSet(["192.0.2.1", "192.0.2.2"], room=8)
    safe.update(NOW, [f"10.0.0.{n}" for n in range(3)], ["10.255.0.1"], [f"10.0.1.{n}" for n in range(9)])
    assert list(why(safe).values()) == ["settings"] * 2 + ["default gateway"] + ["SSH session"] * 3
    safe = SafeSet(["0.0.0.0/0", "192.0.2.2", "2001:db8::1"], room=2)
    safe.update(NOW, [], [], [])
    assert list(safe.reasons) == ["0.0.0.0/0", "2001:db8::1"]
    assert "NETLIMIT_SAFE" in safe.notes[0]


def test_the_far_ends_of_tunnels_are_in_it_with_whom_they_lead_to_and_are_remembered() -> None:
    safe = SafeSet(())
    ends = {"192.0.2.1": Passage("wg0", "10.8.0.2"), "10.2.0.1": Passage("wg1", "10.8.0.2")}
    safe.update(NOW, ["10.8.0.2"], ["10.2.0.1"], (), own=["192.0.2.9"], ends={**ends, "192.0.2.9": ends["192.0.2.1"]})
    assert why(safe) == {
        "10.8.0.2": "SSH session",
        "10.2.0.1": "default gateway",
        "192.0.2.1": "the far end of the tunnel wg0, by which 10.8.0.2 is reached",
    }, "other reasons come first, and an address of the host's own has none"
    recalled = SafeSet(())
    recalled.recall(safe.reasons)
    recalled.update(NOW + REMEMBERED_SECONDS - 1, (), (), ())
    assert recalled.reasons == safe.reasons
    recalled.update(NOW + REMEMBERED_SECONDS, (), (), ())
    assert why(recalled) == {}


def test_who_comes_through_a_tunnel_from_ever_new_addresses_brings_in_few() -> None:
    safe = SafeSet(())
    for beat in range(50):
        safe.update(NOW + 5 * beat, (), (), ["10.8.0.2"], ends={f"192.0.2.{beat}": Passage("wg0", "10.8.0.2")})
    far = [network for network in safe.reasons if network.startswith("192.0.2.")]
    assert far == [f"192.0.2.{beat}" for beat in (49, 48, 47, 46)]
    assert len(far) == MOST_ENDS_OF_ONE
    many = {far: Passage("wg0", f"10.8.1.{number}") for number, far in enumerate(count_off("10.1", 200))}
    safe.update(NOW + 300, ["10.8.0.3"], (), (), ends=many)
    safe.update(NOW + 305, ["10.8.0.3"], (), (), ends={**many, "198.51.100.1": Passage("wg0", "10.8.0.3")})
    assert sum(text.startswith("the far end") for text in why(safe).values()) == MOST_ENDS
    assert any("far ends of tunnels" in note for note in safe.notes)


def test_a_clock_that_was_ahead_makes_nobody_safe_for_longer() -> None:
    safe = SafeSet(())
    safe.update(NOW + 2 * 86400, ["10.0.0.1"], ["10.255.0.1"], ["10.0.1.1"], own=["10.0.0.9"])
    safe.update(NOW, (), (), ["10.0.0.9"])
    assert set(why(safe)) == {"10.0.0.1", "10.255.0.1", "10.0.1.1"}
    safe.update(NOW + REMEMBERED_SECONDS - 1, (), (), ["10.0.0.9"])
    assert set(why(safe)) == {"10.0.0.1", "10.255.0.1", "10.0.1.1"}
    safe.update(NOW + REMEMBERED_SECONDS, (), (), ["10.0.0.9"])
    assert set(why(safe)) == {"10.0.0.9"}, "who was this host itself is a client as any other now"
