"""The OpenAPI document: what it promises holds, and every example in it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from netlimit.store import Store
from tests.api.server import TOKENS, Controller, get

SEED = 20_260_701
EXAMPLES = 7
Operation = tuple[str, str, dict[str, Any]]
PATIENCE = 60
PLAN = {"words": [], "text": "", "steps": []}
SCHEMATHESIS = """
[checks.positive_data_acceptance]
# What a schema cannot say of a rule, such as which rates a kernel can hold, is said by 422, or by 412 of If-Match.
expected-statuses = ["2xx", "3xx", "401", "403", "404", "409", "412", "422", "429"]
"""


@pytest.fixture
def document(url: str) -> dict[str, Any]:
    return dict(get(f"{url}/openapi.json").json())


def operations(document: dict[str, Any]) -> Iterator[Operation]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names)) == 34
    for method, path, operation in operations(document):
        assert operation["summary"], path
        assert len(operation["description"]) > 20, path
        assert operation["tags"], path
        guarded = path.startswith("/api/v1")
        assert ("security" in operation) == guarded
        wanted = {"422"} | ({"401", "403", "503"} if guarded else set())
        wanted |= {"404"} if "{key}" in path else set()
        wanted |= {"400", "409", "413", "415"} if "requestBody" in operation else set()
        assert wanted <= set(operation["responses"]), (method, path)
        for status, answer in operation["responses"].items():
            assert answer["description"]
            if status[0] in "45":
                assert answer["content"]["application/problem+json"]["schema"] == {
                    "$ref": "#/components/schemas/Problem"
                }
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"


def test_every_field_of_a_rule_is_described(document: dict[str, Any]) -> None:
    for model in ("NewRule", "RuleReplacement", "RuleChanges"):
        for name, field in document["components"]["schemas"][model]["properties"].items():
            assert field.get("description"), (model, name)
    references = json.dumps(document).split('"$ref": "#/components/schemas/')[1:]
    assert {each.split('"')[0] for each in references} <= set(document["components"]["schemas"])


def test_every_example_runs(document: dict[str, Any], client: httpx.Client, store: Store) -> None:
    """In one database: the examples of a reader who tries them all do not get into each other's way."""
    store.guarded("gw1")
    run = 0
    for method, path, operation in sorted(operations(document), key=lambda each: each[1]):
        for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
            for name, example in content.get("examples", {}).items():
                domain = example["value"]["domain"] if "{domain}" in path else ""
                answer = client.request(
                    method,
                    path.removeprefix("/api/v1").format(key="1", domain=domain),
                    content=json.dumps(example["value"]),
                    headers={"Content-Type": media_type},
                )
                assert answer.status_code in (200, 201), (name, answer.text)
                run += 1
    assert run == 28


def test_the_ndjson_of_the_description_runs(document: dict[str, Any], client: httpx.Client) -> None:
    content = document["paths"]["/api/v1/rules/bulk"]["post"]["requestBody"]["content"]["application/x-ndjson"]
    lines = content["schema"]["description"].partition("\n\n")[2]
    answer = client.post("/rules/bulk", content=lines, headers={"Content-Type": "application/x-ndjson"})
    assert answer.json()["added"] == 3, answer.text


@pytest.fixture
def patient_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows bad tokens on purpose, more than anybody may in a minute, and wants 401 for each."""
    monkeypatch.setattr("api.doorkeeper.FAILURES", 100_000)


@pytest.mark.usefixtures("patient_doors")
def test_the_document_holds(url: str, controller: Controller, tmp_path: Path) -> None:
    """Generated requests, right ones and wrong ones: every answer is as the document says, and never a fault."""
    controller.answers = {
        "plan": lambda argument: PLAN,
        "preview": lambda argument: {
            "state": "applied",
            "enforced_by": "iptables",
            "message": None,
            **PLAN,
            "relations": [],
        },
        "offenders": lambda argument: {"items": []},
        "counters": lambda argument: {"ok": True},
    }
    controller.start()
    (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS)
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {TOKENS['admin']}", "--seed", SEED, "--max-examples", EXAMPLES]
    command += ["--request-timeout", PATIENCE]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    print(f"seed {SEED}")
    print(done.stdout, done.stderr)
    assert done.returncode == 0
