"""The cheapest levels at given prices: a worker stays, leaves or never starts, by what a miss costs."""

from dynaplan.lab.simulate.oracle.dynamic_programme import Prices, cheapest_levels
from tests.unit.lab.simulate.oracle.windows import timing


def test_the_path_keeps_a_worker_where_a_start_is_dearer_than_the_gap() -> None:
    busy, quiet = [(9, 0), (0, 0)], [(0, 0), (0, 0)]
    prices = Prices(100.0, 100.0)

    def path(gap: int) -> list[int]:
        table = [busy] * 3 + [quiet] * gap + [busy]
        return cheapest_levels(table, timing(len(table)), prices, [2] * len(table), drain_s=0.0)[0]

    assert path(1) == [2] * 5
    assert path(4) == [2] * 3 + [1] * 4 + [2]


def test_the_path_misses_what_is_dearer_to_save() -> None:
    table = [[(0, 0), (0, 0)], [(0, 0), (0, 0)], [(0, 0), (0, 0)], [(3, 0), (0, 0)]]
    levels, missed = cheapest_levels(table, timing(4), Prices(1.0, 1.0), [2] * 4, drain_s=0.0)
    assert (levels, missed.ttft) == ([1, 1, 1, 1], 3)


def test_the_path_keeps_to_caps() -> None:
    table = [[(9, 0), (0, 0)]] * 4
    levels, _ = cheapest_levels(table, timing(4), Prices(100.0, 100.0), [2, 1, 2, 2], drain_s=0.0)
    assert levels[1] == 1
