"""The OpenAPI document as it is served, and a page that lists what is in it: to everybody, for no token is needed to
read how one is used. So both are written once: to write them anew each time would take longer than a request.

The page loads nothing, from here or from elsewhere: a gateway may reach no other host, and who reads the page trusts
none that it did not name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

ADDRESS = "/openapi.json"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{font-size:15px}"
_METHODS = ("get", "post", "put", "patch", "delete")


def serve_description(app: FastAPI) -> None:
    """Answer for the document and its page. `app.openapi` describes the application, whenever it is asked first."""

    @cache
    def write() -> tuple[bytes, str]:
        return _tag(json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")))

    @cache
    def write_page() -> tuple[bytes, str]:
        return _tag("\n".join(_list_operations(app.openapi())))

    @app.get(ADDRESS, include_in_schema=False)
    async def read_description(request: Request) -> Response:
        return _answer(request, write, "application/json")

    @app.get("/docs", include_in_schema=False)
    async def show_description(request: Request) -> Response:
        return _answer(request, write_page, "text/html")


def _tag(text: str) -> tuple[bytes, str]:
    written = text.encode()
    return written, f'"{hashlib.sha256(written).hexdigest()[:16]}"'


def _answer(request: Request, write: Callable[[], tuple[bytes, str]], media_type: str) -> Response:
    written, tag = write()
    headers = {"ETag": tag, "Content-Security-Policy": _POLICY}
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(written, media_type=media_type, headers=headers)


def _list_operations(document: Mapping[str, Any]) -> Iterator[str]:
    title = f"{document['info']['title']} {document['info']['version']}"
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(title)}</h1>"
    yield f'<p>Fields, values and examples are in <a href="{ADDRESS}">{ADDRESS}</a>, an OpenAPI document.</p>'
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in _METHODS
    ]
    for tag in document["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}</p><dl>"
        for path, method, operation in operations:
            if tag["name"] in operation.get("tags", ()):
                yield f"<dt><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}</dt>"
                yield f"<dd>{escape(operation.get('description', ''))}</dd>"
        yield "</dl>"
    yield "</body></html>"
