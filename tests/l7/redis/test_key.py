"""The names of counters: different for different counters."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.redis.key import LONGEST, make_name, make_prefix
from netlimit.l7.rules import Rule

WORDS = st.text(st.sampled_from("ab_|\\{}:#\u00e4\ud800"), max_size=6)
LIMITS = [
    *(Limit(9, seconds, algorithm) for algorithm in Algorithm for seconds in (1, 60)),
    Limit(9, 60, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL),
    *(
        Limit(9, 60, algorithm, burst=burst)
        for algorithm in (Algorithm.GCRA, Algorithm.LEAKY_BUCKET)
        for burst in (1, 9)
    ),
]
COUNTERS = st.tuples(WORDS, WORDS, WORDS, st.sampled_from(LIMITS))


def name(domain: str, rule: str, key: str, limit: Limit) -> bytes:
    return make_name(make_prefix(Rule(domain, rule, limit), limit), key)


@given(COUNTERS, COUNTERS)
def test_no_two_counters_share_a_name(one: tuple[str, str, str, Limit], other: tuple[str, str, str, Limit]) -> None:
    assert (name(*one) == name(*other)) == (_count_alike(one) == _count_alike(other))


def _count_alike(counter: tuple[str, str, str, Limit]) -> tuple[str, str, str, Limit]:
    """How long a lease lasts changes nothing of what is in flight."""
    *place, limit = counter
    return (*place, replace(limit, seconds=1) if limit.algorithm is Algorithm.CONCURRENCY else limit)


def test_what_is_joined_can_be_told_apart() -> None:
    limit = Limit(1, 60)
    parts = [
        ("a_b", "c", "d"),
        ("a", "b_c", "d"),
        ("a", "b", "c_d"),
        ("a|b", "c", "d"),
        ("a", "b|c", "d"),
        ("a", "b", "c|d"),
    ]
    assert len({name(*each, limit) for each in parts}) == len(parts)


def test_long_keys_are_hashed() -> None:
    limit = Limit(1, 60)
    long = [name("d", "r", "x" * LONGEST + end, limit) for end in ("", "y", "z")]
    assert len(set(long)) == 3
    digest = blake2b(b"x" * LONGEST + b"y", digest_size=20).hexdigest()
    assert len({long[1], *(name("d", rule, key, limit) for rule, key in (("r", digest), (f"r#{digest}", "")))}) == 3
    assert max(map(len, long)) <= len(name("d", "r", "", limit)) + LONGEST


def test_the_amount_is_no_part_of_it() -> None:
    assert name("d", "r", "k", Limit(5, 60)) == name("d", "r", "k", Limit(6, 60)) == b"nl:fixed_window:60:{d|r|k}"


def test_nobody_chooses_the_slot_of_his_counter_by_braces() -> None:
    limit = Limit(1, 60)
    slots = {key_slot(name("d", "r", f"{{same}}{number}", limit)) for number in range(100)}
    slots |= {key_slot(name("d", "r", f"}}{number}", limit)) for number in range(100)}
    assert len(slots) > 190
