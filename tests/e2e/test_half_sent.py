"""Strangers who hold thousands of half-sent requests, or ask without end, shut the API for themselves alone."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator

import pytest

from scripts.testbed.namespaces import LAN, LAN6, Lab, close_pipes
from scripts.testbed.service import Service
from scripts.testbed.streams import ROOT

SECONDS = 6.0
ANY = "0.0.0.0"  # noqa: S104  in a namespace of the tests
FRIEND = {ANY: "10.1.77.77", "::": "fd00:1::77"}
STRANGERS = {
    ANY: [f"10.1.{n}.{n}" for n in range(10, 20)],
    "::": [f"fd00:1::{n:x}" for n in range(0x1000, 0x100A)],
}
HERE = {ANY: ("127.0.0.1", LAN), "::": ("::1", LAN6)}


@pytest.fixture(scope="module", params=[ANY, "::"], ids=["IPv4", "IPv6"])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def service(lab: Lab, place: str) -> Iterator[Service]:
    lab.add_client_addresses(FRIEND[place], *STRANGERS[place])
    listen = f"[{place}]:8750" if ":" in place else f"{place}:8750"
    url = f"http://[{HERE[place][0]}]:8750" if ":" in place else f"http://{HERE[place][0]}:8750"
    settings = {"NETLIMIT_LISTEN": listen, "NETLIMIT_URL": url, "NETLIMIT_BOOTSTRAP_TOKEN": "a-token-of-the-tests-1"}
    with Service(lab.gateway, settings=settings, url=url) as running:
        yield running


TWICE = """
import http.client, sys
host, source, token = sys.argv[1:]
connection = http.client.HTTPConnection(host, 8750, 10, (source, 0) if source else None)
for _ in range(2):
    connection.request("GET", "/api/v1/rules?limit=1", headers={"Authorization": "Bearer " + token})
    answer = connection.getresponse()
    answer.read()
    print(answer.status, answer.getheader("connection"))
"""


def test_by_one_connection_a_stranger_is_answered_once(lab: Lab, service: Service, place: str) -> None:
    here, outside = HERE[place]
    ask = (sys.executable, "-c", TWICE)
    assert lab.client.run(*ask, outside, STRANGERS[place][0], "wrong").stdout.splitlines() == ["401 close"] * 2
    assert lab.gateway.run(*ask, here, "", service.token).stdout.splitlines() == ["200 None"] * 2
    lab.client.run(*ask, outside, FRIEND[place], service.token)
    assert lab.client.run(*ask, outside, FRIEND[place], service.token).stdout.splitlines() == ["200 None"] * 2


def test_thousands_of_half_sent_requests_keep_nobody_else_out(lab: Lab, service: Service, place: str) -> None:
    here, outside = HERE[place]
    script = ("-m", "tests.e2e.half_sent")
    # Who has shown a good token before is known, and is served among strangers, too.
    friend = ("import http.client,sys; c=http.client.HTTPConnection(sys.argv[1],8750,10,(sys.argv[2],0));"
              "c.request('GET','/api/v1/rules?limit=1',headers={'Authorization':'Bearer '+sys.argv[3]});"
              "print(c.getresponse().status)")  # fmt: skip
    asking = (sys.executable, "-c", friend, outside, FRIEND[place], service.token)
    assert lab.client.run(*asking).stdout.strip() == "200"
    calm = lab.gateway.run(sys.executable, *script, "ask", here, "1", service.token, cwd=ROOT).stdout.split()
    with tempfile.TemporaryFile("w+") as said:
        arguments = (*script, "flood", outside, str(2 * SECONDS), "300", *STRANGERS[place])
        flood = lab.client.popen(sys.executable, *arguments, stdout=said, cwd=ROOT)
        try:
            done = lab.gateway.run(sys.executable, *script, "ask", here, str(SECONDS), service.token, cwd=ROOT)
            assert lab.client.run(*asking).stdout.strip() == "200"
            flood.wait(60)
        finally:
            flood.kill()
            flood.wait(60)
            close_pipes(flood)
        said.seek(0)
        made = int(said.read().split()[-1])
    longest, answers = done.stdout.split()
    # Well below a second on a machine that does nothing else.
    assert float(longest) < max(2.0, 5 * float(calm[0])), (longest, calm)
    assert int(answers) > SECONDS
    assert made > 300, "that was no flood"
