"""What the planner of a served graph knows of its workers, and what it makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dynaplan.config.model_entries import with_worker_sections
from dynaplan.config.planner import settings_in_graph, settings_of_models
from dynaplan.config.service_config import CONFIG_VARIABLE, ServiceConfig
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.planner.model import PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.sla_policy import PerformanceModel
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.util.errors import ConfigError
from tests.unit.planner.rules.situations import interval
from tests.unit.planner.rules.targets import H200, foreseen, traffic

PLANNER = {"policy": "sla", "profile-results-dir": H200, "itl": 20, "adjustment-interval": 10}


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield
    ServiceConfig.reset()


def served(monkeypatch: pytest.MonkeyPatch, planner: dict[str, Any] | None = None, **sections: Any) -> Any:
    """The settings of a planner in a process to which ``serve`` handed these sections down."""
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps(sections))
    ServiceConfig.reset()
    return settings_in_graph({**PLANNER, **(planner or {})}, "ns", ServiceConfig.get_instance())


def planned_decode_workers(settings: PlannerSettings) -> int:
    model: PerformanceModel = build_sla_model(settings)
    load = {"traffic": traffic(12.0), "foresight": foreseen([12.0] * 4)}
    now = replace(interval(prefill=2, decode=2), **load)  # type: ignore[arg-type]  # told by their names
    _, decision = decide(settings, PlannerState(), now, model)
    return decision.desired.decode


def test_workers_with_few_request_slots_are_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (
        planned_decode_workers(served(monkeypatch, VllmWorker={"engine": "sim", "max_num_seqs": slots}))
        for slots in (8, 256)
    )
    assert few > many


def test_what_the_planner_is_told_itself_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = {"VllmWorker": {"max-num-seqs": 8, "max-num-batched-tokens": 4096}, "Frontend": {"router": "kv"}}
    settings = served(monkeypatch, {"decode-max-num-seqs": 64, "router": "round-robin"}, **worker)
    assert (settings.decode_max_num_seqs, settings.decode_step_limit_tokens) == (64, 4096)
    assert settings.router == "round-robin"


def test_common_options_and_other_services_are_read_as_the_workers_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = served(
        monkeypatch,
        {"decode-component": "Decoder"},
        Common={"max-model-len": 4096, "engine": "vllm", "num-gpu-blocks-override": 1000, "block-size": 16},
        Decoder={"common-configs": ["max-model-len", "engine", "num-gpu-blocks-override", "block-size"]},
        PrefillWorker={"max-num-batched-tokens": 2048, "max-concurrent-prefills": 7},
        Processor={"router": "round-robin"},
        Router={"router": "least_loaded"},
    )
    assert (settings.max_model_len, settings.decode_kv_total_tokens) == (4096, 16_000)
    assert (settings.prefill_step_limit_tokens, settings.max_concurrent_prefills) == (2048, 7)
    assert settings.router == "least-loaded", "the Router's own word is stronger than the Processor's"
    service = build_sla_model(settings).service
    assert not service.is_evenly_routed
    assert service.decode.kv_tokens == 16_000
    assert service.prefill is not None
    assert (service.prefill.concurrent_prefills, service.prefill.settings.batched_tokens) == (7, 2048)


@pytest.mark.parametrize(
    ("engine", "options", "slots"),
    [
        ("vllm", {"max-num-seqs": 32}, 32),
        ("sglang", {"max-running-requests": 48}, 48),
        ("sglang", {"max-num-seqs": 24}, 24),
        ("trtllm", {"max-batch-size": 16}, 16),
        ("llamacpp", {"parallel": 2}, 2),
        ("llamacpp", {}, 4),
        ("vllm", {}, None),
    ],
)
def test_every_engine_tells_its_request_slots_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, engine: str, options: dict[str, Any], slots: int | None
) -> None:
    assert served(monkeypatch, VllmWorker={"engine": engine, **options}).decode_max_num_seqs == slots


@pytest.mark.parametrize(
    "worker",
    [
        {"engine": "vllm", "max-model-len": "32k", "max-num-batched-tokens": 128},
        {"engine": "vllm", "max-model-len": 2_000_000},
        {"engine": "sglang", "max-total-tokens": 1000, "context-length": 4096, "chunked-prefill-size": -1},
        {"engine": "vllm", "max-num-seqs": 10_000},
        {"engine": "one of tomorrow", "max-num-seqs": None},
    ],
)
@pytest.mark.parametrize("profile", [H200, "a100-bf16"])
def test_no_option_that_an_engine_takes_ends_the_planner(
    monkeypatch: pytest.MonkeyPatch, worker: dict[str, Any], profile: str
) -> None:
    settings = served(
        monkeypatch, {"profile-results-dir": profile}, VllmWorker=worker, PrefillWorker=dict(worker)
    )
    assert build_sla_model(settings).service.decode.settings.context_tokens >= 1


def test_a_planner_without_a_graph_plans_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = served(monkeypatch)
    assert settings.to_options() == PlannerSettings.from_options({**PLANNER, "namespace": "ns"}).to_options()


def test_what_cannot_be_said_of_a_worker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="decode-max-num-seqs"):
        served(monkeypatch, {"decode-max-num-seqs": 0})


@pytest.mark.parametrize(
    ("planner", "worker", "deadline_ms"),
    [
        ({"ttft": 700}, {"remote-prefill": True}, 700.0),
        ({"ttft": 700}, {"remote-prefill": True, "prefill-deadline": 0}, 0.0),
        ({"ttft": 700, "prefill-deadline": 900}, {"remote-prefill": True}, 900.0),
        ({"policy": "load"}, {"remote-prefill": True}, None),
        ({"ttft": 700}, {}, None),
    ],
)
def test_the_planner_knows_the_deadline_that_frontends_derive_of_it(
    monkeypatch: pytest.MonkeyPatch,
    planner: dict[str, Any],
    worker: dict[str, Any],
    deadline_ms: float | None,
) -> None:
    settings = served(monkeypatch, planner, VllmWorker=worker)
    assert settings.prefill_deadline_ms == deadline_ms


def test_a_namespace_that_is_not_the_graphs_is_refused_and_the_graphs_own_is_not() -> None:
    assert settings_in_graph({"namespace": "ns"}, "ns", {}).namespace == "ns"
    assert settings_in_graph({}, "ns", {}).namespace == "ns"
    with pytest.raises(ConfigError, match=r"Planner.namespace is 'other', but the graph runs in 'ns'"):
        settings_in_graph({"namespace": "other"}, "ns", {})


MODELS = {
    "Planner": {"adjustment-interval": 10},
    "Models": {
        "ant": {"engine": "sim", "max-workers": 3, "Planner": {"policy": "sla", "ttft": 300}},
        "bee": {"engine": "sim", "tensor-parallel-size": 2, "Planner": {"max-gpu-budget": 6}},
        "cow": {"engine": "sim"},
    },
}


def of_models(**planner: object) -> dict[str, PlannerSettings]:
    models: dict[str, dict[str, object]] = {**MODELS["Models"], "ant": {"Planner": planner}}  # type: ignore[dict-item]
    return settings_of_models(with_worker_sections({"Models": models}), "ns")


def test_a_model_has_a_planner_about_it_alone_with_what_is_said_of_all_planners() -> None:
    found = settings_of_models(with_worker_sections(MODELS), "ns")  # type: ignore[arg-type]
    assert found.keys() == {"ant", "bee"}
    ant, bee = found["ant"], found["bee"]
    assert (ant.served_model_name, ant.decode_component, ant.namespace) == ("ant", "ant", "ns")
    assert (ant.policy, ant.ttft_ms, bee.policy) == ("sla", 300, "load")
    assert (ant.adjustment_interval_s, bee.adjustment_interval_s) == (10, 10)
    assert (ant.max_gpu_budget, bee.max_gpu_budget, bee.decode_engine_num_gpu) == (3, 6, 2)


@pytest.mark.parametrize(
    ("planner", "said"),
    [
        ({"polcy": "sla"}, "Models.ant: Planner has no option 'polcy'"),
        ({"policy": "slow"}, "Models.ant: Planner.policy is 'slow'"),
        ({"served-model-name": "x"}, "Models.ant: Planner.served-model-name is 'x'"),
        ({"environment": "kubernetes"}, "Models.ant: Planner.environment is 'kubernetes'"),
        ({"min-gpu-budget": 9}, "Models.ant: min-gpu-budget is 9"),
    ],
)
def test_what_is_wrong_with_the_planner_of_a_model_is_said_with_its_name(
    planner: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        of_models(**planner)


@pytest.mark.parametrize(
    ("engine", "profile"),
    [
        ({}, H200),
        ({"model": "some/70B"}, "h100_sxm-Llama-3.3-70B-Instruct-FP8"),
        ({"model": "some/70B", "profile": "mocker"}, "mocker"),
        ({"engine": "vllm", "model": "some/70B"}, PlannerSettings.profile_results_dir),
    ],
)
def test_a_simulated_engine_is_planned_for_by_its_own_profile_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], profile: str
) -> None:
    section = {"VllmWorker": engine, "Planner": {}}
    assert served(monkeypatch, {"profile-results-dir": None}, **section).profile_results_dir == profile
    assert served(monkeypatch, **section).profile_results_dir == H200


def test_the_planner_of_a_disaggregated_model_knows_both_its_pools() -> None:
    models = {
        "ant": {
            "engine": "sim",
            "tensor-parallel-size": 2,
            "prefill": {"tensor-parallel-size": 1, "max-num-batched-tokens": 4096, "max-workers": 2},
            "max-workers": 2,
            "Planner": {"policy": "sla", "ttft": 300},
        }
    }
    ant = settings_of_models(with_worker_sections({"Models": models}), "ns")["ant"]
    assert (ant.decode_component, ant.prefill_component) == ("ant", "ant-prefill")
    assert (ant.decode_engine_num_gpu, ant.prefill_engine_num_gpu, ant.max_gpu_budget) == (2, 1, 6)
    assert (ant.prefill_step_limit_tokens, ant.prefill_deadline_ms) == (4096, 300)


def test_a_length_for_local_prompts_is_set_only_where_frontends_ask_for_it() -> None:
    given = {"policy": "sla", "profile-results-dir": "mocker", "max-local-prefill-length": "auto"}
    with pytest.raises(ConfigError, match="no prompt is local"):
        settings_in_graph(given, "ns", {"Frontend": {"remote-prefill": True}})
    config = {"Frontend": {"remote-prefill": True, "conditional-disagg": True}}
    assert settings_in_graph(given, "ns", config).max_local_prefill_length == "auto"
