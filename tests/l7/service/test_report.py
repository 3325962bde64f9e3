"""`GET /v1/report`: what the service says of its limits."""

from __future__ import annotations

import json
import subprocess

import httpx
from prometheus_client.parser import text_string_to_metric_families

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


def test_metrics_are_what_prometheus_reads(http: httpx.Client, served: Served) -> None:
    who = someone()
    asked = {"domain": "web", "descriptors": [[{"key": "told", "value": who}]]}
    for _ in range(3):
        http.post("/v1/decide", json=asked)
    text = http.get("/metrics").text
    labels = ("outcome", "kind", "which", "fit", "value")
    found = {
        (sample.name, *map(sample.labels.get, labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("rule") == "told"
    }
    hits = "netlimit_limiter_hits_total"
    assert (found[hits, "admitted", None, None, None, None], found[hits, "refused", None, None, None, None]) == (2, 1)
    assert found["netlimit_limiter_value_hits_total", "admitted", None, None, None, who] == 2
    assert found["netlimit_limiter_value_hits_total", "refused", None, None, None, who] == 1
    assert found["netlimit_limiter_keys", None, None, "limited", None, None] == 1
    assert found["netlimit_limiter_fit", None, None, None, "too early", None] == 1
    assert "netlimit_limiter_counters_up 1.0" in text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_value_that_is_no_text_takes_the_metrics_from_nobody(http: httpx.Client, served: Served) -> None:
    who = someone()
    for key in ("told", "remote_address"):
        asked = {"domain": "web", "descriptors": [[{"key": key, "value": f"{who}\ud800"}]]}
        answer = http.post("/v1/decide", content=json.dumps(asked), headers={"content-type": "application/json"})
        assert answer.status_code == 200
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert f'value="{who}\\\\ud800"' in answer.text
