"""What takes long to answer is worked out beside the controller: changes and repairs go on meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from api.representation import write_input
from netlimit import account, controller, errands, preview
from netlimit.errands import Errand
from netlimit.rules import parse_rule
from netlimit.state import ChainId
from tests.controller.conftest import Site

PATIENCE = 60.0
CHAIN = ChainId(4, "raw", "NL-PREROUTING")
ROOT = Path(__file__).parents[2]
ORPHAN = """
import time
from netlimit.errands import Errand
errand = Errand(lambda: time.sleep(60) or {})
print(errand._process, flush=True)
time.sleep(60)
"""


@pytest.fixture
def gate(site: Site, tmp_path: Path) -> Iterator[Path]:
    """Every plan and preview is worked out beside the controller, and takes until this file is there."""
    path = tmp_path / "gate"

    def held(work: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any) -> Any:
            end = time.monotonic() + PATIENCE / 2
            while not path.exists() and time.monotonic() < end:
                time.sleep(0.01)
            return work(*arguments)

        return wait

    with ExitStack() as stack:
        stack.enter_context(patch.object(controller, "MUCH", -1, create=True))
        stack.enter_context(patch.object(controller, "tell", held(account.tell)))
        stack.enter_context(patch.object(controller, "answer", held(preview.answer)))
        yield path
        site.controller._errands.stop()


def ask(site: Site, kind: str) -> int:
    rule = parse_rule({"target": "10.1.0.9", "rate": "5 packets/s"}, site.clock())
    argument = {"rule": write_input(rule), "id": 0} if kind == "preview" else {}
    return site.store.ask("gw", kind, argument)


def wait_for(site: Site, asked: int) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE
    while (answer := site.store.answered(asked)) is None:
        assert time.monotonic() < end, "no answer"
        site.controller.tick()
        time.sleep(0.01)
    return answer


def lose_a_chain(site: Site) -> None:
    site.kernel.damage(chain=CHAIN)


@pytest.mark.parametrize("kind", ["plan", "preview"])
def test_changes_and_repairs_go_on_while_an_answer_is_worked_out(site: Site, gate: Path, kind: str) -> None:
    site.add(target="10.1.0.3", action="block")
    site.controller.tick()
    asked = ask(site, kind)
    began = time.monotonic()
    site.controller.tick()
    site.add(target="10.1.0.2", action="block")
    site.controller.tick()
    assert site.send("10.1.0.2") == ["drop"]
    lose_a_chain(site)
    site.controller._due["structure"] = 0.0
    site.controller.tick()
    assert site.kernel.chains[CHAIN]
    counted = site.store.ask("gw", "counters", {"rules": [1]})
    wait_for(site, counted)
    assert time.monotonic() - began < PATIENCE / 2, "nobody has waited for the answer"
    assert site.store.answered(asked) is None
    gate.touch()
    assert not wait_for(site, asked).get("error")
    assert site.store.revision() == 2


def test_it_is_the_answer_that_the_controller_itself_would_give(site: Site) -> None:
    site.add(target="10.1.0.3", rate="100 packets/s", name="office")
    site.controller.tick()
    lose_a_chain(site)
    found = {}
    for much in (10, -1):
        with patch.object(controller, "MUCH", much):
            for kind in ("plan", "preview"):
                site.controller._due["structure"] = time.monotonic() + 600
                found[much, kind] = wait_for(site, ask(site, kind))
    assert found[10, "plan"]["steps"]
    assert found[10, "plan"] == found[-1, "plan"]
    assert found[10, "preview"]["state"] == "applied"
    assert found[10, "preview"] == found[-1, "preview"]


def test_a_plan_says_that_the_kernel_was_changed_meanwhile(site: Site, gate: Path) -> None:
    site.add(target="10.1.0.3", action="block")
    site.controller.tick()
    lose_a_chain(site)
    site.controller._due["structure"] = time.monotonic() + 600
    asked = ask(site, "plan")
    site.controller.tick()
    site.add(target="10.1.0.2", action="block")
    site.controller.tick()
    gate.touch()
    answer = wait_for(site, asked)
    assert answer["steps"]
    assert answer["words"][-1].startswith("The kernel was changed while this was worked out")


def test_what_nobody_waits_for_any_more_is_given_up(site: Site, gate: Path) -> None:
    del gate
    site.controller.tick()
    asked = ask(site, "plan")
    site.controller.tick()
    errand = site.controller._errands._errand
    assert errand is not None
    site.store.withdraw([asked])
    time.sleep(0.02)
    site.controller.tick()
    with pytest.raises(ProcessLookupError):
        os.kill(errand._process, 0)
    assert site.controller._errands.due is None


def test_what_takes_too_long_or_is_killed_is_told(site: Site, gate: Path) -> None:
    site.controller.tick()
    asked = ask(site, "plan")
    with patch.object(errands, "LONGEST", 0.05):
        assert "was given up" in wait_for(site, asked)["error"]
    asked = ask(site, "plan")
    while (errand := site.controller._errands._errand) is None:
        site.controller.tick()
    os.kill(errand._process, signal.SIGKILL)
    assert "ask again" in wait_for(site, asked)["error"]
    gate.touch()
    assert not wait_for(site, ask(site, "plan")).get("error")


def test_a_host_without_room_for_another_process_says_so(site: Site, gate: Path) -> None:
    del gate
    site.controller.tick()
    asked = ask(site, "plan")
    with patch.object(os, "fork", side_effect=BlockingIOError(11, "Resource temporarily unavailable")):
        assert "Resource temporarily unavailable" in wait_for(site, asked)["error"]


def test_it_keeps_no_descriptor_of_who_has_made_it() -> None:
    reading, writing = os.pipe()
    errand = Errand(lambda: time.sleep(60) or {})
    os.close(writing)
    os.set_blocking(reading, False)
    end = time.monotonic() + PATIENCE
    try:
        while True:
            try:
                assert os.read(reading, 1) == b""
                break
            except BlockingIOError:
                assert time.monotonic() < end
                time.sleep(0.01)
        assert errand.result() is None
    finally:
        errand.stop()
        os.close(reading)


def test_it_ends_with_who_has_made_it_however_that_ends() -> None:
    made = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with made:
        assert made.stdout is not None
        number = int(made.stdout.readline())
        made.kill()
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{number}/stat").exists():
        if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # who adopts it here may not look
        assert time.monotonic() < end
        time.sleep(0.01)
