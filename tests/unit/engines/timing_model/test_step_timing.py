"""A measured profile gives back what was measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.sim.profiles import SHIPPED_DIR, known_profiles, load_profile, timing_for
from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest, EngineSettings
from dynaplan.engines.timing_model.step_timing import MeasuredProfile, hand_off_s
from dynaplan.planner.sizing.queueing.queueing_model import TRANSFER_MS, TRANSFER_MS_PER_TOKEN
from dynaplan.util.errors import ConfigError
from tests.unit.engines.models import step

SHIPPED = sorted(path.stem for path in SHIPPED_DIR.glob("*.json"))


def ttft_ms(options: SimOptions, isl: int) -> float:
    timing, kv_tokens = timing_for(options)
    model = EngineModel(EngineSettings.of(options, kv_tokens), timing)
    model.submit(EngineRequest("a", isl, 1))
    total_s = 0.0
    while not model.is_idle:
        total_s += step(model).duration_s
    return total_s * 1000


# In chunks, one profile is left out: its TTFT is not monotone, and a chunk has no negative cost.
@pytest.mark.parametrize(
    ("name", "budget"),
    [(name, budget) for name in SHIPPED for budget in (2048, 20_000) if budget > 2048 or "tp8" not in name],
)
def test_the_ttft_of_a_prompt_alone_is_the_measured_one_in_however_many_chunks(
    name: str, budget: int
) -> None:
    profile = load_profile(name)
    options = SimOptions(profile=name, context_tokens=20_000, batched_tokens=budget)
    for isl, measured_ms in zip(profile.prefill_isl, profile.prefill_ttft, strict=True):
        assert ttft_ms(options, int(isl)) == pytest.approx(measured_ms, rel=0.01)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_itl_at_a_measured_point_is_the_measured_one(name: str) -> None:
    profile = load_profile(name)
    timing = profile.timing()
    for usage, context, itl_ms in zip(
        profile.x_kv_usage, profile.y_context_length, profile.z_itl, strict=True
    ):
        kv_tokens = usage * profile.max_kv_tokens
        concurrency = kv_tokens / context
        assert timing.decode_ms(concurrency, kv_tokens) == pytest.approx(itl_ms, rel=0.01)  # type: ignore[arg-type]


def test_between_measured_points_the_h200_profile_agrees_with_the_published_interpolation() -> None:
    timing = load_profile("h200_sxm-Llama-3.1-8B-Instruct-FP8").timing()
    assert timing.prefill_ms(3000) == pytest.approx(60.46, rel=0.02)
    assert timing.prefill_ms(1000) == pytest.approx(36.82, rel=0.02)
    assert timing.decode_ms(100, 315_000) == pytest.approx(15.80, rel=0.06)


def test_outside_of_what_was_measured_the_itl_is_that_of_the_edge() -> None:
    profile = load_profile("h200_sxm-Llama-3.1-8B-Instruct-FP8")
    timing = profile.timing()
    assert timing.decode_ms(1, 1.0) == pytest.approx(profile.z_itl[0])
    assert timing.decode_ms(70, 70 * 16_000.0) == pytest.approx(profile.z_itl[-1])


def test_a_batch_that_was_measured_twice_does_not_break_the_surface() -> None:
    profile = MeasuredProfile(
        (100.0, 200.0),
        (5.0, 9.0),
        (1.0, 1.0),
        (0.2, 0.2, 0.4),
        (500.0,) * 3,
        (7.0, 8.0, 10.0),
        (1.0,) * 3,
        1000,
    )
    decode_ms = profile.timing().decode_ms
    assert decode_ms(1, 100.0) == pytest.approx(7.0)
    assert decode_ms(1, 300.0) == pytest.approx(9.0)


def test_a_longer_prompt_never_takes_less_than_a_prompt_measured_before_it() -> None:
    timing = load_profile("h200_sxm-Llama-3.1-8B-Instruct-FP8").timing()
    times = [timing.prefill_ms(isl) for isl in range(0, 30_000, 250)]
    assert all(earlier < later for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("profile", "ttft_3000_ms", "itl_ms"),
    [
        ("mocker", 65.84, 5.75),
        ("h100-bf16", 60.88, 6.40),
        ("a100-bf16", 185.1, 11.6),
        ("h200-bf16", 61.6, 4.93),
    ],
)
def test_fitted_timings_follow_their_polynomials(profile: str, ttft_3000_ms: float, itl_ms: float) -> None:
    timing, kv_tokens = timing_for(SimOptions(profile=profile))
    assert timing.prefill_ms(3000) == pytest.approx(ttft_3000_ms, rel=0.002)
    assert timing.decode_ms(1, 10.0) == pytest.approx(itl_ms, rel=0.005)
    assert kv_tokens > 100_000


def test_the_profile_follows_the_model_and_the_tensor_parallel_size() -> None:
    for size in (2, 4, 8):
        options = SimOptions(model="meta/Llama-3.3-70B", tensor_parallel_size=size)
        expected = load_profile(f"h100_sxm-Llama-3.3-70B-Instruct-FP8-tp{size}")
        assert timing_for(options)[0].prefill_ms(100) == pytest.approx(expected.prefill_ttft[0])


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refusal:
        timing_for(SimOptions(profile="h300"))
    assert "h300" in str(refusal.value)
    assert all(name in str(refusal.value) for name in known_profiles())


def test_a_directory_of_the_profilers_archives_is_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    shipped = load_profile(SHIPPED[-1])
    for part, keys in (("prefill", 3), ("decode", 5)):
        folder = tmp_path / f"selected_{part}_interpolation"
        folder.mkdir()
        fields = list(shipped.__dict__)[:3] if keys == 3 else list(shipped.__dict__)[3:]
        arrays = {name: numpy.atleast_1d(getattr(shipped, name)) for name in fields}
        numpy.savez(folder / "raw_data.npz", **arrays)
    assert load_profile(str(tmp_path)) == shipped


def test_a_directory_of_pre_swept_archives_gives_the_row_of_the_tensor_parallel_size(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    shipped = [load_profile(f"h100_sxm-Llama-3.3-70B-Instruct-FP8-tp{size}") for size in (8, 4)]
    for part, fields in (
        ("prefill", list(shipped[0].__dict__)[:3]),
        ("decode", list(shipped[0].__dict__)[3:]),
    ):
        arrays: dict[str, Any] = {
            name: numpy.array([numpy.atleast_1d(getattr(row, name)) for row in shipped]) for name in fields
        }
        numpy.savez(tmp_path / f"{part}.npz", tp=numpy.array([[8], [4]]), **arrays)
    assert load_profile(str(tmp_path), 4) == shipped[1]
    with pytest.raises(ConfigError, match="tensor-parallel-size is 3"):
        load_profile(str(tmp_path), 3)


def test_a_json_file_is_read_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text((SHIPPED_DIR / f"{SHIPPED[0]}.json").read_text())
    assert load_profile(str(tmp_path / "mine.json")) == load_profile(SHIPPED[0])


@pytest.mark.parametrize(
    "change", [{"z_itl": [1.0]}, {"prefill_ttft": None}, {"max_kv_tokens": 0}, {"max_kv_tokens": 10**400}]
)
def test_a_broken_profile_is_refused_by_name(change: dict[str, Any]) -> None:
    document = json.loads((SHIPPED_DIR / f"{SHIPPED[0]}.json").read_text())
    with pytest.raises(ConfigError, match="mine"):
        MeasuredProfile.from_document({**document, **change}, "mine")


def test_a_hand_off_takes_1_ms_and_2_us_for_each_token() -> None:
    assert hand_off_s(0) == 0.001
    assert hand_off_s(1000) == pytest.approx(0.001 + 0.002048)


def test_the_queueing_model_counts_the_same_in_ms() -> None:
    transfer_ms = TRANSFER_MS + 1000 * TRANSFER_MS_PER_TOKEN
    assert transfer_ms == pytest.approx(1000 * hand_off_s(1000))
