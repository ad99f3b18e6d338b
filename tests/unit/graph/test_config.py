"""The configuration of a graph: read, checked, and resolved to services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import graphs
from dynaplan.config.model_entries import with_worker_sections
from dynaplan.config.overrides import merge_sections, parse_overrides
from dynaplan.graph.config import (
    dry_run_text,
    environment_text,
    find_config_file,
    read_config,
    resolve_graph,
    unused_common_overrides,
    unused_common_values,
    validate_config,
)
from dynaplan.graph.model import ServiceSpec
from dynaplan.sdk import Graph, ServiceConfig, load_graph
from dynaplan.util.errors import ConfigError, GraphError
from tests.fakes.graph_files import Write


def test_the_command_line_wins_over_the_yaml_and_keeps_what_it_does_not_name(write: Write) -> None:
    file = write("c.yaml", "Worker:\n  model: a\n  ServiceArgs: {workers: 1, resources: {gpu: 2}}\n")
    config = read_config(file, ["--Worker.ServiceArgs.workers=3", "--Worker.seed", "7"])
    assert config == {
        "Worker": {"model": "a", "seed": 7, "ServiceArgs": {"workers": 3, "resources": {"gpu": 2}}}
    }


def test_without_a_file_only_the_overrides_count() -> None:
    assert read_config(None) == {}
    assert read_config(None, ["--A.b=1"]) == {"A": {"b": 1}}


def test_the_deployment_variable_takes_the_files_place_and_overrides_still_apply(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DEPLOYMENT_CONFIG", '{"A": {"b": 1, "c": 2}}')
    assert read_config(write("c.yaml", "Z: {x: 1}\n"), ["--A.b=9"]) == {"A": {"b": 9, "c": 2}}
    monkeypatch.setenv("DYN_DEPLOYMENT_CONFIG", "[1, 2]")
    with pytest.raises(ConfigError, match="DYN_DEPLOYMENT_CONFIG, line 1: not a mapping"):
        read_config(None)


def test_a_section_without_a_body_is_empty(write: Write) -> None:
    assert read_config(write("c.yaml", "A:\nB: {x: 1}\n")) == {"A": {}, "B": {"x": 1}}


def test_yaml_anchors_and_merge_keys_work(write: Write) -> None:
    file = write("c.yaml", "A: &a {x: 1}\nB: {<<: *a, y: 2}\n")
    assert read_config(file)["B"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml is empty"),
        ("# only a comment\n", "c.yaml is empty"),
        ("- a\n- b\n", "c.yaml, line 1: not a mapping of services"),
        ("just text\n", "c.yaml, line 1: not a mapping"),
        ("A:\n  x: 1\nB: 7\n", "c.yaml, line 3: B is not a mapping of options"),
        ("A:\n  - x\n", "c.yaml, line 2: A is not a mapping of options"),
        ("1:\n  x: 1\n", "c.yaml, line 1: the key 1 is not text"),
        ("A:\n  x: 1\n  on: 2\n", "c.yaml, line 3: the key on is not text"),
        ("A:\n  s: {3: 1}\n", "c.yaml, line 2: the key 3 is not text"),
        ("A:\n  ? [a]\n  : 1\n", "c.yaml, line 2: the key a collection is not text"),
        ("A: {x: 1}\nA: {y: 2}\n", "c.yaml, line 2: A is a second A"),
        ("A:\n  max-len: 1\n  max_len: 2\n", "c.yaml, line 3: max_len is a second max-len"),
        ("A:\n  x: [1\nB: 2\n", "c.yaml, line 2"),
        ("A: {x: 1}\n---\nB: {}\n", "c.yaml, line 2"),
        ("A: {x: !!python/object:os.system {}}\n", "c.yaml, line 1"),
        ("A: {x: \x00}\n", "c.yaml"),
    ],
)
def test_what_is_not_a_configuration_is_refused_with_file_and_line(
    text: str, message: str, write: Write
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write("c.yaml", text))


def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00A")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_config(tmp_path / "binary.yaml")


def test_a_config_file_is_looked_up_here_and_then_beside_the_graph(write: Write, tmp_path: Path) -> None:
    write("folder/found_graph.py", "from dynaplan.sdk import service\n@service\nclass A: pass\n")
    beside = write("folder/mine.yaml", "A: {}\n")
    graph = load_graph("folder/found_graph.py:A", tmp_path)
    assert find_config_file("mine.yaml", tmp_path, graph) == beside
    here = write("mine.yaml", "A: {}\n")
    assert find_config_file("mine.yaml", tmp_path, graph) == here
    assert find_config_file(str(beside), tmp_path, graph) == beside
    with pytest.raises(ConfigError, match=r"(?s)-f mnie.yaml: no such file in .* and .*'mine.yaml'"):
        find_config_file("mnie.yaml", tmp_path, graph)


def test_a_dry_run_prints_the_configuration_in_the_originals_words() -> None:
    config = {"A": {"model": "m", "size": 1, "api-key": "s3cret"}}
    assert dry_run_text(config) == (
        'Service Configuration:\n{\n  "A": {\n    "model": "m",\n    "size": 1,\n    "api-key": "***"\n  }\n}'
    )
    assert environment_text(config) == (
        "Environment Variable that would be set:\n"
        'DYNAMO_SERVICE_CONFIG={"A": {"model": "m", "size": 1, "api-key": "***"}}'
    )


def test_the_configuration_of_the_environment_is_what_a_service_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", json.dumps({"A": {"x": [1]}}))
    assert ServiceConfig.get_instance() == {"A": {"x": [1]}}


@pytest.mark.parametrize(
    "text",
    ["A: {day: 2024-01-01}", "A:\n  b: [{day: 2024-01-01}]", "A: {k: !!set {x}}", "A: {k: !!binary eA==}"],
)
def test_a_value_that_json_lacks_is_refused_with_its_line(write: Write, text: str) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml, line [12]: .* JSON has no word for\n  Put the value in"):
        read_config(write("c.yaml", f"{text}\n"))


@pytest.mark.parametrize("name", ["agg", "disagg", "agg_router", "disagg_router"])
def test_an_override_of_common_reaches_every_service_that_lists_the_key(name: str) -> None:
    folder = Path(graphs.__file__).parent
    config = ServiceConfig(
        read_config(folder / f"{name}.yaml", ["--Common.model=/m", "--Common.engine=vllm"])
    )
    workers = [each for each in ("VllmWorker", "PrefillWorker") if each in config]
    for worker in workers:
        assert config.require(worker, "model") == "/m"
        assert config.require(worker, "engine") == "vllm"
    assert config.require("Processor", "model") == "/m"


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
        ({"VllmWorker": {"gpu": 2}}, r"(?s)unknown.*Write --VllmWorker.ServiceArgs.resources.gpu=2\."),
        ({"VllmWorker": {"envs": {"A": "1"}}}, r"(?s)unknown.*Its place is VllmWorker.ServiceArgs.envs\."),
        ({"VllmWorker": {"gpus": 2}}, r"(?s)unknown.*Write --VllmWorker.ServiceArgs.resources.gpu=2\."),
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
    (warning,) = unused_common_overrides(config, overrides)
    assert warning == "Common.modle has no effect: no service lists it in its common-configs"


def test_an_override_of_common_for_models_is_remarked_upon_once_and_only_if_no_model_takes_it() -> None:
    overrides = ["--Common.power-saving-after=2h", "--Common.max-num-seqs=8", "--Common.modle=m"]
    config = with_worker_sections(merge_sections({"Models": {"a": {}}}, parse_overrides(overrides)))
    (warning,) = [*unused_common_values(config), *unused_common_overrides(config, overrides)]
    assert warning == "Common.modle has no effect: no engine of these models has such an option"


def test_a_service_without_an_option_table_takes_any_key() -> None:
    graph = load_graph("graphs.hello_world:Frontend", Path(graphs.__file__).parents[1])
    assert validate_config(graph, {"Backend": {"message": "x", "whatever": [1]}}) == []


ORIGINALS = Path(__file__).parents[2] / "fixtures" / "original_configs"


@pytest.mark.parametrize("name", ["agg", "agg_router", "disagg", "disagg_router"])
@pytest.mark.parametrize("file", sorted(ORIGINALS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_yaml_of_the_original_loads_unchanged_with_every_graph(name: str, file: Path) -> None:
    from dynaplan.graph.config import resolve_graph

    graph = load_graph(f"graphs.{name}:Frontend", Path(graphs.__file__).parents[1])
    config = read_config(file)
    running = {service.name for service in graph.services()}
    warned = {warning.partition(":")[0] for warning in validate_config(graph, config)}
    assert warned == set(config) - running - {"Common"}
    spec = resolve_graph(graph, config)
    assert all(service.workers >= 1 for service in spec.services)


WORKER = """
    from dynaplan.sdk import service

    @service(resources={{"gpu": "1"}}, workers=2, envs={{"A": "decorator", "B": "kept"}}, {more})
    class Worker: pass
"""


@pytest.fixture
def graph(write: Write, tmp_path: Path) -> Graph:
    write("resolved.py", WORKER.format(more=""))
    return load_graph("resolved:Worker", tmp_path)


def worker(graph: Graph, **service_args: Any) -> ServiceSpec:
    return resolve_graph(graph, {"Worker": {"ServiceArgs": service_args}}).services[0]


def test_the_decorator_counts_where_the_configuration_says_nothing(graph: Graph) -> None:
    spec = resolve_graph(graph, {}).services[0]
    assert (spec.workers, spec.gpus, spec.envs) == (2, 1, {"A": "decorator", "B": "kept"})


def test_the_configuration_is_merged_deeply_over_the_decorator(graph: Graph) -> None:
    spec = worker(graph, workers=3, envs={"A": 7, "C": "new"})
    assert (spec.workers, spec.gpus) == (3, 1)
    assert spec.envs == {"A": "7", "B": "kept", "C": "new"}
    assert worker(graph, workers=None, resources=None, envs=None).workers == 2
    assert worker(graph, resources={"gpu": None}).gpus == 1


@pytest.mark.parametrize(
    ("written", "gpus"), [(2, 2), ("4", 4), (0.5, 0.5), ("0.25", 0.25), (2.0, 2), (0, 0)]
)
def test_gpus_may_be_whole_or_fractional_numbers_or_text(graph: Graph, written: Any, gpus: float) -> None:
    assert worker(graph, resources={"gpu": written}).gpus == gpus


@pytest.mark.parametrize("written", [-1, "-1", 1.5, "many", True, [1], float("nan"), float("inf")])
def test_gpus_that_cannot_be_given_are_refused(graph: Graph, written: Any) -> None:
    with pytest.raises(ConfigError, match=r"Worker.ServiceArgs.resources.gpu = "):
        worker(graph, resources={"gpu": written})


def test_the_number_of_workers_may_be_text(graph: Graph) -> None:
    assert worker(graph, workers="2").workers == 2


@pytest.mark.parametrize("written", [0, -1, "0", "two", 1.5, True, [1], "²"])
def test_fewer_than_one_worker_is_refused(graph: Graph, written: Any) -> None:
    with pytest.raises(ConfigError, match=r"Worker.ServiceArgs.workers = .*at least 1"):
        worker(graph, workers=written)


def test_the_namespace_is_the_given_one_else_the_decorators_else_dynamo(write: Write, tmp_path: Path) -> None:
    write("plain_namespace.py", WORKER.format(more=""))
    write("lab_namespace.py", WORKER.format(more='dynamo={"namespace": "lab"}'))
    plain, lab = (load_graph(f"{name}_namespace:Worker", tmp_path) for name in ("plain", "lab"))
    assert resolve_graph(plain, {}).namespace == "dynamo"
    assert resolve_graph(lab, {}).namespace == "lab"
    assert resolve_graph(lab, {}, "other").namespace == "other"


@pytest.mark.parametrize("namespace", ["a/b", "..", "a b", "-x", "x" * 64, "a.b", "é"])
def test_a_namespace_that_cannot_be_part_of_a_path_or_queue_name_is_refused(
    graph: Graph, namespace: str
) -> None:
    with pytest.raises(ConfigError, match="not a usable name"):
        resolve_graph(graph, {}, namespace)


TWO = """
    from dynaplan.sdk import depends, service

    @service(dynamo={{"namespace": "one", "component_type": "{kind}"}})
    class Low: pass

    @service(dynamo={{"namespace": "{namespace}", "component_type": "{kind}"}}, in_process_of={host})
    class High:
        low = depends(Low)
"""


def test_two_namespaces_in_one_graph_are_refused_unless_one_is_chosen(write: Write, tmp_path: Path) -> None:
    write("two_namespaces.py", TWO.format(namespace="two", kind="", host=None))
    graph = load_graph("two_namespaces:High", tmp_path)
    with pytest.raises(GraphError, match="All components must have the same namespace, got"):
        resolve_graph(graph, {})
    assert resolve_graph(graph, {}, "mine").namespace == "mine"


def test_two_planners_are_refused(write: Write, tmp_path: Path) -> None:
    write("two_planners.py", TWO.format(namespace="one", kind="planner", host=None))
    with pytest.raises(GraphError, match="More than one planner found in the pipeline: High, Low"):
        resolve_graph(load_graph("two_planners:High", tmp_path), {})


def test_a_service_in_the_process_of_one_that_is_absent_is_refused(write: Write, tmp_path: Path) -> None:
    write("homeless.py", TWO.format(namespace="one", kind="", host="'Frontend'"))
    with pytest.raises(GraphError, match="High runs in the process of Frontend, which this graph lacks"):
        resolve_graph(load_graph("homeless:High", tmp_path), {})


@pytest.mark.parametrize("written", [{}, {"ServiceArgs": {"resources": {"gpu": None}}}])
def test_a_worker_with_parallel_ranks_gets_a_gpu_for_each(disagg: Graph, written: dict[str, Any]) -> None:
    ranks = {"common-configs": ["tensor-parallel-size"], "pipeline-parallel-size": 2}
    config = {
        "Common": {"tensor_parallel_size": 4},
        "VllmWorker": {**ranks, **written},
        "PrefillWorker": {"tp-size": 2, "ServiceArgs": {"resources": {"gpu": 2}}},
    }
    found = {service.name: service.gpus for service in resolve_graph(disagg, config).services}
    assert (found["VllmWorker"], found["PrefillWorker"]) == (8, 2)


@pytest.mark.parametrize("gpus", [2, 8, 0.5])
def test_another_number_of_gpus_than_parallel_ranks_is_a_contradiction(disagg: Graph, gpus: float) -> None:
    sizes = {"tp-size": 2, "data-parallel-size": 2}
    config = {"VllmWorker": {**sizes, "ServiceArgs": {"resources": {"gpu": gpus}}}}
    said = rf"VllmWorker: tp-size 2 times data-parallel-size 2 needs 4 GPUs, but resources.gpu is {gpus}"
    with pytest.raises(ConfigError, match=said):
        resolve_graph(disagg, config)


def test_a_worker_without_gpus_may_have_any_number_of_ranks(disagg: Graph) -> None:
    config = {"VllmWorker": {"tensor-parallel-size": 2, "ServiceArgs": {"resources": {"gpu": 0}}}}
    (found,) = (each.gpus for each in resolve_graph(disagg, config).services if each.name == "VllmWorker")
    assert found == 0
