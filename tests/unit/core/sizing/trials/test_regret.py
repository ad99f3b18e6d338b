"""Trust in experts by their costs, and its bound."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from dynaplan.core.sizing.trials.regret import gap, weights

EVEN = [1 / 3] * 3


def run(
    rounds: Sequence[Sequence[float]], fade: float, first: float, odds: Sequence[float]
) -> tuple[float, ...]:
    """The faded costs of the weighted mean and of the best expert, the doubt, and the bound of the doubt."""
    costs, doubt, mean, squares, largest = [0.0] * len(odds), first, 0.0, 0.0, 0.0
    c = -math.log(min(odds))
    for each in rounds:
        trusted = weights(costs, odds, doubt)
        mean = fade * mean + sum(part * cost for part, cost in zip(trusted, each, strict=True))
        doubt = max(first, fade * doubt + gap(trusted, each, odds, doubt))
        costs = [fade * before + cost for before, cost in zip(costs, each, strict=True)]
        spread = max(each) - min(each)
        squares, largest = fade * fade * squares + spread**2 / 4, max(fade * largest, spread)
    bound = math.sqrt(first**2 + c * squares) + largest * (2 / 3 * c + 1)
    return mean, min(costs), doubt, bound


def drawn(seed: int) -> list[list[float]]:
    draws = random.Random(seed)
    return [[draws.paretovariate(1.2) * draws.random() for _ in EVEN] for _ in range(300)]


def against_the_leader() -> list[list[float]]:
    """Costs of an adversary: only the expert that is trusted most costs something."""
    rounds, costs, doubt = [], [0.0] * 3, 1.0
    for _ in range(300):
        trusted = weights(costs, EVEN, doubt)
        leader = trusted.index(max(trusted))
        each = [float(number == leader) for number in range(3)]
        rounds.append(each)
        doubt += gap(trusted, each, EVEN, doubt)
        costs = [before + cost for before, cost in zip(costs, each, strict=True)]
    return rounds


@pytest.mark.parametrize("fade", [1.0, 0.99, 0.8])
@pytest.mark.parametrize("odds", [EVEN, [0.98, 0.01, 0.01]])
def test_the_mean_costs_no_more_than_the_best_expert_but_for_the_bound(
    fade: float, odds: list[float]
) -> None:
    for rounds in (against_the_leader(), *map(drawn, range(10))):
        mean, best, doubt, bound = run(rounds, fade, 1.0, odds)
        assert mean - best <= 2 * doubt + 1e-6
        assert doubt <= bound + 1e-6


def test_before_anything_is_known_the_odds_count_and_equal_costs_change_nothing() -> None:
    odds = [0.9, 0.05, 0.05]
    assert weights([0, 0, 0], odds, 10.0) == pytest.approx(odds)
    assert weights([7, 7, 7], odds, 10.0) == pytest.approx(odds)
    assert gap(odds, [5, 5, 5], odds, 10.0) == pytest.approx(0)


def test_an_expert_is_trusted_as_much_as_another_once_it_has_saved_its_odds_of_the_doubt() -> None:
    odds, doubt = [0.98, 0.01, 0.01], 10.0
    saved = doubt * math.log(0.98 / 0.01) / -math.log(0.01)
    trusted = weights([saved, 0.0, 1e9], odds, doubt)
    assert trusted[0] == pytest.approx(trusted[1])
    assert trusted[2] == pytest.approx(0)


def test_costs_of_any_size_give_weights() -> None:
    assert sum(weights([1e300, 0.0, 1.0], EVEN, 1e-9)) == pytest.approx(1)
    assert gap(EVEN, [1e300, 1e300, 1e300], EVEN, 1.0) == 0
    assert math.isfinite(gap([1.0, 0.0, 0.0], [1e9, 0.0, 0.0], EVEN, 1.0))
