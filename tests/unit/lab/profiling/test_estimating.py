"""``profile-sla --estimate``: from a configuration and a config.json to files that say what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.sim.profiles import load_profile, timing_origin
from dynaplan.lab.profiling import pictures
from dynaplan.lab.profiling.estimating import AICONFIGURATOR, EstimatedEngine, estimated_engine
from dynaplan.lab.profiling.selection import Goal
from dynaplan.lab.profiling.session import Profiled, ProfileOptions, profile
from dynaplan.planner import factory
from dynaplan.util.errors import ConfigError
from tests.unit.lab.profiling.test_model_shape import LLAMA_8B
from tests.unit.lab.profiling.test_session import Said


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "draw", lambda *_: [])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    return directory


def engine(model: Any, gpu_type: str | None = "h100_sxm", **options: Any) -> EstimatedEngine:
    return estimated_engine({"VllmWorker": {"model": str(model), **options}}, gpu_type, None, ())


async def estimated(
    directory: Path, found: EstimatedEngine, said: Any = None, gpus: int = 4, **options: Any
) -> Profiled:
    config = {"VllmWorker": {"engine": "vllm", **options}}
    asked = ProfileOptions(
        config=config,
        output_dir=directory,
        goal=Goal(1000, 200, 100.0, 20.0),
        gpus=gpus,
        prefill_granularity=4,
        origin=found.origin,
    )
    return await profile(asked, said or Said(), found.run_stage)


async def test_the_files_are_a_profile_that_says_that_it_was_not_measured(
    tmp_path: Path, model: Path
) -> None:
    """``--gpus`` may be more than the box has: nothing is started."""
    found, said = engine(model), Said()
    profiled = await estimated(tmp_path / "out", found, said, gpus=8)
    assert {each.tensor_parallel_size for each in profiled.measurements} == {1, 2, 4, 8}
    read = load_profile(str(tmp_path / "out"))
    assert read == profiled.recommendation.profile
    assert read.origin == found.origin
    assert timing_origin(SimOptions(profile=str(tmp_path / "out"))) == found.origin
    assert profiled.recommendation.notes[-1] == found.origin
    assert json.loads((tmp_path / "out" / "decode_raw_data.json").read_text())["origin"] == found.origin
    assert "prefill TP 1: 1 points estimated" in said.lines


def test_measured_profiles_and_formulas_have_nothing_to_say() -> None:
    assert timing_origin(SimOptions()) == timing_origin(SimOptions(profile="mocker")) == ""


async def test_sizes_that_cannot_be_are_left_out(tmp_path: Path, model: Path) -> None:
    said = Said()
    profiled = await estimated(
        tmp_path / "out", engine(model, "a10"), said, gpus=64, **{"gpu-memory-utilization": 0.7}
    )
    assert {each.tensor_parallel_size for each in profiled.measurements} == {2, 4, 8, 16, 32}
    assert any("TP 1 is left out: " in line and "GB of a10" in line for line in said.lines)
    assert any("32 attention heads cannot be split over 64 GPUs" in line for line in said.lines)


async def test_the_worker_s_options_bound_kv_cache_context_and_requests(tmp_path: Path, model: Path) -> None:
    usual = await estimated(tmp_path / "a", engine(model), gpus=1)
    given = {
        "gpu-memory-utilization": 0.5,
        "max-model-len": 4096,
        "max-num-seqs": 16,
        "kv-cache-dtype": "fp8",
    }
    fp8: dict[str, Any] = {"kv-cache-dtype": "fp8"}
    bounded = await estimated(tmp_path / "b", engine(model), gpus=1, **given)
    halved = await estimated(tmp_path / "c", engine(model), gpus=1, **fp8)
    most = [each.recommendation.profile for each in (usual, bounded)]
    assert max(each.concurrency for each in bounded.measurements[0].decode) == 16
    assert max(most[1].prefill_isl) < 4096 < max(most[0].prefill_isl)
    assert most[1].max_kv_tokens < most[0].max_kv_tokens
    assert halved.recommendation.profile.max_kv_tokens // 2 == most[0].max_kv_tokens


def test_the_gpu_is_the_box_s_unless_it_is_named(model: Path) -> None:
    config = {"VllmWorker": {"model": str(model)}}
    names = ("simulated", "NVIDIA L40S")
    assert estimated_engine(config, None, None, names).gpu_type == "l40s"
    assert estimated_engine(config, "l4", None, names).gpu_type == "l4"
    with pytest.raises(ConfigError, match="no GPU of this box has a data sheet") as caught:
        estimated_engine(config, None, None, ("simulated",))
    assert "--gpu-type" in str(caught.value.hint)


def test_the_model_is_named_as_clients_name_it(model: Path) -> None:
    config = {"Frontend": {"served_model_name": "mine"}, "VllmWorker": {"model": "organization/name"}}
    for place in (model, model / "config.json"):
        assert estimated_engine(config, "l4", place, ()).model == "mine"
    assert estimated_engine({}, "l4", model, ()).model == "llama"


@pytest.mark.parametrize("text", ["[]", "{", "\0"])
def test_a_config_json_that_cannot_be_read_is_named(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=str(model / "config.json")):
        engine(model)


def test_a_model_that_is_not_here_needs_its_config_json(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"VllmWorker\.model is 'organization/name'") as caught:
        engine("organization/name")
    assert "--model-config" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="--model-config is "):
        estimated_engine({}, "l4", tmp_path, ())


class Operators:
    """Times that are told from a formula's: a tenth of the prompt, and the number of requests."""

    backend, version = "vllm", "0.12.0"

    def prefill_ms(self, isl_tokens: int, tensor_parallel_size: int) -> float:
        return isl_tokens / 10 / tensor_parallel_size

    def decode_ms(self, isl_tokens: int, osl_tokens: int, requests: int, tensor_parallel_size: int) -> float:
        return 5.0 + requests


async def test_aiconfigurator_estimates_the_points_where_it_is_asked_to(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def operator_times(*names: str) -> Operators:
        asked.append(names)
        return Operators()

    monkeypatch.setattr(factory, "operator_times", operator_times)
    config = {"VllmWorker": {"model": str(model), "engine": "sim"}}
    found = estimated_engine(config, "h100_sxm", None, (), AICONFIGURATOR)
    assert asked == [(str(model), "h100_sxm", "vllm")]
    assert found.origin == (
        f"estimated, not measured: by aiconfigurator 0.12.0, of {model} on h100_sxm with vllm"
    )
    profiled = await estimated(tmp_path / "out", found, gpus=1)
    (measured,) = profiled.measurements
    assert [each.ttft_ms for each in measured.prefill] == [each.isl_tokens / 10 for each in measured.prefill]
    assert {each.itl_ms - each.concurrency for each in measured.decode} == {5.0}
    assert load_profile(str(tmp_path / "out")).origin == found.origin
