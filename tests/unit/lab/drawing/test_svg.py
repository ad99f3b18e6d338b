"""The frame of a picture, for viewers of all kinds.

Scales begin and end at round values, and place values between them.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.lab.drawing.svg import RULES, Scale, document, round_up


def test_every_look_by_variable_comes_after_the_same_look_by_a_plain_colour() -> None:
    """Librsvg knows no variables: it drops what has them, and would draw nothing, or all of it black."""
    picture = document("t", "", 10, 10)
    plain, _, themed = picture.partition("@media")
    assert RULES in themed
    for rule in re.findall(r"^\S.*\{.*var\(--\w+\).*\}$", RULES, re.M):
        selector = rule.partition("{")[0]
        assert re.search(rf"^{re.escape(selector)}{{.*#[0-9a-f]{{3,6}}", plain, re.M), rule


@pytest.mark.parametrize(
    ("values", "limit", "is_log"),
    [
        ([100.0], None, False),
        ([100.0], 500.0, False),
        ([5000.0], 500.0, True),
        ([10.0, 1000.0], 5.0, True),
        ([0.0], None, False),
        ([0.5], 0.02, False),
        ([3e6], 1.0, True),
    ],
)
def test_an_adaptive_axis_is_logarithmic_only_when_a_line_goes_far_beyond(values, limit, is_log):
    scale = Scale.fitting([values], limit, is_adaptive=True)

    assert scale.is_log is is_log
    assert all(0 <= scale.place(value) <= 1 for value in (*values, limit or scale.low))
    assert 1 <= len(scale.ticks()) <= 5


def test_an_axis_of_counts_has_whole_numbers():
    for most in range(20):
        ticks = Scale.fitting([[most]], is_counted=True).ticks()
        assert all(tick == int(tick) for tick in ticks)
        assert ticks[-1] >= most


NUMBERS = st.floats(0, 1e6, allow_subnormal=False).map(lambda number: round(number, 3))


@given(st.lists(NUMBERS, max_size=5), NUMBERS)
def test_a_fitting_scale_places_every_value_from_0_to_1(values: list[float], limit: float) -> None:
    for is_adaptive, is_counted in ((False, False), (True, False), (False, True)):
        scale = Scale.fitting([[*values, None]], limit, is_adaptive=is_adaptive, is_counted=is_counted)
        assert all(-1e-9 <= scale.place(value) <= 1 + 1e-9 for value in values if value >= scale.low)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_a_spanning_scale_holds_every_value_between_its_ends(values: list[float]) -> None:
    scale = Scale.spanning(values, 5)

    assert scale.low < scale.high
    part = (scale.high - scale.low) / 5
    assert part == pytest.approx(round_up(part)) and scale.low / part == pytest.approx(
        round(scale.low / part)
    )
    assert all(-1e-9 <= scale.place(value) <= 1 + 1e-9 for value in values)


def test_a_spanning_scale_begins_with_0_unless_all_values_are_far_above() -> None:
    assert Scale.spanning([10.0, 100.0], 5).low == 0
    assert Scale.spanning([900.0, 1000.0], 5).low == 900
    assert Scale.spanning([10.0, 14.9], 5).ticks(5) == [10, 11, 12, 13, 14, 15]
    assert Scale.spanning([], 5) == Scale(0.0, 1.0)


def test_round_up_takes_the_next_round_number() -> None:
    assert [round_up(value) for value in (0.0, 0.11, 1.0, 17.0, 99.0)] == pytest.approx([1, 0.15, 1, 20, 100])
    assert round_up(17.0, (1, 5, 10)) == 50


@pytest.mark.parametrize(
    ("high", "ticks"),
    [
        (10.0, [1, 2, 5, 10]),
        (100.0, [1, 3, 10, 30, 100]),
        (3e6, [1, 100, 1e4, 1e6]),
        (1e12, [1, 1e3, 1e6, 1e9, 1e12]),
    ],
)
def test_a_logarithmic_axis_has_the_finest_ticks_that_are_few_and_leaves_decades_out_at_worst(high, ticks):
    assert Scale(1.0, high, is_log=True).ticks() == pytest.approx(ticks)
