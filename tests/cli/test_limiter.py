"""`netlimit limiter`: a process that decides over HTTP and gRPC, by rules of a file that may change."""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from netlimit.l7.headers import USUAL, Family
from netlimit.l7.service.protocol.descriptor_pb2 import RateLimitDescriptor
from netlimit.l7.service.protocol.service_pb2 import RateLimitRequest
from netlimit.settings import HEADERS, USUAL_HEADERS
from tests.cli.running import Netlimit, Server, settings_in, until
from tests.places import is_ready, open_client
from tests.ports import free_port

RULES = "domain: web\ndescriptors:\n  - key: user\n    rate_limit: {unit: hour, requests_per_unit: %s}\n"
USER = ("--user", "nobody") if os.geteuid() == 0 else ()


class Running:
    """A limiter, and a client of it."""

    def __init__(self, directory: Path, rules: str, sockets: Path | None = None, **others: str) -> None:
        """It listens at ports, or at Unix sockets in a directory."""
        if sockets is None:
            self.place, self.grpc_place = (f"127.0.0.1:{free_port()}" for _ in range(2))
        else:
            self.place, self.grpc_place = (f"unix:{sockets}/{name}.sock" for name in ("http", "grpc"))
        self.rules = directory / "web.yaml"
        self.write(rules)
        self.netlimit = Netlimit(
            settings_in(
                directory,
                NETLIMIT_LIMITS=str(self.rules),
                NETLIMIT_LIMITER_LISTEN=self.place,
                NETLIMIT_LIMITER_GRPC_LISTEN=self.grpc_place,
                **others,
            ),
            cold=True,  # what it needs is not what others need
        )
        self.netlimit.make_database()
        self.server = self.start()
        self.http = open_client(self.place, 120)
        until(lambda: self.server.ended or self.answers(), self.server.said)
        assert not self.server.ended, self.server.said()

    def start(self) -> Server:
        return self.netlimit.start("limiter", *USER)

    def write(self, rules: str) -> None:
        self.rules.write_text(rules)
        self.rules.chmod(0o644)

    def answers(self) -> bool:
        return is_ready(self.place, self.http)

    def ask(self, value: str = "alice") -> httpx.Response:
        return self.http.post("/v1/decide", json={"domain": "web", "descriptors": [[{"key": "user", "value": value}]]})

    def find_limit(self) -> object:
        return self.ask("looked").json()["descriptors"][0]["limit"]["amount"]


ALGORITHMS = ("fixed_window", "sliding_window_counter", "sliding_window_log", "gcra", "token_bucket")


def test_memory_is_bounded_for_all_rules_together(directory: Path) -> None:
    rules = "".join(
        f"  - key: {name}\n    rate_limit: {{unit: hour, requests_per_unit: 100, algorithm: {name}}}\n"
        for name in ALGORITHMS
    )
    limiter = Running(directory, f"domain: web\ndescriptors:\n{rules}", NETLIMIT_LIMITER_MEMORY="8")
    try:
        before = read_memory(limiter)
        for page in range(1500):
            descriptors = [[{"key": name, "value": f"{page}/{number}"}] for number in range(20) for name in ALGORITHMS]
            question = {"domain": "web", "descriptors": descriptors, "hits": 20}
            assert limiter.http.post("/v1/decide", json=question).status_code == 200
        assert read_memory(limiter) - before < 32 * 2**20  # 60 MB and more without a bound
        kept = {"domain": "web", "descriptors": [[{"key": "gcra", "value": "greedy"}]], "hits": 100}
        assert [limiter.http.post("/v1/decide", json=kept).status_code for _ in range(3)] == [200, 429, 429]
    finally:
        limiter.http.close()
        limiter.server.end()


def read_memory(limiter: Running) -> int:
    """Bytes that the process has resident."""
    return int(Path(f"/proc/{limiter.server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def running(directory: Path) -> Iterator[Running]:
    limiter = Running(directory, RULES % 2, NETLIMIT_LIMITER_HEADERS="ratelimit")
    yield limiter
    limiter.http.close()
    if not limiter.server.ended:
        limiter.server.end(signal.SIGKILL)


def test_it_decides_follows_its_rules_and_ends_when_told(running: Running) -> None:
    assert [running.ask().status_code for _ in range(3)] == [200, 200, 429]
    asked = running.http.get("/v1/auth?domain=web&key=user=bob")
    assert {name for name in asked.headers if "rate" in name} == {
        f"ratelimit-{word}" for word in ("limit", "remaining", "reset")
    }
    with grpc.insecure_channel(running.grpc_place) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120)
    assert health.status == health_pb2.HealthCheckResponse.SERVING

    running.write(RULES % 7)
    until(lambda: running.find_limit() == 7, running.server.said)
    running.write(RULES % "many")
    until(lambda: "many" in running.server.said(), running.server.said)
    health = running.http.get("/healthz").json()
    assert health["status"] == "ok"
    assert any("many is no whole number" in trouble for trouble in health["troubles"])
    assert running.find_limit() == 7

    second = running.start()
    until(lambda: second.ended, second.said)
    assert second.process.returncode == 1
    assert f"The limiter cannot listen at {running.place}: Address already in use." in second.said()

    if os.geteuid() == 0:
        owner = Path(f"/proc/{running.server.process.pid}").stat().st_uid
        assert owner != 0
    assert running.server.end() == 0
    assert "Traceback" not in running.server.said()


def test_a_domain_that_there_is_not_is_told(running: Running) -> None:
    """By whatever way it is asked about; whether the limiter is ready is not for strangers to say."""
    assert running.http.get("/v1/auth?domain=wbe&key=user=bob").status_code == 200
    question = {"domain": "shop", "descriptors": [[{"key": "user", "value": "bob"}]]}
    assert running.http.post("/v1/decide", json=question).status_code == 200
    with grpc.insecure_channel(running.grpc_place) as channel:
        ask = channel.unary_unary("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
        entries = [RateLimitDescriptor.Entry(key="user", value="bob")]
        asked = RateLimitRequest(domain="edge", descriptors=[RateLimitDescriptor(entries=entries)])
        ask(asked.SerializeToString(), timeout=120)
    health = running.http.get("/healthz").json()
    troubles = [each for each in health["troubles"] if "no document of limits has" in each]
    assert [each.split("'")[1] for each in troubles] == ["wbe", "shop", "edge"]
    assert all("There is 'web'." in each and running.server.said().count(each) == 1 for each in troubles)
    assert running.http.get("/readyz").json() == {"status": "ok"}


WITHOUT_DATABASE = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /var/lib; exec "$0" "$@"')
"""Where there is none at the usual place."""


def test_files_alone_are_no_trouble(netlimit: Netlimit, places: dict[str, str], directory: Path) -> None:
    rules = directory / "web.yaml"
    rules.write_text(RULES % 2)
    rules.chmod(0o644)
    environment = {**netlimit.environment, **places, "NETLIMIT_LIMITS": str(rules)}
    del environment["NETLIMIT_DATABASE_URL"]
    server = Netlimit(environment, before=WITHOUT_DATABASE).start("limiter", *USER)
    with httpx.Client(base_url=f"http://{places['NETLIMIT_LIMITER_LISTEN']}", trust_env=False, timeout=120) as client:

        def answers() -> bool:
            try:
                return client.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        until(lambda: server.ended or answers(), server.said)
        time.sleep(1.5)  # it looks for other limits each second
        health = client.get("/healthz").json()
    assert (health["status"], health.get("troubles", [])) == ("ok", [])
    assert server.end() == 0
    said = server.said()
    assert "ERROR" not in said
    assert "WARNING" not in said
    assert "database" not in said.replace("There is no database at the usual place", "")


def test_the_settings_know_all_header_fields() -> None:
    assert set(HEADERS) == set(Family)
    assert set(USUAL_HEADERS) == USUAL


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("LIMITER_LISTEN", "8751", "is no place to listen at"),
        ("LIMITER_HEADERS", "ietf,smoke", "'smoke' names no header fields; it can be ietf, "),
        ("COUNTERS_URL", "mysql://somewhere", "COUNTERS_URL"),
        ("TRANSLATORS", "2001:db8::/44", "it has 32, 40, 48, 56, 64 or 96 bits (RFC 6052)"),
    ],
)
def test_settings_that_cannot_be_used_are_named(netlimit: Netlimit, setting: str, value: str, said: str) -> None:
    listening = {f"NETLIMIT_{name}": f"127.0.0.1:{free_port()}" for name in ("LIMITER_LISTEN", "LIMITER_GRPC_LISTEN")}
    told = netlimit.run("limiter", *USER, **{**listening, f"NETLIMIT_{setting}": value})
    assert told.returncode == 1
    assert said in told.stderr
    assert "Traceback" not in told.stderr


@pytest.fixture
def places() -> dict[str, str]:
    return {f"NETLIMIT_{name}": f"127.0.0.1:{free_port()}" for name in ("LIMITER_LISTEN", "LIMITER_GRPC_LISTEN")}


def refuse_to_start(netlimit: Netlimit, **settings: str) -> str:
    """What a limiter says that is to end with status 1 at once."""
    said = netlimit.refuse("limiter", *USER, **settings)
    assert "does not start" in said
    assert f"as the user {pwd.getpwuid(os.geteuid()).pw_name if not USER else USER[1]}" in said
    assert "--user netlimit" in said
    return said


def test_a_database_that_its_user_may_not_read_is_an_error(
    root: None, netlimit: Netlimit, places: dict[str, str]
) -> None:
    netlimit.do("db", "upgrade")
    file = netlimit.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///")
    assert file in refuse_to_start(netlimit, **places)


def test_a_database_that_was_named_and_is_not_there_is_an_error(netlimit: Netlimit, places: dict[str, str]) -> None:
    (Path(netlimit.environment["HOME"]) / "web.yaml").write_text(RULES % 2)
    rules = str(Path(netlimit.environment["HOME"]) / "web.yaml")
    assert "There is no database at" in refuse_to_start(netlimit, **places, NETLIMIT_LIMITS=rules)


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_limits_that_its_user_may_not_read_are_an_error(
    root: None, netlimit: Netlimit, places: dict[str, str], directory: Path, folder: bool
) -> None:
    netlimit.make_database()
    place = directory / "limits"
    place.mkdir(mode=0o755)
    (place / "web.yaml").write_text(RULES % 2)
    (place / "web.yaml").chmod(0o600)
    named = place if folder else place / "web.yaml"
    said = refuse_to_start(netlimit, **places, NETLIMIT_LIMITS=str(named))
    assert f"{place / 'web.yaml'}: Permission denied." in said
    place.chmod(0o700)
    said = refuse_to_start(netlimit, **places, NETLIMIT_LIMITS=str(named))
    assert f"{named}: Permission denied." in said


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (None, "No such file or directory"),
        ("domain: web\nwrong: 5\n", "`wrong` is not known"),
        ("domain: [", "web.yaml"),
    ],
)
def test_limits_that_cannot_be_used_are_an_error(
    netlimit: Netlimit, places: dict[str, str], directory: Path, rules: str | None, said: str
) -> None:
    netlimit.make_database()
    if rules is not None:
        (directory / "web.yaml").write_text(rules)
    assert said in refuse_to_start(netlimit, **places, NETLIMIT_LIMITS=str(directory / "web.yaml"))


def test_what_goes_away_later_keeps_the_rules_that_are_known(root: None, running: Running) -> None:
    running.netlimit.make_database()
    database = Path(running.netlimit.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///"))
    running.rules.chmod(0o600)
    database.parent.chmod(0o700)
    until(lambda: len(running.http.get("/healthz").json().get("troubles", ())) >= 2, running.server.said)
    assert [running.ask().status_code for _ in range(3)] == [200, 200, 429]
    assert running.http.get("/readyz").status_code == 200
