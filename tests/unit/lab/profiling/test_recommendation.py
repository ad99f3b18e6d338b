"""What is recommended, in the original's words and numbers, and what it left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.lab.profiling.measurements import DecodeMeasurement, Measurements, PrefillMeasurement
from dynaplan.lab.profiling.recommendation import Bounds, kv_bounds, queue_bounds
from dynaplan.util.errors import ConfigError
from tests.unit.lab.profiling.known import LARGE_KV_TOKENS, of_sizes, recommended

TTFTS = {1: 150.0, 2: 80.0, 4: 48.37077}
"""The chosen one is that of the planner's documentation: TTFT 48.37 ms, 15505.23 tokens/s/GPU."""
ITLS = {
    1: [(1, 9.0, 110.0), (5, 9.5, 500.0)],
    2: [(1, 6.5, 76.0), (5, 6.9, 350.0)],
    4: [(1, 4.83, 51.22), (5, 5.2, 230.0)],
}


def test_the_lines_are_those_of_the_documentation() -> None:
    assert recommended(of_sizes(TTFTS, ITLS), 50, 5).lines == (
        "Analyzing results and generate recommendations...",
        "Suggested prefill TP:4 (TTFT 48.37 ms, throughput 15505.23 tokens/s/GPU)",
        "Suggested planner upper/lower bound for prefill queue size: 0.24/0.10",
        "Suggested decode TP:4 (ITL 4.83 ms, throughput 51.22 tokens/s/GPU)",
        "Suggested planner upper/lower bound for decode kv cache utilization: 0.20/0.10",
    )


def test_the_most_throughput_per_gpu_within_the_targets_is_chosen() -> None:
    chosen = recommended(of_sizes(TTFTS, ITLS), 100, 7)
    assert (chosen.prefill.tensor_parallel_size, chosen.prefill.ttft_ms) == (2, 80.0)
    assert (chosen.decode.tensor_parallel_size, chosen.decode.concurrency) == (2, 5)
    assert not any("satisfies" in line for line in chosen.lines)


def test_of_equally_good_sizes_the_smallest_is_chosen() -> None:
    alike = of_sizes({4: 10.0, 2: 20.0, 1: 40.0}, {size: [(1, 5.0, 100.0)] for size in (1, 2, 4)})
    chosen = recommended(alike, 50, 5)
    assert (chosen.prefill.gpus, chosen.decode.gpus) == (1, 1)


def test_where_no_size_meets_the_targets_the_fastest_is_chosen_and_it_says_so() -> None:
    chosen = recommended(of_sizes(TTFTS, ITLS), 20, 2)
    assert (chosen.prefill.tensor_parallel_size, chosen.decode.tensor_parallel_size) == (4, 4)
    wording = "No TP size satisfies the {} requirement, please try a smaller model or a more powerful GPU SKU"
    assert chosen.lines[1] == wording.format("TTFT")
    assert chosen.lines[4] == wording.format("ITL")
    assert any("even a prompt that waits for nobody is late" in note for note in chosen.notes)


def test_the_tables_are_those_of_the_chosen_sizes() -> None:
    """The original took them from the size it had tried last."""
    decode = {1: [(1, 4.0, 250.0), (9, 4.9, 1800.0)], 2: [(1, 3.0, 160.0)], 4: [(1, 2.0, 120.0)]}
    chosen = recommended(of_sizes(TTFTS, decode), 100, 5)
    assert (chosen.prefill.tensor_parallel_size, chosen.decode.tensor_parallel_size) == (2, 1)
    assert chosen.profile.prefill_ttft == (4.0, 80.0)
    assert chosen.profile.prefill_thpt_per_gpu == (12_500.0, 18_750.0)
    assert chosen.profile.z_itl == (4.0, 4.9)
    assert chosen.profile.z_thpt_per_gpu == (250.0, 1800.0)
    assert chosen.profile.y_context_length == (3250.0, 3250.0)
    assert chosen.profile.x_kv_usage == pytest.approx((3250 / LARGE_KV_TOKENS, 9 * 3250 / LARGE_KV_TOKENS))


def test_a_size_that_was_measured_in_part_is_judged_by_that_part() -> None:
    only_prefill = Measurements(8, 8, LARGE_KV_TOKENS, of_sizes(TTFTS, ITLS)[2].prefill, ())
    chosen = recommended([*of_sizes(TTFTS, ITLS), only_prefill], 50, 5)
    assert chosen.decode.tensor_parallel_size == 4


def test_lengths_near_the_target_s_count_where_there_are_none_of_it() -> None:
    near = Measurements(
        1,
        1,
        LARGE_KV_TOKENS,
        (PrefillMeasurement(100, 10.0), PrefillMeasurement(3020, 60.0)),
        (DecodeMeasurement(3020, 490, 2, 5.0, 400.0), DecodeMeasurement(3500, 500, 9, 4.0, 900.0)),
    )
    chosen = recommended([near], 100, 10)
    assert (chosen.prefill.ttft_ms, chosen.decode.concurrency) == (60.0, 2)


def test_without_a_measurement_at_the_target_nothing_is_recommended() -> None:
    elsewhere = Measurements(
        1, 1, LARGE_KV_TOKENS, (PrefillMeasurement(100, 10.0),), (DecodeMeasurement(100, 500, 1, 5.0, 200.0),)
    )
    with pytest.raises(ConfigError, match="no TTFT was measured of a prompt of 3000 tokens"):
        recommended([elsewhere], 50, 5)
    with pytest.raises(ConfigError, match="no TTFT was measured"):
        recommended([], 50, 5)
    half = Measurements(1, 1, LARGE_KV_TOKENS, (PrefillMeasurement(3000, 10.0),), elsewhere.decode)
    with pytest.raises(ConfigError, match="no ITL was measured of prompts of 3000 and answers of 500"):
        recommended([half], 50, 5)


@pytest.mark.parametrize(
    ("ttft_ms", "target_ms", "bounds"),
    [
        (48.37, 50, Bounds(0.10, 0.24)),
        (10.0, 50, Bounds(3.0, 5.0)),
        (40.0, 50, Bounds(0.10, 0.50)),
        (54.4, 50, Bounds(0.05, 0.10)),
        (500.0, 50, Bounds(0.05, 0.10)),
    ],
)
def test_queue_bounds(ttft_ms: float, target_ms: float, bounds: Bounds) -> None:
    found = queue_bounds(ttft_ms, target_ms)
    assert (round(found.lower, 2), round(found.upper, 2)) == (bounds.lower, bounds.upper)


@pytest.mark.parametrize(
    ("kv_usage", "bounds"),
    [(0.003, Bounds(0.1, 0.2)), (0.5, Bounds(0.3, 0.7)), (0.95, Bounds(0.75, 1.0)), (1.0, Bounds(0.8, 1.0))],
)
def test_kv_bounds(kv_usage: float, bounds: Bounds) -> None:
    found = kv_bounds(kv_usage)
    assert (round(found.lower, 2), round(found.upper, 2)) == (bounds.lower, bounds.upper)


@given(ttft_ms=st.floats(0.01, 1e6), target_ms=st.floats(0.01, 1e6), kv_usage=st.floats(0, 1))
def test_the_lower_bound_is_below_the_upper_one_as_written_with_two_decimals(
    ttft_ms: float, target_ms: float, kv_usage: float
) -> None:
    """An early version of the original printed them swapped, and the planner refuses equal ones."""
    for bounds in (queue_bounds(ttft_ms, target_ms), kv_bounds(kv_usage)):
        assert 0 < round(bounds.lower, 2) < round(bounds.upper, 2)


def test_too_few_points_for_the_formulas_are_said() -> None:
    notes = recommended(of_sizes({1: 40.0}, {1: [(1, 5.0, 100.0)]}), 50, 5).notes
    assert [note for note in notes if "2 prompt lengths" in note and "sizing: formula" in note]
    assert [note for note in notes if "along a line" in note]


def test_one_prompt_length_is_no_profile() -> None:
    one = of_sizes({1: 40.0}, {1: [(1, 5.0, 100.0)]})[0]
    with pytest.raises(ConfigError, match="too few points"):
        recommended([Measurements(1, 1, LARGE_KV_TOKENS, one.prefill[1:], one.decode)], 50, 5)
