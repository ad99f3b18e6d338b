"""The plots show the choice: every size, the target, the chosen point and what a request costs."""

from __future__ import annotations

import pytest

from dynaplan.lab.drawing.plots import Plot
from dynaplan.lab.profiling.profile_plots import plots_of
from tests.unit.lab.profiling.known import TIMINGS, recommended, swept


@pytest.fixture
def plots() -> dict[str, Plot]:
    measured = [swept(TIMINGS["a100-bf16"]), swept(TIMINGS["h200-bf16"], size=2)]
    return plots_of(recommended(measured, 100, 15), measured)


def test_the_names_are_those_of_the_original(plots: dict[str, Plot]) -> None:
    assert set(plots) == {
        "prefill_performance",
        "decode_performance",
        "cost_per_request",
        "selected_prefill_interpolation/prefill_ttft_interpolation",
        "selected_prefill_interpolation/prefill_throughput_interpolation",
        "selected_decode_interpolation/decode_itl_interpolation",
        "selected_decode_interpolation/decode_throughput_interpolation",
    }


@pytest.mark.parametrize(("name", "target_ms"), [("prefill_performance", 100), ("decode_performance", 15)])
def test_a_comparison_has_a_curve_for_each_size_and_marks_target_and_choice(
    plots: dict[str, Plot], name: str, target_ms: float
) -> None:
    plot = plots[name]
    assert [curve.name for curve in plot.curves] == ["TP1", "TP2"]
    assert plot.limit
    assert plot.limit[0] == target_ms
    assert plot.chosen in [point for curve in plot.curves for point in curve.points]


def test_a_faster_answer_never_costs_less(plots: dict[str, Plot]) -> None:
    for curve in plots["cost_per_request"].curves:
        speeds, hours = zip(*curve.points, strict=True)
        assert list(speeds) == sorted(speeds, reverse=True)
        assert list(hours) == sorted(hours, reverse=True)


def test_a_curve_of_decoding_is_one_context_over_the_kv_cache_in_use(plots: dict[str, Plot]) -> None:
    curves = plots["selected_decode_interpolation/decode_itl_interpolation"].curves
    assert len(curves) > 1
    for curve in curves:
        usages = [usage for usage, _ in curve.points]
        assert usages == sorted(usages)
        assert 0 < usages[0] <= usages[-1] <= 1
