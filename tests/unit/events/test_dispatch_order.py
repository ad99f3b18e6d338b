"""Which class a prompt is in, and which class is next."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.events.dispatch_order import DispatchRule, UsualTime, deadline_s

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
    assert not RULE.is_late(9.0, deadline_s=10.0, now_s=9.09, usual_s=30.0)
    assert RULE.is_late(9.0, deadline_s=10.0, now_s=9.11, usual_s=30.0)


def test_computing_that_takes_most_of_the_target_is_foreseen() -> None:
    assert not RULE.is_late(9.0, deadline_s=10.0, now_s=9.2, usual_s=0.75)
    assert RULE.is_late(9.0, deadline_s=10.0, now_s=9.3, usual_s=0.75)


def test_the_deadline_leaves_what_the_way_from_hand_over_to_first_token_usually_takes() -> None:
    assert deadline_s(9.0, 500.0, UsualTime()) == 9.5
    assert deadline_s(9.0, 500.0, UsualTime(0.1, 0.05)) == pytest.approx(9.35)
    assert deadline_s(9.0, 500.0, UsualTime(30.0)) == 9.25


@pytest.mark.parametrize(
    ("oldest_s", "any_in_time", "since_owed", "takes"),
    [
        (None, False, 9, False),
        (100.0, False, 0, True),
        (100.0, True, 99, False),
        (85.0, True, 99, False),
        (81.25, True, 7, True),
        (81.25, True, 6, False),
        (77.5, True, 3, True),
        (77.5, True, 2, False),
        (70.0, True, 1, True),
        (70.0, True, 0, False),
        (0.0, True, 1, True),
        (0.0, True, 0, False),
        (0.0, False, 0, True),
    ],
)
def test_late_prompts_come_last_and_more_and_more_often_once_they_are_owed(
    oldest_s: float | None, any_in_time: bool, since_owed: int, takes: bool
) -> None:
    assert RULE.takes_late(oldest_s, 100.0, any_in_time=any_in_time, since_owed=since_owed) is takes


def test_without_a_wait_every_second_turn_is_a_late_ones() -> None:
    rule = DispatchRule(late_wait_s=0.0)
    assert (rule.owed_share(-0.1), rule.owed_share(0.0), rule.owed_share(9.0)) == (0.0, 0.5, 0.5)


@pytest.mark.parametrize("ahead", [0, 1, 7])
def test_a_prompt_owed_for_long_is_passed_over_by_one_for_each_that_is_owed_before_it(ahead: int) -> None:
    """However many come in time, and however late in its life the rule is asked first."""
    taken = {True: 0, False: 0}
    since_owed, turns = 0, 0
    while taken[True] <= ahead:
        is_owed = RULE.takes_late(60.0, 100.0 + turns, any_in_time=True, since_owed=since_owed)
        since_owed = 0 if is_owed else since_owed + 1
        taken[is_owed] += 1
        turns += 1
    assert taken[False] == ahead + 1


def test_the_usual_time_follows_the_last_prompts_with_the_weights_of_rfc_6298() -> None:
    first = UsualTime().after(0.2)
    assert (first.mean_s, first.deviation_s, first.usual_s) == (0.2, 0.1, pytest.approx(0.3))
    second = first.after(0.4)
    assert second.mean_s == pytest.approx(0.225)
    assert second.deviation_s == pytest.approx(0.1 + (0.2 - 0.1) / 4)
    assert UsualTime().usual_s == 0.0


def test_equal_times_leave_no_deviation() -> None:
    time = UsualTime()
    for _ in range(60):
        time = time.after(0.1)
    assert time.usual_s == pytest.approx(0.1, rel=1e-3)
