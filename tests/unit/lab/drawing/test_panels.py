"""Panels over one time axis: lines are steps, with gaps where there is no value."""

import re

import pytest

from dynaplan.lab.drawing.panels import (
    DECIDED,
    HEAD,
    LEFT,
    PLOT,
    RIGHT,
    WIDTH,
    Lane,
    Panel,
    Series,
    TimeAxis,
    draw,
)
from dynaplan.lab.drawing.svg import Scale


def drawn(panel: Panel, end_s: float = 100.0) -> list[tuple[float, float | None]]:
    """What the path of the only line says: each moment, and the value that holds from then on."""
    svg, _ = draw([panel], [], TimeAxis(end_s))
    (path,) = re.findall(r'class="line[^>]*d="([^"]*)"', svg)
    steps, x, value = [], 0.0, None
    for command, first, second in re.findall(r"([MHV])([\d.-]+) ?([\d.-]+)?", path):
        x = float(first) if command in "MH" else x
        if command in "MV":
            y = float(second) if command == "M" else float(first)
            value = (HEAD + PLOT - y) / PLOT * Scale.fitting([panel.series[0].values]).high
        steps.append(((x - LEFT) / (WIDTH - LEFT - RIGHT) * end_s, value))
    return steps


def near(steps):
    return [(pytest.approx(at_s, abs=0.1), pytest.approx(value, abs=0.1)) for at_s, value in steps]


def test_a_line_steps_at_each_moment_to_its_value_and_ends_with_the_axis():
    panel = Panel("k", "t", [Series("", [0, 10, 20, 50], [1, 4, 4, 2])])

    assert drawn(panel) == near([(0, 1), (10, 1), (10, 4), (50, 4), (50, 2), (100, 2)])


def test_a_line_has_a_gap_where_there_is_no_value():
    panel = Panel("k", "t", [Series("", [0, 10, 20, 50], [1, None, 4, None])])

    assert drawn(panel) == near([(0, 1), (10, 1), (20, 4), (50, 4)])


def test_what_comes_after_the_end_of_the_axis_is_not_drawn():
    panel = Panel("k", "t", [Series("", [0, 150], [1, 4])])

    assert drawn(panel) == near([(0, 1), (100, 1)])


@pytest.mark.parametrize(
    ("end_s", "text"), [(500, "312 s"), (3600, "5.21 min"), (86400, "0.09 h")], ids=["s", "min", "h"]
)
def test_moments_are_written_in_the_unit_that_suits_the_whole(end_s, text):
    assert TimeAxis(end_s).text(312.4) == text
    assert 4 <= len(TimeAxis(end_s).ticks()) <= 11


def test_a_decision_after_the_end_of_the_axis_is_not_drawn():
    panel = Panel(DECIDED, "t", [Series("", [0], [1])])
    svg, _ = draw([panel], [Lane([10, 150], ["early", "late"])], TimeAxis(100.0))

    assert "early" in svg
    assert "late" not in svg
