"""`/v1/auth`, as proxies ask it."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from netlimit.l7.addresses import AddressRules
from netlimit.rules import parse_rule
from tests.cli.running import until
from tests.l7.service.serving import Served, serving, someone
from tests.places import connect_to

_hosts = count(1)


@pytest.fixture
def client() -> str:
    """An address that nobody has come from."""
    number = next(_hosts)
    return f"198.51.{number // 250}.{number % 250 + 1}"


def ask(http: httpx.Client, query: str, **headers: str | bytes) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.get(f"/v1/auth?domain=web&{query}", headers=named)


def test_an_address_is_limited_and_told_so(http: httpx.Client, client: str) -> None:
    answers = [ask(http, "key=remote_address", X_Forwarded_For=client) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 403]
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["1", "0", "0"]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 60
    assert answers[2].json()["status"] == 429
    assert answers[0].content == b""


def test_429_for_those_who_hand_it_on(http: httpx.Client, client: str, served: Served) -> None:
    query = "key=remote_address&deny=429"
    answers = [ask(http, query, X_Forwarded_For=client) for _ in range(3)]
    assert answers[2].status_code == 429
    served.pass_time(int(answers[2].headers["retry-after"]))
    assert ask(http, query, X_Forwarded_For=client).status_code == 200


def test_of_a_chain_the_last_stranger_counts(http: httpx.Client, client: str) -> None:
    for forged in ("203.0.113.1", "203.0.113.2"):
        chain = f"{forged}, {client}, 127.0.0.1"
        assert ask(http, "key=remote_address", X_Forwarded_For=chain).status_code == 200
    assert ask(http, "key=remote_address", X_Forwarded_For=client).status_code == 403


def test_a_header_that_is_there_twice_is_one_list(http: httpx.Client, client: str) -> None:
    headers = [("X-Forwarded-For", "203.0.113.3"), ("X-Forwarded-For", client)]
    for _ in range(2):
        assert http.get("/v1/auth?domain=web&key=remote_address", headers=headers).status_code == 200
    assert ask(http, "key=remote_address", X_Forwarded_For=client).status_code == 403


@pytest.mark.parametrize(
    "uri",
    ["/login", "/login?next=/", "//login", "/%6Cogin", "/a/../login", "/./login", "http://host/login", "/login#1",
     "/a%2F..%2Flogin", "http://[host/login", "/login;1", "/login%3b1", "/;x/login", "/x/..;/login", "/.;/login"],
)  # fmt: skip
def test_a_path_is_one_however_it_is_written(http: httpx.Client, client: str, uri: str) -> None:
    query = "key=remote_address,path"
    assert ask(http, query, X_Forwarded_For=client, X_Forwarded_Uri="/login").status_code == 200
    assert ask(http, query, X_Forwarded_For=client, X_Forwarded_Uri=uri).status_code == 403


def test_a_path_that_means_two_things_has_the_limits_of_both(http: httpx.Client, client: str) -> None:
    headers = {"X_Forwarded_For": client, "X_Forwarded_Uri": "/files/../x"}
    assert [ask(http, "key=remote_address,path", **headers).status_code for _ in range(2)] == [200, 403]


@pytest.mark.parametrize("part", [".", "%2e", "", "%2f", ".%2f", "%2e%2f", "..", "%2e%2e%2F", ".;"])
def test_a_limit_of_any_part_of_a_path_is_one_of_dots_too(http: httpx.Client, client: str, part: str) -> None:
    """A route takes them as a parameter."""
    headers = {"X_Forwarded_For": client, "X_Forwarded_Uri": f"/reports/{part}/all"}
    assert [ask(http, "key=remote_address,path", **headers).status_code for _ in range(2)] == [200, 403]


@pytest.mark.parametrize(
    ("uri", "status"),
    [("/open/x", 200), ("/open/a/../x", 200), ("/open/../x", 403), ("/x/../open/y", 403), ("/x", 403)],
)
@pytest.mark.parametrize("general", ["caller", "path"])
def test_what_replaces_a_limit_is_there_whatever_a_path_means(
    http: httpx.Client, client: str, general: str, uri: str, status: int
) -> None:
    """Also where the question itself tells another path."""
    told = f"caller={client}" if general == "caller" else f"path=/constant/{client}"
    answers = [ask(http, f"key={told}&key=path", X_Forwarded_Uri=uri).status_code for _ in range(2)]
    assert answers == [200, status]


@pytest.mark.parametrize("host", ["HOST", "{}.", "{}:80", "{}:", "{}.:443", "u@{}"])
def test_a_host_is_one_however_it_is_written(http: httpx.Client, host: str) -> None:
    name = f"{someone()}.example"
    assert ask(http, "key=host", X_Forwarded_Host=name).status_code == 200
    other = name.upper() if host == "HOST" else host.format(name)
    assert ask(http, "key=host", X_Forwarded_Host=other).status_code == 403


def test_a_target_without_a_path_is_the_root(http: httpx.Client, client: str) -> None:
    for uri in ("", "http://host", "*"):
        assert ask(http, "key=remote_address,path", X_Forwarded_For=client, X_Forwarded_Uri=uri).status_code == 200


def test_a_refusal_may_be_told_by_401(http: httpx.Client, client: str) -> None:
    query = "key=remote_address&deny=401"
    statuses = [ask(http, query, X_Forwarded_For=client).status_code for _ in range(3)]
    assert statuses == [200, 200, 401]


def test_other_paths_are_not_limited(http: httpx.Client, client: str) -> None:
    for _ in range(3):
        answer = ask(http, "key=remote_address,path", X_Forwarded_For=client, X_Forwarded_Uri="/login/help")
        assert answer.status_code == 200


def test_several_descriptors_are_asked_together(http: httpx.Client, client: str) -> None:
    query = "key=remote_address&key=remote_address,path"
    answer = ask(http, query, X_Forwarded_For=client, X_Forwarded_Uri="/login")
    assert answer.headers["ratelimit-policy"].count(";q=") == 2
    assert ask(http, query, X_Forwarded_For=client, X_Forwarded_Uri="/login").status_code == 403


def test_as_traefik_sends_them(http: httpx.Client, client: str) -> None:
    headers = {
        "X-Forwarded-For": client,
        "X-Forwarded-Method": "POST",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": f"{client}.example:8443",
        "X-Forwarded-Uri": "/orders?id=7",
    }
    for query, statuses in (("key=method", [200, 429]), ("key=host", [200, 429]), ("key=path", [200, 200])):
        asked = [http.get(f"/v1/auth?domain=web&deny=429&{query}", headers=headers) for _ in statuses]
        assert [answer.status_code for answer in asked] == statuses


@pytest.mark.parametrize(("named", "sent"), [("GET", "HEAD"), ("GET", "head"), ("POST", "post"), ("POST", "Post")])
@pytest.mark.parametrize("key", ["method", "header:method", "method={}"])
def test_a_method_is_one_however_it_is_written(http: httpx.Client, key: str, named: str, sent: str) -> None:
    """And HEAD has the limits of GET: applications run one handler for both."""
    query = f"key={key},caller={someone()}"
    answers = [ask(http, query.format(told), X_Forwarded_Method=told, Method=told) for told in (named, sent)]
    assert [answer.status_code for answer in answers] == [200, 403]


def test_a_head_has_its_own_limit_as_well(http: httpx.Client) -> None:
    query = f"key=method,caller={someone()}"
    first = ask(http, query, X_Forwarded_Method="HEAD")
    assert first.headers["ratelimit-policy"].count(";q=") == 2
    assert ask(http, query, X_Forwarded_Method="GET").status_code == 403
    refused = ask(http, f"{query}&deny=429", X_Forwarded_Method="HEAD")
    assert (refused.status_code, refused.json()["violated-policies"]) == (429, ["method=GET,caller"])


def test_a_head_has_the_limits_of_all_that_its_path_means(http: httpx.Client) -> None:
    query, where = f"key=method,path,caller={someone()}", "/login/../login"
    assert ask(http, query, X_Forwarded_Method="HEAD", X_Forwarded_Uri=where).status_code == 200
    assert ask(http, query, X_Forwarded_Method="GET", X_Forwarded_Uri="/login").status_code == 403


def test_a_header_of_the_client_names_whom_it_is_for(http: httpx.Client) -> None:
    tenant = someone()
    assert ask(http, "key=header:X-Tenant", X_Tenant=tenant).status_code == 200
    assert ask(http, "key=header:X-Tenant", X_Tenant=tenant).status_code == 403
    assert [ask(http, "key=header:X-Tenant").status_code for _ in range(3)] == [200] * 3


def test_a_value_may_stand_in_the_query(http: httpx.Client) -> None:
    who = someone()
    assert [ask(http, f"key=user={who}").status_code for _ in range(4)] == [200, 200, 200, 403]
    assert ask(http, f"key=user={someone()}&hits=4").status_code == 403


TELLS = ["key=remote_address={}", "key=header:remote_address", "key=header:Remote_Address"]


@pytest.mark.parametrize("query", TELLS)
@pytest.mark.parametrize(
    "forms",
    [
        ("2001:db8:0:{:x}::1", "2001:DB8:0:{:x}:a::7", "2001:db8:0:{:x}::1%eth0"),
        ("198.51.200.{}", "::ffff:198.51.200.{}", "::FFFF:198.51.200.{}"),
    ],
)
def test_an_address_that_is_told_is_one_however_it_is_written(
    http: httpx.Client, query: str, forms: tuple[str, ...]
) -> None:
    number = 100 + next(_hosts)
    statuses = []
    for form in (*forms, *forms[:1]):
        address = form.format(number)
        told = query.format(quote(address))
        statuses.append(http.get(f"/v1/auth?domain=web&{told}", headers={"remote_address": address}).status_code)
    assert statuses == [200, 200, 403, 403]
    found = forms[0].format(number)
    assert ask(http, "key=remote_address", X_Forwarded_For=found).status_code == 403  # it has the counter of that


def test_a_host_and_a_path_that_are_told_are_one_however_they_are_written(http: httpx.Client, client: str) -> None:
    for path, status in (("/login", 200), ("//login", 403), ("/%256Cogin", 403), ("/a/../login", 403)):
        assert ask(http, f"key=remote_address={client},path={path}").status_code == status
    host = f"{someone()}.example"
    for told, status in ((host, 200), (host.upper(), 403), (f"{host}:8443", 403)):
        assert ask(http, f"key=host={told}").status_code == status


def test_of_several_addresses_each_is_asked_about(http: httpx.Client, blocked: str) -> None:
    query = "key=remote_address&key=header:remote_address"
    for found, told, status in (
        (blocked, "2001:db8:67::1", 403),
        ("2001:db8:67::1", blocked, 403),
        (blocked, "198.51.210.1", 403),
        (blocked, "nobody", 403),
        ("2001:db8:67::1", "198.51.210.1", 200),
    ):
        headers = {"X-Forwarded-For": found, "remote_address": told}
        assert http.get(f"/v1/auth?domain=web&{query}", headers=headers).status_code == status


def test_leases_are_told(http: httpx.Client) -> None:
    who = someone()
    lease = ask(http, f"key=flight={who}").headers["x-netlimit-lease"]
    assert ask(http, f"key=flight={who}").status_code == 200
    assert ask(http, f"key=flight={who}").status_code == 403
    assert http.post("/v1/release", json={"leases": [lease]}).status_code == 204
    assert ask(http, f"key=flight={who}").status_code == 200


@pytest.fixture
def blocked(served: Served) -> Iterator[str]:
    """An address that an IP rule blocks here, since the kernel cannot."""
    rule = replace(parse_rule({"target": "2001:db8:66::6", "action": "block"}, datetime.now(UTC)), id=1, revision=1)
    served.addresses = AddressRules([rule], [1])
    yield "2001:db8:66::6"
    served.addresses = AddressRules()


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("key=remote_address", {"X-Forwarded-For": "2001:db8:66::6"}),
        ("key=header:x-tenant", {"X-Forwarded-For": "2001:db8:66::6", "X-Tenant": "any"}),
        ("key=remote_address=2001:db8:66::6", {}),
    ],
)
def test_who_is_blocked_gets_403(http: httpx.Client, blocked: str, query: str, headers: dict[str, str]) -> None:
    refused = http.get(f"/v1/auth?domain=web&deny=429&{query}", headers=headers)
    assert (refused.status_code, refused.json()["status"]) == (403, 403)
    asked = {"domain": "web", "descriptors": [[{"key": "remote_address", "value": blocked}]]}
    told = http.post("/v1/decide", json=asked)
    assert (told.status_code, told.json()["detail"]) == (403, "Requests of this client are blocked.")
    neighbours = {name: value.replace("::6", "::7") for name, value in headers.items()}
    assert http.get(f"/v1/auth?domain=web&{query.replace('::6', '::7')}", headers=neighbours).status_code == 200


def test_who_hangs_up_leaves_the_line(http: httpx.Client, served: Served) -> None:
    query = f"/v1/auth?domain=web&key=line={someone()}"
    served.begin_minute()
    assert http.get(query).status_code == 200
    assert http.get(query).status_code == 403  # its turn comes too late
    served.pass_time(50)
    host, _, port = served.place.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"GET {query} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        until(lambda: served.service.waiting == 1)
    until(lambda: served.service.waiting == 0)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "no domain"),
        ("domain=web", "no key"),
        ("key=path", "no domain"),
        ("domain=web&key=path", "X-Forwarded-Uri"),
        ("domain=web&key=method", "X-Forwarded-Method"),
        ("domain=web&key=host", "X-Forwarded-Host"),
        ("domain=web&key=nonsense", "remote_address"),
        ("domain=web&key=path:x", "remote_address"),
        ("domain=web&key=", "remote_address"),
        ("domain=web&domain=two&key=path", "twice"),
        ("domain=web&key=path&colour=red", "more than"),
        ("domain=web&key=remote_address&hits=-1", "hits"),
        ("domain=web&key=remote_address&hits=4294967296", "hits"),
        ("domain=web&key=remote_address&wait=-1", "0.5"),
        ("domain=web&key=remote_address&wait=inf", "0.5"),
        ("domain=web&key=remote_address&deny=418", "401 or 403 or 429"),
        ("domain=web" + "&key=remote_address" * 200, "cannot be read"),
    ],
)
def test_a_proxy_that_asks_wrongly_is_told(http: httpx.Client, query: str, said: str) -> None:
    answer = http.get(f"/v1/auth?{query}")
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


@pytest.mark.parametrize("host", [b"one.example, two.example", b"h\xbast.example"])
def test_what_is_another_host_to_others_is_none(http: httpx.Client, host: bytes) -> None:
    """To who reads the end of a list, and to who reads letters as browsers do."""
    assert ask(http, "key=host", X_Forwarded_Host=host).status_code == 422
    assert ask(http, "key=remote_address", X_Forwarded_Host=host).status_code == 200


def test_blanks_around_a_key_make_no_other_key(http: httpx.Client) -> None:
    key = someone().encode()
    written = [key, key + b"\xa0", b"\x85" + key, b"\xa0" + key + b"\x85\xa0", key + b"\xc2\xa0"]
    assert [ask(http, "key=header:X-Tenant", X_Tenant=each).status_code for each in written] == [200, *[403] * 4]


def test_a_path_that_may_mean_too_much_is_refused(http: httpx.Client, client: str) -> None:
    uri = "/login" + "/..;//" * 100
    for key in ("path", "remote_address,path", "header:path"):
        answer = http.get(f"/v1/auth?domain=web&key={key}", headers={"X-Forwarded-Uri": uri, "path": uri})
        assert (answer.status_code, answer.json()["field"]) == (422, "key")
        assert "more than 128 parts" in answer.json()["detail"]
    assert ask(http, "key=remote_address", X_Forwarded_For=client, X_Forwarded_Uri=uri).status_code == 200


@pytest.mark.parametrize("uri", [b"/login\xa0", "/caf\u00e9".encode(), b"/%u006cogin", b"/log\tin", b"/login%"])
def test_what_no_path_is_sent_as_is_refused(http: httpx.Client, client: str, uri: bytes) -> None:
    for key in ("path", "remote_address,path", "remote_address,header:path"):
        answer = http.get(f"/v1/auth?domain=web&key={key}", headers={"X-Forwarded-Uri": uri, "path": uri + b"."})
        assert (answer.status_code, answer.json()["field"]) == (422, "key")
        assert "encode it" in answer.json()["detail"]
    assert ask(http, "key=remote_address", X_Forwarded_For=client, X_Forwarded_Uri=uri).status_code == 200


DOOR = """
domain: web
descriptors:
  - key: door
    on_limit: queue
    max_wait: 60s
    concurrency: {limit: 1, lease: 600}
"""


def test_whoever_waits_is_answered_in_time_counted_from_when_the_question_came() -> None:
    """It may have lain on this host: on a connection that is known, or on one that nobody has accepted yet."""
    question = "GET /v1/auth?domain=web&key=door%3D1&deny=429&wait={} HTTP/1.1\r\nHost: a\r\n\r\n"
    with serving(DOOR, running=True) as served, ExitStack() as stack:

        def connect() -> socket.socket:
            host, _, port = served.place.rpartition(":")
            return stack.enter_context(socket.create_connection((host, int(port)), 30))

        known = connect()
        known.sendall(question.format("2").encode())
        assert known.recv(4096).startswith(b"HTTP/1.1 200"), "the only place is taken"
        goes_on = threading.Event()
        stack.callback(goes_on.set)
        served.block(goes_on)
        unknown = connect()
        for early in (known, unknown):
            early.sendall(question.format("2").encode())
        assert not goes_on.wait(2.1)
        late = connect()
        late.sendall(question.format("1").encode())
        goes_on.set()
        order = []
        while len(order) < 3:
            ready, _, _ = select.select([each for each in (known, unknown, late) if each not in order], [], [], 30)
            assert ready
            order += ready
        assert order[2] is late
        assert all(each.recv(4096).startswith(b"HTTP/1.1 429") for each in order)


def test_whose_connection_was_reset_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """Two questions at once, of somebody who is gone before the first is answered."""
    question = b"GET /v1/auth?domain=web&key=door%3D1&deny=429&wait=0.5 HTTP/1.1\r\nHost: a\r\n\r\n"
    with serving(DOOR, running=True) as served:
        host, _, port = served.place.rpartition(":")
        goes_on = threading.Event()
        served.block(goes_on)
        for _ in range(50):
            with socket.create_connection((host, int(port)), 30) as gone:
                gone.sendall(2 * question)
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        goes_on.set()
        with served.connect() as client:
            assert client.get("/v1/auth?domain=web&key=door%3D2").status_code == 200
        served.wait()
    assert "fault" not in caplog.text
    assert {status for _, status in served.service.answers} <= {200, 408, 429}


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_what_nobody_waits_for_any_more_is_not_decided(over: str, tmp_path: Path) -> None:
    """It is found out before the rest, and counts nowhere; who asks on a connection that lasts is answered."""
    question = b"GET /v1/auth?domain=web&key=user%3Dalice HTTP/1.1\r\nHost: a\r\n\r\n"
    rules = "domain: web\ndescriptors:\n  - key: user\n    rate_limit: {unit: hour, requests_per_unit: 2}\n"
    with serving(rules, running=True, directory=tmp_path if over == "unix" else None) as served:
        goes_on = threading.Event()
        served.block(goes_on)
        for _ in range(50):
            with connect_to(served.place) as gone:
                gone.sendall(question)
        with connect_to(served.place) as stays:
            stays.sendall(question)
            goes_on.set()
            assert stays.recv(4096).startswith(b"HTTP/1.1 200")
        served.wait()
    assert served.service.answers == {("auth", 408): 50, ("auth", 200): 1}
