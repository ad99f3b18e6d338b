"""Which configurations are refused, with which words, and which are only remarked upon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphs
from dynaplan.graph.config import read_config
from dynaplan.graph.validation import unused_common, validate_config
from dynaplan.sdk import Graph, load_graph
from dynaplan.util.errors import ConfigError


@pytest.fixture(scope="module")
def disagg() -> Graph:
    return load_graph("graphs.disagg:Frontend", Path(graphs.__file__).parents[1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"VlmWorker": {}}, r"(?s)VlmWorker: no such service.*'VllmWorker'"),
        ({"vllmworker": {}}, r"(?s)vllmworker: no such service.*'VllmWorker'"),
        ({"common": {}}, r"(?s)common: no such service.*'Common'"),
        ({"Zebra": {}}, r"(?s)Zebra: no such service.*Known: .*Frontend"),
        (
            {"VllmWorker": {"max-model-length": 1}},
            r"(?s)VllmWorker.max-model-length: unknown.*'max-model-len'",
        ),
        (
            {"VllmWorker": {"max_model_length": 1}},
            r"(?s)VllmWorker.max_model_length: unknown.*'max-model-len'",
        ),
        ({"VllmWorker": {"qqqqq": 1}}, "VllmWorker.qqqqq: unknown option"),
        (
            {"VllmWorker": {"block-size": "big"}},
            "VllmWorker.block-size = 'big': expected a whole number, 1 or more",
        ),
        (
            {"VllmWorker": {"block-size": -64}},
            "VllmWorker.block-size = -64: expected a whole number, 1 or more",
        ),
        ({"VllmWorker": {"block-size": True}}, "VllmWorker.block-size = True: expected a whole number"),
        (
            {"VllmWorker": {"enforce-eager": "yes"}},
            "VllmWorker.enforce-eager = 'yes': expected true or false",
        ),
        (
            {"VllmWorker": {"speedup-ratio": float("nan")}},
            "VllmWorker.speedup-ratio = nan: expected a number",
        ),
        ({"VllmWorker": {"model": 8}}, "VllmWorker.model = 8: expected text"),
        (
            {"VllmWorker": {"kv-transfer-config": "x"}},
            "VllmWorker.kv-transfer-config = 'x': expected a mapping",
        ),
        ({"Processor": {"router": "robin"}}, "Processor.router = 'robin': expected one of round-robin"),
        ({"Processor": {"router": ["kv"]}}, "Processor.router = "),
        ({"Planner": {"max-gpu-budget": "many"}}, "Planner.max-gpu-budget = 'many': expected a whole number"),
        ({"Planner": {"no-opeartion": True}}, r"(?s)Planner.no-opeartion: unknown.*'no-operation'"),
        ({"VllmWorker": 3}, "VllmWorker = 3: expected a mapping"),
        ({"VllmWorker": {"ServiceArgs": 3}}, "VllmWorker.ServiceArgs = 3: expected a mapping"),
        (
            {"VllmWorker": {"ServiceArgs": {"worker": 3}}},
            r"(?s)VllmWorker.ServiceArgs.worker: unknown.*'workers'",
        ),
        (
            {"VllmWorker": {"ServiceArgs": {"resources": {"gpus": 3}}}},
            r"(?s)resources.gpus: unknown key.*'gpu'",
        ),
        ({"VllmWorker": {"ServiceArgs": {"resources": 3}}}, "resources = 3: expected a mapping"),
        ({"VllmWorker": {"ServiceArgs": {"envs": ["A=1"]}}}, "envs = .*: expected a mapping"),
        ({"VllmWorker": {"ServiceArgs": {"envs": {"A": True}}}}, "envs.A = True: expected text"),
        ({"VllmWorker": {"ServiceArgs": {"envs": {"A=B": "x"}}}}, "envs.A=B: not a name"),
        ({"VllmWorker": {"common-configs": "model"}}, "common-configs = 'model': expected a list"),
        (
            {"Common": {"block-size": "x"}, "VllmWorker": {"common-configs": ["block-size"]}},
            r"VllmWorker.block-size \(from Common\) = 'x': expected a whole number",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_naming_key_value_and_what_was_expected(
    disagg: Graph, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_config(disagg, config)


def test_a_stock_service_that_the_graph_lacks_is_a_warning(disagg: Graph) -> None:
    warnings = validate_config(disagg, {"Router": {"anything": 1}, "SGLangWorker": {}})
    assert [warning.partition(":")[0] for warning in warnings] == ["Router", "SGLangWorker"]


def test_a_common_key_that_does_not_exist_is_a_warning_with_the_nearest(disagg: Graph) -> None:
    config = {"Common": {"blok-size": 64}, "VllmWorker": {"common-configs": ["block-size"]}}
    (warning,) = validate_config(disagg, config)
    assert "Common has no 'block-size'. Did you mean 'blok-size'?" in warning


def test_what_has_no_effect_is_said(disagg: Graph) -> None:
    config = {
        "Processor": {"ServiceArgs": {"workers": 2}},
        "Frontend": {"ServiceArgs": {"dynamo": {"namespace": "x"}}},
    }
    in_process, dynamo = validate_config(disagg, config)
    assert "Processor runs in Frontend's process" in in_process
    assert "use --namespace" in dynamo


@pytest.mark.parametrize("key", ["max-model-len", "max_model_len"])
def test_both_spellings_of_an_option_and_null_are_right(disagg: Graph, key: str) -> None:
    assert (
        validate_config(disagg, {"VllmWorker": {key: 8192, "seed": None, "ServiceArgs": {"envs": None}}})
        == []
    )


REAL = {"engine": "vllm"}


@pytest.mark.parametrize(
    "config",
    [
        {"VllmWorker": {**REAL, "stream-interval": 5}},
        {"VllmWorker": {**REAL, "qqqqq_zzzz": 1}},
        {"Common": REAL, "VllmWorker": {"common-configs": ["engine"], "stream-interval": 5}},
        {"PrefillWorker": {"engine": "llamacpp", "stream-interval": [1, 2]}},
    ],
)
def test_an_option_that_is_not_known_here_goes_to_a_real_engine(
    disagg: Graph, config: dict[str, Any]
) -> None:
    assert validate_config(disagg, config) == []


@pytest.mark.parametrize("engine", ["sim", None])
def test_the_simulated_engine_has_no_options_but_those_that_are_known(
    disagg: Graph, engine: str | None
) -> None:
    with pytest.raises(ConfigError, match=r"VllmWorker.stream-interval: unknown option"):
        validate_config(disagg, {"VllmWorker": {"engine": engine, "stream-interval": 5}})


def test_the_engine_of_one_service_frees_no_other(disagg: Graph) -> None:
    with pytest.raises(ConfigError, match=r"PrefillWorker.stream-interval: unknown option"):
        validate_config(disagg, {"VllmWorker": REAL, "PrefillWorker": {"stream-interval": 5}})
    with pytest.raises(ConfigError, match=r"Frontend.stream-interval: unknown option"):
        validate_config(disagg, {"Frontend": {"stream-interval": 5}, "VllmWorker": REAL})


@pytest.mark.parametrize("key", ["max-nm-seqs", "max_num_seq"])
def test_a_slip_that_goes_to_a_real_engine_is_remarked_upon(disagg: Graph, key: str) -> None:
    (warning,) = validate_config(disagg, {"VllmWorker": {**REAL, key: 1}})
    assert warning == f"VllmWorker.{key} is passed on to vllm as it is; did you mean max-num-seqs?"


def test_a_known_option_keeps_its_type_whatever_the_engine(disagg: Graph) -> None:
    with pytest.raises(ConfigError, match=r"(?s)VllmWorker.hang-timeout = -1: expected a number.*never"):
        validate_config(disagg, {"VllmWorker": {**REAL, "hang-timeout": -1}})


@pytest.mark.parametrize(
    ("engine", "effect"), [("sim", "it has no effect"), ("vllm", "vllm gets it as it is")]
)
def test_an_option_of_another_engine_is_remarked_upon(disagg: Graph, engine: str, effect: str) -> None:
    (warning,) = validate_config(disagg, {"VllmWorker": {"engine": engine, "ctx-size": 512}})
    assert warning == f"VllmWorker.ctx-size is an option of llamacpp; {effect}"
    assert validate_config(disagg, {"VllmWorker": {"engine": "llamacpp", "ctx-size": 512}}) == []


@pytest.mark.parametrize("key", ["two words", "-x", "a=b", ""])
def test_what_no_flag_can_be_called_is_refused(disagg: Graph, key: str) -> None:
    with pytest.raises(ConfigError, match="not a name that an option of vllm can have"):
        validate_config(disagg, {"VllmWorker": {**REAL, key: 1}})


def test_an_override_of_common_that_nobody_takes_is_remarked_upon() -> None:
    config = {"VllmWorker": {"common-configs": ["model", "max_model_len"]}}
    overrides = ["--Common.model=m", "--Common.max-model-len=8", "--Common.modle=m", "--VllmWorker.x=1"]
    overrides.append("--Common.served-model-name=public")
    (warning,) = unused_common(config, overrides)
    assert warning == "Common.modle has no effect: no service lists it in its common-configs"


def test_a_service_without_an_option_table_takes_any_key() -> None:
    graph = load_graph("graphs.hello_world:Frontend", Path(graphs.__file__).parents[1])
    assert validate_config(graph, {"Backend": {"message": "x", "whatever": [1]}}) == []


ORIGINALS = Path(__file__).parents[2] / "fixtures" / "original_configs"


@pytest.mark.parametrize("name", ["agg", "agg_router", "disagg", "disagg_router"])
@pytest.mark.parametrize("file", sorted(ORIGINALS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_yaml_of_the_original_loads_unchanged_with_every_graph(name: str, file: Path) -> None:
    from dynaplan.graph.resolve import resolve_graph

    graph = load_graph(f"graphs.{name}:Frontend", Path(graphs.__file__).parents[1])
    config = read_config(file)
    running = {service.name for service in graph.services()}
    warned = {warning.partition(":")[0] for warning in validate_config(graph, config)}
    assert warned == set(config) - running - {"Common"}
    spec = resolve_graph(graph, config)
    assert all(service.workers >= 1 for service in spec.services)
