"""`GET /v1/report`: what the service says of its limits."""

from __future__ import annotations

import httpx

from tests.l7.service.serving import Served, someone


def test_every_limit_is_told_of_and_nobody_s_key(http: httpx.Client, served: Served) -> None:
    served.begin_minute()
    who = someone()
    asked = {"domain": "web", "descriptors": [[{"key": "user", "value": who}]]}
    before = next(each for each in http.get("/v1/report").json()["limits"] if each["rule"] == "user")
    statuses = [http.post("/v1/decide", json=asked).status_code for _ in range(5)]
    assert statuses == [200] * 3 + [429] * 2
    answer = http.get("/v1/report")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    limits = {each["rule"]: each for each in answer.json()["limits"]}
    assert {"user", "nobody", "flight", "place,room"} <= limits.keys()
    assert "guest" not in limits  # it is unlimited
    gained = {what: limits["user"][what] - before[what] for what in ("admitted", "refused")}
    assert gained == {"admitted": 3, "refused": 2}
    assert (limits["flight"]["kind"], limits["flight"]["limit"]) == ("concurrency", "2 in flight")
    assert who not in answer.text


def test_a_report_is_read(http: httpx.Client) -> None:
    assert http.post("/v1/report").status_code == 405
