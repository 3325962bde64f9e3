"""What a proxy hands on of the fields of a request: none that is another one to the application."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.l7.proxies.deferring import deferring
from tests.l7.proxies.programs import MAKERS, Places, running_at
from tests.l7.proxies.recording import recording
from tests.l7.proxies.wire import send_plainly
from tests.l7.service.serving import serving
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: remote_address
    on_limit: defer
    rate_limit: {unit: second, requests_per_unit: 1}
"""
OF_PATHS = ["X-Forwarded-Prefix", "X-Forwarded-Path", "X-Forwarded-Uri", "X-Script-Name", "X-Forwarded-Script-Name",
            "Script-Name", "Path-Info", "X-Traversal-Path", "X-Original-URL", "X-Original-URI", "X-Request-URI",
            "X-Rewrite-URL", "X-Rewrite-URI", "X-HTTP-Path-Override", "X-Envoy-Original-Path", "X-Waws-Unencoded-URL",
            "Daphne-Root-Path"]  # fmt: skip
"""By these some applications and servers take another path than the one that is sent."""
FIELDS = {
    "X_Api_Key": "s3cret",
    "X_Forwarded-For": "192.0.2.1",
    "X-Forwarded-For": "192.0.2.1",
    "X-Forwarded-Host": "other.example",
    "X-Forwarded-Proto": "http://other.example/other?",
    **dict.fromkeys(OF_PATHS, "/other"),
    "Forwarded": "for=192.0.2.1;host=other.example",
}
"""What a client says of itself, of somebody else, or of what it asks for."""
CLIENT = "127.0.0.2"
PATIENCE = 60.0


@pytest.mark.parametrize("name", [*MAKERS, "nginx-defer"])
def test_what_the_application_may_believe_of_a_client_is_what_is_limited(name: str, tmp_path: Path) -> None:
    """A field with an underscore is the one with a `-` to those that make variables of fields, as CGI does."""
    check(ask(name, tmp_path, "200"), name)


def test_of_what_is_kept_for_later_as_well(tmp_path: Path) -> None:
    check(ask("nginx-defer", tmp_path, "200", "202"), "nginx-defer")


@pytest.mark.parametrize("name", [*MAKERS, "nginx-defer"])
def test_a_host_that_is_a_list_is_no_other_one_to_who_reads_its_end(name: str, tmp_path: Path) -> None:
    """Rails, and Werkzeug behind proxies, take the last of `X-Forwarded-Host`."""
    hosts = "other.example,host.example"
    if name == "envoy":  # which tells the application of hosts in `Host` alone
        told = ask(name, tmp_path, "200", host=hosts)
        assert (told["host"], told.get("x-forwarded-host")) == (hosts, None)
    else:
        assert ask(name, tmp_path, "400", host=hosts) == {}


def check(told: dict[str, str], name: str) -> None:
    assert not [field for field in told if "_" in field]
    assert not told.keys() & {"forwarded", *map(str.lower, OF_PATHS)}
    assert told["x-forwarded-proto"] == "http"
    assert told.get("x-forwarded-host", told["host"]) == told["host"] == "host.example"
    believed = [address.strip() for address in told["x-forwarded-for"].split(",")]
    assert believed[-1] == CLIENT
    assert len(believed) == 1 or name == "envoy", "which writes behind what is there"


def ask(name: str, directory: Path, *statuses: str, host: str = "host.example") -> dict[str, str]:
    """The fields that the application gets of the last of some requests with these, to which there are such answers;
    none of what is refused."""
    fields = "".join(f"{field}: {value}\r\n" for field, value in FIELDS.items())
    with ExitStack() as stack:
        recorder, served = stack.enter_context(recording()), stack.enter_context(serving(RULES, running=True))
        deferral = stack.enter_context(deferring(served, directory, recorder.place))
        proxy = f"127.0.0.1:{free_port()}"
        places = Places(proxy, recorder.place, served.place, served.grpc_place, deferral, any_host=True)
        with running_at(name, directory, places) as place:
            for mark, status in enumerate(statuses):
                request = f"GET / HTTP/1.1\r\nHost: {host}\r\nX-Mark: {mark}\r\n{fields}Connection: close\r\n\r\n"
                assert asyncio.run(send_plainly(place, CLIENT, request.encode())) == status
            if statuses[-1] == "400":
                assert not recorder.heads
                return {}
            deadline = time.monotonic() + PATIENCE
            while (head := recorder.heads.get(str(mark))) is None:
                assert time.monotonic() < deadline, "what was kept has not come"
                time.sleep(0.05)
    lines = [line.partition(": ") for line in head.decode("latin-1").splitlines() if line]
    assert len({field.lower() for field, _, _ in lines}) == len(lines), lines
    return {field.lower(): value for field, _, value in lines}
