"""Which class a prompt is in, and which class is next."""

from __future__ import annotations

import pytest

from dynaplan.core.routing.dispatching import ComputingTime, DispatchRule
from dynaplan.domain.settings.routing import DisaggregationSettings

RULE = DispatchRule(late_wait_s=15.0)


def test_without_a_deadline_there_is_no_rule() -> None:
    assert DispatchRule.of(DisaggregationSettings(is_on=True)) is None
    settings = DisaggregationSettings(is_on=True, prefill_deadline_ms=500.0, prefill_late_wait_s=7.0)
    assert DispatchRule.of(settings) == DispatchRule(7.0)


def test_a_prompt_is_late_once_less_is_left_than_one_usually_takes() -> None:
    assert not RULE.is_late(9.0, deadline_s=10.0, now_s=9.7, usual_s=0.3)
    assert RULE.is_late(9.0, deadline_s=10.0, now_s=9.71, usual_s=0.3)
    assert RULE.is_late(9.0, deadline_s=10.0, now_s=10.1, usual_s=0.0)


def test_what_has_just_come_is_never_late_however_slow_the_engine() -> None:
    assert not RULE.is_late(9.0, deadline_s=10.0, now_s=9.5, usual_s=30.0)
    assert RULE.is_late(9.0, deadline_s=10.0, now_s=9.51, usual_s=30.0)


@pytest.mark.parametrize(
    ("oldest_s", "any_in_time", "was_owed", "takes"),
    [
        (None, False, False, False),
        (100.0, False, False, True),
        (100.0, True, False, False),
        (85.0, True, False, True),
        (85.0, True, True, False),
        (85.0, False, True, True),
    ],
)
def test_late_prompts_come_last_and_every_second_time_once_they_are_owed(
    oldest_s: float | None, any_in_time: bool, was_owed: bool, takes: bool
) -> None:
    assert RULE.takes_late(oldest_s, 100.0, any_in_time=any_in_time, was_owed=was_owed) is takes


def test_the_usual_time_follows_the_last_prompts_with_the_weights_of_rfc_6298() -> None:
    first = ComputingTime().after(0.2)
    assert (first.mean_s, first.deviation_s, first.usual_s) == (0.2, 0.1, pytest.approx(0.3))
    second = first.after(0.4)
    assert second.mean_s == pytest.approx(0.225)
    assert second.deviation_s == pytest.approx(0.1 + (0.2 - 0.1) / 4)
    assert ComputingTime().usual_s == 0.0


def test_equal_times_leave_no_deviation() -> None:
    time = ComputingTime()
    for _ in range(60):
        time = time.after(0.1)
    assert time.usual_s == pytest.approx(0.1, rel=1e-3)
