from itertools import pairwise

from netlimit.endings import Endings


def test_rules_that_end_all_the_time_do_not_have_large_sets_read_each_time() -> None:
    """Reading rests, and is done for all at once that end meanwhile."""
    moment, spent = [0.0], [0.0]
    endings = Endings(lambda: spent[0], lambda: moment[0])
    readings = []

    def read() -> None:
        readings.append((moment[0], moment[0] + endings.ahead))
        spent[0] += 1.0

    for _ in range(1000):
        endings.read(read)
        moment[0] += 0.1
    assert spent[0] <= 0.1 * moment[0] + 4
    late = [each for each in readings if each[0] > 30]
    assert len(late) > 3
    assert all(until >= after for (_, until), (after, _) in pairwise(late)), "none is missed between"
