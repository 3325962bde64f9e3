"""What every backlog must do, in SQLite and in Redis."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import pytest

from netlimit.l7.deferral.backlog import Backlog, BacklogFull
from netlimit.l7.deferral.request import Deferred, Reply, State, keep_headers, make_id, write_head
from netlimit.l7.rules import Descriptor, Entry

OpenBacklog = Callable[..., Backlog]
Spoil = Callable[[Deferred, bytes], None]
"""Writes something else where all of a request but its body is kept."""
UNREADABLE = "A deferred request cannot be read, and is dropped: it is damaged, or of another version of netlimit."


def make_request(
    key: str = "alice", target: str = "/a?b=%20c", body: bytes = b"\0\xff body", **others: object
) -> Deferred:
    identity = make_id()
    descriptors = (
        Descriptor((Entry("path", "/a"), Entry("user", key)), 3),
        Descriptor((Entry("user", key),)),
    )
    headers = keep_headers([(b"authorization", b"Bearer s3cret"), (b"x-name", "\u00e4".encode("latin-1"))], identity)
    now = time.time()
    fields = {
        "id": identity, "key": key, "domain": "app", "descriptors": descriptors, "hits": 2, "method": "POST",
        "target": target, "headers": headers, "body": body, "client": "192.0.2.1 1234", "scheme": "https",
        "accepted": now, "expires": now + 1000,
    }  # fmt: skip
    return Deferred(**fields | others)  # type: ignore[arg-type]


async def end_one(backlog: Backlog, body: bytes = b"", client: str = "192.0.2.1 80") -> Deferred:
    """Have a request answered so."""
    request = make_request(client=client)
    await backlog.put(request)
    assert await backlog.claim(time.time()) == (request, 1)
    await backlog.finish(request, State.DONE, time.time(), Reply(200, (), body), "")
    return request


class BacklogSuite:
    """Run by modules that have the fixtures `open_backlog` and `spoil`."""

    pytestmark = pytest.mark.anyio

    async def test_a_request_comes_out_as_it_went_in(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        request = make_request()
        await backlog.put(request)
        claim = await backlog.claim(time.time())
        assert claim == (request, 1)
        assert await backlog.claim(time.time()) is None

    async def test_what_a_path_means_besides_is_kept_as_that(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        entries = (Entry("path", "/login"),)
        request = make_request(descriptors=tuple(Descriptor(entries, 2, besides=reading) for reading in (0, 2, ~0, ~1)))
        await backlog.put(request)
        assert await backlog.claim(time.time()) == (request, 1)

    async def test_those_of_a_key_come_one_at_a_time_in_order(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        requests = [make_request(key, f"/{number}") for number in range(3) for key in ("alice", "bob")]
        for request in requests:
            await backlog.put(request)
        now, order = time.time(), []
        for _ in range(3):
            claims = [await backlog.claim(now), await backlog.claim(now)]
            assert await backlog.claim(now) is None
            for claim in claims:
                assert claim is not None
                order.append((claim.request.key, claim.request.target))
                assert await backlog.is_waiting(claim.request.key)
                await backlog.finish(claim.request, State.DONE, now, Reply(200, (), b""), "")
        assert sorted(order, key=lambda each: each[0]) == [
            (key, f"/{number}") for key in ("alice", "bob") for number in range(3)
        ]
        assert not await backlog.is_waiting("alice")

    async def test_what_is_postponed_keeps_its_place(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        first, second = make_request(target="/1"), make_request(target="/2")
        await backlog.put(first)
        await backlog.put(second)
        now = time.time()
        claim = await backlog.claim(now)
        assert claim is not None
        await backlog.postpone(claim.request, now + 5, tried=False)
        assert await backlog.claim(now + 4) is None
        assert await backlog.claim(now + 5) == (first, 1)
        await backlog.postpone(first, now + 9, tried=True)
        assert await backlog.claim(now + 9) == (first, 2)

    async def test_what_is_withdrawn_has_not_been_put(
        self, open_backlog: OpenBacklog, caplog: pytest.LogCaptureFixture
    ) -> None:
        backlog, other = open_backlog(most_of_one=2), open_backlog(most_of_one=2)
        first, second = make_request(target="/1"), make_request(target="/2")
        for request in (first, second):
            await backlog.put(request)
        now = time.time()
        assert await other.claim(now) == (first, 1), "who has claimed one has read of both"
        assert [await backlog.withdraw(request) for request in (first, second, second)] == [False, True, True]
        third = make_request(target="/3")
        await backlog.put(third)  # there is room again
        await other.finish(first, State.DONE, now, None, "")
        assert await other.claim(now) == (third, 1)
        await other.finish(third, State.DONE, now, None, "")
        await other.sweep(now)
        assert await other.claim(now) is None
        assert not await backlog.is_waiting(first.key)
        assert caplog.records == []

    async def test_a_claim_that_is_renewed_is_nobody_elses(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog(lease=100)
        request = make_request()
        await backlog.put(request)
        now = time.time()
        assert await backlog.claim(now) == (request, 1)
        await backlog.renew(request, now + 99)
        assert await backlog.claim(now + 198) is None
        assert await backlog.claim(now + 199) == (request, 2)
        await backlog.finish(request, State.DONE, now, None, "")
        await backlog.renew(request, now)
        assert not await backlog.is_waiting(request.key)

    async def test_of_a_network_no_more_are_claimed_than_it_has_places(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        crowd = [make_request(f"key {n}", client=f"2001:db8:0:{n:x}::1 80") for n in range(3)]
        other = make_request("other", client="192.0.2.1 80")
        for request in (*crowd, other):
            await backlog.put(request)
        assert len({request.network for request in crowd}) == 1
        now, network = time.time(), crowd[0].network
        assert await backlog.claim(now, {network: 1}, 2) == (other, 1)  # of whom fewer are under way
        assert await backlog.claim(now, {network: 2}, 2) is None
        assert await backlog.claim(now, {network: 1, other.network: 1}, 2) == (crowd[0], 1)
        assert await backlog.claim(now, {network: 2}, 3) == (crowd[1], 1)

    async def test_its_end_can_be_read(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        request = make_request()
        assert await backlog.find(request.id) is None
        await backlog.put(request)
        report = await backlog.find(request.id)
        assert report is not None
        assert (report.state, report.tries, report.reply) == (State.WAITING, 0, None)
        await backlog.claim(time.time())
        reply = Reply(201, (("content-type", "text/plain"),), b"\xff made", truncated=True)
        await backlog.finish(request, State.DONE, time.time(), reply, "")
        report = await backlog.find(request.id)
        assert report is not None
        assert (report.state, report.tries, report.reply) == (State.DONE, 1, reply)
        assert report.accepted == pytest.approx(request.accepted)

    async def test_why_it_failed_can_be_read(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        request = make_request()
        await backlog.put(request)
        await backlog.claim(time.time())
        await backlog.finish(request, State.FAILED, time.time(), None, "The upstream has answered 503.")
        report = await backlog.find(request.id)
        assert report is not None
        assert (report.state, report.reply, report.reason) == (State.FAILED, None, "The upstream has answered 503.")

    async def test_it_is_bounded_by_key_and_in_all(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog(most=5, most_of_one=2)
        for _ in range(2):
            await backlog.put(make_request("alice"))
        with pytest.raises(BacklogFull, match="as many are kept or being read as may be"):
            await backlog.put(make_request("alice"))
        for number in range(3):
            await backlog.put(make_request(f"bob {number}", client=f"203.0.{number}.1 80"))
        with pytest.raises(BacklogFull):
            await backlog.put(make_request("carol", client="198.51.100.1 80"))
        claim = await backlog.claim(time.time())
        assert claim is not None
        await backlog.finish(claim.request, State.DONE, time.time(), None, "")
        await backlog.put(make_request("carol", client="198.51.100.1 80"))

    async def test_it_is_bounded_in_bytes(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog(most_bytes=35_000)
        for number in range(2):
            await backlog.put(make_request(body=b"x" * 10_000, client=f"192.0.{number}.1 80"))
        await backlog.put(make_request("bob", body=b"x" * 9000))
        with pytest.raises(BacklogFull):
            await backlog.put(make_request("carol", body=b"x" * 5000, client="198.51.100.1 80"))
        await backlog.put(make_request("carol", body=b"x" * 100, client="198.51.100.1 80"))
        claim = await backlog.claim(time.time())
        assert claim is not None
        await backlog.finish(claim.request, State.DONE, time.time(), None, "")
        await backlog.put(make_request("carol", body=b"x" * 5000, client="198.51.100.1 80"))

    async def test_of_one_key_it_is_bounded_in_bytes(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog(most_bytes_of_one=15_000)
        await backlog.put(make_request(body=b"x" * 10_000))
        with pytest.raises(BacklogFull):
            await backlog.put(make_request(body=b"x" * 10_000, client="198.51.100.1 80"))
        await backlog.put(make_request("bob", body=b"x" * 10_000))
        claim = await backlog.claim(time.time())
        assert claim is not None
        await backlog.finish(claim.request, State.DONE, time.time(), None, "")
        await backlog.put(make_request(body=b"x" * 10_000))

    @pytest.mark.parametrize("bounds", [{"most": 16}, {"most_bytes": 170_000}], ids=["requests", "bytes"])
    async def test_there_is_room_for_other_networks(self, open_backlog: OpenBacklog, bounds: dict[str, int]) -> None:
        """Whatever keys a client invents, and though there be several such."""
        backlog = open_backlog(**bounds)

        async def fill(network: int) -> int:
            for number in range(16):
                client = f"2001:db8:{network:x}:{number:x}::1 80"
                try:
                    await backlog.put(make_request(f"{network} {number}", body=b"x" * 10_000, client=client))
                except BacklogFull:
                    return number
            return 16

        kept = [await fill(network) for network in range(4)]
        assert kept == [8, 4, 2, 1]
        while (claim := await backlog.claim(time.time())) is not None:
            await backlog.finish(claim.request, State.DONE, time.time(), None, "")
        assert await fill(9) == 8  # what has ended takes up nothing

    async def test_how_much_waits_is_told(self, open_backlog: OpenBacklog) -> None:
        """Of all, of a key, of a network and of both: what may still come."""
        backlog, places = open_backlog(), (("alice", 1), ("alice", 2), ("bob", 1), ("carol", 3))
        requests = [make_request(key, client=f"192.0.{network}.1 80") for key, network in places]
        network, size = requests[0].network, len(write_head(requests[0])) + len(requests[0].body)
        assert await backlog.weigh("alice", network) == (0,) * 8
        for request in requests:
            await backlog.put(request)
        load = await backlog.weigh("alice", network)
        assert (load.requests, load.of_key, load.of_network, load.of_both) == (4, 2, 2, 1)
        weights = load.bytes, load.bytes_of_key, load.bytes_of_network, load.bytes_of_both
        assert weights == pytest.approx((4 * size, 2 * size, 2 * size, size), rel=0.05), "the heads differ a little"
        assert await backlog.weigh("dan", "nowhere") == (4, load.bytes, 0, 0, 0, 0, 0, 0)
        for request in requests:
            assert await backlog.withdraw(request)
        assert await backlog.weigh("alice", network) == (0,) * 8

    async def test_another_process_takes_over_when_the_lease_has_ended(self, open_backlog: OpenBacklog) -> None:
        dying, heir = open_backlog(lease=2.0), open_backlog(lease=2.0)
        requests = [make_request(target=f"/{number}") for number in range(3)]
        for request in requests:
            await dying.put(request)
        now = time.time()
        assert await dying.claim(now) == (requests[0], 1)
        assert await heir.claim(now) is None  # nobody else's
        deadline = time.monotonic() + 60
        while (claim := await heir.claim(time.time())) is None:
            assert time.monotonic() < deadline
        assert claim == (requests[0], 2)
        assert time.time() - now >= 1.9
        await heir.finish(requests[0], State.DONE, time.time(), None, "")
        assert await heir.claim(time.time()) == (requests[1], 1)

    async def test_it_is_forgotten_in_time(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog(keep=3)
        request = make_request()
        await backlog.put(request)
        await backlog.claim(time.time())
        await backlog.finish(request, State.DONE, time.time(), None, "")
        await backlog.sweep(time.time())
        assert await backlog.find(request.id) is not None
        deadline = time.monotonic() + 60
        while await backlog.find(request.id) is not None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
            await backlog.sweep(time.time())

    async def test_so_many_ends_are_remembered(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog(most=3)
        waiting = make_request("bob")
        ended = [await end_one(backlog) for _ in range(5)]
        await backlog.put(waiting)
        await backlog.sweep(time.time())
        known = [await backlog.find(request.id) is not None for request in (*ended, waiting)]
        assert known == [False, False, True, True, True, True]

    async def test_so_many_bytes_of_answers_are_remembered(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog(most_bytes=35_000)
        ended = [await end_one(backlog, b"x" * 10_000) for _ in range(5)]
        await backlog.sweep(time.time())
        assert [await backlog.find(request.id) is not None for request in ended] == [False, False, True, True, True]

    @pytest.mark.parametrize("garbage", [b"\xff\0", b"{}", b"[1]", b'"', b"[" * 9999])
    async def test_what_cannot_be_read_is_dropped_and_told(
        self, open_backlog: OpenBacklog, spoil: Spoil, garbage: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        backlog = open_backlog()
        spoilt, behind = make_request(), make_request()
        await backlog.put(spoilt)
        await backlog.put(behind)
        spoil(spoilt, garbage)
        await self._see_it_dropped(backlog, spoilt, behind, caplog)

    async def test_so_is_what_a_newer_version_has_put(
        self, open_backlog: OpenBacklog, spoil: Spoil, caplog: pytest.LogCaptureFixture
    ) -> None:
        backlog = open_backlog()
        newer, behind = make_request(), make_request()
        await backlog.put(newer)
        await backlog.put(behind)
        spoil(newer, json.dumps(json.loads(write_head(newer)) | {"news": 1}).encode())
        await self._see_it_dropped(backlog, newer, behind, caplog)

    @staticmethod
    async def _see_it_dropped(
        backlog: Backlog, dropped: Deferred, behind: Deferred, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert await backlog.claim(time.time()) == (behind, 1)
        report = await backlog.find(dropped.id)
        assert report is not None
        assert (report.state, report.reason) == (State.FAILED, UNREADABLE)
        assert [record.getMessage() for record in caplog.records] == [UNREADABLE]
        await backlog.finish(behind, State.DONE, time.time(), None, "")
        assert not await backlog.is_waiting("alice")
