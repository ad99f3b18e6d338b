"""Measurements survive a file, and a file that holds something else is refused by key.

A profile made from a sweep gives back the timing of the engine that was swept.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from dynaplan.engines.timing_model.step_timing import MeasuredProfile, StepTiming
from dynaplan.lab.profiling.load_points import DecodeLoad
from dynaplan.lab.profiling.measurements import (
    DecodeMeasurement,
    Measurements,
    PrefillMeasurement,
    measured_profile,
)
from dynaplan.util.errors import ConfigError
from tests.unit.lab.profiling.known import CONTEXT_TOKENS, KV_TOKENS, SLOTS, TIMINGS, measurements, swept

PREFILL = {"isl_tokens": 100, "ttft_ms": 12.5}
DECODE = {
    "isl_tokens": 100,
    "osl_tokens": 50,
    "concurrency": 4,
    "itl_ms": 5.25,
    "output_tokens_per_s": 750.0,
}


def test_measurements_are_read_as_they_were_written() -> None:
    measured = swept(TIMINGS["mocker"])
    for point in (*measured.prefill, *measured.decode):
        assert type(point).from_document(json.loads(json.dumps(asdict(point)))) == point
    assert asdict(PrefillMeasurement.from_document(PREFILL)) == PREFILL
    assert asdict(DecodeMeasurement.from_document(DECODE)) == DECODE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("isl_tokens", 0),
        ("concurrency", 1.5),
        ("osl_tokens", True),
        ("itl_ms", float("nan")),
        ("itl_ms", float("inf")),
        ("output_tokens_per_s", "fast"),
        ("output_tokens_per_s", 0),
        ("concurrency", None),
    ],
)
def test_a_value_that_nobody_measured_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"a measurement's {key} is"):
        DecodeMeasurement.from_document({**DECODE, key: value})


LENGTHS = range(70, CONTEXT_TOKENS, 211)
CONTEXTS = (200, 333, 500, 900, 1400, 2100, 3300, 5000, 8000, 12_000, 15_000)
FULL = (0.003, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
"""Parts of the batch that the engine holds at a context: none of them was measured."""


def loads_between() -> list[tuple[int, float]]:
    """(requests, KV tokens) of states that a service passes through."""
    return [
        (decodes, decodes * context)
        for context in CONTEXTS
        for part in FULL
        if (decodes := max(1, round(part * min(SLOTS, KV_TOKENS / context))))
    ]


def errors(profile: MeasuredProfile, truth: StepTiming) -> tuple[list[float], list[float]]:
    """Relative errors of TTFT and ITL, rising."""
    found = profile.timing()
    ttft = [abs(found.prefill_ms(isl) / truth.prefill_ms(isl) - 1) for isl in LENGTHS]
    itl = [abs(found.decode_ms(*load) / truth.decode_ms(*load) - 1) for load in loads_between()]
    return sorted(ttft), sorted(itl)


@pytest.mark.parametrize("name", TIMINGS)
def test_a_sweep_gives_back_ttft_within_3_and_itl_mostly_within_5_per_cent(name: str) -> None:
    """ITL between two contexts is read straight at one KV usage, where it bends; hence not always."""
    ttft, itl = errors(measured_profile([swept(TIMINGS[name])], 1, 1), TIMINGS[name])
    assert ttft[-1] < 0.03
    assert itl[len(itl) // 2] < 0.01
    assert itl[int(len(itl) * 0.95)] < 0.05
    assert itl[-1] < 0.2


def test_a_coarse_sweep_is_a_coarse_profile_and_a_fine_one_a_better() -> None:
    truth = TIMINGS["h200-bf16"]
    profiles: list[tuple[list[float], list[float]]] = []
    for prefill, decode in ((3, 3), (16, 6), (32, 10)):
        measured = swept(truth, prefill_granularity=prefill, decode_granularity=decode)
        profiles.append(errors(measured_profile([measured], 1, 1), truth))
    for half in zip(*profiles, strict=True):
        medians = [each[len(each) // 2] for each in half]
        assert medians == sorted(medians, reverse=True)


def test_halves_come_from_the_sizes_that_are_named() -> None:
    one, two = swept(TIMINGS["h100-bf16"]), swept(TIMINGS["h200-bf16"], size=2, max_kv_tokens=900_000)
    profile = measured_profile([one, two], 1, 2)
    alone = measured_profile([one], 1, 1)
    assert profile.prefill_ttft == alone.prefill_ttft
    assert profile.max_kv_tokens == 900_000
    assert set(profile.z_itl) == set(measured_profile([two], 2, 2).z_itl)


def test_parts_of_one_size_are_one() -> None:
    whole = swept(TIMINGS["mocker"])
    parts = [replace(whole, decode=()), replace(whole, prefill=())]
    assert measured_profile(parts, 1, 1) == measured_profile([whole], 1, 1)


def test_prompt_lengths_that_nearly_coincide_are_averaged() -> None:
    """The target of 3000 tokens beside a point of the curve: noise would make a cubic curve swing."""
    truth = TIMINGS["h200-bf16"]
    measured = measurements(truth, (1000, 2000, 3000, 3050, 4000), [DecodeLoad(100, 100, 1)])
    profile = measured_profile([measured], 1, 1)
    assert profile.prefill_isl == (1000.0, 2000.0, 3025.0, 4000.0)
    assert profile.prefill_ttft[2] == pytest.approx((truth.prefill_ms(3000) + truth.prefill_ms(3050)) / 2)


def test_contexts_that_nearly_coincide_are_one_row() -> None:
    points = (
        DecodeMeasurement(1000, 100, 1, 5.0, 200.0),
        DecodeMeasurement(1020, 100, 40, 9.0, 4400.0),
        DecodeMeasurement(2000, 100, 1, 5.2, 190.0),
        DecodeMeasurement(2000, 100, 20, 9.5, 2100.0),
    )
    measured = Measurements(1, 1, KV_TOKENS, (PrefillMeasurement(1, 1.0), PrefillMeasurement(2, 2.0)), points)
    profile = measured_profile([measured], 1, 1)
    assert profile.y_context_length == (1060.0, 1060.0, 2050.0, 2050.0)
    assert profile.z_itl == (5.0, 9.0, 5.2, 9.5)


def test_the_same_load_measured_twice_is_averaged() -> None:
    point = DecodeMeasurement(1000, 100, 4, 5.0, 800.0)
    lengths = (PrefillMeasurement(100, 10.0), PrefillMeasurement(100, 12.0), PrefillMeasurement(900, 30.0))
    measured = Measurements(1, 1, KV_TOKENS, lengths, (point, replace(point, itl_ms=6.0)))
    profile = measured_profile([measured], 1, 1)
    assert (profile.z_itl, profile.prefill_ttft) == ((5.5,), (11.0, 30.0))


def test_a_size_that_was_not_measured_has_no_profile() -> None:
    with pytest.raises(ConfigError, match="nothing was measured at tensor parallel size 2"):
        measured_profile([swept(TIMINGS["h200-bf16"])], 1, 2)


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_sweep_without_points_of_a_kind_has_no_profile(part: str) -> None:
    with pytest.raises(ConfigError, match="too few points"):
        measured_profile([replace(swept(TIMINGS["h200-bf16"]), **{part: ()})], 1, 1)
