"""Limits as texts, and what is no limit."""

from __future__ import annotations

import pytest

from netlimit.errors import LimitError
from netlimit.l7.limit import UNITS, Algorithm, Limit, Refill, parse_limit, read_weight


@pytest.mark.parametrize(
    ("text", "amount", "seconds"),
    [
        *((f"7/{unit}", 7, seconds) for unit, seconds in UNITS.items()),
        *((f"7 per {unit}s", 7, seconds) for unit, seconds in UNITS.items()),
        ("5 per 10 minutes", 5, 600),
        ("5/10min", 5, 600),
        (" 5 / S ", 5, 1),
        ("5/m", 5, 60),
        ("5/h", 5, 3600),
        ("5/D", 5, 86_400),
        ("0/second", 0, 1),
    ],
)
def test_a_limit_is_so_many_in_a_unit_or_several(text: str, amount: int, seconds: int) -> None:
    assert parse_limit(text) == Limit(amount, seconds)


@pytest.mark.parametrize(
    "text",
    ["", "5", "often", "5/ms", "5/ss", "5/hs", "5/ minutess", "5/fortnight", "-5/minute", "5/0 minutes"],
)
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(LimitError):
        parse_limit(text)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("requests_per_unit", {"amount": -1}),
        ("requests_per_unit", {"amount": 2**32}),
        ("unit", {"seconds": 0}),
        ("unit", {"seconds": 101 * UNITS["year"]}),
        ("burst", {"burst": 3}),
        ("burst", {"burst": 0, "algorithm": Algorithm.GCRA}),
        ("refill", {"refill": Refill.INTERVAL, "algorithm": Algorithm.GCRA}),
        ("count_refused", {"count_refused": False}),
    ],
)
def test_values_that_mean_nothing_are_refused_by_their_field(field: str, values: dict[str, object]) -> None:
    with pytest.raises(LimitError) as caught:
        Limit(**{"amount": 5, "seconds": 60, **values})  # type: ignore[arg-type]
    assert caught.value.field == field


class Foreign:
    """A whole number of somebody else's, such as numpy's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def test_a_weight_is_any_whole_number_from_0() -> None:
    weight = read_weight(Foreign(3), "A call")
    assert (weight, type(weight)) == (3, int)
    assert (read_weight(0, "A call"), read_weight(True, "A call")) == (0, 1)
    for wrong in (-1, Foreign(-1), 1.0, "1", None):
        with pytest.raises(LimitError, match=r"A call weighs .* a whole number from 0"):
            read_weight(wrong, "A call")
