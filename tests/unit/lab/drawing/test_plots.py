"""Plots: one SVG file with its points where their values are, and a legend that names everything."""

import re
from xml.etree import ElementTree

from dynaplan.lab.drawing.plots import BOTTOM, LEFT, RIGHT, TOP, Curve, Plot, plot_svg
from dynaplan.lab.drawing.svg import COLOURS

PLOT = Plot(
    "Decode <performance>",
    "ITL (ms)",
    "tokens/s/GPU",
    [Curve("TP1", [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)]), Curve("TP2", [(5.0, 100.0)])],
    limit=(10.0, "target ITL 10 ms"),
    chosen=(5.0, 50.0),
)


def marks(svg: str, colour: str) -> list[tuple[float, float]]:
    found = re.findall(rf'<circle class="mark {colour}" cx="([\d.]+)" cy="([\d.]+)" r="3.5"', svg)
    return [(float(x), float(y)) for x, y in found]


def test_points_lie_where_their_values_are() -> None:
    assert marks(plot_svg(PLOT), "p0") == [
        (LEFT, BOTTOM),
        ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2),
        (RIGHT, TOP),
    ]


def test_a_curve_that_is_not_joined_has_points_and_no_line() -> None:
    svg = plot_svg(PLOT)

    assert len(re.findall(r'class="line p0"', svg)) == 1
    assert "line p1" not in svg
    assert len(marks(svg, "p1")) == 1


def test_the_limit_and_the_chosen_point_are_drawn_and_named_in_the_legend() -> None:
    svg = plot_svg(PLOT)

    assert f'<path class="limit" d="M{RIGHT:.1f} {TOP}V{BOTTOM}"/>' in svg
    assert svg.count('class="ring"') == 2
    for name in ("TP1", "TP2", "target ITL 10 ms", "chosen"):
        assert f">{name}</text>" in svg


def test_a_plot_is_one_well_formed_file_that_names_no_other() -> None:
    svg = plot_svg(PLOT)

    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "Decode &lt;performance&gt;" in svg
    assert not re.search(r"href|src=|@import|url\(|<script", svg)


def test_curves_beyond_the_colours_are_dashed() -> None:
    curves = [Curve(str(index), [(0.0, 1.0), (1.0, 2.0)]) for index in range(COLOURS + 1)]
    svg = plot_svg(Plot("t", "x", "y", curves))

    assert svg.count('class="line p0"') == 1
    assert svg.count('class="line p0 dashed"') == 1


def test_a_plot_without_points_is_an_empty_frame() -> None:
    assert plot_svg(Plot("t", "x", "y", [Curve("nothing", [])])).startswith("<svg")
