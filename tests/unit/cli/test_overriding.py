"""A model where a graph stands, and an engine's option without its section: answered with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dynaplan.cli.main import group
from dynaplan.cli.overriding import is_model
from dynaplan.domain.errors import GraphError


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "command"),
    [
        ("tiny.gguf", "graphs.agg:Frontend -f llamacpp.yaml --Common.model=tiny.gguf"),
        ("~/my models/Tiny.GGUF", "-f llamacpp.yaml --Common.model='~/my models/Tiny.GGUF'"),
        ("Qwen/Qwen3-0.6B", "graphs.agg:Frontend -f vllm.yaml --Common.model=Qwen/Qwen3-0.6B"),
        ("downloaded", "-f vllm.yaml --Common.model=downloaded"),
    ],
)
def test_a_model_in_the_place_of_the_graph_is_answered_with_the_command_that_serves_it(
    model: str, command: str, directory: Path
) -> None:
    (directory / "downloaded").mkdir()
    (directory / "downloaded" / "config.json").write_text("{}")
    result = CliRunner().invoke(group, ["serve", model])
    assert isinstance(result.exception, GraphError)
    assert "is a model, not a graph" in str(result.exception)
    assert f"{command}`." in str(result.exception)


@pytest.mark.parametrize(
    "graph",
    [
        "graphs.agg:Frontend",
        "graphs.agg",
        "graphs/agg",
        "mine/graph",
        "mine/graph.py:Frontend",
        "new/graph.py",
    ],
)
def test_a_graph_is_not_taken_for_a_model(graph: str, directory: Path) -> None:
    (directory / "mine").mkdir()
    assert not is_model(graph)


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
