"""A target that no measured size meets is told, and what serves the profile plans for targets."""

from __future__ import annotations

from dynaplan.lab.profiling.recommendation import DecodeChoice, Goal, PrefillChoice, _missed_targets

PREFILL = PrefillChoice(1, 1, 2457.0, 900.0)
DECODE = DecodeChoice(1, 1, 4, 0.5, 20.0, 100.0)


def test_a_missed_target_is_told_with_how_far_it_is() -> None:
    (said,) = _missed_targets(PREFILL, DECODE, Goal(3000, 500, 500.0, 100.0))
    assert "TTFT is 2457 ms at best, 4.9 times what is asked for (500 ms)" in said
    assert list(_missed_targets(PREFILL, DECODE, Goal(3000, 500, 3000.0, 100.0))) == []
