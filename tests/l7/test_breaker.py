"""The breaker, by a clock that the test sets."""

from __future__ import annotations

from netlimit.l7.breaker import Breaker, State, worst


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_as_long_as_there_are_answers_everybody_asks() -> None:
    breaker = Breaker(1.0, Time())
    for _ in range(3):
        assert breaker.admit()
        breaker.succeed()
    assert breaker.state is State.CLOSED


def test_after_a_failure_nobody_asks_for_a_while_and_then_one() -> None:
    time = Time()
    breaker = Breaker(1.0, time)
    breaker.fail()
    assert (breaker.state, breaker.admit()) == (State.OPEN, False)
    time.now += 0.999
    assert not breaker.admit()
    time.now += 0.001
    assert [breaker.admit() for _ in range(5)] == [True, False, False, False, False]
    assert breaker.state is State.HALF_OPEN


def test_one_answer_is_enough() -> None:
    time = Time()
    breaker = Breaker(1.0, time)
    breaker.fail()
    time.now += 1
    assert breaker.admit()
    breaker.succeed()
    assert breaker.state is State.CLOSED
    assert all(breaker.admit() for _ in range(5))


def test_one_more_failure_is_another_rest() -> None:
    time = Time()
    breaker = Breaker(1.0, time)
    breaker.fail()
    time.now += 1
    assert breaker.admit()
    time.now += 0.5
    breaker.fail()
    time.now += 0.9
    assert (breaker.state, breaker.admit()) == (State.OPEN, False)
    time.now += 0.1
    assert breaker.admit()


def test_a_trial_that_never_ends_does_not_keep_others_from_trying() -> None:
    time = Time()
    breaker = Breaker(1.0, time)
    breaker.fail()
    for _ in range(3):
        time.now += 1
        assert [breaker.admit(), breaker.admit()] == [True, False]


def test_the_worst_of_several_is_what_counts() -> None:
    assert worst([]) is State.CLOSED
    assert worst([State.CLOSED, State.HALF_OPEN]) is State.HALF_OPEN
    assert worst([State.HALF_OPEN, State.OPEN, State.CLOSED]) is State.OPEN
