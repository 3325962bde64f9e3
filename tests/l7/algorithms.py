"""The suite of algorithms: what every store must answer, to the nanosecond or the microsecond of its clock.

The examples are those of the documents that the limiter was built from; times are theirs. A module that defines the
fixture `subject` and imports these classes runs them over its store.
"""

from __future__ import annotations

from math import inf

import pytest

from netlimit.l7.limit import BOUNDLESS, Algorithm, Limit, Refill
from tests.l7.counting import SECOND, Subjects

EVERY = [algorithm for algorithm in Algorithm if algorithm is not Algorithm.CONCURRENCY]
KINDS = [
    *(Limit(10, 60, algorithm) for algorithm in Algorithm),
    Limit(10, 60, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL),
]
"""A limit for every way in which requests are counted."""
BUCKETS = [Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA]
WINDOWS = [Algorithm.FIXED_WINDOW, Algorithm.SLIDING_WINDOW_LOG, Algorithm.SLIDING_WINDOW_COUNTER]


class TestExamples:
    def test_a_token_bucket_of_four_gets_four_a_minute(self, subject: Subjects) -> None:
        bucket = subject(Limit(4, 60, Algorithm.TOKEN_BUCKET, burst=4, refill=Refill.INTERVAL))
        assert bucket.at("1:00:00").hit().remaining == 3
        assert bucket.at("1:00:05").hits(3) == [True] * 3
        refused = bucket.at("1:00:20").hit()
        assert (refused.admitted, refused.remaining, refused.retry_after) == (False, 0, 40)
        assert bucket.at("1:00:59.999").hit().admitted is False
        assert bucket.at("1:01:00").hits(5) == [True] * 4 + [False]
        assert bucket.at("1:09:00").hits(5) == [True] * 4 + [False]  # what overflows is lost

    def test_a_refiller_of_two_a_second_fills_a_bucket_of_four(self, subject: Subjects) -> None:
        bucket = subject(Limit(2, 1, Algorithm.TOKEN_BUCKET, burst=4))
        assert bucket.at("1:00:00").hits(5) == [True] * 4 + [False]
        assert bucket.at("1:00:00.499").hit().admitted is False
        assert bucket.at("1:00:00.5").hits(2) == [True, False]
        assert bucket.at("1:00:01.5").hits(3) == [True, True, False]

    def test_a_leaky_bucket_lets_out_at_a_fixed_rate(self, subject: Subjects) -> None:
        bucket = subject(Limit(4, 60, Algorithm.LEAKY_BUCKET, burst=4))
        queued = [bucket.at("1:00:00").hit() for _ in range(5)]
        assert [decision.admitted for decision in queued] == [True] * 4 + [False]
        assert [decision.delay for decision in queued[:4]] == [0, 15, 30, 45]
        later = bucket.at("1:00:20").hit()  # one of those before it has gone, another is on its way
        assert (later.admitted, later.delay) == (True, 40)
        assert bucket.at("1:00:20").hit().admitted is False
        assert bucket.at("1:05:00").hit().delay == 0

    def test_who_cannot_wait_for_the_turn_takes_no_place_in_a_leaky_bucket(self, subject: Subjects) -> None:
        bucket = subject(Limit(4, 60, Algorithm.LEAKY_BUCKET, burst=4)).at("1:00:00")
        hurried = [bucket.hit(longest=20) for _ in range(9)]
        assert [decision.admitted for decision in hurried] == [True] * 2 + [False] * 7
        assert {decision.retry_after for decision in hurried[2:]} == {30}
        assert hurried[8].remaining == 0
        assert bucket.hit().delay == 30, "those who were refused have left the place"
        assert bucket.hit(longest=44).retry_after == 45
        assert bucket.hit(longest=0, charge=True).admitted is False, "what has happened counts all the same"
        assert bucket.at("1:00:50").hit(longest=10).delay == 10
        assert bucket.at("1:10:00").hit(longest=0).delay == 0

    def test_three_a_second_in_fixed_windows(self, subject: Subjects) -> None:
        window = subject(Limit(3, 1))
        assert window.at("1:00:00.1").hits(4) == [True] * 3 + [False]
        assert window.at("1:00:01").hits(5) == [True] * 3 + [False] * 2

    def test_fixed_windows_let_twice_the_limit_pass_around_their_edge(self, subject: Subjects) -> None:
        window = subject(Limit(5, 60))
        assert window.at("2:00:30").hits(5) == [True] * 5
        assert window.at("2:01:30").hits(5) == [True] * 5
        minute = subject(Limit(5, 60))
        assert minute.at("2:00:30").hits(5) == [True] * 5
        assert minute.at("2:01:00").hits(6) == [True] * 5 + [False]  # ten between 2:00:30 and 2:01:30

    @pytest.mark.parametrize("algorithm", [Algorithm.SLIDING_WINDOW_LOG, Algorithm.SLIDING_WINDOW_COUNTER])
    def test_sliding_windows_do_not(self, subject: Subjects, algorithm: Algorithm) -> None:
        window = subject(Limit(5, 60, algorithm))
        assert window.at("2:00:59").hits(5) == [True] * 5
        assert window.at("2:01:00").hit().admitted is False

    def test_the_log_of_two_a_minute(self, subject: Subjects) -> None:
        log = subject(Limit(2, 60, Algorithm.SLIDING_WINDOW_LOG))
        assert log.at("1:00:01").hit().admitted
        assert log.at("1:00:30").hit().admitted
        refused = log.at("1:00:50").hit()  # and it is logged
        assert (refused.admitted, refused.retry_after) == (False, 40)
        assert log.at("1:01:40").hit().admitted  # 1:00:01 and 1:00:30 are forgotten, 1:00:50 is not
        assert log.at("1:01:40").hit().admitted is False

    def test_the_same_log_in_the_other_document(self, subject: Subjects) -> None:
        log = subject(Limit(2, 60, Algorithm.SLIDING_WINDOW_LOG))
        assert log.at("10:00:01").hit().admitted
        assert log.at("10:00:30").hit().admitted
        assert log.at("10:00:40").hit().admitted is False
        assert log.at("10:01:30").hit().admitted  # the window is (10:00:30, 10:01:30]

    def test_a_log_that_does_not_count_what_it_refuses(self, subject: Subjects) -> None:
        log = subject(Limit(2, 60, Algorithm.SLIDING_WINDOW_LOG, count_refused=False))
        assert log.at("1:00:01").hit().admitted
        assert log.at("1:00:30").hit().admitted
        refused = log.at("1:00:50").hit()
        assert (refused.admitted, refused.retry_after) == (False, 11)
        assert log.at("1:00:55").hit().retry_after == 6
        assert log.at("1:01:01").hits(2) == [True, False]

    def test_six_and_a_half_of_seven_are_admitted(self, subject: Subjects) -> None:
        counter = subject(Limit(7, 60, Algorithm.SLIDING_WINDOW_COUNTER))
        assert counter.at("1:00:10").hits(5) == [True] * 5
        assert counter.at("1:01:01").hits(2) == [True] * 2
        assert counter.at("1:01:15").hit().admitted
        assert counter.at("1:01:18").hits(2) == [True, False]  # 3 + 5 * 70 % = 6.5; then there is no room

    def test_five_of_five_are_not(self, subject: Subjects) -> None:
        counter = subject(Limit(5, 60, Algorithm.SLIDING_WINDOW_COUNTER))
        assert counter.at("12:00:00").hits(4) == [True] * 4
        assert counter.at("12:01:29").hits(3) == [True] * 3
        assert counter.at("12:01:30").hit().admitted is False  # 3 + 4 * 50 % = 5

    def test_gcra_spaces_what_exceeds_its_burst(self, subject: Subjects) -> None:
        gcra = subject(Limit(10, 1, Algorithm.GCRA, burst=3))
        assert gcra.at("1:00:00").hits(4) == [True] * 3 + [False]
        assert gcra.at("1:00:00").hit().retry_after == pytest.approx(0.1, abs=1e-6)
        assert gcra.at("1:00:00.1").hits(2) == [True, False]
        assert gcra.at("1:00:00.25").hits(2) == [True, False]
        assert gcra.at("1:00:00.3").hits(2) == [True, False]


class TestPromises:
    """What holds for every algorithm."""

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_who_waits_as_long_as_told_gets_in_and_nobody_sooner(self, subject: Subjects, algorithm: Algorithm) -> None:
        for amount, seconds, hits in ((1, 60, 1), (3, 1, 1), (7, 60, 2), (10, 3, 3), (1000, 86400, 400)):
            for start in ("1:00:00", "1:00:59.123456"):
                counts = algorithm is not Algorithm.SLIDING_WINDOW_LOG
                sub = subject(Limit(amount, seconds, algorithm, count_refused=counts)).at(start)
                while (decision := sub.after(0.011).hit(hits)).admitted:
                    assert decision.remaining >= 0
                wait = decision.retry_after
                assert 0 < wait <= 2 * seconds
                assert sub.after(wait - 0.00001).hit(hits).admitted is False
                assert sub.after(0.000011).hit(hits).admitted, (amount, seconds, hits, start)

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_never_one_over(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(20, 10, algorithm)).at("1:00:00")
        assert sum(sub.hits(50)) == 20
        assert sub.hit().remaining == 0

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_a_look_counts_nothing(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(2, 60, algorithm)).at("1:00:00")
        looks = [sub.hit(0) for _ in range(5)]
        assert {(look.admitted, look.remaining, look.retry_after, look.reset_after) for look in looks} == {
            (True, 2, 0, 0)
        }
        assert sub.hits(3) == [True, True, False]
        refused = sub.hit(0)
        assert (refused.admitted, refused.remaining) == (False, 0)
        assert sub.after(refused.retry_after + 0.00001).hit(0).admitted

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_hits_are_admitted_together_or_not_at_all(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(10, 60, algorithm, count_refused=algorithm is not Algorithm.SLIDING_WINDOW_LOG))
        assert sub.at("1:00:00").hit(7).remaining == 3
        assert sub.hit(4).admitted is False
        assert sub.hit(3).admitted
        assert sub.hit(1).admitted is False

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_what_is_heavier_than_the_limit_never_passes(self, subject: Subjects, algorithm: Algorithm) -> None:
        decision = subject(Limit(10, 60, algorithm)).at("1:00:00").hit(11)
        assert (decision.admitted, decision.retry_after) == (False, inf)

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_a_limit_of_nothing_admits_nothing(self, subject: Subjects, algorithm: Algorithm) -> None:
        decision = subject(Limit(0, 60, algorithm)).at("1:00:00").hit()
        assert (decision.admitted, decision.remaining, decision.retry_after) == (False, 0, inf)

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_keys_do_not_meet(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(1, 60, algorithm)).at("1:00:00")
        for key in ("a_b", "a", "b", "a:b", "a|b", "", "{a}", "a b", "\u00e4", "x" * 3000, "x" * 2999 + "y"):
            assert sub.hit(key=key).admitted, key
            assert sub.hit(key=key).admitted is False, key

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_slack_admits_so_many_more_and_says_so(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(10, 60, algorithm)).at("1:00:00")
        decisions = [sub.hit(slack=1) for _ in range(12)]
        assert [decision.admitted for decision in decisions] == [True] * 11 + [False]
        assert [decision.over for decision in decisions] == [False] * 10 + [True, False]
        assert [decision.remaining for decision in decisions[8:]] == [1, 0, 0, 0]
        assert [decision.retry_after == 0 for decision in decisions] == [True] * 10 + [False] * 2

    @pytest.mark.parametrize("limit", KINDS, ids=str)
    def test_slack_may_be_more_than_the_limit(self, subject: Subjects, limit: Limit) -> None:
        sub = subject(limit).at("1:00:00")
        admitted = [sub.hit(slack=25, lease=sub.make_lease()).admitted for _ in range(50)]
        assert admitted == [True] * 35 + [False] * 15

    @pytest.mark.parametrize("limit", KINDS, ids=str)
    def test_a_look_is_never_over(self, subject: Subjects, limit: Limit) -> None:
        sub = subject(limit).at("1:00:00")
        assert [sub.hit(slack=5, lease=sub.make_lease()).over for _ in range(12)] == [False] * 10 + [True] * 2
        look = sub.hit(0, slack=5, lease=sub.make_lease())
        assert (look.admitted, look.remaining, look.over) == (True, 0, False)

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_boundless_slack_leaves_no_boundless_debt(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(10, 60, algorithm)).at("1:00:00")
        assert all(sub.hit(slack=BOUNDLESS).admitted for _ in range(100))
        decision = sub.hit()
        assert decision.admitted is False
        assert decision.retry_after <= 120

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_what_is_charged_counts_even_if_refused(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(10, 60, algorithm)).at("1:00:00")
        assert sub.hit(8).admitted
        assert sub.hit(5, charge=True).admitted is False
        assert sub.hit(1).admitted is False
        assert sub.hit(0).remaining == 0

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_less_than_one_a_second(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(1, 3600, algorithm)).at("1:00:00")
        assert sub.hits(2) == [True, False]
        assert sub.at("1:59:59").hit().admitted is False
        assert sub.at("3:00:00").hit().admitted

    @pytest.mark.parametrize("algorithm", BUCKETS)
    def test_a_burst_of_ten_at_a_hundred_a_second(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(100, 1, algorithm, burst=10)).at("1:00:00")
        assert sum(sub.hits(50)) == 10
        admitted = sum(sub.after(0.001).hit().admitted for _ in range(3000))
        assert admitted == 300

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_a_clock_set_back_refuses_nobody_for_long(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(2, 60, algorithm)).at("9:00:00")
        sub.hits(3)
        sub.at("3:00:00")
        waited = next(minute for minute in range(5) if sub.after(60 * bool(minute)).hit().admitted)
        assert waited <= 2

    @pytest.mark.parametrize("algorithm", EVERY)
    def test_a_clock_set_forward_forgets_and_goes_on(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(2, 60, algorithm)).at("3:00:00")
        sub.hits(3)
        assert sub.at("9:00:00").hits(3) == [True, True, False]

    @pytest.mark.parametrize("seconds", [1, 60, 3600, 86_400, 604_800, 2_592_000, 31_536_000])
    @pytest.mark.parametrize("algorithm", EVERY)
    def test_every_unit(self, subject: Subjects, algorithm: Algorithm, seconds: int) -> None:
        sub = subject(Limit(2, seconds, algorithm)).at("1:00:00")
        assert sub.hits(3) == [True, True, False]
        assert sub.after(2 * seconds).hit().admitted

    @pytest.mark.parametrize("algorithm", WINDOWS)
    def test_a_window_is_forgotten_two_units_later(self, subject: Subjects, algorithm: Algorithm) -> None:
        sub = subject(Limit(5, 60, algorithm)).at("1:00:30")
        sub.hits(5)
        fresh = sub.at("1:03:00").hit(0)
        assert (fresh.remaining, fresh.reset_after) == (5, 0)


class TestLeases:
    def test_so_many_are_in_flight_and_no_more(self, subject: Subjects) -> None:
        door = subject(Limit(2, 30, Algorithm.CONCURRENCY)).at("1:00:00")
        assert door.hit(lease="a").remaining == 1
        assert door.hit(lease="b").admitted
        refused = door.at("1:00:10").hit(lease="c")
        assert (refused.admitted, refused.retry_after) == (False, 20)
        door.counting.release(door.make_ask(lease="a"))
        assert door.hit(lease="c").admitted
        assert door.hit(lease="d").admitted is False

    def test_the_lease_of_who_died_ends_by_itself(self, subject: Subjects) -> None:
        door = subject(Limit(1, 30, Algorithm.CONCURRENCY)).at("1:00:00")
        assert door.hit(lease="a").admitted
        assert door.at("1:00:29.9").hit(lease="b").admitted is False
        assert door.at("1:00:30").hit(lease="b").admitted

    def test_a_lease_that_is_renewed_lasts(self, subject: Subjects) -> None:
        door = subject(Limit(1, 30, Algorithm.CONCURRENCY)).at("1:00:00")
        door.hit(lease="a")
        door.at("1:00:20").counting.renew(door.make_ask(lease="a"))
        assert door.at("1:00:40").hit(lease="b").admitted is False
        assert door.at("1:00:50").hit(lease="b").admitted

    def test_a_lease_that_has_ended_is_not_renewed(self, subject: Subjects) -> None:
        door = subject(Limit(1, 30, Algorithm.CONCURRENCY)).at("1:00:00")
        door.hit(lease="a")
        door.at("1:00:31").counting.renew(door.make_ask(lease="a"))
        assert door.hit(lease="b").admitted

    def test_a_release_too_many_is_no_error(self, subject: Subjects) -> None:
        door = subject(Limit(1, 30, Algorithm.CONCURRENCY)).at("1:00:00")
        door.hit(lease="a")
        for lease in ("a", "a", "stranger"):
            door.counting.release(door.make_ask(lease=lease))
        assert door.hit(lease="b").admitted
        assert door.hit(lease="c").admitted is False

    def test_a_look_takes_no_lease(self, subject: Subjects) -> None:
        door = subject(Limit(1, 30, Algorithm.CONCURRENCY)).at("1:00:00")
        assert door.hit(0, lease="a").admitted
        assert door.hit(lease="b").admitted
        assert door.hit(0, lease="c").admitted is False

    def test_a_clock_set_back_holds_no_lease_for_long(self, subject: Subjects) -> None:
        door = subject(Limit(1, 30, Algorithm.CONCURRENCY)).at("9:00:00")
        door.hit(lease="a")
        refused = door.at("3:00:00").hit(lease="b")
        assert (refused.admitted, refused.retry_after) == (False, 30)
        assert door.at("3:00:30").hit(lease="b").admitted

    @pytest.mark.parametrize("seconds", [10, 3600])
    def test_what_is_in_flight_stays_so_when_the_lease_is_changed(self, subject: Subjects, seconds: int) -> None:
        door = subject(Limit(2, 30, Algorithm.CONCURRENCY)).at("1:00:00")
        first = door.make_ask(lease="a")
        assert door.hit(lease="a").admitted
        assert door.hit(lease="b").admitted
        door.change_lease(seconds)
        refused = door.at("1:00:05").hit(lease="c")
        assert (refused.admitted, refused.retry_after) == (False, min(25, seconds))
        door.counting.release(first)  # as it was taken
        assert door.hit(lease="c").admitted
        assert door.hit(lease="d").admitted is False
        assert door.at(door.counting.now + min(25, seconds) * SECOND).hit(0).admitted

    def test_a_lease_that_is_made_shorter_ends_in_order(self, subject: Subjects) -> None:
        door = subject(Limit(3, 60, Algorithm.CONCURRENCY)).at("1:00:00")
        for lease in "ab":
            assert door.hit(lease=lease).admitted
        door.change_lease(20).at("1:00:10")
        door.counting.renew(door.make_ask(lease="a"))
        assert door.at("1:00:15").hit(lease="c").admitted
        refused = door.hit(lease="d")
        assert (refused.admitted, refused.retry_after <= 20, refused.reset_after) == (False, True, 20)
        door.at("1:00:36")
        assert [door.hit(lease=f"e{number}").admitted for number in range(4)] == [True] * 3 + [False]

    def test_a_lease_that_is_made_longer_lasts_when_it_is_renewed(self, subject: Subjects) -> None:
        door = subject(Limit(1, 10, Algorithm.CONCURRENCY)).at("1:00:00")
        assert door.hit(lease="a").admitted
        assert door.change_lease(100).at("1:00:05").hit(0, lease="b").admitted is False
        door.counting.renew(door.make_ask(lease="a"))
        assert door.at("1:01:44").hit(lease="b").admitted is False
        assert door.at("1:01:45").hit(lease="b").admitted
