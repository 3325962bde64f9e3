"""Plans and dry runs of many rules, of a controller that runs, on a real kernel."""

from __future__ import annotations

from netlimit.controller import MUCH
from tests.e2e.gateway import HOST, Gateway


def test_many_rules_are_planned_and_previewed_by_a_copy_while_changes_go_on(gateway: Gateway) -> None:
    wanted = [{"target": f"10.9.{i // 250}.{1 + i % 250}", "rate": "50 packets/s"} for i in range(MUCH + 1)]
    gateway.put(*wanted)
    for direction in ("from", "to"):
        gateway.add({"target": "10.1.0.2", "rate": "10 Mbit/s", "action": "shape", "direction": direction})
    argument = {"rule": {"target": "10.9.9.9", "rate": "5 packets/s"}, "id": 0}
    for number in range(3):
        plan = gateway.store.ask(HOST, "plan", {})
        preview = gateway.store.ask(HOST, "preview", argument)
        gateway.put({"target": f"10.8.0.{number + 1}", "action": "block"})
        gateway.wait(lambda asked=plan: gateway.store.answered(asked) is not None, "a plan")  # type: ignore[misc]
        gateway.wait(lambda asked=preview: gateway.store.answered(asked) is not None, "a preview")  # type: ignore[misc]
        found = gateway.store.answered(preview)
        assert found is not None
        assert found["state"] == "applied", found
    plan = gateway.store.ask(HOST, "plan", {})
    gateway.wait(lambda: gateway.store.answered(plan) is not None, "a plan")
    assert gateway.store.answered(plan) == {"words": [], "text": "Nothing to do.", "steps": []}
    assert " ERROR " not in gateway.log.read_text()
