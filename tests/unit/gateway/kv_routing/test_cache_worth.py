"""The worth of caches: the tokens that they have served of late."""

from __future__ import annotations

import pytest

from dynaplan.gateway.kv_routing.cache_worth import MEMORY_S, CacheWorth


def test_a_cache_is_worth_what_it_has_served_and_one_that_served_nothing_is_not_named() -> None:
    worth = CacheWorth()
    worth.record_hit(1, 300, 0.0)
    worth.record_hit(1, 50, 0.0)
    worth.record_hit(2, 0, 0.0)
    assert worth.tokens(0.0) == {1: 350}


def test_under_a_steady_rate_it_is_what_was_served_in_the_time_that_is_remembered() -> None:
    worth = CacheWorth()
    for second in range(10 * int(MEMORY_S)):
        worth.record_hit(1, 20, float(second))
    assert worth.tokens(10 * MEMORY_S) == {1: 20 * MEMORY_S}


def test_the_newer_of_two_equal_servings_is_worth_more_and_all_are_forgotten() -> None:
    worth = CacheWorth()
    worth.record_hit(1, 1000, 0.0)
    worth.record_hit(2, 1000, MEMORY_S)
    assert worth.tokens(MEMORY_S) == {1: 370, 2: 1000}
    assert worth.tokens(20 * MEMORY_S) == {}
    worth.record_hit(1, 7, 20 * MEMORY_S)
    assert worth.tokens(20 * MEMORY_S) == {1: 7}


@pytest.mark.parametrize(("served", "told"), [(7, 7), (99, 99), (104, 100), (12_345, 12_000)])
def test_caches_that_differ_by_little_are_worth_the_same(served: int, told: int) -> None:
    worth = CacheWorth()
    worth.record_hit(1, served, 0.0)
    assert worth.tokens(0.0) == {1: told}
