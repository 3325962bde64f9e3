"""Requests that proxies and servers read in different ways, and some that none should let through."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from tests.l7.proxies.recording import MARK
from tests.l7.proxies.wire import Pairs

HOST = b"host.example"


@dataclass(frozen=True)
class Kind:
    """A request. `path` and `host` say whether it means /login, and host.example, to any server there is."""

    name: str
    target: bytes = b"/login"
    host: bytes = HOST
    method: bytes = b"GET"
    more: Pairs = ()
    body: bytes = b""
    path: bool = True
    named: bool = True
    raw: bytes = b""
    """All of it over HTTP/1.1, with MARK where its mark belongs."""
    versions: tuple[int, ...] = (1, 2)

    def write_plainly(self, mark: str) -> bytes:
        """Over HTTP/1.1."""
        if self.raw:
            return self.raw.replace(b"MARK", MARK + b": " + mark.encode())
        fields = [(b"Host", self.host), (MARK, mark.encode()), *self.more]
        if not any(name.lower() == b"connection" for name, _ in self.more):
            fields.append((b"Connection", b"close"))
        head = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
        return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (self.method, self.target, head, self.body)

    def write_fields(self, mark: str) -> Pairs:
        """Over HTTP/2."""
        pseudo = [(b":method", self.method), (b":scheme", b"http"), (b":path", self.target), (b":authority", self.host)]
        return [*pseudo, (MARK.lower(), mark.encode()), *((name.lower(), value) for name, value in self.more)]


@dataclass(frozen=True)
class Told:
    """Short for kinds that differ in one thing alone."""

    paths: tuple[tuple[str, bytes], ...] = ()
    others: tuple[tuple[str, bytes], ...] = field(default=())

    @cached_property
    def kinds(self) -> list[Kind]:
        return [Kind(name, target) for name, target in self.paths] + [
            Kind(name, target, path=False) for name, target in self.others
        ]


_PATHS = Told(
    paths=(
        ("`/login`", b"/login"),
        ("`/login?x=1`", b"/login?x=1"),
        ("`/login?`", b"/login?"),
        ("`/login#1`", b"/login#1"),
        ("`/login#`", b"/login#"),
        ("`/login?x#1`", b"/login?x#1"),
        ("`/login#/../x`", b"/login#/../x"),
        ("`/login?/../x`", b"/login?/../x"),
        ("`//login`", b"//login"),
        ("`///login`", b"///login"),
        ("`/./login`", b"/./login"),
        ("`/a/../login`", b"/a/../login"),
        ("`/a//../login`", b"/a//../login"),
        ("`/../login`", b"/../login"),
        ("`/%6cogin`", b"/%6cogin"),
        ("`/%6C%6f%67%69%6E`", b"/%6C%6f%67%69%6E"),
        ("`/%2e/login`", b"/%2e/login"),
        ("`/a/%2e%2E/login`", b"/a/%2e%2E/login"),
        ("`/a/.%2e/login`", b"/a/.%2e/login"),
        ("`/%2Flogin`", b"/%2Flogin"),
        ("`/a%2f..%2flogin`", b"/a%2f..%2flogin"),
        ("`/login;1`", b"/login;1"),
        ("`/login%3b1`", b"/login%3b1"),
        ("`/;x/login`", b"/;x/login"),
        ("`/.;/login`", b"/.;/login"),
        ("`/x/..;/login`", b"/x/..;/login"),
        ("`/x/..%3b/login`", b"/x/..%3b/login"),
        ("`/login%0a`", b"/login%0a"),
        ("`/\\login`", b"/\\login"),
        ("`/x\\..\\login`", b"/x\\..\\login"),
        ("`/x%5C..%5Clogin`", b"/x%5C..%5Clogin"),
        ("`//x%2fy/login`", b"//x%2fy/login"),
        ("`/login` and a byte A0", b"/login\xa0"),
        ("`//login` and the bytes A0 and 85", b"//login\xa0\x85"),
        ("`/%u006cogin`", b"/%u006cogin"),
        ("`/%6<ogin`", b"/%6<ogin"),
        ("`/login` and a query that is no UTF-8", b"/login?\xff\xfe"),
        ("`/login` and a query of 7 kB", b"/login?" + b"x" * 7000),
        ("`http://host.example/login`", b"http://host.example/login"),
        ("`http://host.example//login#1`", b"http://host.example//login#1"),
    ),
    others=(
        ("a path that is no UTF-8", b"/\xff\xfe"),
        ("`/%ff`", b"/%ff"),
        ("`/%00`", b"/%00"),
        ("`/%0d%0aX-Injected:1`", b"/%0d%0aX-Injected:1"),
        ("`/%zz`", b"/%zz"),
        ("a path of 15 kB", b"/" + b"x" * 15000),
        ("a query of 60 kB", b"/?" + b"x" * 60000),
        ("`http://host.example`", b"http://host.example"),
        ("`http://host.example?x`", b"http://host.example?x"),
        ("`http://[host/`", b"http://[host/"),
        ("`*`", b"*"),
        ("`a:http://host.example/healthz`", b"a:http://host.example/healthz"),
        ("`a:x`", b"a:x"),
        ("no path", b""),
        ("`login`", b"login"),
        ("`?x`", b"?x"),
        ("`#`", b"#"),
        ("a tab in the path", b"/a\tb"),
        ("a control character in the path", b"/a\x01b"),
        ("`\\login`", b"\\login"),
    ),
)
_HOSTS = [
    Kind(f"host {name}", host=host, named=named)
    for name, host, named in (
        ("`host.example.`", b"host.example.", True),
        ("`host.example:`", b"host.example:", True),
        ("`host.example:8080`", b"host.example:8080", True),
        ("`host.example.:80`", b"host.example.:80", True),
        ("`HOST.Example`", b"HOST.Example", True),
        ("`u@host.example`", b"u@host.example", True),
        ("`%68ost.example`", b"%68ost.example", True),
        ("with a control character", b"host\x01example", False),
        ("with DEL", b"host\x7fexample", False),
        ("with a tab", b"host\texample", False),
        ("with a blank", b"host example", False),
        ("that is no UTF-8", b"h\xff\xfe", False),
        ("of 300 bytes", b"h" * 300, False),
        ("of 15 kB", b"h" * 15000, False),
        ("that is empty", b"", False),
        ("`[`", b"[", False),
        ("`[::1]:80`", b"[::1]:80", False),
        ("`a,b`", b"a,b", False),
        ("`/`", b"/", False),
        ("`..`", b"..", False),
        ("`host.example?x`", b"host.example?x", True),
        ("`host.example#x`", b"host.example#x", True),
        ("`host.example/x`", b"host.example/x", True),
        ("`host.example\\x`", b"host.example\\x", True),
        ("`h\u00bast.example`, in Latin-1", b"h\xbast.example", False),
        ("`?`", b"?", False),
    )
]
_METHODS = [
    Kind("`OPTIONS *`", b"*", method=b"OPTIONS", path=False),
    Kind("`OPTIONS /login`", method=b"OPTIONS"),
    Kind("`HEAD /login`", method=b"HEAD"),
    Kind("`TRACE /login`", method=b"TRACE"),
    Kind("`BREW /login`", method=b"BREW"),
    Kind("`get /login`", method=b"get"),
    Kind("`CONNECT host.example:80`", b"host.example:80", method=b"CONNECT", path=False, versions=(1,)),
    Kind("`POST /login`", method=b"POST", more=[(b"Content-Length", b"3")], body=b"abc", versions=(1,)),
    Kind("`POST /login` in chunks", method=b"POST", more=[(b"Transfer-Encoding", b"chunked")],
         body=b"3\r\nabc\r\n0\r\n\r\n", versions=(1,)),
    Kind("`GET /login` with a body", more=[(b"Content-Length", b"3")], body=b"abc", versions=(1,)),
    Kind("`POST /login` with two lengths", method=b"POST",
         more=[(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")], body=b"0\r\n\r\n", versions=(1,)),
    Kind("`POST /login` that expects 100", method=b"POST",
         more=[(b"Content-Length", b"3"), (b"Expect", b"100-continue")], body=b"abc", versions=(1,)),
]  # fmt: skip
_FIELDS = [
    Kind("`X-Forwarded-For` of another client", more=[(b"X-Forwarded-For", b"203.0.113.7")]),
    Kind("`X-Forwarded-Uri` of another path", more=[(b"X-Forwarded-Uri", b"/other")]),
    Kind("`X-Forwarded-Host` of another host", more=[(b"X-Forwarded-Host", b"other.example")]),
    Kind("all of them with underscores", more=[(b"X_Forwarded_For", b"203.0.113.7"), (b"X_Forwarded_Uri", b"/other"),
                                               (b"X_Forwarded_Host", b"other.example")]),
    Kind("`Connection` that names `X-Forwarded-For`, `-Uri` and `-Host`", versions=(1,),
         more=[(b"Connection", b"close, X-Forwarded-For, X-Forwarded-Uri, X-Forwarded-Host")]),
    Kind("`X-Original-URL`, `X-Rewrite-URL`", more=[(b"X-Original-URL", b"/other"), (b"X-Rewrite-URL", b"/other")]),
    Kind("`X-HTTP-Method-Override`", more=[(b"X-HTTP-Method-Override", b"OPTIONS")]),
    Kind("`Range`, `If-None-Match`", more=[(b"Range", b"bytes=0-0"), (b"If-None-Match", b"*")]),
    Kind("`Upgrade: websocket`", versions=(1,),
         more=[(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket"), (b"Sec-WebSocket-Version", b"13"),
               (b"Sec-WebSocket-Key", b"AAAAAAAAAAAAAAAAAAAAAA==")]),
    Kind("`Upgrade: h2c`", versions=(1,),
         more=[(b"Connection", b"Upgrade, HTTP2-Settings"), (b"Upgrade", b"h2c"), (b"HTTP2-Settings", b"AAMAAABk")]),
    Kind("a field of 7 kB", more=[(b"X-Long", b"x" * 7000)]),
    Kind("fields of 12 kB", more=[(b"X-Long-%d" % number, b"x" * 1200) for number in range(10)]),
    Kind("fields of 60 kB", more=[(b"X-Long-%d" % number, b"x" * 6000) for number in range(10)]),
    Kind("a control character in a field", more=[(b"X-Odd", b"a\x01b")]),
    Kind("a field that is no UTF-8", more=[(b"X-Odd", b"\xff\xfe")]),
    Kind("two hosts, the other second", more=[(b"Host", b"other.example")]),
    Kind("another host besides `http://host.example/login`", b"http://host.example/login", b"other.example"),
    Kind("another path, `Content-Length: 0` twice", more=[(b"Content-Length", b"0"), (b"Content-Length", b"0")]),
]  # fmt: skip
_RAW = [
    Kind(name, raw=raw, versions=(1,), path=path, named=named)
    for name, raw, path, named in (
        ("HTTP/1.0 without a host", b"GET /login HTTP/1.0\r\nMARK\r\n\r\n", True, False),
        ("HTTP/1.1 without a host", b"GET /login HTTP/1.1\r\nMARK\r\nConnection: close\r\n\r\n", True, False),
        ("HTTP/1.0 that keeps on",
         b"GET /login HTTP/1.0\r\nHost: host.example\r\nMARK\r\nConnection: keep-alive\r\n\r\n", True, True),
        ("HTTP/0.9", b"GET /login\r\nMARK\r\n\r\n", True, False),
        ("HTTP/1.2", b"GET /login HTTP/1.2\r\nHost: host.example\r\nMARK\r\nConnection: close\r\n\r\n", True, True),
        ("blank lines first",
         b"\r\n\r\nGET /login HTTP/1.1\r\nHost: host.example\r\nMARK\r\nConnection: close\r\n\r\n", True, True),
        ("lines that end in LF", b"GET /login HTTP/1.1\nHost: host.example\nMARK\nConnection: close\n\n", True, True),
        ("two blanks before the path",
         b"GET  /login HTTP/1.1\r\nHost: host.example\r\nMARK\r\nConnection: close\r\n\r\n", True, True),
        ("a tab before the path",
         b"GET\t/login HTTP/1.1\r\nHost: host.example\r\nMARK\r\nConnection: close\r\n\r\n", True, True),
        ("a host in two lines",
         b"GET /login HTTP/1.1\r\nHost:\r\n host.example\r\nMARK\r\nConnection: close\r\n\r\n", True, True),
        ("`Host :` with a blank",
         b"GET /login HTTP/1.1\r\nHost : host.example\r\nMARK\r\nConnection: close\r\n\r\n", True, True),
        ("the second of two on a connection",
         b"GET /login HTTP/1.1\r\nHost: host.example\r\n\r\n"
         b"GET /login HTTP/1.1\r\nHost: host.example\r\nMARK\r\nConnection: close\r\n\r\n", True, True),
    )
]  # fmt: skip
KINDS = [*_PATHS.kinds, *_HOSTS, *_METHODS, *_FIELDS, *_RAW]
