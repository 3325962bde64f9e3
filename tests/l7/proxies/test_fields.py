"""What a proxy hands on of the fields of a request: none that is another one to the application."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.l7.proxies.programs import MAKERS, Places, running_at
from tests.l7.proxies.recording import recording
from tests.l7.proxies.wire import send_plainly
from tests.l7.service.serving import serving
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 10}
"""
REQUEST = (
    b"GET / HTTP/1.1\r\nHost: host.example\r\nX-Mark: one\r\nX_Api_Key: s3cret\r\nX_Forwarded-For: 192.0.2.1\r\n"
    b"Connection: close\r\n\r\n"
)


@pytest.mark.parametrize("name", MAKERS)
def test_no_field_with_an_underscore_reaches_the_application(name: str, tmp_path: Path) -> None:
    """To those that make variables of fields, as CGI does, it would be the one with a `-`, of which the limiter, and
    who trusts the proxy, look at the other."""
    with recording() as recorder, serving(RULES) as served:
        places = Places(f"127.0.0.1:{free_port()}", recorder.place, served.place, served.grpc_place, any_host=True)
        with running_at(name, tmp_path, places) as place:
            assert asyncio.run(send_plainly(place, "127.0.0.2", REQUEST)) == "200"
    assert "one" in recorder.reached
    assert not recorder.underscored
