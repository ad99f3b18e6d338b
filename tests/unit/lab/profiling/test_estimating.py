"""``profile-sla --estimate``: from a configuration to files that say what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.sim.profiles import load_profile, profile_origin
from dynaplan.lab.profiling.estimating import AiConfigurator, EstimatedEngine, estimated_engine
from dynaplan.lab.profiling.recommendation import Goal
from dynaplan.lab.profiling.session import ProfileOptions, ProfileResult, profile
from dynaplan.util.errors import ConfigError
from tests.unit.lab.profiling.test_session import Reported

KV_TOKENS = 400_000
WORKER = {"engine": "vllm", "model": "organization/name", "max-model-len": 8192}
ORIGIN = "estimated, not measured: by aiconfigurator 0.12.0, of organization/name on h100_sxm with vllm"


class Operators(AiConfigurator):
    """Without the library: it refuses sizes without tables, too, here from 8 GPUs on."""

    def __init__(self) -> None:
        super().__init__("organization/name", "h100_sxm", "vllm", "0.12.0", api=None)

    def prefill_ms(self, isl_tokens: int, tensor_parallel_size: int) -> float:
        if tensor_parallel_size >= 8:
            raise ConfigError("aiconfigurator cannot estimate it", hint="Without --estimate ...")
        return isl_tokens / 10 / tensor_parallel_size

    def decode_ms(self, isl_tokens: int, osl_tokens: int, requests: int, tensor_parallel_size: int) -> float:
        return 5.0 + requests


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The models, GPUs and engines that times were asked of."""
    names: list[tuple[str, ...]] = []

    def operator_times(*each: str) -> Operators:
        names.append(each)
        return Operators()

    monkeypatch.setattr("dynaplan.lab.profiling.estimating.find_aiconfigurator", operator_times)
    return names


async def estimated(directory: Path, reported: Reported, gpus: int, **worker: Any) -> ProfileResult:
    engine = EstimatedEngine("organization/name", "h100_sxm", Operators())
    options = ProfileOptions(
        config={"VllmWorker": {**WORKER, **worker}},
        output_dir=directory,
        goal=Goal(1000, 200, 100.0, 20.0),
        gpus=gpus,
        prefill_granularity=4,
        max_kv_tokens=KV_TOKENS,
        origin=engine.origin,
    )
    return await profile(options, reported, engine.run_stage)


async def test_the_files_are_a_profile_that_says_that_it_was_not_measured(tmp_path: Path) -> None:
    """``--gpus`` may be more than the box has: nothing is started."""
    reported = Reported()
    profiled = await estimated(tmp_path / "out", reported, gpus=4)
    assert {each.tensor_parallel_size for each in profiled.measurements} == {1, 2, 4}
    first = profiled.measurements[0]
    assert [each.ttft_ms for each in first.prefill] == [each.isl_tokens / 10 for each in first.prefill]
    assert {each.itl_ms - each.concurrency for each in first.decode} == {5.0}
    read = load_profile(str(tmp_path / "out"))
    assert read == profiled.recommendation.profile
    assert read.origin == ORIGIN
    assert profile_origin(SimOptions(profile=str(tmp_path / "out"))) == ORIGIN
    assert profiled.recommendation.notes[-1] == ORIGIN
    assert json.loads((tmp_path / "out" / "decode_raw_data.json").read_text())["origin"] == ORIGIN
    assert "prefill TP 1: 1 points estimated" in reported.lines


def test_measured_profiles_and_formulas_have_nothing_to_say() -> None:
    assert profile_origin(SimOptions()) == profile_origin(SimOptions(profile="mocker")) == ""


async def test_sizes_that_cannot_be_estimated_are_left_out(tmp_path: Path) -> None:
    reported = Reported()
    profiled = await estimated(tmp_path / "out", reported, gpus=8)
    assert {each.tensor_parallel_size for each in profiled.measurements} == {1, 2, 4}
    assert any("TP 8 is left out: aiconfigurator cannot estimate it" in line for line in reported.lines)


async def test_the_worker_s_options_bound_kv_cache_context_and_requests(tmp_path: Path) -> None:
    given = {"max-model-len": 4096, "max-num-seqs": 16}
    bounded = await estimated(tmp_path / "a", Reported(), gpus=1, **given)
    assert max(each.concurrency for each in bounded.measurements[0].decode) == 16
    assert 3000 < max(bounded.recommendation.profile.prefill_isl) < 4096
    assert bounded.recommendation.profile.max_kv_tokens == KV_TOKENS


def test_the_simulated_engine_is_estimated_as_the_one_that_it_stands_for(
    asked: list[tuple[str, ...]],
) -> None:
    config = {"VllmWorker": {**WORKER, "engine": "sim"}}
    assert estimated_engine(config, "h100_sxm", KV_TOKENS).origin == ORIGIN
    assert asked == [("organization/name", "h100_sxm", "vllm")]


@pytest.mark.parametrize(
    ("worker", "gpu_type", "kv_tokens", "missing"),
    [
        ({}, "l4", KV_TOKENS, r"VllmWorker\.model"),
        (WORKER, None, KV_TOKENS, "--gpu-type"),
        (WORKER, "l4", None, "--max-kv-tokens"),
    ],
)
def test_what_an_estimate_lacks_is_named(
    worker: dict[str, Any], gpu_type: str | None, kv_tokens: int | None, missing: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        estimated_engine({"VllmWorker": worker}, gpu_type, kv_tokens)
    assert missing.replace("\\", "") in f"{caught.value} {caught.value.hint}"
