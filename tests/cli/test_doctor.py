"""What `netlimit doctor` finds of netlimit's own parts, in a process of the test's own."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit import unforced
from netlimit.cli import doctor
from netlimit.faults import find_faults
from netlimit.kernel import sessions
from netlimit.kernel.fake import FakeKernel
from netlimit.kernel.none import NoKernel
from netlimit.namesakes import MANY, Namesakes
from netlimit.records import HostStatus, SafeReason
from netlimit.rules import parse_rule
from netlimit.settings import Settings
from netlimit.store import Store
from netlimit.tunnels import End, Hop, Tunnel, Tunnels

GB = 2**30


@pytest.mark.parametrize(("total", "told"), [(2 * GB, False), (GB, True), (GB // 2, True), (None, False)])
def test_what_buckets_may_come_to_is_measured_by_the_memory_of_this_host(
    total: int | None, told: bool, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemFree: 1 kB\nMemTotal: {total // 1024} kB\n" if total else "nothing\n")
    monkeypatch.setattr(doctor, "MEMINFO", meminfo)
    now = datetime.now(UTC)
    wide = [{"target": f"{n}.16.0.0/12", "per": "host", "rate": f"{n} packets/day"} for n in (20, 21)]
    rules = [parse_rule(fields, now) for fields in (*wide, {**wide[0], "target": "30.0.0.0/12", "hosts": ["gw2"]})]
    store = Store(sqlite_url)
    store.add(rules, "test", now)
    store.close()
    settings = Settings(database_url=sqlite_url, host="gw1")
    found = find_faults(doctor._survey_service(settings, NoKernel(tmp_path)))
    sentences = [str(each) for each in found if each.name == "memory for buckets"]
    assert bool(sentences) == told
    if total and told:
        assert sentences[0].startswith(f"This host has {'1 GB' if total == GB else '512 MB'} in all. The buckets of")
        assert "256 MB of kernel memory" in sentences[0]


def test_a_namesake_is_told_with_what_the_controller_says_of_it(sqlite_url: str, tmp_path: Path) -> None:
    namesakes = Namesakes("gw1")
    for _ in range(MANY + 1):
        namesakes.note("another", "own")
    assert namesakes.warning is not None
    store = Store(sqlite_url)
    store.report(HostStatus(host="gw1", backend="fake", notes=("something else", namesakes.warning)))
    store.close()
    settings = Settings(database_url=sqlite_url, host="gw1")
    found = {each.name: str(each) for each in find_faults(doctor._survey_service(settings, NoKernel(tmp_path)))}
    assert found["two of one name"].startswith("Another controller reports by the name gw1 to this database")


def test_what_the_controller_does_not_know_of_ssh_is_told(sqlite_url: str, tmp_path: Path) -> None:
    notes = (sessions.TELL_UNPLACED, "something else", sessions.tell_names(["admin.example", "boss.example"]))
    store = Store(sqlite_url)
    store.report(HostStatus(host="gw1", backend="fake", notes=notes))
    store.close()
    settings = Settings(database_url=sqlite_url, host="gw1")
    found = find_faults(doctor._survey_service(settings, NoKernel(tmp_path)))
    told = [str(each) for each in found if each.name == "SSH"]
    assert ["NETLIMIT_SAFE" in each for each in told] == [True, True]
    assert "admin.example and 1 more" in told[1]


def test_that_rules_close_a_gateway_is_told_as_the_controller_says_it(sqlite_url: str, tmp_path: Path) -> None:
    told = f"{unforced.PREFIX} what this host is managed by"
    store = Store(sqlite_url)
    store.report(HostStatus(host="gw1", backend="fake", notes=("something else", told)))
    store.close()
    settings = Settings(database_url=sqlite_url, host="gw1")
    found = {each.name: str(each) for each in find_faults(doctor._survey_service(settings, NoKernel(tmp_path)))}
    assert found["closed to management"].startswith(told)


class Unreadable(FakeKernel):
    """A host whose tunnels cannot be read."""

    def tunnels(self) -> Tunnels:
        raise OSError("odd bytes")


def find_tunnels(kernel: FakeKernel, sqlite_url: str) -> list[str]:
    settings = Settings(database_url=sqlite_url, host="gw1")
    return [str(each) for each in find_faults(doctor._survey_service(settings, kernel)) if each.name == "tunnel"]


def test_who_is_safe_and_comes_by_a_tunnel_of_which_too_little_is_known_is_told(sqlite_url: str) -> None:
    reasons = {"10.8.0.2": "SSH session", "10.8.0.3": "API client", "10.8.0.4": "settings", "10.7.0.2": "API client"}
    store = Store(sqlite_url)
    safe = {address: SafeReason(text, 1.0) for address, text in reasons.items()}
    store.report(HostStatus(host="gw1", backend="fake", safe=tuple(safe), safe_reasons=safe))
    store.close()
    found = {5: Tunnel("tun0", (End(None),)), 6: Tunnel("wg0", (End("192.0.2.1"),))}
    ways = {address: (Hop(6 if address == "10.7.0.2" else 5, address),) for address in reasons}
    (told,) = find_tunnels(FakeKernel(ended=Tunnels(found), ways=ways), sqlite_url)
    assert told.startswith("By tun0, a tunnel of which the outer address of the far end is not known, comes who is")
    assert "(10.8.0.2 and 1 more)" in told
    assert told.endswith("Put the outer address into NETLIMIT_SAFE, if it is not there yet.")
    (told,) = find_tunnels(Unreadable(), sqlite_url)
    assert "odd bytes" in told
