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
FIELDS = {
    "X_Api_Key": "s3cret",
    "X_Forwarded-For": "192.0.2.1",
    "X-Forwarded-For": "192.0.2.1",
    "X-Forwarded-Host": "other.example",
    "Forwarded": "for=192.0.2.1;host=other.example",
}
"""What a client says of itself, or of somebody else."""
CLIENT = "127.0.0.2"


@pytest.mark.parametrize("name", [*MAKERS, "nginx-defer"])
def test_what_the_application_may_believe_of_a_client_is_what_is_limited(name: str, tmp_path: Path) -> None:
    """A field with an underscore is the one with a `-` to those that make variables of fields, as CGI does."""
    told = ask(name, tmp_path)
    assert not [field for field in told if "_" in field]
    assert "forwarded" not in told
    assert told.get("x-forwarded-host", told["host"]) == told["host"] == "host.example"
    believed = [address.strip() for address in told["x-forwarded-for"].split(",")]
    assert believed[-1] == CLIENT
    assert len(believed) == 1 or name == "envoy", "which writes behind what is there"


def ask(name: str, directory: Path) -> dict[str, str]:
    """The fields that the application gets of a request with these."""
    fields = "".join(f"{field}: {value}\r\n" for field, value in FIELDS.items())
    request = f"GET / HTTP/1.1\r\nHost: host.example\r\nX-Mark: one\r\n{fields}Connection: close\r\n\r\n"
    with recording() as recorder, serving(RULES) as served:
        proxy = f"127.0.0.1:{free_port()}"
        places = Places(proxy, recorder.place, served.place, served.grpc_place, "127.0.0.1:1", any_host=True)
        with running_at(name, directory, places) as place:
            assert asyncio.run(send_plainly(place, CLIENT, request.encode())) == "200"
    lines = [line.partition(": ") for line in recorder.heads["one"].decode("latin-1").splitlines() if line]
    assert len({field.lower() for field, _, _ in lines}) == len(lines), lines
    return {field.lower(): value for field, _, value in lines}
