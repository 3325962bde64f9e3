"""plan, apply, teardown and serve on the real kernel, in a network namespace of the test's own."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit import namesakes
from netlimit.records import HostStatus
from netlimit.store import Store, open_replica
from scripts.testbed.lock import wait_for_lock
from tests.cli.running import Netlimit, until

_SAVES = ("iptables-save", "ip6tables-save", "iptables-legacy-save", "ip6tables-legacy-save")
WITHOUT_LOCK = ("unshare", "--mount", "sh", "-c",
                'mount -t tmpfs tmpfs /run && mkdir /run/xtables.lock && exec "$@"', "sh")  # fmt: skip
"""For a process of its own alone, the lock of iptables cannot be taken."""
WITH_LOCK_TAKEN = ("unshare", "--mount", "sh", "-c",
                   'mount -t tmpfs tmpfs /run && exec 9>/run/xtables.lock && flock 9 && exec "$@"', "sh")  # fmt: skip
"""For a process of its own alone, somebody else holds the lock of iptables."""
CONTROLLER = "from netlimit.kernel.linux import LinuxKernel\nwith LinuxKernel().sole(): print(flush=True); input()"
"""One that does not ask the database."""
_LISTS = ("ipset list", "ip address", "ip rule", "ip route", "tc qdisc", "tc filter")


def look(gateway: Netlimit, *command: str) -> str:
    """What a tool prints in the gateway."""
    done = subprocess.run(
        gateway.within(*wait_for_lock(command)),
        capture_output=True,
        text=True,
        check=True,
        env=dict(gateway.environment),
    )
    return done.stdout


def snapshot(gateway: Netlimit) -> str:
    """What the kernel holds: without comments and counters, and without tables in which there is no rule."""
    tables: list[str] = []
    for save in _SAVES:
        text = re.sub(r"^#.*\n|\[\d+:\d+\]", "", look(gateway, save), flags=re.MULTILINE)
        tables += [table for table in text.split("COMMIT\n") if "\n-A " in table or re.search(r"^:\S+ -", table, re.M)]
    lists = "\n".join(look(gateway, *each.split()) for each in _LISTS)
    return "".join(tables) + re.sub(r" initval \S+|Size in memory: \d+", "", lists)


@pytest.fixture
def foreign(gateway: Netlimit) -> Netlimit:
    """A gateway that has rules and sets of others already."""
    look(gateway, "ipset", "create", "theirs", "hash:ip")
    look(gateway, "iptables-legacy", "-t", "mangle", "-A", "FORWARD", "-s", "192.0.2.1", "-j", "DROP")
    return gateway


def test_serve_add_teardown(foreign: Netlimit) -> None:
    before = snapshot(foreign)
    server = foreign.serve()
    rule = foreign.ask(
        "rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--name", "office", "--wait", "60"
    )
    assert (rule["status"]["state"], rule["status"]["enforced_by"]) == ("applied", "iptables")
    assert "200/sec" in look(foreign, "iptables-legacy-save", "-t", "mangle")
    assert "10.1.0.0/16" in look(foreign, "ipset", "list")
    assert foreign.do("plan") == "Nothing to do.\n"

    assert foreign.do("teardown").endswith("The kernel holds nothing of netlimit's any more.\n")
    assert snapshot(foreign) == before
    added = foreign.ask("rule", "add", "10.2.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "1")
    assert added["status"]["state"] == "pending"
    assert "netlimit apply" in added["status"]["message"]
    assert snapshot(foreign) == before

    assert foreign.do("apply").endswith("2 rules in force here.\n")
    until(lambda: foreign.ask("rule", "show", "office")["status"]["state"] == "applied")
    assert foreign.do("teardown")
    assert foreign.do("teardown") == "There was nothing to remove.\n"
    server.end()
    assert snapshot(foreign) == before


def test_rules_stay_when_serve_ends(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    held = snapshot(gateway)
    server.end()
    assert snapshot(gateway) == held
    assert gateway.ask("plan")["steps"] == []
    gateway.do("teardown")


def is_ended(gateway: Netlimit) -> bool:
    """Whether the gateway's copy knows that the last teardown was ended here."""
    with (
        closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store,
        closing(open_replica(state_of(gateway), gateway.environment["NETLIMIT_HOST"])) as copy,
    ):
        word = store.last_pause(gateway.environment["NETLIMIT_HOST"])
        assert word is not None
        return copy.has_resumed(word)


def test_apply_without_a_controller(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    server.end()
    held = snapshot(gateway)
    gateway.do("teardown")
    assert not is_ended(gateway)
    plan = gateway.ask("plan")
    assert plan["steps"]
    assert "Rule 1 comes into force" in plan["words"][0]
    assert gateway.do("plan").startswith(f"{plan['words'][0]}\n")
    assert gateway.ask("apply") == {"steps": plan["steps"], "in_force": 1, "errors": 0, "confirm_within": None,
                                     "warnings": []}  # fmt: skip
    assert is_ended(gateway)
    assert snapshot(gateway) == held
    assert gateway.do("apply") == "1 rule in force here.\n"
    forget(gateway)
    assert gateway.run("apply", "--last").stdout.endswith("Revision 1 is back: 1 rule in force here.\n")
    assert snapshot(gateway) == held
    gateway.do("teardown")
    assert gateway.run("apply", "--last").stdout == "Paused by teardown, until `netlimit apply`.\n"


def test_what_root_applies_for_good_no_window_tears_down(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    held = snapshot(gateway)
    gateway.do("teardown")
    open_window(gateway)
    said = "A window of confirmation is open until"
    assert f"1 rule in force here.\n{said}" in gateway.do("apply")
    gateway.do("rollback")
    assert snapshot(gateway) == held
    assert "paused" not in gateway.do("status")
    open_window(gateway)
    assert said in gateway.do("teardown")
    assert said in gateway.ask("teardown")["warnings"][0]
    gateway.do("rollback")
    gateway.do("apply", "--confirm", "1h")
    assert snapshot(gateway) == held
    assert "paused by teardown" in gateway.do("rollback")
    gateway.do("apply", "--confirm", "1h")
    gateway.do("apply")
    gateway.do("rollback")
    assert snapshot(gateway) == held
    gateway.do("teardown")
    server.end()


def open_window(gateway: Netlimit) -> None:
    """What `POST /confirmation` of an operator does."""
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.open_window(3600, "operator", datetime.now(UTC))


def forget(gateway: Netlimit) -> None:
    """The machine starts anew: nothing is in the kernel."""
    for table in ("raw", "mangle", "filter", "security"):
        for program, what in itertools.product(("iptables-legacy", "ip6tables-legacy"), ("-F", "-X")):
            look(gateway, program, "-t", table, what)
    look(gateway, "ipset", "destroy")


def start_anew(gateway: Netlimit) -> str:
    """The machine starts anew, without a controller; what is said of what comes back."""
    forget(gateway)
    return gateway.run("apply", "--last").stdout


PAUSED = "Paused by teardown, until `netlimit apply`.\n"


@pytest.mark.parametrize("applied", [False, True], ids=["never torn down", "torn down once"])
def test_what_nobody_confirms_after_a_boot_no_boot_and_no_controller_brings_back(
    gateway: Netlimit, applied: bool
) -> None:
    empty = snapshot(gateway)
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    if applied:
        gateway.do("teardown")
        gateway.do("apply")
        until(lambda: gateway.ask("status")["rules"]["applied"] == 1, server.said)
    server.end()
    forget(gateway)
    gateway.do("apply", "--confirm", "8s")
    assert snapshot(gateway) != empty
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        assert not store.paused("gw1")
        assert gateway.run("apply", "--last").stdout == PAUSED, "a machine that starts anew meanwhile begins so"
        until(lambda: store.paused("gw1"))
    until(lambda: snapshot(gateway) == empty)
    assert start_anew(gateway) == PAUSED
    assert snapshot(gateway) == empty
    server = gateway.serve()
    until(lambda: gateway.ask("status")["hosts"][0]["paused"], server.said)
    assert "older state" not in gateway.do("status")
    assert snapshot(gateway) == empty
    assert gateway.do("apply").endswith("1 rule in force here.\n")
    until(lambda: gateway.ask("status")["rules"]["applied"] == 1, server.said)
    server.end()
    assert "1 rule in force here" in start_anew(gateway)
    gateway.do("teardown")


def test_what_is_confirmed_elsewhere_after_a_boot_the_next_boot_brings_back(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    server.end()
    forget(gateway)
    gateway.do("apply", "--confirm", "1h")
    held = snapshot(gateway)
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.confirm("operator", datetime.now(UTC))  # by REST, on another gateway
    with closing(open_replica(state_of(gateway), "gw1")) as copy:
        until(lambda: not copy.paused("gw1"))
    assert "1 rule in force here" in start_anew(gateway)
    assert snapshot(gateway) == held
    gateway.do("teardown")


def test_no_window_is_opened_after_a_boot_where_the_copy_cannot_be_told(gateway: Netlimit) -> None:
    """It would have the next boot put in what nobody has confirmed."""
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    server.end()
    forget(gateway)
    empty, copy = snapshot(gateway), state_of(gateway)
    sealed = ("unshare", "--mount", "sh", "-c", f'mount --bind {copy} {copy} && mount -o remount,ro,bind {copy} && '
              'exec "$@"', "sh")  # fmt: skip
    said = replace(gateway, before=sealed).refuse("apply", "--confirm", "60s")
    assert "`netlimit apply --last`" in said
    assert "the window of confirmation is given up" in said
    assert snapshot(gateway) == empty


def test_a_teardown_that_ended_early_is_told_and_another_finishes_it(foreign: Netlimit) -> None:
    before = snapshot(foreign)
    server = foreign.serve()
    foreign.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    server.end()
    pause(foreign)
    doctor = foreign.run("doctor").stdout
    assert "SERIOUS: paused. `netlimit teardown` was ended before it was done" in doctor
    assert "has taken all limits out" not in doctor
    assert "Run `netlimit teardown` again" in doctor
    foreign.do("teardown")
    assert snapshot(foreign) == before
    assert "SERIOUS: paused. `netlimit teardown` has taken all limits out" in foreign.run("doctor").stdout


def test_a_set_that_somebody_uses_is_told_and_another_teardown_removes_it(gateway: Netlimit) -> None:
    """Nobody is told that nothing is left, nor sent in a circle."""
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.3", "--action", "block")
    server.end()
    rule = "FORWARD -m set --match-set nl-safe4 src -j ACCEPT"
    look(gateway, *f"iptables-legacy -w -t filter -A {rule}".split())
    for _ in range(2):
        done = gateway.run("teardown")
        assert done.returncode == 3
        assert "nothing of netlimit's" not in done.stdout
        assert "nothing to remove" not in done.stdout
        assert "The set nl-safe4 is used by a rule of somebody else." in done.stdout
        assert f"`iptables-legacy -t filter -D {rule}` removes it" in done.stdout
    assert len(json.loads(gateway.run("teardown", "--json").stdout)["left"]) == 1
    doctor = gateway.run("doctor").stdout
    assert "WARNING: used by others. The set nl-safe4" in doctor
    assert "SERIOUS: paused. `netlimit teardown` has taken all limits out" in doctor
    look(gateway, *f"iptables-legacy -w -t filter -D {rule}".split())
    assert gateway.do("teardown").endswith("The kernel holds nothing of netlimit's any more.\n")
    assert gateway.ask("teardown")["left"] == []
    assert "used by others" not in gateway.run("doctor").stdout


def test_a_teardown_that_is_refused_says_what_goes_on(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    server.end()
    said = replace(gateway, before=WITHOUT_LOCK).refuse("teardown")
    assert "/run/xtables.lock cannot be opened: Is a directory. Limits that are left" in said
    assert said.rstrip().endswith("run `netlimit teardown` again.")
    assert gateway.do("teardown").endswith("The kernel holds nothing of netlimit's any more.\n")


def test_a_controller_that_goes_by_its_copy_hears_of_a_teardown(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    server.end()
    program = gateway.within(sys.executable, "-c", CONTROLLER)
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "\n"
        gateway.do("teardown")
        controller.communicate("\n")
    host = gateway.environment["NETLIMIT_HOST"]
    with closing(open_replica(state_of(gateway), host)) as copy:
        assert copy.paused(host)


def test_what_an_apply_could_not_bring_back_is_not_said_to_hold(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--name", "office")
    server.end()
    gateway.do("teardown")
    api = gateway.start("api", "--user", "nobody")
    until(lambda: api.ended or not gateway.run("status").returncode, api.said)
    assert tell(gateway) == ("pending", 0, 0, 0, True)

    assert "/run/xtables.lock cannot be opened" in replace(gateway, before=WITHOUT_LOCK).refuse("apply")
    assert tell(gateway) == ("pending", 0, 0, 0, False)
    kill_apply(gateway)
    assert tell(gateway) == ("pending", 0, 0, 0, False)
    assert "200/sec" not in look(gateway, "iptables-legacy-save", "-t", "mangle")

    controller = replace(gateway, before=WITHOUT_LOCK).start("controller")
    until(lambda: "cannot be opened" in str(gateway.ask("status")["last_error"]), controller.said)
    assert tell(gateway) == ("pending", 0, 0, 0, False)
    controller.end()

    gateway.do("apply")
    assert tell(gateway) == ("applied", 1, 1, 1, False)
    api.end()


def tell(gateway: Netlimit) -> tuple[str, int, int, int, bool]:
    """What is said of the rule, and of the gateway: which revision it has applied, how many rules are in force there,
    and whether it is paused."""
    status = gateway.ask("status")
    (host,), rules = status["hosts"], status["rules"]
    state = gateway.ask("rule", "show", "office")["status"]["state"]
    assert [each["status"]["state"] for each in gateway.ask("rule", "list")["items"]] == [state]
    assert rules[state] == rules["total"] == 1
    assert status["applied_revision"] == host["applied_revision"]
    return state, rules["applied"], host["applied_revision"], host["enforced"], host["paused"]


def kill_apply(gateway: Netlimit) -> None:
    """Tear down, and kill an `apply` that has ended the pause, and waits for its turn to write the kernel."""
    gateway.do("teardown")
    applying = replace(gateway, before=WITH_LOCK_TAKEN).start("apply")
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        until(lambda: not store.paused(gateway.environment["NETLIMIT_HOST"]), applying.said)
    assert applying.end(signal.SIGKILL) == -signal.SIGKILL


def state_of(gateway: Netlimit) -> Path:
    """Where the controller keeps its copy."""
    return Path(gateway.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///")).parent / "controller"


def pause(gateway: Netlimit) -> None:
    """What a teardown does first, and one that is killed at once does alone."""
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.pause(gateway.environment["NETLIMIT_HOST"], True)


def test_teardown_without_a_database(gateway: Netlimit) -> None:
    done = gateway.run("teardown")
    assert done.returncode == 0
    assert "There is no database" in done.stderr
    assert "stop it first" in done.stderr
    assert done.stdout == "There was nothing to remove.\n"


def test_a_teardown_without_its_database_holds(gateway: Netlimit) -> None:
    """Neither the guard nor a machine that starts puts back what is in the copy."""
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    server.end()
    database = Path(gateway.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///"))
    database.rename(database.with_suffix(".away"))
    done = gateway.run("teardown")
    assert (done.returncode, "stop it first" in done.stderr) == (0, True)
    assert gateway.run("apply", "--last").stdout == "Paused by teardown, until `netlimit apply`.\n"


def test_a_teardown_that_cannot_tell_the_copy_says_what_a_boot_does_and_a_controller_ends_it(
    gateway: Netlimit,
) -> None:
    before = snapshot(gateway)
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    server.end()
    copy = state_of(gateway)
    sealed = ("unshare", "--mount", "sh", "-c", f'mount --bind {copy} {copy} && mount -o remount,ro,bind {copy} && '
              'exec "$@"', "sh")  # fmt: skip
    done = replace(gateway, before=sealed).run("teardown")
    assert done.returncode == 3
    assert done.stdout.endswith("The kernel holds nothing of netlimit's any more.\n")
    assert "A boot (`netlimit apply --last`) brings the limits back" in done.stderr
    assert f"remove {copy}/applied.db" in done.stderr
    assert snapshot(gateway) == before
    assert "1 rule in force here" in gateway.run("apply", "--last").stdout
    assert snapshot(gateway) != before
    server = gateway.serve()
    until(lambda: snapshot(gateway) == before, server.said)
    server.end()
    assert gateway.run("apply", "--last").stdout == "Paused by teardown, until `netlimit apply`.\n"


def test_a_teardown_that_can_tell_neither_database_nor_copy_says_what_a_boot_does(gateway: Netlimit) -> None:
    """Both are on a disk that is read-only."""
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    server.end()
    place = state_of(gateway).parent
    sealed = ("unshare", "--mount", "sh", "-c", f'mount --bind {place} {place} && mount -o remount,ro,bind {place} && '
              'exec "$@"', "sh")  # fmt: skip
    done = replace(gateway, before=sealed).run("teardown")
    assert done.returncode == 3
    assert done.stdout.endswith("The kernel holds nothing of netlimit's any more.\n")
    assert "A boot (`netlimit apply --last`) brings the limits back" in done.stderr
    assert "1 rule in force here" in gateway.run("apply", "--last").stdout
    gateway.do("teardown")


@pytest.mark.parametrize("lost", [False, True])
def test_a_teardown_by_another_name_than_that_of_the_copy_says_so(gateway: Netlimit, lost: bool) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    server.end()
    assert "is that of gw1, and this gateway is called gw2 now" in gateway.run("doctor", NETLIMIT_HOST="gw2").stdout
    database = Path(gateway.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///"))
    if lost:
        database.rename(database.with_suffix(".away"))
    done = gateway.run("teardown", NETLIMIT_HOST="gw2")
    assert done.returncode == 0
    assert "run `NETLIMIT_HOST=gw1 netlimit teardown`" in " ".join(done.stderr.split())
    assert gateway.run("apply", "--last").stdout == "Paused by teardown, until `netlimit apply`.\n"


def test_a_teardown_tells_of_another_gateway_of_its_name(gateway: Netlimit) -> None:
    gateway.do("db", "upgrade")
    with closing(Store(gateway.environment["NETLIMIT_DATABASE_URL"])) as store:
        note = f"{namesakes.PREFIX} gw1 to this database."
        store.report(HostStatus(host="gw1", backend="iptables", notes=(note, "Something else.")))
    assert gateway.do("teardown") == f"There was nothing to remove.\n{note}\n"


def test_a_teardown_is_refused_where_it_would_take_the_limits_of_another_gateway_of_its_name(
    gateway: Netlimit, make_directory: Callable[[], Path], make_clone: Callable[[Netlimit, Path], Netlimit]
) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host", "--wait", "60")
    held, clone = snapshot(gateway), make_clone(gateway, make_directory())
    assert clone.run("apply").stdout.endswith("1 rule in force here.\n")
    said = " ".join(clone.refuse("teardown").split())
    assert "A controller on another gateway reports by the name gw1 to this database" in said
    assert "`NETLIMIT_HOST=gw1-2 netlimit teardown`" in said
    assert not gateway.ask("status")["hosts"][0]["paused"]

    alone = clone.run("teardown", NETLIMIT_HOST="gw1-2")
    assert (alone.returncode, "holds nothing of netlimit's" in alone.stdout) == (0, True), alone
    server.end()
    server = gateway.serve()
    assert snapshot(gateway) == held
    server.end()
    assert clone.run("teardown").stdout == "There was nothing to remove.\n", "the other reports no more"


def test_a_teardown_without_a_copy_has_nothing_to_tell_it(gateway: Netlimit) -> None:
    gateway.do("db", "upgrade")
    state_of(gateway).write_text("It is no directory.")
    assert gateway.do("teardown") == "There was nothing to remove.\n"


def test_by_another_name_than_that_of_the_controller_nothing_is_touched(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    held = snapshot(gateway)
    for command in (("teardown",), ("apply", "--confirm", "60s"), ("apply", "--take-over", "lo")):
        said = gateway.refuse(*command, NETLIMIT_HOST="gw2")
        assert "A controller runs here, but as gw1, not as gw2" in said
        assert f"`NETLIMIT_HOST=gw1 netlimit {command[0]}`" in said
        assert "`systemctl stop netlimit-controller`" in said
    assert snapshot(gateway) == held
    assert [each["host"] for each in gateway.ask("status")["hosts"]] == ["gw1"]
    assert gateway.do("teardown").endswith("The kernel holds nothing of netlimit's any more.\n")
    server.end()
    assert gateway.run("apply", NETLIMIT_HOST="gw2").stdout.endswith("1 rule in force here.\n"), "nobody is there"
    torn = gateway.run("teardown")
    assert (torn.returncode, "applied by the name gw2" in torn.stderr) == (0, True)


def test_by_another_database_than_that_of_the_controller_nothing_is_touched(
    gateway: Netlimit, make_directory: Callable[[], Path]
) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    held, state = snapshot(gateway), _find_copy(gateway)
    other = replace(
        gateway,
        environment={**gateway.environment, "NETLIMIT_DATABASE_URL": f"sqlite:///{make_directory()}/netlimit.db"},
    )
    other.do("db", "upgrade")
    said = other.refuse("apply", NETLIMIT_STATE_DIRECTORY=str(state))
    assert "A controller runs here, but none called gw1 has ever reported to the database" in said
    assert "Set NETLIMIT_HOST and NETLIMIT_DATABASE_URL to those of the controller" in said
    assert snapshot(gateway) == held
    warned = other.run("teardown")
    assert (warned.returncode, "none called gw1 has ever reported" in warned.stderr) == (0, True)
    gateway.do("teardown")
    server.end()


def test_a_teardown_needs_no_word_of_a_controller_that_hangs(gateway: Netlimit) -> None:
    server = gateway.serve()
    gateway.do("rule", "add", "10.1.0.0/16", "--rate", "200 packets/s", "--per", "host")
    gateway.do("apply")  # which reports beside the controller
    for process in server.children:
        os.kill(process, signal.SIGSTOP)
    try:
        assert gateway.do("teardown").endswith("The kernel holds nothing of netlimit's any more.\n")
    finally:
        for process in server.children:
            os.kill(process, signal.SIGCONT)
    server.end()
    assert "There was nothing to remove" in gateway.do("teardown")


def test_a_controller_that_has_just_started_is_waited_for(gateway: Netlimit) -> None:
    gateway.do("db", "upgrade")
    server = gateway.start("controller")
    until(lambda: find_controller(gateway), server.said)
    gateway.do("teardown")
    server.end()


def find_controller(gateway: Netlimit) -> bool:
    """Whether one runs, though it may not have reported yet."""
    return gateway.run("apply", "--last").stdout.startswith("A controller runs here")


def _find_copy(gateway: Netlimit) -> Path:
    return Path(gateway.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///")).parent / "controller"


def test_doctor_tells_what_the_host_can_do(gateway: Netlimit) -> None:
    before = snapshot(gateway)
    done = gateway.run("doctor", "--json")
    found = json.loads(done.stdout)
    assert {"iptables", "ipset", "marks", "classify", "htb", "bpf", "ifb", "fq_codel"} <= set(found["capabilities"])
    assert {"controller", "database"} == {each["name"] for each in found["findings"] if each["severity"] == "serious"}
    assert done.returncode == 1
    assert snapshot(gateway) == before


def test_tools_are_found_where_the_path_is_that_of_a_user(gateway: Netlimit) -> None:
    """As in cron, in at, and after `su` without a dash."""
    path = "/usr/bin:/bin"
    assert "Missing" not in gateway.run("doctor", PATH=path).stdout
    done = gateway.run("teardown", PATH=path)
    assert (done.returncode, "install" in done.stderr) == (0, False)


def test_doctor_is_content_where_everything_runs(gateway: Netlimit) -> None:
    server = gateway.serve()
    until(lambda: gateway.ask("status")["hosts"])
    rows = {words[0]: words[1:] for line in gateway.do("doctor").splitlines() if (words := line.split())}
    assert [rows[name] for name in ("classify", "htb", "bpf", "ifb")] == [["yes"]] * 4
    assert rows["fq_codel"][:2] in (["yes"], ["not", "needed"])
    assert rows["Nothing"] == ["keeps", "rules", "from", "holding."]
    gateway.do("teardown")
    torn = gateway.run("doctor")
    assert (torn.returncode, "SERIOUS: paused. `netlimit teardown` has taken" in torn.stdout) == (1, True)
    server.end()
    assert "SERIOUS: controller. No controller runs here" in gateway.run("doctor").stdout
