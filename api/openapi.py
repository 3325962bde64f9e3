"""The OpenAPI document: what the framework cannot know of bodies that netlimit reads itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from . import schemas

_REF = "#/components/schemas/{model}"
Examples = Mapping[str, object]

DESCRIPTION = """
The admin API of netlimit, the rate-limit controller for Linux gateways.

A *rule* says who (`target`) may send or receive how much (`rate`). Rules are kept in a database; on each gateway a
controller puts them into the kernel, usually within a tenth of a second, and reports how they stand.

* Errors are problem documents (RFC 9457): `detail` says what is wrong and what would be accepted, `field` names it.
* `Prefer: wait=5` (RFC 7240) delays the answer to a change until the kernel holds it.
* `ETag` and `If-Match` keep two clients from overwriting each other's changes.
* Every answer has an `X-Request-ID`: the one that was sent (1 to 64 of `A-Za-z0-9._-`), or a new one. The audit has it.
* Of one token, two requests that look are in work at a time, eight changes, and one body above 64 KiB; the others stand
  in line, without hindering anybody else. What waits for a kernel does not count.
* Whoever asks too much, or too slowly, gets 429 or 408; `Retry-After` says when to come back.
* Parameters and fields that are not known are refused: a word that is misspelt must not go unheard.
"""


def reference(model: type[BaseModel]) -> dict[str, str]:
    """The schema of a model, by reference."""
    return {"$ref": _REF.format(model=model.__name__)}


def body_of(contents: Mapping[str, tuple[type[BaseModel], Examples]]) -> dict[str, Any]:
    """The description of a body: for each media type its model and examples by name."""
    content = {
        media_type: {"schema": reference(model), "examples": write_examples(examples)}
        for media_type, (model, examples) in contents.items()
    }
    return {"requestBody": {"required": True, "content": content}}


def write_examples(examples: Examples) -> dict[str, dict[str, object]]:
    """Examples by name, as OpenAPI wants them."""
    return {name: {"value": value} for name, value in examples.items()}


def one_rule(status: int, description: str, model: object = schemas.Rule) -> dict[int | str, dict[str, Any]]:
    """The answer that is one rule, with the headers that go with it."""
    headers = {
        "ETag": {"description": "The rule's revision, for `If-Match`.", "schema": {"type": "string"}},
        "Preference-Applied": {"description": "How long was waited at most.", "schema": {"type": "string"}},
    }
    if status == 201:
        headers["Location"] = {"description": "Where the rule is.", "schema": {"type": "string"}}
    return {status: {"description": description, "model": model, "headers": headers}}


def describe_api(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
        _, sent = models_json_schema([(model, "validation") for model in schemas.SENT], ref_template=_REF)
        document["components"]["schemas"].update(sent["$defs"])
        document["tags"] = TAGS
        app.openapi_schema = document
    return app.openapi_schema


TAGS = [
    {"name": "rules", "description": "Who may send or receive how much."},
    {"name": "limits", "description": "How many requests the limiter lets pass, as documents."},
    {"name": "kernel", "description": "What the gateways hold, and what they would do."},
    {"name": "undo", "description": "Going back to what was, by hand or unless somebody confirms."},
    {"name": "access", "description": "Who may do what, and who did."},
    {"name": "health", "description": "For load balancers and monitoring."},
]
