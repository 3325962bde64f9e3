"""What the kernel cannot enforce the limiter does: one layer a rule, and counters that go on."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from datetime import timedelta
from pathlib import Path

import pytest

from api.standing import judge
from netlimit import controller as controllers
from netlimit.controller import Controller, Setup
from netlimit.errors import StoreError
from netlimit.kernel.none import REASON, NoKernel
from netlimit.l7.addresses import FREE
from netlimit.l7.assignments import Assignments
from netlimit.l7.gate import Gate
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.plan import Step
from netlimit.records import Exceptional, HostStatus, LimiterReport, State
from netlimit.rules import Rule
from netlimit.store import Store
from tests.controller.conftest import Site
from tests.databases import DATABASES
from tests.forcing import make_rule

OVER = DATABASES
PATIENCE = 60.0
MISSING = {"hashlimit": "This host has no hashlimit."}
METERED = {"rate": "5 packets/h", "per": "host"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limiter that runs takes over, however long its thread is kept from running."""
    monkeypatch.setattr(controllers, "HANDOVER_SECONDS", PATIENCE)


@pytest.fixture
def limiter(site: Site) -> Iterator[Assignments]:
    """A limiter of the site's own host, which follows the database in a thread."""
    running = Assignments(site.store, "gw", now=site.clock)
    running.start()
    yield running
    running.stop()


def lose(site: Site) -> None:
    """The kernel cannot meter any more."""
    set_capabilities(site, MISSING)


def regain(site: Site) -> None:
    set_capabilities(site, {})


def set_capabilities(site: Site, missing: dict[str, str]) -> None:
    site.kernel.facts = site.kernel.facts._replace(capabilities=missing)
    site.controller._due["probe"] = 0.0


def say(site: Site, rule: Rule) -> Exceptional | None:
    return site.store.marked("gw").get(rule.id)


def layer_of(site: Site, rule: Rule) -> tuple[object, object]:
    """What the API says of a rule."""
    standing = judge(rule, site.store.hosts(), site.store.exceptional([rule.id]).get(rule.id, {}), site.clock())
    return standing["state"], standing["enforced_by"]


def until(come: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not come():
        assert time.monotonic() < end
        time.sleep(0.005)


async def send(limiter: Assignments, address: str, times: int) -> int:
    """Send requests of a client, each with 100 bytes; how many were let through. Buckets do not fill meanwhile."""
    gate = Gate(lambda: limiter.rules, MemoryStore(Clock(lambda: 10**12, 0)))
    return sum([(await gate.ask(address, 100)).allowed for _ in range(times)])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_what_the_kernel_cannot_enforce_the_limiter_does(site: Site, limiter: Assignments) -> None:
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    verdict = site.add(target="10.0.0.9", action="block")
    site.controller.sync()
    said = say(site, rule)
    assert said is not None
    assert (said.state, said.layer) == (State.APPLIED, "l7")
    assert said.message == "This host has no hashlimit. The limiter enforces it instead, on HTTP requests."
    assert layer_of(site, rule) == ("applied", "l7")
    assert layer_of(site, verdict) == ("applied", "iptables")
    assert site.controller.standing() == (2, 0)
    assert site.send("10.0.0.1", times=20) == ["accept"] * 20, "the kernel leaves it to the limiter"
    assert limiter.rules.find_limits("10.0.0.1").hits
    assert limiter.rules.find_limits("10.0.0.9") == FREE, "the limiter leaves that to the kernel"
    assert site.send("10.0.0.9") == ["drop"]


def test_the_kernel_takes_it_back_as_soon_as_it_can(site: Site, limiter: Assignments) -> None:
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.tick()
    assert layer_of(site, rule) == ("applied", "l7")
    regain(site)
    site.controller.tick()
    assert layer_of(site, rule) == ("applied", "iptables")
    assert say(site, rule) is None
    assert site.store.assigned("gw").rules == {}
    assert site.send("10.0.0.1", times=6)[-1] == "drop"
    until(lambda: limiter.rules.find_limits("10.0.0.1") == FREE)


@pytest.mark.anyio
async def test_counters_go_on_from_layer_to_layer(site: Site, limiter: Assignments) -> None:
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.tick()
    lost_to_nobody = site.add(target="10.0.0.2", rate="5 connections")
    site.controller.tick()
    seen = []

    def read() -> tuple[int, int]:
        counted = site.store.counters(rule.id).get("gw")
        seen.append((counted.total.matched_packets, counted.total.dropped_packets) if counted else (0, 0))
        return seen[-1]

    site.send("10.0.0.1", times=20)
    set_capabilities(site, MISSING | {"connlimit": "None."})
    site.store.remove(lost_to_nobody.id, "test", site.clock())
    site.restart().tick()  # the kernel is read before it lets go, though nobody has asked for counters
    assert layer_of(site, rule) == ("applied", "l7")
    assert read() == (20, 15)
    until(lambda: bool(limiter.rules.find_limits("10.0.0.1").hits))
    assert await send(limiter, "10.0.0.1", 10) == 5
    limiter.write_counts()
    limiter.write_counts()
    assert read() == (30, 20)
    regain(site)
    site.controller.tick()
    assert read() == (30, 20)
    site.clock.pass_by(seconds=10)
    site.send("10.0.0.1", times=25)  # more than it had counted before: the kernel counts from nothing
    site.controller._count([rule.id])
    assert read() == (55, 40)
    lose(site)
    site.restart().tick()
    assert read() == (55, 40)
    until(lambda: bool(limiter.rules.find_limits("10.0.0.1").hits))
    assert await send(limiter, "10.0.0.1", 6) == 5
    limiter.write_counts()
    assert read() == (61, 41)
    assert seen == sorted(seen)
    before = site.store.total_counters()
    site.store.remove(rule.id, "test", site.clock())
    assert site.store.total_counters() == before, "what was counted stays in the totals"


def test_without_a_limiter_it_is_an_error_that_says_how_to_start_one(site: Site) -> None:
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    began = time.monotonic()
    site.controller.sync()
    assert time.monotonic() - began < controllers.HANDOVER_SECONDS, "nobody is waited for"
    said = say(site, rule)
    assert said == Exceptional(
        rule.id,
        State.ERROR,
        "This host has no hashlimit. A limiter could enforce it on HTTP requests, but none answers on gw: start one "
        "there, with `netlimit limiter`.",
    )
    assert layer_of(site, rule) == ("error", None)
    assert site.controller.standing() == (0, 1)


def test_a_limiter_that_comes_takes_over_and_one_that_goes_is_missed(site: Site) -> None:
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    limiter = Assignments(site.store, "gw", now=site.clock)
    limiter.start()
    site.controller.sync()
    assert layer_of(site, rule) == ("applied", "l7")
    limiter.stop()
    site.controller.sync()
    assert layer_of(site, rule) == ("error", None)


def test_a_limiter_that_was_killed_is_missed_after_a_while(site: Site) -> None:
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    killed = Assignments(site.store, "gw", now=site.clock)
    site.controller.sync()
    killed.refresh()
    site.controller.sync()
    assert layer_of(site, rule) == ("applied", "l7")
    site.clock.pass_by(seconds=7)
    site.controller.sync()
    assert layer_of(site, rule) == ("error", None)


def test_a_limiter_that_was_killed_is_missed_though_the_clock_was_set_back(site: Site) -> None:
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    killed = Assignments(site.store, "gw", now=site.clock)
    site.controller.sync()
    killed.refresh()
    site.clock.moment -= timedelta(hours=1)
    site.controller.sync()
    assert layer_of(site, rule) == ("error", None)


def test_a_plan_tells_what_is_left_to_the_limiter(site: Site) -> None:
    lose(site)
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.add(target="10.0.0.2", rate="5 packets/s", direction="to")
    sentence = "1 rule falls back to the limiter, on HTTP requests: the kernel of this host cannot enforce them."
    assert site.controller.account()[1][-1] == sentence.replace("them", "it")
    site.add(target="10.0.0.3", rate="5 packets/s")
    assert site.controller.account()[1][-1] == sentence.replace("1 rule falls", "2 rules fall")


def test_one_that_runs_but_does_not_load_holds_nothing_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "HANDOVER_SECONDS", 0.1)
    site.store.limiter_runs(LimiterReport("gw", "hung", 1, site.clock(), site.clock()))
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    blocked = site.add(target="10.0.0.9", action="block")
    site.controller.sync()
    said = say(site, rule)
    assert said is not None
    assert said.state is State.ERROR
    assert "has not loaded it yet" in said.message
    assert layer_of(site, blocked) == ("applied", "iptables")
    site.store.limiter_runs(LimiterReport("other", "elsewhere", 1, site.clock(), site.clock()))
    monkeypatch.setattr(controllers, "HANDOVER_SECONDS", PATIENCE)
    began = time.monotonic()
    site.controller.sync()
    assert time.monotonic() - began < PATIENCE / 2, "it is waited for once"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"direction": "to"}, "it is about what is sent to its target"),
        ({"protocol": "udp"}, "it is about udp"),
        ({"protocol": "tcp", "ports": 443}, "it names ports"),
        ({"protocol": "tcp", "source_ports": 443}, "it names ports"),
        ({"interface": "lan"}, "it names an interface"),
    ],
)
def test_what_has_no_meaning_for_requests_is_an_error(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments], fields: dict[str, object], why: str
) -> None:
    site = sqlite_site
    limiter_of(site)
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s", **fields)
    site.controller.sync()
    said = say(site, rule)
    assert said is not None
    assert (said.state, said.layer) == (State.ERROR, None)
    assert said.message.startswith(f"This host has no hashlimit. The limiter cannot either: {why}")
    assert site.store.assigned("gw").rules == {}


@pytest.fixture
def sqlite_site(small_site: Callable[[int], Site]) -> Site:
    return small_site(1000)


@pytest.fixture
def limiter_of() -> Iterator[Callable[[Site], Assignments]]:
    started: list[Assignments] = []

    def start(site: Site) -> Assignments:
        started.append(Assignments(site.store, "gw", now=site.clock))
        started[-1].start()
        return started[-1]

    yield start
    for limiter in started:
        limiter.stop()


def test_who_takes_over_begins_before_the_other_lets_go(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sqlite_site
    limiter = limiter_of(site)
    held: list[tuple[bool, bool]] = []
    apply = site.kernel.apply

    def watch(step: Step) -> None:
        apply(step)
        held.append((site.send("10.0.0.1", times=6)[-1] == "drop", limiter.rules.find_limits("10.0.0.1") != FREE))

    rule = site.add(target="10.0.0.1", rate="5 packets/h")
    site.add(target="10.0.0.2", rate="5 connections")
    site.kernel.facts = site.kernel.facts._replace(capabilities={"connlimit": "None."})
    site.controller.tick()
    assert site.send("10.0.0.1", times=6)[-1] == "drop"
    monkeypatch.setattr(site.kernel, "apply", watch)
    set_capabilities(site, MISSING | {"connlimit": "None."})
    site.controller.tick()
    assert layer_of(site, rule) == ("applied", "l7")
    assert held, "the kernel has let go"
    assert all(kernel or l7 for kernel, l7 in held)
    assert held[-1] == (False, True)
    held.clear()
    set_capabilities(site, {"connlimit": "None."})
    site.controller.tick()
    assert layer_of(site, rule) == ("applied", "iptables")
    assert all(kernel or l7 for kernel, l7 in held)
    assert held[-1][0]
    until(lambda: limiter.rules.find_limits("10.0.0.1") == FREE)


def test_a_rule_that_is_changed_is_loaded_anew_before_it_is_called_applied(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments]
) -> None:
    site = sqlite_site
    limiter = limiter_of(site)
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    changed = site.store.replace(rule.id, Rule(**{**_fields(rule), "burst": 50}), "test", site.clock()).rule
    site.controller.sync()
    assert layer_of(site, changed) == ("applied", "l7")
    (hit,) = limiter.rules.find_limits("10.0.0.1").hits
    assert hit.limit.burst == 50
    site.store.remove(rule.id, "test", site.clock())
    site.controller.sync()
    assert (site.store.assigned("gw").rules, site.store.marked("gw")) == ({}, {})
    until(lambda: limiter.rules.find_limits("10.0.0.1") == FREE)


def _fields(rule: Rule) -> dict[str, object]:
    return {name: getattr(rule, name) for name in Rule.__slots__}


def test_a_block_ends_in_time_and_a_teardown_ends_everything(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments]
) -> None:
    site = sqlite_site
    limiter = limiter_of(site)
    set_capabilities(site, {"raw": "This host has no raw."})
    site.add(target="10.0.0.1", action="block", ttl=60)
    site.add(target="10.0.0.2", action="block")
    site.controller.sync()
    assert [limiter.rules.find_limits(f"10.0.0.{n}").blocked is not None for n in (1, 2)] == [True, True]
    site.clock.pass_by(seconds=61)
    limiter.refresh()
    assert [limiter.rules.find_limits(f"10.0.0.{n}").blocked is not None for n in (1, 2)] == [False, True]
    site.store.pause("gw", True)
    until(lambda: limiter.rules.find_limits("10.0.0.2") == FREE)
    site.store.pause("gw", False)
    until(lambda: limiter.rules.find_limits("10.0.0.2") != FREE)


def test_without_the_database_rules_stay_but_for_those_that_would_rather_not(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments], tmp_path: Path
) -> None:
    site = sqlite_site
    limiter = limiter_of(site)
    limiter._failure_seconds = 0.0
    lose(site)
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.add(target="10.0.0.2", rate="5 packets/s", on_failure="open")
    site.controller.sync()
    path = tmp_path / "netlimit.db"
    path.rename(tmp_path / "away.db")
    until(lambda: limiter.rules.find_limits("10.0.0.2") == FREE)
    assert limiter.rules.find_limits("10.0.0.1").hits
    (tmp_path / "away.db").rename(path)
    until(lambda: limiter.rules.find_limits("10.0.0.2") != FREE)


def test_a_kernel_that_is_left_alone(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments], tmp_path: Path
) -> None:
    site = sqlite_site
    limiter = limiter_of(site)
    site.controller = Controller(site.store, NoKernel(tmp_path), Setup("gw", "l7", safe=("192.0.2.9/32",)), site.clock)
    limited = site.add(target="10.0.0.0/24", rate="5 packets/s", per="host")
    exempt = site.add(target="10.0.0.7", action="allow")
    shaped = site.add(target="10.0.0.1", rate="5 Mbit/s", action="shape")
    assert not site.controller.plan()
    site.controller.tick()
    assert [layer_of(site, rule) for rule in (limited, exempt, shaped)] == [
        ("applied", "l7"), ("applied", "l7"), ("error", None),
    ]  # fmt: skip
    said = say(site, shaped)
    assert said is not None
    assert said.message == REASON
    assert limiter.rules.find_limits("10.0.0.1").hits
    assert limiter.rules.find_limits("10.0.0.7").allowed is not None
    (host,) = site.store.hosts()
    assert host.own, "addresses of its own are safe from the limiter too"


def test_a_dry_run_tells_who_would_enforce_it(sqlite_site: Site, limiter_of: Callable[[Site], Assignments]) -> None:
    site = sqlite_site
    lose(site)
    site.controller.sync()
    body = {"target": "10.0.0.1", "rate": "5 packets/s"}

    def ask(**fields: object) -> tuple[object, object, str]:
        question = site.store.ask("gw", "preview", {"rule": body | fields})
        site.answer_question()
        answer = site.store.answered(question)
        assert answer is not None
        return answer["state"], answer["enforced_by"], answer["message"]

    assert ask()[:2] == ("error", None)
    assert "start one there" in ask()[2]
    limiter_of(site)
    assert ask()[:2] == ("applied", "l7")
    assert ask(direction="to")[:2] == ("error", None)


def test_a_limiter_that_is_slow_to_say_that_it_lives_is_alive(site: Site) -> None:
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    limiter = Assignments(site.store, "gw", now=site.clock)
    site.controller.sync()
    limiter.refresh()
    site.clock.moment += timedelta(seconds=5)
    site.controller.sync()
    assert layer_of(site, rule) == ("applied", "l7")


def test_a_limit_is_in_force_again_when_a_clock_that_was_ahead_is_set_right(site: Site) -> None:
    lose(site)
    site.add(target="10.0.0.1", rate="5 packets/s", ttl=600)
    site.controller.sync()
    limiter = Assignments(site.store, "gw", now=site.clock)

    def is_limited() -> bool:
        limiter.refresh()
        return limiter.rules.find_limits("10.0.0.1") != FREE

    assert is_limited()
    site.clock.moment += timedelta(hours=1)
    assert not is_limited()
    site.clock.moment -= timedelta(hours=1) - timedelta(seconds=30)
    assert is_limited()
    site.clock.moment += timedelta(seconds=571)
    assert not is_limited()


def test_what_limiters_have_loaded_they_go_on_with(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "HANDOVER_SECONDS", 0.1)
    lose(site)
    limiter = Assignments(site.store, "gw", now=site.clock)
    first = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    limiter.refresh()
    site.controller.sync()
    second = site.add(target="10.0.0.2", rate="5 packets/s")
    site.controller.sync()
    assert [layer_of(site, rule) for rule in (first, second)] == [("applied", "l7"), ("error", None)]
    limiter.refresh()
    site.controller.sync()
    assert layer_of(site, second) == ("applied", "l7")


def test_a_rule_that_comes_while_a_pass_begins_is_handed_over_by_it(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sqlite_site
    limiter = limiter_of(site)
    lose(site)
    site.controller.sync()
    late: list[Rule] = []
    exclusive = site.kernel.exclusive

    def enter(*_: float) -> AbstractContextManager[None]:
        if not late:
            late.append(site.add(target="10.0.0.2", rate="5 packets/s"))
        return exclusive()

    monkeypatch.setattr(site.kernel, "exclusive", enter)
    site.add(target="10.0.0.9", action="block")
    site.controller.sync()
    assert layer_of(site, late[0]) == ("applied", "l7")
    assert limiter.rules.find_limits("10.0.0.2").hits


@pytest.mark.parametrize(("lack", "fields"), [("hashlimit", {"rate": "5 packets/h"}), ("raw", {"action": "block"})])
def test_a_controller_beside_another_that_knows_more_leaves_no_rule_to_nobody(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments], lack: str, fields: dict[str, object]
) -> None:
    site = sqlite_site
    limiter = limiter_of(site)
    set_capabilities(site, {lack: "None."})
    rule = site.add(target="10.0.0.1", **fields)
    first = site.controller
    first.tick()
    assert layer_of(site, rule) == ("applied", "l7")

    set_capabilities(site, {})
    site.restart().sync()  # `netlimit apply`, which has probed the host just now
    assert layer_of(site, rule) == ("applied", "iptables")
    until(lambda: limiter.rules.find_limits("10.0.0.1") == FREE)
    first._due |= {"probe": math.inf, "structure": 0.0}
    first.tick()
    assert limiter.rules.find_limits("10.0.0.1") != FREE, "it has let go in the kernel, which it knows no better"
    first.tick()
    assert layer_of(site, rule) == ("applied", "l7")
    first._due["probe"] = 0.0
    first.tick()
    assert layer_of(site, rule) == ("applied", "iptables")
    assert site.send("10.0.0.1", times=6)[-1] == "drop"
    assert site.store.assigned("gw").rules == {}


@pytest.mark.parametrize(
    ("missing", "around", "fields", "state"),
    [
        ({"reject": "None."}, METERED, {"rate": "9 packets/h", "action": "reject"}, "degraded"),
        ({"mangle": "None."}, {"action": "block"}, {"action": "allow"}, "degraded"),
        ({"ipset": "None."}, {"action": "block"}, {"action": "allow"}, "applied"),
        (MISSING, {"action": "block"}, {"rate": "9 packets/h"}, "applied"),
    ],
)
def test_an_exception_that_the_kernel_does_not_make_is_not_called_applied(
    sqlite_site: Site,
    limiter_of: Callable[[Site], Assignments],
    missing: dict[str, str],
    around: dict[str, object],
    fields: dict[str, object],
    state: str,
) -> None:
    site = sqlite_site
    limiter_of(site)
    set_capabilities(site, missing)
    site.add(target="10.0.0.0/24", **around)
    rule = site.add(target="10.0.0.1", **fields)
    site.controller.sync()
    said = say(site, rule)
    assert said is not None
    assert layer_of(site, rule) == (state, "l7")
    assert ("goes before it" in said.message) is (state == "degraded")
    if state == "degraded":
        assert next(host.degraded for host in site.store.hosts()) == 1
        assert site.send("10.0.0.1", times=6)[-1] == "drop"
    question = site.store.ask("gw", "preview", {"rule": {"target": "10.0.0.7", **fields}})
    site.answer_question()
    answer = site.store.answered(question)
    assert answer is not None
    assert (answer["state"], answer["enforced_by"]) == (state, "l7")


def test_what_could_not_be_taken_back_is_taken_back_later(
    sqlite_site: Site, limiter_of: Callable[[Site], Assignments], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sqlite_site
    limiter = limiter_of(site)
    lose(site)
    rule = site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.tick()
    assert layer_of(site, rule) == ("applied", "l7")

    def fail(*asked: object) -> int:
        raise StoreError("The database is busy.")

    regain(site)
    with monkeypatch.context() as patched:
        patched.setattr(site.store, "assign", fail)
        with pytest.raises(StoreError):
            site.controller.tick()
    assert limiter.rules.find_limits("10.0.0.1") != FREE
    site.controller.tick()
    assert site.store.assigned("gw").rules == {}
    assert layer_of(site, rule) == ("applied", "iptables")
    until(lambda: limiter.rules.find_limits("10.0.0.1") == FREE)


def test_a_limiter_goes_by_no_older_file_until_its_gateway_does(sqlite_site: Site, tmp_path: Path) -> None:
    """Whatever is changed there meanwhile."""
    site = sqlite_site
    lose(site)
    site.add(target="10.0.0.1", rate="5 packets/s")
    site.controller.sync()
    site.store.close()
    assert site.store.path is not None
    shutil.copy(site.store.path, tmp_path / "older.db")
    site.add(target="10.0.0.2", rate="5 packets/s")
    limiter = Assignments(site.store, "gw", now=site.clock)
    site.controller.sync()
    limiter.refresh()
    assert set(limiter._known) == {1, 2}
    with closing(Store(f"sqlite:///{tmp_path}/older.db")) as older:
        limiter._store = older  # as if the file had been exchanged
        older.report(HostStatus("gw", "fake", refused="It is older."))
        for host in (3, 4, 5):
            with pytest.raises(StoreError, match="or an older state of it"):
                limiter.refresh()
            assert set(limiter._known) == {1, 2}
            older.add([make_rule({"target": f"10.0.0.{host}", "action": "block"}, site.clock())], "test", site.clock())
        older.report(HostStatus("gw", "fake"))
        limiter.refresh()
        found = {str(rule.target) for rule in limiter._known.values()}
        assert found == {f"10.0.0.{host}/32" for host in (1, 3, 4, 5)}


def test_a_limiter_goes_by_no_other_database_until_its_gateway_does(sqlite_site: Site, tmp_path: Path) -> None:
    site = sqlite_site
    lose(site)
    site.add(target="10.0.0.1", rate="5 packets/s")
    limiter = Assignments(site.store, "gw", now=site.clock)
    site.controller.sync()
    limiter.refresh()
    assert set(limiter._known) == {1}
    other = Store(f"sqlite:///{tmp_path}/other.db")
    other.upgrade()
    limiter._store = other  # as if the file had been exchanged
    for _ in range(2):
        with pytest.raises(StoreError, match="another database"):
            limiter.refresh()
        assert set(limiter._known) == {1}
        other.report(HostStatus("gw", "fake", refused="It is another one."))
        rule = make_rule({"target": f"10.0.0.{9 + other.revision()}", "action": "block"}, site.clock())
        other.add([rule], "test", site.clock())
    other.report(HostStatus("gw", "fake"))
    limiter.refresh()
    assert not limiter._known
    other.close()
