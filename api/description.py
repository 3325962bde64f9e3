"""The OpenAPI document as it is served, and the page that shows it: to everybody, for no token is needed to read how
one is used. So it is written once; FastAPI would write it anew each time, which takes longer than a request."""

from __future__ import annotations

import hashlib
import json
from functools import cache

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response

ADDRESS = "/openapi.json"


def serve_description(app: FastAPI) -> None:
    """Answer for the document and its page. `app.openapi` describes the application, whenever it is asked first."""

    @cache
    def write() -> tuple[bytes, str]:
        written = json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()
        return written, f'"{hashlib.sha256(written).hexdigest()[:16]}"'

    @app.get(ADDRESS, include_in_schema=False)
    async def read_description(request: Request) -> Response:
        written, tag = write()
        headers = {"ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(written, media_type="application/json", headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def show_description() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url=ADDRESS, title=f"{app.title} - Swagger UI")
