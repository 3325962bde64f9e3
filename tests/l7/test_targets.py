"""However a path or a host is written, it is compared in one form."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from io import BytesIO
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit
from wsgiref.simple_server import WSGIRequestHandler

import pytest
from fastapi import FastAPI
from hypothesis import assume, given
from hypothesis import strategies as st

from netlimit.l7.document import parse_document
from netlimit.l7.forms import find_misfit
from netlimit.l7.patterns import make_pattern
from netlimit.l7.rules import RuleSet
from netlimit.l7.targets import (
    LONGEST,
    MOST_MEANINGS,
    MOST_PARTS,
    Ambiguous,
    decode,
    plain_host,
    plain_path,
    read_paths,
)
from tests.l7.asking import ask
from tests.l7.leaping import run
from tests.l7.test_middleware import limited

RULES = """
domain: app
descriptors:
  - key: path
    value: /login
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: path
    value: /files/*
    rate_limit: {unit: minute, requests_per_unit: 1}
"""


@pytest.mark.parametrize(
    "target",
    [
        "/login", "/login?x=1", "/login#1", "/login?#", "/login#?", "//login", "///login", "/./login", "/.//login",
        "/a/../login", "/a//../login", "/../login", "/%6cogin", "/%6C%6F%67%69%6E", "/%2e/login", "/a/%2e%2E/login",
        "/a%2f..%2Flogin", "/%2flogin", "http://host/login", "HTTPS://u@host:1/login?x#y",
    ],
)  # fmt: skip
def test_a_path_is_one_however_it_is_written(target: str) -> None:
    assert plain_path(target.encode()) == "/login"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("", "/"), ("/", "/"), ("//", "/"), ("http://host", "/"), ("http://h?x/../login", "/"), ("*", "*"),
        ("/a/..", "/"), ("/login/", "/login/"), ("/login/.", "/login/"), ("/login/a/..", "/login/"),
        ("/?#//..", "/"),
        ("/Login", "/Login"), ("/%256cogin", "/%6cogin"), ("/login%23", "/login#"), ("/login%3F", "/login?"),
        ("/%25", "/%"), ("/..a", "/..a"), ("/%C3%A9", "/\u00e9"), ("/%ff", "/\ufffd"), ("/%20", "/ "),
        ("/a|b[c]{d}^`\"<>'", "/a|b[c]{d}^`\"<>'"), ("/login?\u00e9 %zz", "/login"), ("/login#\u00e9", "/login"),
    ],
)  # fmt: skip
def test_what_it_means_stays(target: str, path: str) -> None:
    assert plain_path(target.encode()) == path


def test_what_servers_read_in_two_ways_is_both() -> None:
    assert read_paths(b"/files/../x") == ("/x", "/files/../x")
    assert read_paths(b"/files/%2e%2E/x?a=/../") == ("/x", "/files/../x")
    assert read_paths(b"/files/x..y/..z") == ("/files/x..y/..z",)
    assert read_paths(b"%ff/../%00") == ("/\x00", "/\ufffd/../\x00")
    assert read_paths(b"/login/.") == ("/login/", "/login", "/login/.")
    assert read_paths(b"/login/x/..") == ("/login/", "/login/x/..", "/login")
    assert read_paths(b"/a/../..") == ("/", "/a/../..")


def test_what_stands_for_no_part_may_be_one() -> None:
    """A route takes any part of a path as a parameter; others have resolved `.` and `..` before, or made one `/` of
    several."""
    assert read_paths(b"/./login") == read_paths(b"/%2e/login") == ("/login", "/./login")
    assert read_paths(b"/files//raw") == read_paths(b"/files/%2fraw") == ("/files/raw", "/files//raw")
    assert read_paths(b"/login/./") == ("/login/", "/login/./")
    assert read_paths(b"//a/./b") == ("/a/b", "//a/./b", "/a/./b", "//a/b", "/b", "/./b")
    assert read_paths(b"/..//login") == ("/login", "/../login", "/..//login", "//login")
    assert read_paths(b"/a/../b//.") == ("/b/", "/a/../b/", "/b", "/a/../b//.", "/a/../b/.", "/b//")
    assert {"/x", "/files/../x", "/files/./..//x", "//x"} <= {*read_paths(b"/files/./%2e%2E//x")}
    assert {"/", "/a/../", "/./a/..///././"} <= {*read_paths(b"/./a/..///././")}
    assert read_paths(b"/a/./../..") == ("/", "/a/../..", "/a/./../..")


@pytest.mark.parametrize("target", ["/./login", "/%2e/login", "/%2f/login", "/%2F%2f/login", "/.%2f/login", "//login",
                                    "/%2e%2f/login", "/%2e%2e%2f/login", "/../login", "/.;/login", "/;x/login",
                                    "/./;/login", "/x/..//./login", "/\\/login", "/./login%0a"])  # fmt: skip
def test_a_pattern_fits_a_parameter_whatever_it_is(target: str) -> None:
    """Of `/{lang}/login`, to which Express, say, parts a path before it decodes it."""
    assert any(make_pattern("path", "/*/login").fits(("path", each)) for each in read_paths(target.encode()))


@pytest.mark.parametrize("target", ["/a/./c", "//a/./c", "/./x/../a//c", "/a//c", "/./a//c", "/x/../a//c", "//./a//c",
                                    "/a/.//c", "/a/%2f/c"])  # fmt: skip
def test_so_it_does_where_the_rest_is_resolved_or_merged(target: str) -> None:
    """By Litestar and Rails, which make one `/` of several alone, or by a URL of JavaScript, which leaves these."""
    assert any(make_pattern("path", "/a/*/c").fits(("path", each)) for each in read_paths(target.encode()))


@pytest.mark.parametrize(
    "target",
    [
        "/login;1", "/login;a=b;c", "/login;", "/login%3b1", "/login;%2f", "/login;a%2Fb?x", "/;x/login", "/;/login",
        "/.;/login", "/.;x/;y//login", "/x/..;/login", "/x/..;a;b/login;c", "/x/%2e%2e;/login", "/x%2f..;/login",
        "/x/..%3b/login", "/..;/login", "/login/.;x", "/login/x/..;", "/x/;a%2fb/..;/login", "http://h;x/;y/login;z",
        "/lo%67in;%3b",
    ],
)  # fmt: skip
def test_a_path_has_the_limits_that_it_has_without_its_parameters_too(target: str) -> None:
    """As Tomcat and Jetty serve it, also behind a proxy that decodes or resolves before them."""
    plain, *others = read_paths(target.encode())
    assert ";" in plain
    assert "/login" in others


@pytest.mark.parametrize(
    ("target", "direct", "resolved"),
    [
        ("/b/;/../login;x", "/login", "/b/login"),
        ("/b/%3b/..;/login", "/b/login", "/login"),
        ("/b/..;/../login;x", "/login", "/b/login"),
    ],
)
def test_parameters_may_be_cut_off_before_or_after_all_else(target: str, direct: str, resolved: str) -> None:
    """By Tomcat, asked directly, before it decodes; by Jetty, and behind nginx, once `..` are resolved."""
    assert {direct, resolved} <= {*read_paths(target.encode())}


@pytest.mark.parametrize(
    "target",
    ["/login%0a", "/login%0A?x", "/x/../login%0a", "http://h/login%0a", "/\\login", "\\login", "/x\\..\\login",
     "/x%5c..%5Clogin", "/x/..\\.\\login", "/x\\../login%0a"],
)  # fmt: skip
def test_a_path_has_the_limits_of_what_routers_of_one_language_make_of_it_too(target: str) -> None:
    """A `$` before a newline is the end to Python's and Perl's regular expressions, and `\\` is `/` to the URL of
    JavaScript."""
    paths = read_paths(target.encode())
    assert "/login" in paths
    assert len(paths) <= MOST_MEANINGS


@pytest.mark.parametrize(
    "target",
    [
        "//x/login",
        "//x//login?y",
        "///x/login",
        "/\\x/login",
        "/\\x\\login",
        "//x:80/login",
        "//x/%6cogin",
        "//x/a/../login",
        "//x%2fy/login",
        "//x\\y/login",
        "//x%5cy/%6cogin",
        "//x%2f%2f/login",
        "//x%3fy/login?z",
        "http://h//x%2fy/login",
    ],
)
def test_what_begins_with_a_host_may_be_what_follows(target: str) -> None:
    """As the URL of JavaScript reads it against a base (RFC 3986, 4.2), and those of Python and PHP (`parse_url`), to
    which a host ends at the first `/` of what was sent."""
    paths = read_paths(target.encode())
    assert "/login" in paths
    assert len(paths) <= MOST_MEANINGS


@given(st.lists(st.sampled_from(["%2f", "%5c", "%3f", "%23", "%6c", "\\", "x", ":", "@"])).map("".join))
def test_a_host_ends_where_a_library_has_it(host: str) -> None:
    path = unquote(urlsplit(f"//x{host}/login").path)
    assert path == "/login"
    with suppress(Ambiguous):
        assert path in read_paths(f"//x{host}/login".encode())


@pytest.mark.parametrize(
    "target",
    [
        b"/login\xa0", b"/login\x85", b"/login\xa0\x85", b"//login\xa0", b"http://h/login\xa0", b"/\xff\xfe",
        b"\xa0/login", "/caf\u00e9".encode(), b"/a\tb", b"/login\x0b", b"/login\x1c", b"/login ", b"/login\x7f",
        b"/a\nb", b"/\0",
        b"/%u006cogin", b"/%6<ogin", b"/x/%u002e%u002e/login", b"/x%u002f../login", b"/%", b"/login%", b"/%zz", b"/%2",
    ],
)  # fmt: skip
def test_what_no_path_is_sent_as_is_not_read(target: bytes) -> None:
    """Servers of Python end a request line at `\\xa0`, and `%u006c` is a letter to Jetty."""
    with pytest.raises(Ambiguous, match="encode it"):
        read_paths(target)


class Handler(WSGIRequestHandler):
    """Reads a request line as wsgiref does, and what is made of it: gevent and eventlet read it likewise."""

    def __init__(self, line: bytes) -> None:
        self.raw_requestline, self.rfile, self.wfile = line, BytesIO(b"\r\n"), BytesIO()
        self.client_address = ("", 0)

    def log_message(self, *words: object) -> None:
        pass


@given(st.lists(st.sampled_from([b"\xa0", b"\x85", b"/", b"x", b"?", b"%20", b"%a0"])).map(b"".join))
def test_a_server_that_ends_a_target_elsewhere_serves_nothing_that_is_read_otherwise(rest: bytes) -> None:
    target = b"/login" + rest
    handler = Handler(b"GET %b HTTP/1.1\r\n" % target)
    assume(handler.parse_request())
    served = unquote_to_bytes(handler.path.partition("?")[0]).decode("utf-8", "replace")
    assume(served == "/login")
    with suppress(Ambiguous):
        assert served in read_paths(target)


@pytest.mark.parametrize("target", ["/b//../login", "/b/x//../../login", "/b/x///../../../login", "/c/..//b//../login"])
def test_an_empty_part_of_a_path_may_be_what_dots_take_away(target: str) -> None:
    """As Jetty and the URL of JavaScript read it; others make one `/` of several before."""
    assert "/b/login" in read_paths(target.encode())


@pytest.mark.parametrize(
    ("target", "script", "rest"),
    [
        ("/wp-login.php/1", "/wp-login.php", "/1"),
        ("/index.php/login?x", "/index.php", "/login"),
        ("/a/index.php/login/", "/a/index.php", "/login/"),
        ("/x/../wp-login.php%2f", "/wp-login.php", "/"),
        ("//wp-login.php//1;x", "/wp-login.php", "/1;x"),
    ],
)
def test_what_follows_a_script_may_be_told_to_it(target: str, script: str, rest: str) -> None:
    """PATH_INFO (RFC 3875, 4.1.5): servers of PHP run `/wp-login.php` for `/wp-login.php/1`, and many a framework takes
    `/index.php/login` for `/login`."""
    assert {script, rest} <= {*read_paths(target.encode())}


def test_a_script_by_itself_means_one_thing() -> None:
    assert read_paths(b"/wp-login.php") == ("/wp-login.php",)
    assert read_paths(b"/wp-login.phpx/1") == ("/wp-login.phpx/1",)


def test_other_newlines_and_letters_stay() -> None:
    assert read_paths(b"/log%0ain") == ("/log\nin",)
    assert read_paths(b"/login%0d") == ("/login\r",)
    assert read_paths(b"/login%0a%0a") == ("/login\n\n", "/login\n")


def test_what_has_parameters_keeps_what_it_means() -> None:
    assert read_paths(b"/a;1/b;2") == ("/a;1/b;2", "/a/b")
    assert read_paths(b"/a;1/") == ("/a;1/", "/a/")
    assert read_paths(b"/a/;1") == ("/a/;1", "/a/")
    assert read_paths(b"/%E9t;1") == ("/�t;1", "/�t")
    assert read_paths(b"/a?b;c") == ("/a",)
    assert read_paths(b"/a/..;/b") == ("/a/..;/b", "/b", "/a/../b")


@pytest.mark.parametrize(
    "part",
    [b"/;", b"/..;", b"/.;%2f", b"/;/..", b"/%3b%2e%2e;", b";", b"%3b", b"/", b"\\", b"\\..", b"%5c;", b"//..", b"a/"],
)
def test_a_path_of_parameters_means_few_things_and_is_soon_read(part: bytes) -> None:
    """As many and as long as are read: some tenths of a millisecond, so that thousands of them keep nobody waiting."""
    counted = max(1, sum(map(decode(part).count, "/\\;")))
    target = b"/" + part * ((MOST_PARTS - 8) // counted)
    target += b"a" * (LONGEST - 40 - len(decode(target))) + b"%3b.php/x\\a%5c%0a"
    began = time.thread_time()
    for number in range(20):
        with suppress(Ambiguous):
            assert len(read_paths(b"//x/%d" % number + target)) <= MOST_MEANINGS
    assert time.thread_time() - began < 20 * 0.005


@pytest.mark.parametrize("part", [b"/;", b"/..;//", b"/%3b%2e%2e;", b"%3b", b"\\", b"/%5c..", b"/..", b"/a/."])
def test_a_path_that_may_mean_too_much_is_not_read(part: bytes) -> None:
    """It took 7 ms to find what 8 KiB of `/..;//` may mean."""
    counted = sum(map(decode(part).count, "/\\;"))
    assert read_paths(b"/login" + part * ((MOST_PARTS - 2) // counted))
    for many in (MOST_PARTS // counted + 1, 8192 // len(part)):
        with pytest.raises(Ambiguous, match="more than 128 parts, or 2048 letters"):
            read_paths(b"/login/" + part * many)
    assert read_paths(b"/login" + part + b"a" * (LONGEST - 10 - len(part)))
    with pytest.raises(Ambiguous):
        read_paths(b"/login" + part + b"a" * LONGEST)


def test_a_path_that_may_mean_many_things_is_not_read() -> None:
    """Each of them has limits, and counters that are asked: with seven keys and Redis those of twelve took 3 ms."""
    for target in (
        b"//x/.php/a/..;//b%3b.php/x\\a%5c%0a",
        b"//x/..\\/..;/a.php/b",
        b"//x/../login%0a",
        b"//a;1/.php/..;/b",
    ):
        with pytest.raises(Ambiguous, match="more than 8 paths"):
            read_paths(target)


def test_a_path_that_means_one_thing_may_have_many_parts() -> None:
    for target in (b"/a" * 4000, b"/%61" * 2000, b"/%ED%95%9C" * 2000, b"/a" * 4000 + b"?;/../"):
        assert len(read_paths(target)) == 1


def test_one_that_has_empty_parts_too() -> None:
    """They have a URL within themselves, some of them."""
    assert read_paths(b"/a//b" * 1000) == ("/a/b" * 1000, "/a//b" * 1000)


@pytest.mark.parametrize(
    "host", ["host.example", "HOST.Example", "host.example:80", "host.example:", "host.example.", "host.example.:443",
             "host.example..", "u@host.example", "host.example,other", "%68ost.example",
             "host.example?x", "host.example#x", "host.example/x", "host.example\\x", "host.example?,other",
             " host.example "],
)  # fmt: skip
def test_a_host_is_one_however_it_is_written(host: str) -> None:
    assert plain_host(host.encode()) == "host.example"


@pytest.mark.parametrize(
    ("host", "plain"),
    [("[2001:DB8::0:1]:80", "[2001:db8::1]"), ("2001:db8:0::1", "[2001:db8::1]"), ("[zz]", "[zz]"), ("[::1", "[::1]"),
     (":80", ""), ("", ""), ("\u00e9", "\u00e9")],
)  # fmt: skip
def test_hosts_that_are_addresses_or_none(host: str, plain: str) -> None:
    assert plain_host(host.encode()) == plain


@pytest.mark.parametrize("raw", [b"/log\xa0in", b"/log%u0069n", b"/log in", b"/log%in", b"/login\x1c"])
def test_the_middleware_does_not_read_what_no_path_is_sent_as(raw: bytes) -> None:
    """As far as the server says how it came."""
    rules = RuleSet({"app": parse_document(RULES).root})

    async def main() -> None:
        compares = limited(limits=lambda: rules, domain="app", exempt=["/log*"])
        weighs = limited("9/minute", hits=lambda scope: 1)
        for app in (compares, weighs):
            answer = await ask(app, decode(raw), raw_path=raw)
            assert (answer.status, "encode it" in answer.json()["detail"]) == (400, True)
            assert (await ask(app, decode(raw), raw_path=None)).status == 200
            assert (await ask(app, decode(raw))).status == 200
        assert (await ask(weighs, "/a", raw_path=b"/a?" + raw)).status == 200, "as some clients of tests write it"
        assert (await ask(limited("9/minute"), decode(raw), raw_path=raw)).status == 200
        assert (await ask(limited("1/minute", exempt=["/a"]), "/a", raw_path=raw)).status == 200

    run(main())


def test_a_rule_is_written_in_letters_as_they_are() -> None:
    for path in ("/caf\u00e9", "/100%", "/a b", "/caf\u00e9/*", "/100%*"):
        assert find_misfit("path", path) is None
    assert find_misfit("path", "/caf%C3%A9") is not None


def test_the_middleware_compares_so_too() -> None:
    rules = RuleSet({"app": parse_document(RULES).root})

    async def main() -> None:
        app = limited(limits=lambda: rules, domain="app", exempt=["/static/*"])
        for path in ("/login", "//login", "/./login", "/a/../login", "/static/../login"):
            assert (await ask(app, path)).status == (200 if path == "/login" else 429), path
        assert (await ask(app, "/files/x")).status == 200
        assert [(await ask(app, "/files/../z")).status for _ in range(2)] == [200, 429]
        assert (await ask(app, "/static/a.css")).status == 200

    run(main())


PARAMETERS = """
domain: app
descriptors:
  - {key: path, value: /*/login, share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: path, value: /files/*/raw, share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: path, value: /plain, rate_limit: {unit: minute, requests_per_unit: 2}}
"""


def make_site() -> FastAPI:
    site = FastAPI()

    @site.get("/{lang}/login")
    @site.get("/files/{name:path}/raw")
    @site.get("/plain")
    @site.get("/static/{name:path}")
    async def answer() -> str:
        return "in"

    return site


@pytest.mark.parametrize(
    ("within", "around"),
    [
        ("/en/login", ["/./login", "/%2e/login", "/../login", "/.%2f/login"]),
        ("/files/x/raw", ["/files//raw", "/files/./raw", "/files/%2fraw", "/files/.//raw", "/files/%2f/raw"]),
    ],
)
def test_the_middleware_limits_a_route_whatever_its_parameter_is(within: str, around: list[str]) -> None:
    rules = RuleSet({"app": parse_document(PARAMETERS).root})

    async def main() -> None:
        site = make_site()
        app = limited(limits=lambda: rules, domain="app", app=site)

        async def send(to: Any, target: str) -> int | None:
            return (await ask(to, unquote(target), raw_path=target.encode())).status

        assert await send(app, within) == 200
        for target in around:
            assert await send(site, target) in (200, 404), "some of them are for another router"
        assert [await send(app, target) for target in around][2:] == [429] * (len(around) - 2)
        assert await send(app, within) == 429

    run(main())


def test_the_middleware_counts_once_what_is_one_request() -> None:
    rules = RuleSet({"app": parse_document(PARAMETERS).root})

    async def main() -> None:
        app = limited(limits=lambda: rules, domain="app", app=make_site(), exempt=["/static/*", "/plain"])
        for path in ("/static/./a", "/static//a"):
            assert [(await ask(app, path)).headers.get("ratelimit") for _ in range(2)] == [None] * 2
        app = limited(limits=lambda: rules, domain="app", app=make_site(), exempt=["/files/x/*"])
        assert [(await ask(app, "/files/a//b/raw")).status for _ in range(4)] == [200, 200, 200, 429]
        assert [(await ask(app, "/plain")).status for _ in range(3)] == [200, 200, 429]
        assert [(await ask(app, "/x/../files/x//raw")).status for _ in range(2)] == [429] * 2, "exempt by one reading"

    run(main())


SHARED = """
domain: app
descriptors:
  - key: path
    value: /login
    rate_limit: {unit: minute, requests_per_unit: 2}
  - key: path
    value: /a;1
    rate_limit: {unit: minute, requests_per_unit: 1}
"""


def test_the_middleware_counts_for_a_path_with_and_without_its_parameters() -> None:
    rules = RuleSet({"app": parse_document(SHARED).root})

    async def main() -> None:
        app = limited(limits=lambda: rules, domain="app", exempt=["/static/*"])

        async def ask_each(*paths: str, **others: str) -> list[int | None]:
            return [(await ask(app, path, **others)).status for path in paths]

        assert await ask_each("/a;1", "/a;1", "/a;2", "/a;3") == [200, 429, 200, 200]
        assert await ask_each("/login;1", "/x/..;/login", "/login;2", "/;/login", "/login") == [200, 200, 429, 429, 429]
        assert await ask_each("/login/.", "/login/x/..", "/login/") == [429, 429, 200]
        assert await ask_each("/login\n", "/x\\..\\login", "/login\n\n") == [429, 429, 200]
        assert await ask_each("//x/login", "/\\x/login", "/x//login") == [429, 429, 200]
        assert await ask_each("/index.php/login", "/index.php/x") == [429, 200]
        assert await ask_each("/static/..;/login", "/static/a;1", "/static/../static/a", "/static/..\\login") == [
            429,
            200,
            200,
            429,
        ]
        assert await ask_each("/api/login;3", "/api/x/..;/login", "/apilogin", root_path="/api") == [429] * 3
        assert await ask_each("/other;1", "/other;1", "/other") == [200] * 3

    run(main())


@pytest.mark.parametrize("path", ["/apilogin", "/x/api/login", "/api/login", "/x/../api/login"])
def test_below_a_root_path_a_path_counts_without_it_wherever_it_ends_and_begins(path: str) -> None:
    """Quart makes `/login` of `/apilogin`, and Litestar of `/x/api/login`."""
    rules = RuleSet({"app": parse_document(RULES).root})

    async def main() -> None:
        app = limited(limits=lambda: rules, domain="app")
        assert [(await ask(app, path, root_path="/api")).status for _ in range(2)] == [200, 429]

    run(main())


def test_a_target_of_megabytes_takes_no_longer_than_it_is_long() -> None:
    """Of letters that may be a scheme: nobody else is answered meanwhile."""
    began = time.process_time()
    assert plain_path(b"A" * 2**20) == "/" + "A" * 2**20
    assert time.process_time() - began < 5  # seconds; it took a quarter of an hour


def test_only_what_begins_with_a_scheme_has_an_authority() -> None:
    assert plain_path(b"a:x/http://h/login") == "/a:x/http:/h/login"


@given(st.lists(st.sampled_from([*b"%%%%012eEfFgG\\x{}NuU/.\n\r\0\x80\xc3\xa9\xff"])).map(bytes))
def test_escapes_are_read_as_a_library_does(text: bytes) -> None:
    assert decode(text) == unquote_to_bytes(text).decode("utf-8", "replace")


def test_nothing_is_loaded_with_the_first_path() -> None:
    """Whoever has given up root may not be able to."""
    script = f"import sys; from {decode.__module__} import decode; before = {{*sys.modules}}; decode(b'/%20')"
    told = subprocess.run(
        [sys.executable, "-c", f"{script}; print({{*sys.modules}} - before)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "set()\n"
