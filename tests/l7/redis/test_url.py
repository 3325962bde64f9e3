"""What a COUNTERS_URL says."""

from __future__ import annotations

import pytest

from netlimit.errors import SettingsError
from netlimit.l7.counters import open_counters
from netlimit.l7.failover import Failover
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.redis.cluster import Address
from netlimit.l7.redis.url import read_url


def test_a_server() -> None:
    place = read_url("redis://me:p%40ss@cache.example:6380/2?timeout_ms=50&probe_ms=500&merge_ms=100")
    assert (place.addresses, place.cluster) == ((Address("cache.example", 6380),), False)
    assert place.options == {"username": "me", "password": "p@ss", "db": 2}
    assert (place.timeout, place.probe, place.merge) == (0.05, 0.5, 0.1)
    assert str(place) == "cache.example:6380"


def test_what_is_not_said() -> None:
    place = read_url("redis://cache")
    assert (place.addresses, place.options) == ((Address("cache", 6379),), {"db": 0})
    assert (place.timeout, place.probe, place.merge) == (0.25, 1.0, 0.0)


def test_tls() -> None:
    place = read_url("rediss://cache?ssl_ca_certs=/etc/ca.pem")
    assert place.kind.__name__ == "SSLConnection"
    assert place.options["ssl_ca_certs"] == "/etc/ca.pem"


def test_a_socket() -> None:
    place = read_url("unix:///run/redis/redis.sock?db=1")
    assert (place.addresses, place.options) == ((), {"path": "/run/redis/redis.sock", "db": 1})
    assert str(place) == "/run/redis/redis.sock"


def test_a_cluster() -> None:
    place = read_url("rediss+cluster://:secret@one:7000,[::1]:7001,three?merge_ms=20")
    assert place.addresses == (Address("one", 7000), Address("::1", 7001), Address("three", 6379))
    assert (place.cluster, place.options["password"]) == (True, "secret")
    assert "secret" not in repr(place)
    assert str(place) == "one:7000, [::1]:7001, three:6379"


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("http://cache", "'http' is no scheme of it"),
        ("memory", "'' is no scheme of it"),
        ("redis:///0", "a host is missing"),
        ("redis://cache:port", "a host or its port cannot be read; in a password"),
        ("redis://cache/nine", "the database after the last / is no number"),
        ("redis://one,two", "several hosts are a cluster's"),
        ("redis+cluster://one,two/1", "a cluster has no databases"),
        ("redis://cache?merge_ms=0", "merge_ms is not between 1 and 60000"),
        ("redis://cache?timeout_ms=soon", "timeout_ms is no number"),
        ("redis://cache?ssl_ca_certs=/ca.pem", "'ssl_ca_certs' is no option of it; there are timeout_ms"),
        ("unix+cluster:///run/redis", "'unix[+]cluster' is no scheme of it"),
    ],
)
def test_what_is_wrong_is_said(url: str, wrong: str) -> None:
    with pytest.raises(SettingsError, match=f"{wrong}.*redis[+]cluster://"):
        read_url(url)


def test_no_error_tells_the_password() -> None:
    with pytest.raises(SettingsError) as error:
        read_url("redis://me:secret@cache?secret_ms=secret")
    assert "redis://me" not in str(error.value)
    with pytest.raises(SettingsError) as error:
        read_url("redis://me:secret@:x")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr?ret@host:6379/0",
        "redis://:s3c?ret=1@host",
        "redis://:s3c?timeout_ms=ret@host",
        "redis://me:s3c#ret@host:6379",
        "redis://me:1234#s3c@host",
        "redis://:s3c/ret@host",
        "redis://me:1234/s3c@host",
        "redis://s3c:ret",
        "redis://[s3c]",
        "redis://[s3c",
        "redis://s3c\u2100ret?x",
        "redis+cluster://one,:s3c?ret@host",
        "unix:///s3c#ret",
        "unix:///run?s3c",
        "me:s3c://ret@host",
    ],
)
def test_no_error_tells_a_part_of_the_password_however_it_is_written(url: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_url(url)
    told = str(error.value).partition(" Write ")[0]
    assert not any(part in told for part in ("s3c", "ret", "1234", "host:"))


@pytest.mark.parametrize("url", ["redis://cache#", "redis://cache/1#x", "unix:///run/redis#1", "redis://me:a#b@cache"])
def test_a_fragment_means_nothing(url: str) -> None:
    with pytest.raises(SettingsError, match=r"`#`.*%23"):
        read_url(url)


def test_every_kind_of_store() -> None:
    assert isinstance(open_counters("memory://"), MemoryStore)
    assert isinstance(open_counters("redis://cache"), Failover)
    assert isinstance(open_counters("redis+cluster://one,two?merge_ms=50"), Failover)
