"""Reading a configuration: files, environment, order of precedence, dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import graphs
from dynaplan.graph.config import dry_run_text, environment_text, find_config_file, read_config
from dynaplan.sdk import ServiceConfig, load_graph
from dynaplan.util.errors import ConfigError
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
