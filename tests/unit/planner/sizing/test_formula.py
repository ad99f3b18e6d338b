"""The formulas of the seeds give the original's numbers, and something sensible where it has none.

The interpolators give the numbers that Dynamo's gave, from every form in which a profile comes.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.config.settings.worker import SimOptions
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.engines.sim.profiles import DECODE_KEYS, PREFILL_KEYS, load_profile, timing_for
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.planner.model import Corrections, Expected, Sizing, WorkerLimits
from dynaplan.planner.sizing.formula import (
    DecodeInterpolator,
    DecodePoint,
    DecodeTable,
    Formula,
    PrefillInterpolator,
    ProfileTables,
)
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from dynaplan.planner.sla_model import fit_tables, open_profile
from dynaplan.util.errors import ConfigError
from tests.unit.planner.sizing.engine_pools import Shape, arrivals, decode_times_ms

CURRENT = PoolSizes(2, 3)
H200 = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
SEEN = Traffic(180.0, 1800.0, 3000.0, 150.0, ttft_ms=120.9174, itl_ms=20.0, duration_ms=3000.0)


@cache
def formula() -> Formula:
    tables = fit_tables(load_profile(H200), "H200")
    return Formula.from_tables(tables, tables)


def sized(expected: Expected, **changes: object) -> Sizing:
    arguments: dict[str, object] = {
        "interval_s": 180.0,
        "targets": SlaTargets(500.0, 10.0),
        "corrections": Corrections(),
        "limits": WorkerLimits(max_gpus=64),
        "current": CURRENT,
        **changes,
    }
    return formula().size(expected, **arguments)  # type: ignore[arg-type]


def test_the_numbers_of_workers_are_those_of_the_seeds() -> None:
    sizing = sized(Expected(36_000, 3000, 300))
    assert sizing.workers == PoolSizes(
        math.ceil(36_000 * 3000 / 180 / 49481.1), math.ceil(36_000 * 300 / 180 / 4555.68)
    )
    assert [step.stage for step in sizing.steps] == ["prefill", "decode", "budget"]
    assert "600000 prompt tokens/s at 49481 tokens/s" in sizing.steps[0].why


def test_a_worker_of_several_gpus_does_as_much_as_they_do_each() -> None:
    limits = WorkerLimits(max_gpus=64, prefill_gpus=4, decode_gpus=2)
    assert sized(Expected(36_000, 3000, 300), limits=limits).workers == PoolSizes(4, 7)


def test_a_high_ttft_needs_no_more_prefill_workers_but_a_low_one_fewer() -> None:
    expected = Expected(36_000, 3000, 300)
    assert sized(expected, corrections=Corrections(prefill=5.0)).workers.prefill == 13
    assert sized(expected, corrections=Corrections(prefill=0.5)).workers.prefill == 7


def test_a_high_itl_tightens_the_target_and_none_leaves_it() -> None:
    expected = Expected(36_000, 3000, 300)
    assert sized(expected, corrections=Corrections(decode=2.0)).workers.decode > 14
    assert sized(expected, corrections=Corrections(decode=0.0)).workers.decode == 14


def test_the_corrections_are_measured_over_expected() -> None:
    after, why = formula().corrections(Corrections(), SEEN, decode_workers=3)
    assert after.prefill == pytest.approx(2.0, abs=1e-4)
    concurrency = 1800 / 3 * 3.0 / 180
    assert after.decode == pytest.approx(20.0 / formula().decode.itl_ms(concurrency, 3075))
    assert "TTFT 2, ITL" in why


@pytest.mark.parametrize(
    ("traffic", "reason"),
    [
        (replace(SEEN, requests=0.0), "there were no requests"),
        (replace(SEEN, requests=None, missing="the frontend is away"), "the frontend is away"),
        (replace(SEEN, isl_tokens=math.nan), "something was not measured"),
    ],
)
def test_an_interval_that_tells_nothing_leaves_the_corrections(traffic: Traffic, reason: str) -> None:
    before = Corrections(0.7, 1.3)
    after, why = formula().corrections(before, traffic, decode_workers=3)
    assert after == before
    assert reason in why


def test_only_what_was_measured_is_corrected() -> None:
    before = Corrections(0.7, 1.3)
    assert formula().corrections(before, replace(SEEN, ttft_ms=math.nan), 3)[0].prefill == 0.7
    assert formula().corrections(before, SEEN, decode_workers=0)[0].decode == 1.3


def test_a_profile_that_expects_nothing_corrects_nothing() -> None:
    tables = fit_tables(load_profile(H200), "H200")
    none = tuple((0.0,) * 100 for _ in range(100))
    nothing = replace(
        tables,
        prefill=replace(tables.prefill, ttft_ms=((0.0,) * 4,) * len(tables.prefill.ttft_ms)),
        decode=replace(tables.decode, itl_ms=none, tokens_per_s_per_gpu=none),
    )
    zero = Formula.from_tables(nothing, nothing)
    assert zero.corrections(Corrections(), SEEN, 3)[0] == Corrections()
    sizing = zero.size(Expected(1, 1, 1), 180.0, SlaTargets(), Corrections(), WorkerLimits(), CURRENT)
    assert sizing.workers == CURRENT
    assert "change nothing" in sizing.steps[-1].why


def test_no_traffic_is_no_demand_whatever_its_lengths() -> None:
    assert sized(Expected(0.0, math.nan, None)).workers == PoolSizes(1, 1)


@pytest.mark.parametrize(
    "expected",
    [
        Expected(),
        Expected(10.0),
        Expected(10.0, math.nan, 5.0),
        Expected(math.nan, 5.0, 5.0),
        Expected(10, 0, 0),
    ],
)
def test_what_could_not_be_foretold_changes_nothing(expected: Expected) -> None:
    sizing = sized(expected)
    assert sizing.workers == CURRENT
    assert "no data: change nothing" in sizing.steps[0].why


def test_the_budget_is_not_exceeded_where_the_original_exceeds_it() -> None:
    """1 prefill worker of 2 GPUs and 4 decode workers of 4 on 16 GPUs: the original asks for 18."""
    limits = WorkerLimits(max_gpus=16, prefill_gpus=2, decode_gpus=4)
    sizing = sized(Expected(5_400, 3000, 2000), limits=limits)
    assert sizing.steps[-1].before == PoolSizes(1, 4)
    assert sizing.workers == PoolSizes(1, 3)
    assert "18 GPUs are over the budget of 16: 14 can be used" in sizing.steps[-1].why


# -- aggregated workers ----------------------------------------------------------------------------------

AGGREGATED = PoolSizes(0, 3)
ONE_POOL = WorkerLimits(max_gpus=64, least=PoolSizes(0, 1))


def sized_aggregated(expected: Expected, itl_ms: float = 20.0, **changes: object) -> Sizing:
    changes = {"limits": ONE_POOL, "current": AGGREGATED, "targets": SlaTargets(500.0, itl_ms), **changes}
    return sized(expected, **changes)


def test_an_aggregated_service_asks_for_no_prefill_worker_and_spends_no_gpu_on_one() -> None:
    sizing = sized_aggregated(Expected(36_000, 3000, 300), limits=replace(ONE_POOL, max_gpus=8))
    assert sizing.workers == PoolSizes(0, 8)
    assert [step.stage for step in sizing.steps] == ["decode", "budget"]


@pytest.mark.parametrize(
    ("isl", "osl", "rate_per_s", "itl_ms"),
    [(1000, 200, 40.0, 12.0), (1000, 200, 40.0, 20.0), (3000, 150, 40.0, 12.0), (3000, 500, 40.0, 20.0)],
)
def test_aggregated_workers_keep_the_mean_itl_and_two_workers_fewer_do_not(
    isl: int, osl: int, rate_per_s: float, itl_ms: float
) -> None:
    """The workers that the formula asks for, held against engine models in virtual time."""
    workers = sized_aggregated(Expected(180 * rate_per_s, isl, osl), itl_ms).workers.decode
    requests = arrivals(Shape(isl, 0.01, osl, 0.01), rate_per_s, 1500)

    def mean_itl_ms(count: int) -> float:
        options = SimOptions(profile=H200, block_tokens=64)
        timing, kv_tokens = timing_for(options)
        kind = WorkerKind(timing, EngineSettings.of(options, kv_tokens))
        return mean(decode_times_ms(kind, count, requests, is_remote=False)[1])

    assert mean_itl_ms(workers) <= itl_ms < mean_itl_ms(workers - 2)


def test_prompts_take_a_part_of_the_time_of_aggregated_workers() -> None:
    answers_only = sized_aggregated(Expected(7200, 1, 200)).workers.decode
    assert sized_aggregated(Expected(7200, 3000, 200)).workers.decode > answers_only
    assert "% of the time" in sized_aggregated(Expected(7200, 3000, 200)).steps[0].why


def test_a_cached_prefix_makes_aggregated_workers_fewer_and_a_high_ttft_does_not_add_any() -> None:
    expected = Expected(36_000, 3000, 100)
    usual = sized_aggregated(expected).workers.decode
    assert sized_aggregated(expected, corrections=Corrections(prefill=0.3)).workers.decode < usual
    assert sized_aggregated(expected, corrections=Corrections(prefill=5.0)).workers.decode == usual


def test_prefill_beside_decoding_is_expected_and_no_correction() -> None:
    """Of the ITL of an aggregated worker what prompts take is no fault of the profile."""
    share = 1800 / 3 / 180 * formula().prefill.ttft_ms(3000) / 1000
    decode_ms = formula().decode.itl_ms(1800 / 3 * 3.0 / 180, 3075)
    as_expected = replace(SEEN, ttft_ms=formula().prefill.ttft_ms(3000), itl_ms=decode_ms / (1 - share))
    after, _ = formula().corrections(Corrections(), as_expected, 3, is_aggregated=True)
    assert after.decode == pytest.approx(1.0)


def test_any_demand_of_aggregated_workers_has_a_size() -> None:
    for requests in (1e-9, 1e300):
        assert 1 <= sized_aggregated(Expected(requests, 3000, 300)).workers.decode <= 64


@pytest.mark.parametrize("table", ["prefill", "decode", "aggregated_prefill"])
def test_a_profile_without_throughput_promises_nothing_and_changes_nothing(table: str) -> None:
    powerless: Any = SimpleNamespace(
        tokens_per_s_per_gpu=lambda *_: 0.0,
        find_best_throughput_per_gpu=lambda *_: DecodePoint(0.0, 1.0, 1.0),
    )
    broken = replace(formula(), **{table: powerless})
    current = PoolSizes(0, 3) if table == "aggregated_prefill" else CURRENT
    sizing = broken.size(
        Expected(36_000, 3000, 300),
        180.0,
        SlaTargets(500.0, 10.0),
        Corrections(),
        WorkerLimits(max_gpus=64),
        current,
    )
    assert sizing.workers == current
    assert "promises nothing here: change nothing" in sizing.steps[0].why


def test_aggregated_workers_that_are_busy_with_prompts_alone_are_not_enough() -> None:
    as_fast_as_they_come: Any = SimpleNamespace(
        tokens_per_s_per_gpu=lambda *_: 36_000 * 3000 / 180, ttft_ms=lambda *_: 100.0
    )
    expected, current = Expected(36_000, 3000, 300), PoolSizes(0, 3)
    sizing = replace(formula(), aggregated_prefill=as_fast_as_they_come).size(
        expected, 180.0, SlaTargets(500.0, 10.0), Corrections(), WorkerLimits(max_gpus=64), current
    )
    assert sizing.workers.decode > 1


H100 = "h100_sxm-Llama-3.3-70B-Instruct-FP8"


def selected_directory(directory: Path) -> Path:
    """The layout of Dynamo's profiler: one archive for each half."""
    import numpy

    profile = load_profile(H200)
    for part, keys in (("prefill", PREFILL_KEYS), ("decode", DECODE_KEYS)):
        place = directory / f"selected_{part}_interpolation"
        place.mkdir()
        numpy.savez(place / "raw_data.npz", **{key: numpy.atleast_1d(getattr(profile, key)) for key in keys})
    return directory


def json_directory(directory: Path) -> Path:
    """The layout of its fallback: one document for each half."""
    profile = load_profile(H200)
    for part, keys in (("prefill", PREFILL_KEYS), ("decode", DECODE_KEYS)):
        document = {key: getattr(profile, key) for key in keys}
        (directory / f"{part}_raw_data.json").write_text(json.dumps(document))
    return directory


def pre_swept_directory(directory: Path) -> Path:
    """The layout of the pre-swept results: a row for each configuration."""
    import numpy

    profile = load_profile(H200)
    for part, keys in (("prefill", PREFILL_KEYS), ("decode", DECODE_KEYS)):
        rows = {key: numpy.atleast_1d(getattr(profile, key))[None] for key in keys}
        numpy.savez(directory / f"{part}.npz", **rows, tp=numpy.array([[1]]))
    return directory


@cache
def shipped(name: str = H200, tensor_parallel_size: int = 1) -> ProfileTables:
    return fit_tables(open_profile(name, tensor_parallel_size), name)


@pytest.fixture(params=["shipped", "selected", "json", "pre-swept"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> ProfileTables:
    if request.param == "shipped":
        return shipped()
    write = {"selected": selected_directory, "json": json_directory, "pre-swept": pre_swept_directory}
    name = str(write[request.param](tmp_path))
    return fit_tables(open_profile(name), name)


def test_the_golden_numbers_of_the_original(tables: ProfileTables) -> None:
    prefill, decode = PrefillInterpolator(tables.prefill), DecodeInterpolator(tables.decode)
    assert prefill.ttft_ms(3000) == pytest.approx(60.4587, abs=5e-5)
    assert prefill.tokens_per_s_per_gpu(3000) == pytest.approx(49481.1, abs=0.05)
    assert prefill.ttft_ms(1000) == pytest.approx(36.8234, abs=5e-5)
    assert prefill.tokens_per_s_per_gpu(1000) == pytest.approx(26917.8, abs=0.05)
    assert prefill.ttft_ms(40_000) == prefill.ttft_ms(16_372) == pytest.approx(375.4826, abs=5e-5)
    assert decode.itl_ms(100, 3150) == pytest.approx(15.8037, abs=5e-5)
    best = decode.find_best_throughput_per_gpu(decode.itl_ms(100, 3150), 3150)
    assert best.tokens_per_s_per_gpu == pytest.approx(5697.56, abs=0.005)


@pytest.mark.parametrize(
    ("itl_ms", "context_tokens", "expected"),
    [
        (10, 3150, (4555.68, 9.7344, 0.16162)),
        (10, 3075, (4679.64, 9.7404, 0.15152)),
        (10, 1000, (5674.11, 9.7498, 0.04040)),
        (50, 3150, (6794.77, 41.7078, 1.0)),
        (1, 3150, (223.734, 4.427375, 0.0)),
    ],
)
def test_the_golden_points_of_the_original(
    itl_ms: float, context_tokens: float, expected: tuple[float, float, float]
) -> None:
    best = DecodeInterpolator(shipped().decode).find_best_throughput_per_gpu(itl_ms, context_tokens)
    assert best.tokens_per_s_per_gpu == pytest.approx(expected[0], abs=0.006)
    assert best.itl_ms == pytest.approx(expected[1], abs=6e-5)
    assert best.kv_usage == pytest.approx(expected[2], abs=6e-6)


def test_a_prompt_shorter_than_any_measured_one_counts_as_the_shortest() -> None:
    prefill = PrefillInterpolator(shipped().prefill)
    assert prefill.ttft_ms(0) == prefill.ttft_ms(100)


def test_of_two_points_equally_near_the_even_one_is_taken() -> None:
    row = (1.0, 2.0, 3.0, 4.0)
    decode = DecodeInterpolator(DecodeTable(300.0, 300, (row, row, row, row), (row, row, row, row)))
    assert decode.itl_ms(0.5, 100) == 1.0
    assert decode.itl_ms(1.5, 100) == 3.0


def test_beyond_the_grid_its_edge_counts() -> None:
    decode = DecodeInterpolator(shipped().decode)
    assert decode.itl_ms(1e9, 3000) == decode.itl_ms(945_029 / 3000, 3000)
    assert decode.itl_ms(10, 1e9) == decode.itl_ms(1e9, 13_585)


@pytest.mark.parametrize("tensor_parallel_size", [2, 4, 8])
def test_a_configuration_is_found_by_its_tensor_parallel_size(tensor_parallel_size: int) -> None:
    prefill = PrefillInterpolator(shipped(H100, tensor_parallel_size).prefill)
    profile = load_profile(H100, tensor_parallel_size)
    assert prefill.ttft_ms(profile.prefill_isl[3]) == pytest.approx(profile.prefill_ttft[3])


def test_the_originals_name_of_a_pre_swept_configuration_is_understood() -> None:
    name = f"use-pre-swept-results:h100_sxm:nvidia/{H100.split('-', 1)[1]}:vllm:0.10.1.1:4:1:1:128:128:8"
    assert open_profile(name) == load_profile(H100, 4)
    with pytest.raises(ConfigError, match="gpu_type:model:framework"):
        open_profile("use-pre-swept-results:h100_sxm")


def test_a_profile_that_is_not_there_is_named_with_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile-results-dir is 'nowhere'") as refusal:
        open_profile("nowhere")
    assert H200 in str(refusal.value)
    with pytest.raises(ConfigError, match="no prefill measurements"):
        open_profile(str(tmp_path))


def test_points_that_cannot_be_interpolated_are_an_error_of_the_user() -> None:
    profile = load_profile(H200)
    few = replace(profile, prefill_isl=(100, 200), prefill_ttft=(1, 2), prefill_thpt_per_gpu=(1, 2))
    with pytest.raises(ConfigError, match="at least 4"):
        fit_tables(few, "few")
    flat = replace(profile, y_context_length=(500.0,) * len(profile.y_context_length))
    with pytest.raises(ConfigError, match="span no area"):
        fit_tables(flat, "flat")
