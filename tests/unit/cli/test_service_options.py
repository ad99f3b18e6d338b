"""A model where a graph stands is served, and an option without its section is told with its section."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynaplan.cli.main import group
from dynaplan.cli.service_options import is_model, is_models_file, model_override, refuse_what_is_no_graph
from dynaplan.util.errors import GraphError


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("tiny.gguf", "llamacpp.yaml"),
        ("~/my models/Tiny.GGUF", "llamacpp.yaml"),
        ("smollm2", "llamacpp.yaml"),
        ("Qwen/Qwen3-0.6B", "vllm.yaml"),
        ("downloaded", "vllm.yaml"),
    ],
)
def test_a_model_in_the_place_of_the_graph_is_served_by_itself_with_the_engine_that_takes_it(
    model: str, file: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "downloaded").mkdir()
    (directory / "downloaded" / "config.json").write_text("{}")
    read: list[object] = []

    def read_config(path: Path, overrides: list[str]) -> None:
        read.append((path.name, overrides))
        raise GraphError("far enough")

    monkeypatch.setattr("dynaplan.graph.config.read_config", read_config)
    result = CliRunner().invoke(group, ["serve", model, "--VllmWorker.max-num-seqs=2"])
    assert str(result.exception) == "far enough"
    told = model if model != "downloaded" else str(directory / model)
    assert read == [(file, [f'--Common.model="{told}"', "--VllmWorker.max-num-seqs=2"])]
    assert f"graphs.agg:Frontend -f {file} --Common.model={shlex.quote(model)}" in result.output


def test_a_path_below_the_home_of_nobody_is_one_that_is_not_there() -> None:
    text = "~nobody-here/model"
    assert not is_model(text)
    assert not is_models_file(text)
    assert model_override(text) == f'--Common.model="{text}"'
    refuse_what_is_no_graph(text)


def test_a_file_of_settings_that_is_not_there_is_no_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(group, ["serve", "models.yaml"])
    assert f"models.yaml: no such file in {tmp_path}" in str(result.exception)
    assert "dynaplan init" in str(result.exception)
    (tmp_path / "mine-models.yaml").touch()
    result = CliRunner().invoke(group, ["serve", "models.yaml"])
    assert "Did you mean 'mine-models.yaml'?" in str(result.exception)


def test_the_file_that_is_named_serves_a_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(group, ["serve", "smollm2", "-f", "llamacp.yaml"])
    assert "did you mean 'llamacpp.yaml'?" in str(result.exception).lower()


@pytest.mark.parametrize(
    "graph",
    [
        "graphs.agg:Frontend",
        "graphs.agg",
        "graphs/agg",
        "mine/graph",
        "mine/graph.py:Frontend",
        "new/graph.py",
        "smolm2",
    ],
)
def test_a_graph_is_not_taken_for_a_model(graph: str, directory: Path) -> None:
    (directory / "mine").mkdir()
    assert not is_model(graph)


@pytest.mark.parametrize("name", ["smollm2", "smollm2.py"])
def test_a_module_of_ones_own_goes_before_a_model_that_can_be_pulled(name: str, directory: Path) -> None:
    assert is_model("smollm2")
    (directory / name).write_text("")
    assert not is_model("smollm2")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--model", "foo"], "-f vllm.yaml --Common.model=foo`."),
        (["--model=m.gguf"], "-f llamacpp.yaml --Common.model=m.gguf`."),
        (["--max-model-len", "4096"], "Write --Common.max-model-len=4096."),
        (["--max_num_seqs=3"], "Write --VllmWorker.max-num-seqs=3."),
        (["--tensor-parallel-size", "2"], "Write --VllmWorker.tensor-parallel-size=2."),
        (["--enable-prefix-caching", "--dry-run"], "Write --VllmWorker.enable-prefix-caching=VALUE."),
        (["--adjustment-interval", "10"], "Write --Planner.adjustment-interval=10."),
        (["--prot", "1"], "--port"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_option_without_its_section_is_answered_with_how_to_write_it(
    arguments: list[str], hint: str
) -> None:
    result = CliRunner().invoke(group, ["serve", "graphs.agg:Frontend", *arguments])
    assert result.exit_code == 2
    assert hint in result.output
