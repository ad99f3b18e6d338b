"""Which worker gets the next request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from dynaplan.config.settings.frontend import ROUTERS
from dynaplan.routing.routing_logic import (
    Candidate,
    KvAware,
    LeastLoaded,
    RandomChoice,
    RoundRobin,
    make_routing_logic,
)

IDLE = (Candidate(1), Candidate(2), Candidate(3))


def no_draw() -> float:
    raise AssertionError("without a temperature nothing is drawn")


def test_round_robin_takes_turns() -> None:
    logic = RoundRobin()
    chosen = [logic.choose(IDLE).instance_id for _ in range(6)]
    assert chosen == [1, 2, 3, 1, 2, 3]


def test_random_follows_the_draw_and_never_leaves_the_candidates() -> None:
    draws = iter((0.0, 0.34, 0.999999))
    logic = RandomChoice(lambda: next(draws))
    chosen = [logic.choose(IDLE).instance_id for _ in range(3)]
    assert chosen == [1, 2, 3]


def test_least_loaded_takes_the_fewest_requests_in_flight() -> None:
    candidates = (Candidate(1, in_flight=3), Candidate(2, in_flight=1), Candidate(3, in_flight=2))
    assert LeastLoaded().choose(candidates).instance_id == 2


def test_least_loaded_equals_take_turns() -> None:
    candidates = (Candidate(1, in_flight=1), Candidate(2), Candidate(3))
    logic = LeastLoaded()
    chosen = [logic.choose(candidates).instance_id for _ in range(4)]
    assert chosen == [2, 3, 2, 3]


def test_kv_cost_is_weighted_prefill_blocks_plus_active_blocks() -> None:
    candidate = Candidate(1, active_blocks=20, prefill_blocks=5, overlap_blocks=6)
    assert KvAware(no_draw, 2.0).cost(candidate, 10) == 2.0 * (5 + 4) + 20 + 10


def test_kv_prefers_the_worker_with_the_prefix_until_it_is_too_busy() -> None:
    logic = KvAware(no_draw, 1.0)
    near = Candidate(1, overlap_blocks=8)
    assert logic.choose((near, Candidate(2)), 10).instance_id == 1
    busy = Candidate(1, overlap_blocks=8, active_blocks=9)
    assert logic.choose((busy, Candidate(2)), 10).instance_id == 2


def drawn(candidates: Sequence[Candidate], temperature: float, draws: int = 1000) -> list[float]:
    """The part of all draws that each candidate got."""
    numbers = iter([(index + 0.5) / draws for index in range(draws)])
    logic = KvAware(lambda: next(numbers), temperature=temperature)
    chosen = [logic.choose(candidates, 10).instance_id for _ in range(draws)]
    return [chosen.count(each.instance_id) / draws for each in candidates]


def test_a_temperature_draws_the_cheaper_the_more_often() -> None:
    candidates = (Candidate(1), Candidate(2, active_blocks=5), Candidate(3, active_blocks=10))
    weights = [1.0, math.exp(-0.5), math.exp(-1.0)]
    expected = [each / sum(weights) for each in weights]
    assert drawn(candidates, temperature=1.0) == pytest.approx(expected, abs=0.002)
    assert drawn(candidates, temperature=0.01) == [1.0, 0.0, 0.0]
    assert drawn(candidates, temperature=1000.0) == pytest.approx([1 / 3] * 3, abs=0.002)


def test_a_temperature_does_not_depend_on_how_large_costs_are() -> None:
    small = (Candidate(1, active_blocks=1), Candidate(2, active_blocks=2))
    large = (Candidate(1, active_blocks=1000), Candidate(2, active_blocks=2000))
    assert drawn(small, temperature=0.5) == drawn(large, temperature=0.5)


def test_with_a_temperature_equals_are_drawn_alike_often() -> None:
    assert drawn(IDLE, temperature=1.0) == pytest.approx([1 / 3] * 3, abs=0.002)


def test_a_draw_that_rounding_leaves_over_takes_the_last() -> None:
    assert KvAware(lambda: 1.0, temperature=1.0).choose(IDLE).instance_id == 3


def test_every_mode_of_the_configuration_chooses() -> None:
    for mode in ROUTERS:
        assert make_routing_logic(mode, lambda: 0.5, 1.0, 0.0).choose(IDLE) in IDLE
