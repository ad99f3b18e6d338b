"""The configuration that is measured."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from dynaplan.lab.profiling.measured_config import Phase, engine_name, measured_config, splits_layers
from dynaplan.util.errors import ConfigError

DISAGGREGATED: dict[str, dict[str, Any]] = {
    "Common": {"model": "m", "engine": "vllm", "block-size": 64, "tensor_parallel_size": 4},
    "Frontend": {"served_model_name": "m", "port": 80, "api-key": "k"},
    "Processor": {"router": "kv", "common-configs": ["model"]},
    "Router": {"router": "kv"},
    "VllmWorker": {
        "remote-prefill": True,
        "conditional-disagg": True,
        "enable_prefix_caching": False,
        "pipeline-parallel-size": 2,
        "common-configs": ["model", "engine", "block-size", "tensor-parallel-size"],
        "ServiceArgs": {"workers": 3, "resources": {"gpu": 8, "cpu": 4}},
    },
    "PrefillWorker": {
        "max-num-batched-tokens": 16384,
        "enable-prefix-caching": True,
        "common-configs": ["model", "engine", "block-size"],
        "ServiceArgs": {"workers": 2, "resources": {"gpu": 1}},
    },
    "Planner": {"policy": "sla", "environment": "kubernetes"},
}


def test_the_users_configuration_stays_as_it_is() -> None:
    before = deepcopy(DISAGGREGATED)
    for phase in Phase:
        measured_config(DISAGGREGATED, phase, 2)
    assert before == DISAGGREGATED


@pytest.mark.parametrize("phase", Phase)
def test_one_worker_without_remote_prefill_is_measured_and_the_planner_leaves_it_alone(phase: Phase) -> None:
    config = measured_config(DISAGGREGATED, phase, 2)
    worker = config["VllmWorker"]
    assert worker["ServiceArgs"]["workers"] == 1
    assert (worker["remote-prefill"], worker["conditional-disagg"]) == (False, False)
    assert config["Planner"] == {"no-operation": True}
    assert config["Processor"]["router"] == "round-robin"
    assert not {"PrefillWorker", "Router"} & config.keys()


def test_prefill_is_measured_with_the_prefill_workers_settings_and_without_prefix_cache() -> None:
    worker = measured_config(DISAGGREGATED, Phase.PREFILL, 1)["VllmWorker"]
    assert worker["max-num-batched-tokens"] == 16384
    assert worker["enable-prefix-caching"] is False


def test_decoding_is_measured_with_the_decode_workers_settings_and_the_prefix_cache() -> None:
    worker = measured_config(DISAGGREGATED, Phase.DECODE, 1)["VllmWorker"]
    assert "max-num-batched-tokens" not in worker
    assert worker["enable_prefix_caching"] is True, (
        "the option keeps its spelling: it must not be there twice"
    )
    assert "enable-prefix-caching" not in worker


def test_the_size_is_the_only_parallelism_that_is_left_and_has_as_many_gpus() -> None:
    config = measured_config(DISAGGREGATED, Phase.DECODE, 2)
    worker = config["VllmWorker"]
    assert worker["tensor-parallel-size"] == 2
    assert worker["ServiceArgs"]["resources"] == {"gpu": 2, "cpu": 4}
    assert "pipeline-parallel-size" not in worker
    assert "tensor_parallel_size" not in config["Common"]


def test_the_frontend_is_nobody_elses() -> None:
    frontend = measured_config(DISAGGREGATED, Phase.DECODE, 1)["Frontend"]
    assert not {"port", "api-key"} & frontend.keys()
    assert frontend["served_model_name"] == "m"
    assert frontend["max-waiting-requests"] >= 2000, "no load may be refused"


def test_an_engine_without_tensor_parallelism_is_measured_as_it_is_configured() -> None:
    config = {"VllmWorker": {"engine": "llamacpp", "ServiceArgs": {"resources": {"gpu": 0.5}}}}
    assert not splits_layers(config)
    worker = measured_config(config, Phase.DECODE, 1)["VllmWorker"]
    assert "tensor-parallel-size" not in worker
    assert worker["ServiceArgs"]["resources"] == {"gpu": 0.5}


@pytest.mark.parametrize(("gpu", "is_ours"), [(None, True), (1, True), (4, True), (0.5, False), (0, False)])
def test_sizes_are_tried_on_whole_gpus_only(gpu: float | None, is_ours: bool) -> None:
    arguments = {"ServiceArgs": {"resources": {"gpu": gpu}}}
    assert splits_layers({"VllmWorker": {"engine": "vllm", **arguments}}) is is_ours


def test_the_engine_may_be_named_among_the_common_options() -> None:
    assert engine_name(DISAGGREGATED) == "vllm"
    assert engine_name({}) == "sim"


def test_a_number_of_gpus_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu is 'many'"):
        splits_layers({"VllmWorker": {"ServiceArgs": {"resources": {"gpu": "many"}}}})
