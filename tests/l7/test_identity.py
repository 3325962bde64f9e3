"""Whom a request comes from: believed is what trusted proxies have added, and nothing else."""

from __future__ import annotations

import socket
import tracemalloc
from time import thread_time
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from starlette.authentication import SimpleUser, UnauthenticatedUser

from netlimit import translation
from netlimit.errors import LimitError
from netlimit.l7.identity import (
    EXTRACTORS,
    ClientAddress,
    api_key,
    find_culprit,
    find_network,
    hash_key,
    header,
    plain_client,
    read_address,
    take_fields,
)
from netlimit.l7.memory.shares import find_network as find_shared_network

PROXIES = ["10.0.0.0/8", "2001:db8:ffff::/48"]


def make_scope(peer: str | None = "192.0.2.1", **headers: str | list[str]) -> dict[str, Any]:
    pairs = []
    for name, values in headers.items():
        for value in [values] if isinstance(values, str) else values:
            pairs.append((name.replace("_", "-").encode(), value.encode("latin-1")))
    return {"client": (peer, 1234) if peer else None, "headers": pairs, "path": "/a", "method": "GET"}


def test_long_texts_that_are_no_address_are_not_kept() -> None:
    """Who tells thousands of them would fill the memory."""
    tracemalloc.start()
    try:
        for number in range(200):
            told = f"{number}" + "a" * 100_000
            assert read_address(told) is None
            assert find_culprit(told) is None
            assert find_culprit(f"192.0.2.1%{told}") == read_address(f"192.0.2.1%{told}")
        assert tracemalloc.get_traced_memory()[0] < 2**20
    finally:
        tracemalloc.stop()


class TestClientAddress:
    def test_the_peer_by_itself(self) -> None:
        assert ClientAddress()(make_scope("192.0.2.1")) == "192.0.2.1"

    @pytest.mark.parametrize("name", ["x_forwarded_for", "forwarded", "x_real_ip", "client_ip", "cf_connecting_ip"])
    def test_a_forged_header_of_an_untrusted_peer_changes_nothing(self, name: str) -> None:
        forged = make_scope("192.0.2.1", **{name: "203.0.113.9"})
        assert ClientAddress()(forged) == "192.0.2.1"
        assert ClientAddress(PROXIES, name.replace("_", "-"))(forged) == "192.0.2.1"

    def test_from_right_to_left_until_the_first_untrusted(self) -> None:
        find = ClientAddress(PROXIES)
        assert find(make_scope("10.0.0.1", x_forwarded_for="192.0.2.7")) == "192.0.2.7"
        assert find(make_scope("10.0.0.1", x_forwarded_for="192.0.2.7, 10.0.0.2,10.0.0.3")) == "192.0.2.7"
        assert find(make_scope("10.0.0.1", x_forwarded_for="1.1.1.1, 10.9.9.9, 192.0.2.7")) == "192.0.2.7"

    def test_a_header_in_several_lines_is_one_list(self) -> None:
        scope = make_scope("10.0.0.1", x_forwarded_for=["1.1.1.1, 192.0.2.7", "10.0.0.2"])
        assert ClientAddress(PROXIES)(scope) == "192.0.2.7"

    @pytest.mark.parametrize("garbage", ["unknown", "", "1.2.3", "_hidden", "999.1.1.1", "\xe4", "1.1.1.1;x", "[::1"])
    def test_what_is_no_address_ends_the_chain_at_the_proxy_that_passed_it_on(self, garbage: str) -> None:
        find = ClientAddress(PROXIES)
        assert find(make_scope("10.0.0.1", x_forwarded_for=f"192.0.2.7, {garbage}, 10.0.0.2")) == "10.0.0.2"
        assert find(make_scope("10.0.0.1", x_forwarded_for=garbage)) == "10.0.0.1"

    def test_who_is_behind_trusted_proxies_alone_is_the_first_of_them(self) -> None:
        assert ClientAddress(PROXIES)(make_scope("10.0.0.1", x_forwarded_for="10.0.0.9, 10.0.0.2")) == "10.0.0.9"
        assert ClientAddress(PROXIES)(make_scope("10.0.0.1")) == "10.0.0.1"

    @pytest.mark.parametrize(
        ("written", "address"),
        [
            ("192.0.2.7:4711", "192.0.2.7"),
            ("[2001:db8:1:2:3::4]:4711", "2001:db8:1:2::/64"),
            ("[2001:db8:1:2:3::4]", "2001:db8:1:2::/64"),
            ("2001:DB8:1:2:0:0:0:4", "2001:db8:1:2::/64"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
        ],
    )
    def test_addresses_as_proxies_write_them(self, written: str, address: str) -> None:
        assert ClientAddress(PROXIES)(make_scope("10.0.0.1", x_forwarded_for=written)) == address

    def test_ipv6_by_its_block_and_mapped_ipv4_as_itself(self) -> None:
        assert ClientAddress()(make_scope("2001:db8:1:2:3:4:5:6")) == "2001:db8:1:2::/64"
        assert ClientAddress(prefix=56)(make_scope("2001:db8:1:2ff::1")) == "2001:db8:1:200::/56"
        assert ClientAddress(prefix=128)(make_scope("2001:db8::1")) == "2001:db8::1"
        assert ClientAddress()(make_scope("::ffff:192.0.2.1")) == "192.0.2.1"

    def test_of_a_link_each_address_is_a_client(self) -> None:
        """fe80::/64 is there on each link, with everybody in it; whose link it is the address does not tell."""
        for client in ("fe80::1", "fe80::1%eth0", "fe80::2", "febf::1"):
            whole = client.partition("%")[0]
            assert ClientAddress()(make_scope(client)) == find_culprit(client) == plain_client(client.encode()) == whole
            assert ClientAddress(prefix=48)(make_scope(client)) == whole
        assert find_network("fe80::1") == find_network("fe80::a:2") == "fe80::/10"
        assert find_shared_network("fe80::1") == find_shared_network("fe80::a:2")
        assert find_culprit("fe80::/64") is None
        assert ClientAddress()(make_scope("fec0::1")) == "fec0::/64"
        assert ClientAddress()(make_scope("fe8::1")) == find_culprit("fe8::/64") == "fe8::/64"
        assert find_network("fe8::1") == "fe8::/48"

    @pytest.mark.parametrize("host", ["64:ff9b::c633:6409", "64:ff9b::198.51.100.9"])
    def test_a_host_behind_a_translator_is_itself(self, host: str) -> None:
        """All of IPv4 is in that /64: others are not blocked for it."""
        assert ClientAddress()(make_scope(host)) == find_culprit(host) == "64:ff9b::c633:6409"
        assert find_culprit("64:ff9b:2::1") == "64:ff9b:2::/64"
        assert find_culprit("64:ff9b::1:0:0:1") == "64:ff9b::/64"

    @pytest.mark.parametrize("host", ["64:ff9b:1::c633:6409", "64:ff9b:1:fffe::c633:6409", "::ffff:0:c633:6409"])
    def test_behind_a_translator_with_another_prefix_too(self, host: str) -> None:
        """RFC 8215 (for local use) and RFC 7915 (addresses that are translated without a state)."""
        assert ClientAddress()(make_scope(host)) == find_culprit(host) == host

    @pytest.mark.parametrize(
        ("prefix", "host", "neighbour"),
        [
            ("2001:db8:64::/96", "2001:db8:64::c633:6409", "2001:db8:64::c633:640a"),
            ("2001:db8:122:344::/64", "2001:db8:122:344:c0:2:2100:0", "2001:db8:122:344:c0:2:2200:0"),
            ("2001:db8:100::/40", "2001:db8:1c0:2:21::", "2001:db8:1c0:2:22::"),
        ],
    )
    def test_behind_a_translator_of_ones_own(
        self, prefix: str, host: str, neighbour: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = find_culprit(host)
        assert before == find_culprit(neighbour) == ClientAddress()(make_scope(host))
        monkeypatch.setattr(translation, "_known", translation._known)  # what is known ends with this test
        find = ClientAddress(translators=[prefix])
        for each in (host, neighbour):
            assert find(make_scope(each)) == find_culprit(each) == plain_client(each.encode()) == each
            assert find_shared_network(each) == each
        assert find_culprit("2001:db8:64::1:0:0:1") == "2001:db8:64::/64"
        assert find_culprit("2001:db8:122:344:ffc0:2:2100:0") == "2001:db8:122:344::/64"

    def test_what_is_no_prefix_of_a_translator_is_told(self) -> None:
        with pytest.raises(LimitError, match="it has 32, 40, 48, 56, 64 or 96 bits"):
            ClientAddress(translators=["2001:db8::/44"])

    def test_a_proxy_is_trusted_by_its_address_not_by_its_block(self) -> None:
        find = ClientAddress(["2001:db8::1"])
        assert find(make_scope("2001:db8::2", x_forwarded_for="192.0.2.7")) == "2001:db8::/64"
        assert find(make_scope("2001:db8::1", x_forwarded_for="192.0.2.7")) == "192.0.2.7"
        assert ClientAddress(["10.0.0.1"])(make_scope("::ffff:10.0.0.1", x_forwarded_for="192.0.2.7")) == "192.0.2.7"

    def test_a_unix_socket_is_trusted_by_name(self) -> None:
        scope = make_scope(None, x_forwarded_for="192.0.2.7")
        assert ClientAddress(["unix"])(scope) == "192.0.2.7"
        assert ClientAddress(PROXIES)(scope) == "unix"  # all together: rather too strict than without a limit

    @pytest.mark.parametrize(
        ("written", "address"),
        [
            ("for=192.0.2.7", "192.0.2.7"),
            ('For="192.0.2.7:80"; proto=https;by=10.0.0.1', "192.0.2.7"),
            ('for=1.1.1.1, proto=http;for="[2001:db8:1:2::4]:80", for=10.0.0.2', "2001:db8:1:2::/64"),
            ("for=_hidden", "10.0.0.1"),
            ("proto=https", "10.0.0.1"),
            ("for=192.0.2.7;for=1.1.1.1", "10.0.0.1"),
            ('for="1.1.1.1, for=192.0.2.7', "192.0.2.7"),
            ('for=192.0.2.7;host="a,for=6.6.6.6;x=y";proto=http', "192.0.2.7"),
            ('host="a,for=6.6.6.6;x=y";for="192.0.2.7"', "192.0.2.7"),
            ('for=192.0.2.7;host="a\\",for=6.6.6.6;x=\\"y"', "192.0.2.7"),
            ('for="1.1.1.1, for=192.0.2.7;host="a,for=6.6.6.6;x=y"', "192.0.2.7"),
            ('for=1.1.1.1;host="a, for=192.0.2.7', "192.0.2.7"),
            ('for=192.0.2.7;host="a;for=6.6.6.6";', "192.0.2.7"),
            ('for=192.0.2.7;host="a\\\\",for=6.6.6.6', "6.6.6.6"),  # the text ends before the comma
            ("for=192.0.2.7 for=6.6.6.6", "10.0.0.1"),
            ('for=192.0.2.7;host=a";for=6.6.6.6', "10.0.0.1"),
            ("FOR=192.0.2.7:80;host=a:80", "192.0.2.7"),
            ("for=192.0.2.7,,", "10.0.0.1"),
        ],
    )
    def test_forwarded(self, written: str, address: str) -> None:
        scope = make_scope("10.0.0.1", forwarded=written, x_forwarded_for="6.6.6.6")
        assert ClientAddress(PROXIES, "Forwarded")(scope) == address

    @pytest.mark.parametrize("written", ['for={}"', "for{}x", "{}x", 'for="{}', "for=1.1.1.1{}x", 'a="{}"{}"'])
    @pytest.mark.parametrize("many", [" ", '"', "\\", '\\"', ",", ";", 'a="', "a=b;"])
    def test_what_has_no_end_is_read_once(self, written: str, many: str) -> None:
        scope = make_scope("10.0.0.1", forwarded=written.format(*2 * [many * (60_000 // len(many))]))
        begun = thread_time()
        assert ClientAddress(PROXIES, "Forwarded")(scope) == "10.0.0.1"
        assert thread_time() - begun < 0.5  # 23 s where each is tried in each of its places

    def test_one_header_and_no_other(self) -> None:
        scope = make_scope("10.0.0.1", x_real_ip="6.6.6.6", forwarded="for=6.6.6.6", x_forwarded_for="192.0.2.7")
        assert ClientAddress(PROXIES)(scope) == "192.0.2.7"

    def test_a_chain_without_end_is_read_a_little_way(self) -> None:
        scope = make_scope("10.0.0.1", x_forwarded_for="1.1.1.1, " + ", ".join(["10.0.0.2"] * 30_000))
        assert ClientAddress(PROXIES)(scope) == "10.0.0.2"

    @pytest.mark.parametrize("place", ["10.0.0.0/33", "proxy.example", "", "*"])
    def test_what_is_no_proxy_is_refused_by_name(self, place: str) -> None:
        with pytest.raises(LimitError, match="is no proxy; write an address"):
            ClientAddress([place])
        with pytest.raises(LimitError, match="no length of an IPv6 prefix"):
            ClientAddress(prefix=0)


class Quiet(WSGIRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


class TestKeys:
    def test_an_api_key_is_known_by_its_hash_alone(self) -> None:
        found = api_key()(make_scope(x_api_key="s3cret"))
        assert found == hash_key("s3cret")
        assert "s3cret" not in found
        assert len(found) == 32
        assert api_key()(make_scope(x_api_key="other")) != found

    def test_a_bearer_token_is_known_whatever_the_scheme_is_written_like(self) -> None:
        find = api_key("Authorization")
        assert find(make_scope(authorization="Bearer s3cret")) == hash_key("s3cret")
        assert find(make_scope(authorization="bearer  s3cret ")) == hash_key("s3cret")
        assert find(make_scope(authorization="Basic s3cret")) is None
        assert find(make_scope(authorization="Bearer ")) is None

    @pytest.mark.parametrize("written", ["Bearer\ts3cret", "bearer \t s3cret\t", "Bearer s3cret 1", "Bearer\x0bs3cret"])
    def test_a_bearer_token_is_what_applications_split_off(self, written: str) -> None:
        assert api_key("Authorization")(make_scope(authorization=written)) == hash_key("s3cret")

    @pytest.mark.parametrize(
        "around", ["\xa0", "\x85", "\xa0\x85", "\t", "\x0b", "\x1c", "\xc2\xa0", "\xe2\x80\x83", " \xa0 "]
    )
    def test_blanks_around_a_key_make_no_other_key(self, around: str) -> None:
        """Servers and applications strip them: to them it is the same."""
        for written in (f"k1{around}", f"{around}k1", f"{around}k1{around}"):
            assert api_key()(make_scope(x_api_key=written)) == hash_key("k1")
            assert api_key("Authorization")(make_scope(authorization=f"Bearer k1{around}")) == hash_key("k1")
            assert header("X-Device")(make_scope(x_device=written)) == "k1"

    @pytest.mark.parametrize("value", ["k 1", "k\xa01", "caf\xc3\xa9", "citt\xc3\xa0", "k\xe9", "", "k1\xc2"])
    def test_what_is_no_blank_around_it_stays(self, value: str) -> None:
        assert header("X-Device")(make_scope(x_device=value)) == value

    @pytest.mark.parametrize("around", ["\xa0", "\x85\x85", "\xa0\x85 "])
    def test_of_what_a_server_makes_one_key_one_is_counted(self, around: str) -> None:
        """wsgiref, and gevent likewise."""
        seen: list[str] = []

        def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
            seen.append(environ["HTTP_X_API_KEY"])
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]

        with make_server("127.0.0.1", 0, application, handler_class=Quiet) as server:
            for written in ("k1", f"k1{around}", f"{around}k1"):
                with socket.create_connection(server.server_address) as client:
                    client.sendall(f"GET / HTTP/1.0\r\nX-API-Key: {written}\r\n\r\n".encode("latin-1"))
                    server.handle_request()
                assert hash_key(seen[-1]) == api_key()(make_scope(x_api_key=written))
        assert seen == ["k1"] * 3

    def test_a_field_with_underscores_is_the_one_that_variables_are_made_of(self) -> None:
        scope = make_scope()
        scope["headers"] = [(b"x_api_key", b"s3cret"), (b"x-device_id", b"d1")]
        assert api_key()(scope) == hash_key("s3cret")
        assert header("X-Device-Id")(scope) == header("X_Device_Id")(scope) == "d1"
        scope["headers"].append((b"x-api-key", b"other"))
        assert api_key()(scope) == hash_key("other"), "as the application sees it, without the first"
        assert [*take_fields(scope)["headers"]] == scope["headers"][1:]

    def test_a_second_key_is_no_way_around_a_limit(self) -> None:
        assert api_key()(make_scope()) is None
        assert api_key()(make_scope(x_api_key=["one", "two"])) == hash_key("one")
        assert header("X-Device")(make_scope(x_device="d1")) == "d1"


class DjangoUser:
    """As Channels leaves one in the scope."""

    is_authenticated = True

    def get_username(self) -> str:
        return "ann"


class TestUser:
    def test_who_is_authenticated(self) -> None:
        find = EXTRACTORS["user"]
        assert find({"user": SimpleUser("ann")}) == "ann"
        assert find({"user": DjangoUser()}) == "ann"
        assert find({"user": UnauthenticatedUser()}) is None
        assert find({"user": UnauthenticatedUser(), "state": {"user": "ann"}}) == "ann"
        assert find({"state": {"user": object()}}) is None
        assert find({}) is None


def test_path_and_method() -> None:
    scope = make_scope()
    assert (EXTRACTORS["path"](scope), EXTRACTORS["method"](scope)) == ("/a", "GET")
    assert EXTRACTORS["method"]({**scope, "method": "m-Search"}) == "M-SEARCH"
    del scope["method"]
    assert EXTRACTORS["method"](scope) is None
