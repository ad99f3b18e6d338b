"""Measurements survive a file, and a file that holds something else is refused by key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynaplan.lab.profiling.measurements import DecodeMeasurement, PrefillMeasurement
from dynaplan.util.errors import ConfigError
from tests.unit.lab.profiling.known import TIMINGS, swept

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
        assert type(point).from_document(json.loads(json.dumps(point.to_document()))) == point
    assert PrefillMeasurement.from_document(PREFILL).to_document() == PREFILL
    assert DecodeMeasurement.from_document(DECODE).to_document() == DECODE


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
