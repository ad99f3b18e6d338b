"""The estimate is the measurement, near enough, and its constants are what the fit gives."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from dynaplan.lab.profiling.gpu_sheets import GPU_SHEETS
from dynaplan.lab.profiling.model_shape import shape_of
from dynaplan.lab.profiling.roofline import (
    FITTED,
    LEFT_OUT,
    RESERVED_BYTES,
    TILE_ROWS,
    Roofline,
    origin_words,
)
from tests.bench import estimate
from tests.unit.lab.profiling.test_model_shape import LLAMA_8B

FP8 = {**LLAMA_8B, "quantization_config": {"quant_method": "fp8"}}
ENGINE = Roofline(shape_of(FP8, "config.json"), GPU_SHEETS["h200_sxm"])


def test_the_constants_are_what_the_fit_gives() -> None:
    assert astuple(estimate.fit(estimate.shipped())) == pytest.approx(astuple(FITTED), rel=0.002)
    assert estimate.reserved_bytes() == pytest.approx(RESERVED_BYTES, rel=0.02)


def test_the_stated_errors_are_those_of_profiles_left_out_of_the_fit() -> None:
    found = estimate.left_out()
    assert found.keys() == LEFT_OUT.keys()
    for name, error in LEFT_OUT.items():
        assert astuple(found[name]) == pytest.approx(astuple(error), abs=0.003)


def test_the_words_state_the_error_and_that_nothing_was_measured() -> None:
    words = origin_words("m", "h100_sxm")
    assert words.startswith("estimated, not measured: a roofline of m on h100_sxm.")
    assert "TTFT was off by 2% to 8%" in words
    assert "ITL by 3% to 8% (at most 28%)" in words


def test_a_measured_engine_is_estimated_as_it_was_measured() -> None:
    assert ENGINE.prefill_ms(4168) == pytest.approx(87.3, rel=0.1)
    assert ENGINE.decode_ms(1, 350) == pytest.approx(4.38, rel=0.1)
    assert ENGINE.decode_ms(105, 592_620) == pytest.approx(24.9, rel=0.1)
    assert ENGINE.max_kv_tokens(0.9) == pytest.approx(945_029, rel=0.02)


def test_a_step_costs_one_more_tile_for_each_further_tile_of_requests() -> None:
    times = [ENGINE.decode_terms(each, 0).matrices for each in (1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS)]
    assert times[0] == times[1] == 0 < times[2] == times[3]


def test_gpus_share_weights_and_kv_but_not_launches_and_have_links_between_them() -> None:
    four = replace(ENGINE, tensor_parallel_size=4)
    alone, shared = ENGINE.decode_terms(8, 1e5), four.decode_terms(8, 1e5)
    assert (alone.links, shared.layer) == (0.0, alone.layer)
    assert shared.weights == alone.weights / 4
    assert shared.kv == alone.kv / 4
    assert shared.links > 0


def test_more_never_takes_less() -> None:
    prompts = [ENGINE.prefill_ms(tokens) for tokens in (0, 1, 100, 10_000, 100_000)]
    loads = [ENGINE.decode_ms(each, each * 1000) for each in (1, 2, 100, 200, 1000)]
    assert prompts == sorted(prompts)
    assert loads == sorted(loads)


def test_a_gpu_that_cannot_hold_the_weights_has_no_room_for_kv() -> None:
    assert Roofline(shape_of(LLAMA_8B, "config.json"), GPU_SHEETS["l4"]).max_kv_tokens(0.7) < 1
