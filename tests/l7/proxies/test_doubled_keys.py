"""Of two keys in one request the application sees no other than the limiter has counted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.l7.proxies.deferring import deferring
from tests.l7.proxies.gateways import Gateway, serving_by
from tests.l7.proxies.programs import Places, running_at
from tests.l7.proxies.wire import send_plainly
from tests.l7.service.serving import serving
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: api_key
    rate_limit: {unit: day, requests_per_unit: 3}
"""
KEPT = RULES + "    on_limit: defer\n"
CLIENT = "127.0.0.2"
ASKED = "key=remote_address&key=remote_address,path&"
TOLD = "# proxy_set_header X-API-Key $http_x_api_key;"
PROTOCOLS = ["proxy", "fastcgi", "uwsgi", "scgi"]


def limit_keys(text: str) -> str:
    """nginx.conf that asks about keys, as it says itself how."""
    asked = text.replace(ASKED, "key=api_key&").replace("key=remote_address&", "key=api_key&")
    assert "key=api_key&" in asked
    assert asked.count(TOLD) == 1
    return asked.replace(TOLD, TOLD.removeprefix("# "))


def pass_by(protocol: str, place: str, text: str) -> str:
    """nginx.conf that passes on by another protocol, as it says itself how."""
    passing = f"proxy_pass http://{place}/;"
    assert text.count(passing) == 1
    if protocol == "proxy":
        return text
    lines = re.findall(rf"# ({protocol}_(?:param|set_header) .*;)$", text, re.MULTILINE)
    assert len(lines) == 1, lines
    if protocol == "grpc":
        return text.replace(passing, f"{lines[0]} grpc_pass grpc://{place};")
    return text.replace(passing, f"include /etc/nginx/{protocol}_params; {lines[0]} {protocol}_pass {place};")


@contextmanager
def running_before(gateway: Gateway, directory: Path) -> Iterator[str]:
    """nginx before an application, with a limit of keys; where it is."""
    with serving(RULES, running=True) as served:
        places = Places(f"127.0.0.1:{free_port()}", gateway.place, served.place, "")
        change = lambda text: pass_by(gateway.protocol, gateway.place, limit_keys(text))  # noqa: E731
        with running_at("nginx", directory, places, change) as place:
            gateway.keys.clear()
            yield place


def ask(place: str, *keys: str) -> str:
    fields = "".join(f"X-API-Key: {key}\r\n" for key in keys)
    request = f"GET / HTTP/1.1\r\nHost: host.example\r\n{fields}Connection: close\r\n\r\n"
    return asyncio.run(send_plainly(place, CLIENT, request.encode()))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_another_key_before_his_own_is_the_one_that_the_application_gets(protocol: str, tmp_path: Path) -> None:
    with serving_by(protocol) as gateway, running_before(gateway, tmp_path) as place:
        others = [f"other{number}" for number in range(20)]
        assert [ask(place, other, "own") for other in others] == ["200"] * 20
        assert gateway.keys == others
        assert [ask(place, "own", other) for other in others] == ["200"] * 3 + ["429"] * 17
        assert gateway.keys[20:] == ["own"] * 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_key_is_handed_on_as_it_is_and_none_as_none(protocol: str, tmp_path: Path) -> None:
    with serving_by(protocol) as gateway, running_before(gateway, tmp_path) as place:
        assert [ask(place, "own") for _ in range(5)] == ["200"] * 3 + ["429"] * 2
        assert ask(place) == "200"
        assert gateway.keys == ["own"] * 3 + [None]


def test_two_keys_in_one_field_are_refused(tmp_path: Path) -> None:
    """So nginx from 1.23 on makes one of two fields: with each other key it would be a new one."""
    with serving_by("proxy") as gateway, running_before(gateway, tmp_path) as place:
        assert [ask(place, told) for told in ("own, other", "own,other", ",own", "own,")] == ["400"] * 4
        assert gateway.keys == []


def test_what_is_kept_for_later_has_the_key_that_was_counted(tmp_path: Path) -> None:
    with (
        serving_by("proxy") as gateway,
        serving(KEPT, running=True) as served,
        deferring(served, tmp_path, gateway.place) as deferral,
    ):
        places = Places(f"127.0.0.1:{free_port()}", gateway.place, served.place, "", deferral)
        with running_at("nginx-defer", tmp_path, places, limit_keys) as place:
            gateway.keys.clear()
            statuses = [ask(place, "own", f"other{number}") for number in range(5)]
            assert ask(place, "own, other") == "400"
    assert statuses == ["200"] * 3 + ["202"] * 2
    assert gateway.keys == ["own"] * 3


ASKING = {
    "haproxy": {
        "key=remote_address&key=remote_address,path&": "key=api_key&",
        '-- "x-api-key: "': '"x-api-key: "',
    },
    "caddy": {"key=remote_address&key=remote_address,path&": "key=api_key&"},
    "envoy": {
        "- actions: [{remote_address: {}}]":
        "- actions: [{request_headers: {header_name: x-api-key, descriptor_key: api_key}}]",
    },
}  # fmt: skip
"""How the others ask about keys."""


@pytest.mark.parametrize("name", ASKING)
def test_behind_others_two_keys_are_refused_or_the_first_is_handed_on(name: str, tmp_path: Path) -> None:
    """They show the limiter one of the two, and would hand on both."""
    changed: set[str] = set()

    def change(text: str) -> str:
        for old, new in ASKING[name].items():
            changed.update([old] if old in text else [])
            text = text.replace(old, new)
        return text

    with serving_by("proxy") as gateway, serving(RULES, running=True) as served:
        places = Places(f"127.0.0.1:{free_port()}", gateway.place, served.place, served.grpc_place, any_host=True)
        with running_at(name, tmp_path, places, change) as place:
            assert changed == {*ASKING[name]}
            gateway.keys.clear()
            two = [ask(place, f"other{number}", "own") for number in range(5)]
            assert two == ["200" if name == "envoy" else "400"] * 5
            assert gateway.keys == [f"other{number}" for number in range(5) if name == "envoy"]
            gateway.keys.clear()
            assert ask(place, "own, other") == "400"
            assert [ask(place, "own") for _ in range(5)] == ["200"] * 3 + ["429"] * 2
            assert ask(place) == "200"
            assert gateway.keys == ["own"] * 3 + [None]


class Naming(grpc.GenericRpcHandler):
    """Answers all calls, and remembers their keys."""

    def __init__(self) -> None:
        self.keys: list[list[str]] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        metadata = details.invocation_metadata  # type: ignore[attr-defined]
        self.keys.append([value for name, value in metadata if name == "x-api-key"])
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)


def test_a_call_of_grpc_has_one_key(tmp_path: Path) -> None:
    naming = Naming()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[naming])
    application = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with serving(RULES, running=True) as served:
        places = Places(
            f"127.0.0.1:{free_port()}", application, served.place, "", h2=f"127.0.0.1:{free_port()}", any_host=True
        )
        change = lambda text: pass_by("grpc", application, limit_keys(text))  # noqa: E731
        with running_at("nginx", tmp_path, places, change), grpc.insecure_channel(places.h2) as channel:
            naming.keys.clear()
            call = channel.unary_unary("/test.Test/Call")
            for number in range(5):
                metadata = (("x-api-key", f"other{number}"), ("x-api-key", "own"))
                assert call(b"x", metadata=metadata, timeout=20) == b"x"
            assert call(b"x", timeout=20) == b"x"
    server.stop(0).wait()
    assert naming.keys == [[f"other{number}"] for number in range(5)] + [[]]
