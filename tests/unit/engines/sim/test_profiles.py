"""Profiles of the first version of Dynamo's profiler, and the check of the simulated engine's options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from dynaplan.engines.sim.kind import KIND
from dynaplan.engines.sim.profiles import load_profile
from dynaplan.util.errors import ConfigError

KV_TOKENS = 200_000
CONTEXTS = (350, 2997, 8291)
LENGTHS = {100: 20.0, 1100: 30.0, 4100: 80.0, 9100: 190.0}


def early(directory: Path, size: int = 2, last_size: int = 4, has_throughput: bool = True) -> Path:
    """What it wrote for this size; ``last_size`` is the last one that it tried."""
    points = [
        (context * requests / KV_TOKENS, context, 4.0 + requests / 10, requests * 99.0)
        for context in CONTEXTS
        for requests in range(1, KV_TOKENS // (context + 250), 10)
    ]
    names = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")[: 4 if has_throughput else 3]
    arrays = {
        name: numpy.array(column) for name, column in zip(names, zip(*points, strict=True), strict=False)
    }
    decode = directory / f"decode_tp{size}_interpolation"
    decode.mkdir()
    numpy.savez(decode / f"decode_tp{last_size}_data.npz", **arrays)
    for isl, ttft_ms in LENGTHS.items():
        run = directory / f"prefill_tp{size}_interpolation" / f"gap_isl{isl}" / "m-openai-chat-concurrency1"
        run.mkdir(parents=True)
        result = {"time_to_first_token": {"unit": "ms", "avg": ttft_ms}}
        (run / "profile_export_genai_perf.json").write_text(json.dumps(result))
    return directory


def test_both_halves_are_read_and_the_size_of_the_kv_cache_follows_from_the_points(tmp_path: Path) -> None:
    profile = load_profile(str(early(tmp_path)), 2)
    assert profile.max_kv_tokens == KV_TOKENS
    assert profile.prefill_isl == tuple(LENGTHS)
    assert profile.prefill_ttft == tuple(LENGTHS.values())
    assert profile.prefill_thpt_per_gpu[-1] == pytest.approx(9100 / 190 * 1000 / 2)
    assert (profile.z_itl[0], profile.z_thpt_per_gpu[0]) == (4.1, 99.0)
    assert profile.timing()


def test_throughput_that_was_not_written_is_requests_over_itl_for_each_gpu(tmp_path: Path) -> None:
    profile = load_profile(str(early(tmp_path, has_throughput=False)), 2)
    assert profile.z_thpt_per_gpu[1] == pytest.approx(11 / 5.1 * 1000 / 2)


def test_the_only_size_is_taken_and_of_several_the_one_that_is_asked_for(tmp_path: Path) -> None:
    assert load_profile(str(early(tmp_path, size=2)), 1).max_kv_tokens == KV_TOKENS
    early(tmp_path, size=4)
    halved = 9100 / 190 * 1000 / 4
    assert load_profile(str(tmp_path), 4).prefill_thpt_per_gpu[-1] == pytest.approx(halved)
    with pytest.raises(ConfigError, match="tensor-parallel-size is 8") as raised:
        load_profile(str(tmp_path), 8)
    assert raised.value.hint == "Expected one of: 2, 4."


@pytest.mark.parametrize("lost", ["*_data.npz", "gap_isl*/**/profile_export_genai_perf.json"])
def test_a_half_whose_files_are_lost_is_an_error_that_names_them(tmp_path: Path, lost: str) -> None:
    for path in early(tmp_path).glob(f"*_interpolation/{lost}"):
        path.unlink()
    with pytest.raises(ConfigError, match="cannot be read") as raised:
        load_profile(str(tmp_path), 2)
    assert lost in str(raised.value)


def test_the_check_raises_what_making_the_engine_would() -> None:
    KIND.check({"speedup-ratio": 2}, 1)
    with pytest.raises(ConfigError, match="speedup-ratio"):
        KIND.check({"speedup-ratio": -1}, 1)
    for profile in ("no-such-profile", "~nobody-here/profile"):
        with pytest.raises(ConfigError, match="does not exist"):
            KIND.check({"profile": profile}, 1)
