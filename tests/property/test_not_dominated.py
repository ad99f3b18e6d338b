"""On random hours of bursts no number of workers that stands still, found afterwards, dominates the policy.

It does on some: ``tests/bench/decisions.py`` says how many are let pass, docs/benchmarks.md why there are
any.
"""

from __future__ import annotations

import pytest

from tests.bench.decisions import MAX_DOMINATED, dominated_hours
from tests.bench.standing import Fared
from tests.e2e.traces import in_torture

BLOCKS, HOURS = 10, 10


@in_torture
@pytest.mark.parametrize("block", range(BLOCKS))
def test_of_ten_random_hours_few_are_dominated_by_a_number_that_stands_still(block: int) -> None:
    found = list(dominated_hours(range(HOURS * block, HOURS * (block + 1))))
    assert len(found) <= MAX_DOMINATED, "\n".join(found)


def test_what_dominates_is_better_by_two_points_at_no_more_gpus_or_as_good_with_ten_per_cent_fewer() -> None:
    ours = Fared("ours", 0.9, 4.0)
    assert Fared("a", 0.921, 4.0).dominates(ours)
    assert Fared("b", 0.9, 3.59).dominates(ours)
    for other in (Fared("c", 0.92, 4.0), Fared("d", 1.0, 4.01), Fared("e", 0.9, 3.6), Fared("f", 0.89, 2.0)):
        assert not other.dominates(ours)
