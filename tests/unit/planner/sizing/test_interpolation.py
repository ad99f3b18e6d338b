"""The interpolators give the numbers that Dynamo's gave, from every form in which a profile comes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dynaplan.engines.sim.profiles import DECODE_KEYS, PREFILL_KEYS, load_profile
from dynaplan.planner.formula_tables import fit_tables
from dynaplan.planner.sizing.formula import (
    DecodeInterpolator,
    DecodeTable,
    PrefillInterpolator,
    ProfileTables,
)
from dynaplan.planner.sla_model import open_profile
from dynaplan.util.errors import ConfigError

H200 = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
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
    assert decode.tokens_per_s_per_gpu(100, 3150) == pytest.approx(5697.56, abs=0.005)


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
