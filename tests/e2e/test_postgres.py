"""netlimit over a PostgreSQL server: what is asked by REST is in the kernel, also when the server was away."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from scripts.testbed.service import Service
from tests.databases import Postgres

RULE = {"target": CLIENT, "rate": "100 packets/s"}
WAIT = "Prefer: wait=60"
SECONDS = 60.0
HANG = (
    "CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(86400); RETURN NULL; END'; "
    "CREATE CONSTRAINT TRIGGER hang AFTER INSERT ON pauses DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION hang()"
)
"""A commit that does not come back: as when a standby is away that must have it, or when the server's disk hangs."""


@pytest.fixture
def service(lab: Lab, postgres: Postgres, postgres_url: str, tmp_path: Path) -> Iterator[Service]:
    settings = {
        "NETLIMIT_DATABASE_URL": postgres_url,
        "NETLIMIT_BOOTSTRAP_TOKEN": "a-token-of-the-tests",
        "NETLIMIT_STATE_DIRECTORY": str(tmp_path / "controller"),
    }
    with Service(lab.gateway, settings=settings) as running:
        yield running


def pass_through(lab: Lab) -> int:
    """How many of 1000 packets arrive."""
    return send(lab)[0]


def send(lab: Lab) -> tuple[int, float]:
    """How many of 1000 packets arrive, and in how many seconds they were sent: half a second, or a little more."""
    with streams.receive(lab.server) as receiver:
        sent = streams.send(lab.client, SERVER, rate=2000, count=1000)
    return receiver.report().packets, sent.seconds


def keeps(lab: Lab, rate: int) -> bool:
    """Whether so many packets a second pass, and what a full bucket holds."""
    passed, seconds = send(lab)
    return rate / 2 <= passed <= rate * seconds * 1.1 + rate / 10


def test_a_server_that_goes_and_comes_back_lifts_no_limit(service: Service, lab: Lab, postgres: Postgres) -> None:
    """A full bucket holds ten packets, and fifty flow in while packets are sent."""
    assert pass_through(lab) == 1000
    added = service.request("POST", "/api/v1/rules", RULE, WAIT)
    assert added.body["status"]["state"] == "applied", added
    assert keeps(lab, 100)

    postgres.stop(signal.SIGQUIT)
    refused = service.request("PATCH", "/api/v1/rules/1", {"rate": "200 packets/s"})
    assert refused.body["status"] == 503
    assert "cannot be reached" in refused.body["detail"]
    assert keeps(lab, 100)

    postgres.start()
    end = time.monotonic() + SECONDS
    while service.request("GET", "/readyz").body["status"] != "ok":
        assert time.monotonic() < end
        time.sleep(0.1)
    changed = service.request("PATCH", "/api/v1/rules/1", {"rate": "200 packets/s"}, WAIT)
    assert changed.body["status"]["state"] == "applied", changed
    assert keeps(lab, 200)
    removed = service.request("DELETE", "/api/v1/rules/1", None, WAIT)
    assert removed.body is None, removed
    assert pass_through(lab) == 1000


def test_a_teardown_does_not_wait_for_a_commit_that_never_ends(service: Service, lab: Lab, postgres_url: str) -> None:
    added = service.request("POST", "/api/v1/rules", RULE, WAIT)
    assert added.body["status"]["state"] == "applied", added
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        connection.exec_driver_sql(HANG)
    engine.dispose()
    words = "-m", "netlimit.cli.main", "--config", "/dev/null", "teardown"
    done = lab.gateway.run(sys.executable, *words, env=service.env, timeout=3 * SECONDS)
    assert "the database is told once it answers" in done.stderr
    assert "NL-" not in lab.gateway.run("iptables-legacy-save").stdout
