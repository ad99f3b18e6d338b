"""A queue of prompts as a fluid."""

from __future__ import annotations

import random

import pytest

from dynaplan.planner.bursts.fluid import late_by_chance, queued


@pytest.mark.parametrize(
    ("load", "arrived", "after", "late"),
    [
        (0.0, 5.0, 0.0, 0.0),
        (0.0, 20.0, 10.0, 0.5),
        (10.0, 10.0, 10.0, 1.0),
        (10.0, 0.0, 0.0, 0.5),
    ],
)
def test_a_queue_grows_by_what_its_workers_do_not_compute_and_the_part_beyond_the_room_is_late(
    load, arrived, after, late
):
    assert queued(load, arrived, pull_s=1.0, per_s=10.0, room_s=0.5) == (after, late)


def lost(rate: float, room: int) -> float:
    """The part of Poisson arrivals that finds ``room`` others before it, one computed in each second."""
    draws = random.Random(1)
    waiting, at_s, missed, arrivals = 0.0, 0.0, 0, 20_000
    for _ in range(arrivals):
        passed_s = draws.expovariate(rate)
        waiting, at_s = max(0.0, waiting - passed_s), at_s + passed_s
        if waiting > room:
            missed += 1
        else:
            waiting += 1
    return missed / arrivals


@pytest.mark.parametrize("rate", [0.7, 0.9, 0.97, 1.0, 1.03, 1.2])
def test_where_late_prompts_give_way_chance_makes_late_what_a_queue_with_a_bound_turns_away(
    rate: float,
) -> None:
    by_chance = late_by_chance(rate, 1.0, 10.0, 1.0, gives_way=True) + max(0.0, 1 - 1 / rate)
    assert by_chance == pytest.approx(lost(rate, 10), abs=0.02)


def test_in_the_order_of_arrival_all_are_late_once_more_come_than_are_computed() -> None:
    chances = [
        late_by_chance(rate, 1.0, 10.0, 1.0, gives_way=False) for rate in (0.0, 0.5, 0.9, 0.99, 1.0, 2.0)
    ]
    assert chances == sorted(chances)
    assert (chances[0], chances[-1]) == (0.0, 1.0)
