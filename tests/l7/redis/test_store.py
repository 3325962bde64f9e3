"""What goes wrong elsewhere: keys that never end or end too soon, scripts that are lost, and connections that are."""

from __future__ import annotations

import asyncio
import subprocess
import time
from math import inf
from pathlib import Path
from socket import socket
from threading import Thread

import pytest

from netlimit.errors import CountersUnavailable
from netlimit.l7.breaker import State
from netlimit.l7.limit import BOUNDLESS, Algorithm, Limit, Refill
from netlimit.l7.redis.algorithms import HEAVIEST
from netlimit.l7.redis.key import make_name, make_prefix
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.url import read_url
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask
from tests.l7.redis.driving import EVERY, PATIENT, ask_until_answered, hit, make_rule, opened
from tests.l7.redis.racing import ALGORITHMS, ROOT, Racers
from tests.l7.redis.servers import Server
from tests.ports import free_port

FOREVER = -1  # what PTTL says
DAY = 86_400


@pytest.fixture(autouse=True)
def _empty(server: Server) -> None:
    server.client.flushall()


def find_lives(server: Server) -> dict[bytes, int]:
    """Each key's milliseconds to live."""
    return {key: server.client.pttl(key) for key in server.client.scan_iter(count=1000)}


def name_of(rule: Rule, key: str = "alice") -> bytes:
    assert rule.limit
    return make_name(make_prefix(rule, rule.limit), key)


def test_every_key_ends_by_itself(server: Server) -> None:
    async def ask_all() -> None:
        async with opened(server.url + PATIENT) as store:
            for limit in [*EVERY, Limit(5, 60, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL)]:
                rule = make_rule(limit)
                for hits, charge, slack in (
                    (0, False, 0),
                    (3, False, 0),
                    (3, False, 0),
                    (3, True, 0),
                    (20, False, BOUNDLESS),
                ):
                    await hit(store, rule, hits=hits, charge=charge, slack=slack)
                    lives = find_lives(server)
                    assert all(life != FOREVER and life <= 2 * limit.seconds * 1000 for life in lives.values()), lives
                assert name_of(rule) in lives or limit.seconds == 1
                server.client.flushall()

    asyncio.run(ask_all())


def test_whoever_is_killed_leaves_no_key_for_ever(server: Server) -> None:
    with Racers(server.url + PATIENT, 1) as racers:
        for number, algorithm in enumerate(ALGORITHMS):
            racers.start(Limit(10**6, 3600, algorithm), f"killed {number}", 3000)
        while server.client.dbsize() < 2:
            time.sleep(0.001)
    lives = find_lives(server)
    assert lives
    assert FOREVER not in lives.values()


def test_a_look_leaves_nothing(server: Server) -> None:
    async def look() -> None:
        async with opened(server.url + PATIENT) as store:
            for limit in EVERY:
                assert (await hit(store, make_rule(limit), hits=0)).admitted

    asyncio.run(look())
    assert server.client.dbsize() == 0


def test_a_log_is_no_longer_than_its_limit_however_much_is_refused(server: Server) -> None:
    rule = make_rule(Limit(4, DAY, Algorithm.SLIDING_WINDOW_LOG))

    async def hit_often() -> None:
        async with opened(server.url + PATIENT) as store:
            for hits in (1, 3, 100) * 5:
                await hit(store, rule, hits=hits)

    asyncio.run(hit_often())
    assert server.client.zcard(name_of(rule)) == 4


def test_a_windows_end_is_not_put_off_by_hits(server: Server) -> None:
    rule = make_rule(Limit(3, DAY))

    async def hit_often() -> None:
        async with opened(server.url + PATIENT) as store:
            for _ in range(6):
                decision = await hit(store, rule)
                assert (
                    server.client.pttl(name_of(rule)) <= decision.reset_after * 1000 + 1000
                )  # its clock ticks in between

    asyncio.run(hit_often())


def test_the_previous_window_is_kept_as_long_as_it_counts(server: Server) -> None:
    rule = make_rule(Limit(3, DAY, Algorithm.SLIDING_WINDOW_COUNTER))

    async def hit_once() -> None:
        async with opened(server.url + PATIENT) as store:
            rest = (await hit(store, rule)).reset_after - DAY
            assert server.client.pttl(name_of(rule)) > (rest + DAY) * 1000 - 20_000

    asyncio.run(hit_once())


@pytest.mark.parametrize(
    ("limit", "longest"),
    [
        (Limit(3000, 1, Algorithm.GCRA, burst=1), 1),
        (Limit(100, 1, Algorithm.GCRA, burst=10), 100),
        (Limit(100, 1, Algorithm.TOKEN_BUCKET, burst=10), 100),
        (Limit(1, 3600, Algorithm.GCRA), 3_600_000),
        (Limit(3, DAY, Algorithm.TOKEN_BUCKET), DAY * 1000),
    ],
    ids=str,
)
def test_a_bucket_is_kept_until_it_is_full_to_the_millisecond(server: Server, limit: Limit, longest: int) -> None:
    rule = make_rule(limit)

    async def empty() -> None:
        async with opened(server.url + PATIENT) as store:
            assert (await hit(store, rule, hits=limit.capacity)).admitted
            life = server.client.pttl(name_of(rule))
            assert longest - 15_000 <= life <= longest
            assert life != FOREVER

    asyncio.run(empty())


def test_a_lease_that_is_renewed_is_kept_as_long_as_it_lasts(server: Server) -> None:
    rule = make_rule(Limit(1, DAY, Algorithm.CONCURRENCY))

    async def renew() -> None:
        async with opened(server.url + PATIENT) as store:
            ask = Ask(rule, Limit(1, DAY, Algorithm.CONCURRENCY), "alice", lease="lease")
            await store.decide([ask])
            server.client.pexpire(name_of(rule), 60_000)
            await store.renew([ask])
            assert server.client.pttl(name_of(rule)) > DAY * 1000 - 20_000

    asyncio.run(renew())


def test_leases_are_kept_as_long_as_the_longest_lasts(server: Server) -> None:
    """Also when the one that is renewed is of a limiter that has read a shorter one already."""
    long, short = (Limit(9, seconds, Algorithm.CONCURRENCY) for seconds in (DAY, 10))
    rule = make_rule(long)

    async def renew() -> None:
        async with opened(server.url + PATIENT) as store:
            old, new = (Ask(rule, limit, "alice", lease=f"{limit.seconds}") for limit in (long, short))
            await store.decide([new])
            await store.decide([old])
            await store.renew([new])
            assert server.client.pttl(name_of(rule)) > DAY * 1000 - 20_000

    asyncio.run(renew())


def test_a_rule_may_change_how_it_counts(server: Server) -> None:
    async def change() -> None:
        async with opened(server.url + PATIENT) as store:
            for _ in range(2):
                for limit in [*EVERY, Limit(5, 60, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL), Limit(5, 3600)]:
                    decision = await hit(store, Rule("test", "changing", limit))
                    assert decision.admitted, limit

    asyncio.run(change())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rule_that_changes_its_amount_goes_on(server: Server, algorithm: Algorithm) -> None:
    async def change() -> None:
        async with opened(server.url + PATIENT) as store:
            assert (await hit(store, Rule("test", "growing", Limit(5, DAY, algorithm)), hits=5)).admitted
            more = Rule("test", "growing", Limit(8, DAY, algorithm))
            assert (await hit(store, more, hits=2)).admitted
            assert (await hit(store, more, hits=2)).admitted is False
            fewer = Rule("test", "growing", Limit(6, DAY, algorithm))
            assert (await hit(store, fewer)).admitted is False

    asyncio.run(change())


def test_scripts_that_are_flushed_under_load_are_sent_again(server: Server) -> None:
    rule = make_rule(Limit(1000, DAY, Algorithm.GCRA))

    async def load() -> int:
        async with opened(server.url + PATIENT) as store:
            flushing = asyncio.create_task(asyncio.to_thread(flush))
            admitted = await asyncio.gather(*(ask_often(store) for _ in range(64)))
            await flushing
            return sum(admitted)

    async def ask_often(store: object) -> int:
        return sum([(await hit(store, rule)).admitted for _ in range(20)])

    def flush() -> None:
        for _ in range(20):
            server.client.script_flush()

    assert asyncio.run(load()) == 1000


def test_a_store_that_restarts_empty_counts_anew(mortal: Server) -> None:
    rule = make_rule(Limit(2, DAY))

    async def restart() -> None:
        async with opened(mortal.url + PATIENT) as store:
            assert [(await hit(store, rule)).admitted for _ in range(3)] == [True, True, False]
            mortal.kill()
            mortal.start()
            await ask_until_answered(store, rule)
            assert [(await hit(store, rule)).admitted for _ in range(2)] == [True, False]

    asyncio.run(restart())


def test_a_connection_that_was_closed_while_idle_is_opened_again(server: Server) -> None:
    rule = make_rule(Limit(5, DAY))

    async def lose() -> None:
        async with opened(server.url + PATIENT) as store:
            for number in range(3):
                assert (await hit(store, rule)).remaining == 4 - number
                server.client.client_kill_filter(_type="normal", skipme=True)
                await asyncio.sleep(0.02)
            assert store.state is State.CLOSED

    asyncio.run(lose())


def test_who_stops_waiting_disturbs_nobody(server: Server) -> None:
    rule = make_rule(Limit(1000, DAY))

    async def cancel() -> None:
        async with opened(server.url + PATIENT) as store:
            asking = [asyncio.create_task(hit(store, rule)) for _ in range(100)]
            await asyncio.sleep(0)
            for number, task in enumerate(asking):
                if number % 3 == 0:
                    task.cancel()
            done = await asyncio.gather(*asking, return_exceptions=True)
            assert [isinstance(each, asyncio.CancelledError) for each in done] == [n % 3 == 0 for n in range(100)]
            assert (await hit(store, rule)).remaining == 899

    asyncio.run(cancel())


def test_threads_with_loops_of_their_own_share_a_store(server: Server) -> None:
    rule = make_rule(Limit(100, DAY, Algorithm.SLIDING_WINDOW_LOG))
    store = open_store(read_url(server.url + PATIENT))
    admitted: list[bool] = []

    async def ask_often() -> None:
        admitted.extend([(await hit(store, rule)).admitted for _ in range(30)])
        await store.aclose()

    threads = [Thread(target=asyncio.run, args=(ask_often(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (len(admitted), sum(admitted)) == (120, 100)


def test_what_is_asked_together_is_answered_in_order(server: Server) -> None:
    rules = [make_rule(limit) for limit in EVERY]
    asks = [Ask(rule, rule.limit, key, 2) for rule in rules for key in ("one", "two") if rule.limit]

    async def ask_all() -> None:
        async with opened(server.url + PATIENT) as store:
            assert await store.decide([]) == []
            for expected in (3, 1):
                for ask, decision in zip(asks, await store.decide(asks), strict=True):
                    assert decision.remaining == ask.limit.capacity - 5 + expected or ask.limit.seconds == 1, ask
            refused = await store.decide([ask._replace(hits=6) for ask in asks if ask.limit.seconds > 1])
            assert not any(decision.admitted for decision in refused)

    asyncio.run(ask_all())


def test_a_request_that_is_too_heavy_for_a_log_is_refused_and_keeps_redis_from_others_no_longer(
    server: Server,
) -> None:
    """An entry for each hit of 1,000,000 takes Redis many seconds, in which it answers nobody."""
    limit = Limit(10**6, DAY, Algorithm.SLIDING_WINDOW_LOG)
    rule = make_rule(limit)

    async def ask() -> None:
        async with opened(server.url + "?timeout_ms=60000") as store:
            assert (await hit(store, rule, hits=HEAVIEST)).remaining == 10**6 - HEAVIEST
            refused = await hit(store, rule, hits=HEAVIEST + 1)
            assert (refused.admitted, refused.retry_after) == (False, inf)
            assert (await hit(store, rule, hits=10**6)).remaining == 10**6 - 3 * HEAVIEST
            assert server.client.zcard(make_name(make_prefix(rule, limit), "alice")) == 3 * HEAVIEST
            looked = await hit(store, rule, hits=0)
            assert (looked.admitted, looked.retry_after) == (True, 0)

    asyncio.run(ask())


def count_calls(server: Server, command: str) -> int:
    return int(server.client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_heavy_requests_that_come_together_leave_redis_to_others_in_between(server: Server) -> None:
    """Whoever asks of many counters at once may write no more entries in one go than who asks of one."""
    limit = Limit(10**6, DAY, Algorithm.SLIDING_WINDOW_LOG)
    rule, half = make_rule(limit), HEAVIEST // 2

    async def ask() -> None:
        async with opened(server.url + "?timeout_ms=60000") as store:
            await hit(store, rule, "first", hits=0)  # the script is known
            server.client.config_resetstat()
            asks = [Ask(rule, limit, f"{key}", hits) for key, hits in enumerate([half, half, 1, HEAVIEST, 1, 1])]
            decisions = await store.decide(asks)
            assert [decision.remaining for decision in decisions] == [10**6 - ask.hits for ask in asks]
            assert count_calls(server, "evalsha") == 4
            assert count_calls(server, "zadd") <= 2 * HEAVIEST / 1000 + 3
            assert server.client.zcard(name_of(rule, "3")) == HEAVIEST
            assert (await store.decide(asks[3:4]))[0].remaining == 10**6 - 2 * HEAVIEST
            assert server.client.zcard(name_of(rule, "3")) == 2 * HEAVIEST

    asyncio.run(ask())


def test_a_socket_a_database_and_a_password(mortal: Server) -> None:
    mortal.client.config_set("requirepass", "secret")
    rule = make_rule(Limit(5, DAY))

    async def ask(url: str) -> int:
        async with opened(url) as store:
            return (await hit(store, rule)).remaining

    place = mortal.directory / "socket"
    assert asyncio.run(ask(f"unix://:secret@{place}?timeout_ms=60000")) == 4
    assert asyncio.run(ask(f"redis://:secret@127.0.0.1:{mortal.port}/0?timeout_ms=60000")) == 3
    assert asyncio.run(ask(f"redis://:secret@127.0.0.1:{mortal.port}/1?timeout_ms=60000")) == 4
    with pytest.raises(CountersUnavailable, match=f"127.0.0.1:{mortal.port} cannot be asked: .*"):
        asyncio.run(ask(f"redis://:wrong@127.0.0.1:{mortal.port}/0?timeout_ms=60000"))


def test_tls(tmp_path: Path) -> None:
    certificate, key, port = tmp_path / "certificate.pem", tmp_path / "key.pem", free_port()
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost -days 2"
    name = ("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate))
    subprocess.run([*make.split(), *name], check=True, capture_output=True)
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    server = Server(tmp_path, "--tls-port", str(port), *files)

    async def ask(options: str) -> None:
        async with opened(f"rediss://localhost:{port}/0?timeout_ms=60000{options}") as store:
            assert (await hit(store, make_rule(Limit(5, DAY)))).remaining == 4

    try:
        asyncio.run(ask(f"&ssl_ca_certs={certificate}"))
        with pytest.raises(CountersUnavailable, match="certificate"):
            asyncio.run(ask(""))
    finally:
        server.close()


def test_a_server_that_is_full_is_said_to_be(mortal: Server) -> None:
    mortal.client.config_set("maxmemory", 1)

    async def ask() -> None:
        async with opened(mortal.url + PATIENT) as store:
            with pytest.raises(CountersUnavailable, match="OOM"):
                await hit(store, make_rule(Limit(5, 60)))
            mortal.client.config_set("maxmemory", 0)
            await ask_until_answered(store, make_rule(Limit(5, 60)))

    asyncio.run(ask())


@pytest.mark.parametrize("kind", ["redis", "redis+cluster"])
def test_a_store_that_is_closed_leaves_nobody_waiting(kind: str) -> None:
    async def close(port: int) -> None:
        store = open_store(read_url(f"{kind}://127.0.0.1:{port}{PATIENT}"))
        asking = [asyncio.create_task(hit(store, make_rule(Limit(5, 60)))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await store.aclose()
        done = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(each, CountersUnavailable) for each in done)

    with socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        asyncio.run(asyncio.wait_for(close(silent.getsockname()[1]), 30))


def test_the_user_of_the_documentation_has_rights_enough(mortal: Server) -> None:
    text = (ROOT / "docs/limiter-stores.md").read_text("utf-8")
    (command,) = [line for line in text.splitlines() if line.startswith("ACL SETUSER ")]
    mortal.client.execute_command(*command.split())

    async def ask_all() -> None:
        async with opened(f"redis://netlimit:password@127.0.0.1:{mortal.port}/0?timeout_ms=60000") as store:
            for limit in [*EVERY, Limit(5, 60, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL)]:
                ask = Ask(make_rule(limit), limit, "alice", 2, lease="lease")
                assert [(await store.decide([ask]))[0].admitted for _ in range(2)] == [True] * 2
                if limit.algorithm is Algorithm.CONCURRENCY:
                    await store.renew([ask])
                    await store.release([ask])

    asyncio.run(ask_all())
