"""When a split that stands still counts as better than a policy (``tests/bench/standing.py``)."""

from __future__ import annotations

from tests.bench.standing import Fared


def test_what_dominates_is_better_by_two_points_at_no_more_gpus_or_as_good_with_ten_per_cent_fewer() -> None:
    ours = Fared("ours", 0.9, 4.0)
    assert Fared("a", 0.921, 4.0).dominates(ours)
    assert Fared("b", 0.9, 3.59).dominates(ours)
    for other in (Fared("c", 0.92, 4.0), Fared("d", 1.0, 4.01), Fared("e", 0.9, 3.6), Fared("f", 0.89, 2.0)):
        assert not other.dominates(ours)
