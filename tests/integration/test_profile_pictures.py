"""The pictures of a sweep, drawn as PNG too by the real matplotlib."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.lab.profiling.results import write_results
from tests.unit.lab.profiling.known import TIMINGS, recommended, swept

pytest.importorskip("matplotlib", reason="an extra: pip install matplotlib")

PICTURES = {
    "prefill_performance.png",
    "decode_performance.png",
    "cost_per_request.png",
    "selected_prefill_interpolation/prefill_ttft_interpolation.png",
    "selected_prefill_interpolation/prefill_throughput_interpolation.png",
    "selected_decode_interpolation/decode_itl_interpolation.png",
    "selected_decode_interpolation/decode_throughput_interpolation.png",
}


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    measured = [swept(TIMINGS["a100-bf16"]), swept(TIMINGS["h200-bf16"], size=2)]
    files = write_results(tmp_path, recommended(measured, 100, 15), measured, {})
    drawn = [file for file in files if file.suffix == ".png"]
    assert {str(file.relative_to(tmp_path)) for file in drawn} == PICTURES
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn)
