"""What sites of nginx have around the limiter's location: caches, and rewrites for all of a server."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from scripts.testbed.streams import ROOT
from tests.l7.proxies.conftest import RULES, Answering, Application, answering
from tests.l7.proxies.deferring import deferring
from tests.l7.proxies.programs import Change, Places, running_at
from tests.l7.proxies.test_fields import OF_PATHS
from tests.l7.service.serving import serving
from tests.ports import free_port

CACHE = "proxy_cache_path {}/cache keys_zone=pages:1m; proxy_cache pages; proxy_cache_valid any 1m;\n"
BY_URL = CACHE + 'proxy_cache_key "$scheme$host$request_uri";\n'
FRONT = "if (!-e $request_filename) { rewrite ^(.*)$ /index.php?q=$1 last; }\n"
VERSION = "rewrite ^/(?!v2/)(.*)$ /v2/$1;\n"
PAGES = "proxy_intercept_errors on; recursive_error_pages on; error_page 401 403 500 /error.html;\n"
AROUND = {
    "cache": (CACHE, ""),
    "cache-by-url": (BY_URL, ""),
    "front-controller": ("", FRONT),
    "version": ("", VERSION),
    "error-pages": ("", PAGES),
}
"""What stands in `http`, and in `server`."""
KEPT = RULES.replace("    rate_limit: {unit: minute", "    on_limit: defer\n    rate_limit: {unit: minute")


@contextmanager
def running_site(name: str, directory: Path, application: Application, change: Change) -> Iterator[str]:
    """nginx before an application, with what keeps requests for later; where it is."""
    with (
        answering(application),
        serving(KEPT, running=True) as served,
        deferring(served, directory, application.place) as deferral,
    ):
        places = Places(f"127.0.0.1:{free_port()}", application.place, served.place, "", deferral)
        with running_at(name, directory, places, change) as place:
            yield place


class Reading(Answering):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("name", "refused"), [("nginx", 429), ("nginx-defer", 202)])
def test_every_request_is_asked_about(name: str, refused: int, around: str, tmp_path: Path) -> None:
    """It was asked about once for all clients, or the application was asked instead."""
    of_http, of_server = AROUND[around]
    application = Application()

    def write(text: str) -> str:
        text = text.replace("http {", f"http {{ {of_http.format(tmp_path)}", 1)
        return text.replace("    location / {", f"    {of_server}    location / {{", 1)

    with running_site(name, tmp_path, application, write) as place:
        application.asked.clear()
        statuses = [ask(place, "127.0.0.7", f"/{number}") for number in range(6)]
        assert statuses == [200] * 3 + [refused] * 3
        assert len(application.asked) == 3, application.asked
        assert [ask(place, "127.0.0.8", "/0") for _ in range(3)] == [200] * 3
        assert httpx.get(f"http://{place}/.netlimit", trust_env=False).status_code == 404


class Naming(Answering):
    def do_GET(self) -> None:
        self.server.asked += [name for name in self.headers if "_" in name]
        super().do_GET()


@pytest.mark.parametrize("name", ["nginx", "nginx-defer"])
def test_no_field_of_a_client_looks_like_one_of_the_proxy(name: str, tmp_path: Path) -> None:
    """To applications that make variables of fields. Many a site lets them pass everywhere."""
    application = Application()
    application.RequestHandlerClass = Naming

    def write(text: str) -> str:
        return text.replace("http {", "http { underscores_in_headers on; ignore_invalid_headers off;", 1)

    with running_site(name, tmp_path, application, write) as place:
        application.asked.clear()
        fields = {"X_Forwarded_For": "192.0.2.6", "X_Original_URL": "/login"}
        assert httpx.get(f"http://{place}/", headers=fields, trust_env=False).status_code == 200
        assert application.asked == ["/"]


@pytest.mark.parametrize("protocol", ["fastcgi", "uwsgi"])
def test_what_speaks_no_http_gets_the_fields_of_the_proxy_alone(protocol: str, tmp_path: Path) -> None:
    """With what the page says."""
    (told,) = re.findall(r"```text\n(fastcgi_param .*?)```", (ROOT / "docs/proxies.md").read_text(), re.DOTALL)
    asked: list[bytes] = []

    def write(text: str) -> str:
        passing = f"{protocol}_pass 127.0.0.1:{listening.getsockname()[1]};"
        lines = f"include /etc/nginx/{protocol}_params; {told.replace('fastcgi_', f'{protocol}_')}"
        return text.replace(f"proxy_pass http://{places.application}/;", f"{lines} {passing}")

    def serve() -> None:
        with suppress(OSError):  # the end of the test
            while True:
                connection, _ = listening.accept()
                with connection:
                    asked.append(connection.recv(65536))

    with socket.create_server(("127.0.0.1", 0)) as listening, serving(RULES, running=True) as served:
        places = Places(f"127.0.0.1:{free_port()}", "127.0.0.1:9", served.place, "")
        thread = threading.Thread(target=serve)
        thread.start()
        with running_at("nginx", tmp_path, places, write) as place:
            asked.clear()
            fields = {"X-Forwarded-For", "Forwarded", *OF_PATHS} - {"Daphne-Root-Path"}  # which reads HTTP alone
            httpx.get(f"http://{place}/", headers=dict.fromkeys(fields, "for=192.0.2.6"), trust_env=False)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert b"HTTP_X_FORWARDED_FOR" in asked[0]
    assert b"192.0.2.6" not in asked[0]


def test_without_the_limiter_a_page_for_errors_is_no_leave(tmp_path: Path) -> None:
    """As the configuration has it that comes with nginx."""
    application = Application()
    nowhere = f"127.0.0.1:{free_port()}"
    page = f"error_page 500 502 503 504 /50x.html; location = /50x.html {{ root {tmp_path}; }}\n"
    (tmp_path / "50x.html").write_text("Sorry.")

    def write(text: str) -> str:
        return text.replace("    location / {", f"{page}    location / {{", 1)

    with answering(application):
        places = Places(f"127.0.0.1:{free_port()}", application.place, nowhere, "", nowhere)
        with running_at("nginx-defer", tmp_path, places, write) as place:
            application.asked.clear()
            assert ask(place, "127.0.0.7", "/") == 500
            assert application.asked == []


def test_without_any_of_several_limiters_everything_passes(tmp_path: Path) -> None:
    """`localhost` is two, too. nginx keeps off those that have failed for ten seconds, unless it is told not to."""
    application = Application()

    def write(text: str) -> str:
        found = re.search(r"^( *server )\S+( max_conns=.*;)$", text, re.MULTILINE)
        assert found
        return text.replace(found[0], f"{found[0]}\n{found[1]}127.0.0.1:{free_port()}{found[2]}", 1)

    with answering(application):
        nowhere = f"127.0.0.1:{free_port()}"
        places = Places(f"127.0.0.1:{free_port()}", application.place, nowhere, "")
        with running_at("nginx", tmp_path, places, write) as place:
            assert [ask(place, "127.0.0.7", "/") for _ in range(9)] == [200] * 9


def test_a_site_that_hides_its_files_tells_what_has_become_of_a_request(tmp_path: Path) -> None:
    application = Application()

    def write(text: str) -> str:
        return text.replace("    location / {", "    location ~ /\\. { deny all; }\n    location / {", 1)

    with running_site("nginx-defer", tmp_path, application, write) as place:
        answers = [httpx.get(f"http://{place}/", trust_env=False, timeout=20) for _ in range(4)]
        assert answers[3].status_code == 202
        told = httpx.get(f"http://{place}{answers[3].headers['location']}", trust_env=False, timeout=20)
        assert told.status_code == 200
        assert ask(place, "127.0.0.7", "/.git/config") == 403


def test_who_is_not_asked_about_is_refused_whatever_pages_there_are(tmp_path: Path) -> None:
    """The limiter has room for no question, which is no reason to pass."""
    application = Application()

    def write(text: str) -> str:
        text = text.replace("max_conns=250", "max_conns=1")
        return text.replace("    location / {", f"{PAGES}    location / {{", 1)

    with answering(application), socket.create_server(("127.0.0.1", 0)) as silent:
        limiter = f"127.0.0.1:{silent.getsockname()[1]}"
        places = Places(f"127.0.0.1:{free_port()}", application.place, limiter, "")
        with running_at("nginx", tmp_path, places, write) as place, ThreadPoolExecutor(20) as pool:
            application.asked.clear()
            statuses = [*pool.map(lambda number: ask(place, "127.0.0.7", f"/{number}"), range(20))]
            passed = [path for path in application.asked if path != "/error.html"]
            assert statuses.count(200) == len(passed) <= 2, statuses
            assert statuses.count(403) == 20 - len(passed)


@pytest.mark.parametrize("name", ["nginx", "nginx-defer"])
def test_a_body_may_be_as_large_as_the_site_says(name: str, tmp_path: Path) -> None:
    """nginx compares it with what the location of the question allows, too."""
    application = Application()
    application.RequestHandlerClass = Reading

    def write(text: str) -> str:
        return text.replace("    location / {", "    location / { client_max_body_size 9m;", 1)

    with running_site(name, tmp_path, application, write) as place:
        body = b"a" * 4 * 2**20
        assert httpx.post(f"http://{place}/", content=body, trust_env=False, timeout=20).status_code == 200


def ask(place: str, source: str, path: str) -> int:
    with httpx.Client(transport=httpx.HTTPTransport(local_address=source), trust_env=False, timeout=20) as client:
        return client.get(f"http://{place}{path}", headers={"Cache-Control": "no-cache"}).status_code
