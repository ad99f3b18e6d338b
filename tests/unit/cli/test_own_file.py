"""A file of several models: what ``Common`` gives, where a model is found, and all that is wrong at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynaplan.cli.main import main
from dynaplan.engines.pulled_models import CATALOGUE
from tests.unit.engines.test_gguf import GOOD, written

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a directory with models, on a machine that has pulled smollm2; code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("DYN_LOCAL_STATE_DIR", "DYNAPLAN_NODE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    pulled = tmp_path / "home/dynaplan/models" / CATALOGUE["smollm2"].file
    pulled.parent.mkdir(parents=True)
    for path in (tmp_path / "second.gguf", pulled):
        written(path.parent, GOOD).rename(path)

    def run(*words: str, **files: str) -> tuple[int, str]:
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed = capfd.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return run


GUIDE = """
Common: {max-model-len: 512, ttl: 10m}
Models:
  small: {model: smollm2}
  second: {model: second.gguf}
  fake: {engine: sim}
  echo: {command: "sleep --port ${PORT}", memory: 200MB}
"""


@pytest.mark.parametrize("command", ["serve m.yaml --dry-run", "doctor -f m.yaml"])
def test_common_reaches_those_that_have_the_option_and_no_command(run: Run, command: str) -> None:
    code, output = run(*command.split(), m=GUIDE)
    assert code == 0, output
    assert "max-model-len is no option" not in output


def test_a_value_of_common_that_no_engine_has_is_a_warning(run: Run) -> None:
    file = "Common: {max-model-len: 512}\nModels: {echo: {command: 'sleep --port ${PORT}', memory: 1GB}}\n"
    code, output = run("serve", "m.yaml", "--dry-run", m=file)
    assert code == 0
    assert "Common.max-model-len has no effect" in output


WRONG = """
Models:
  a: {model: nothere.gguf}
  b: {model: smollm2, max-model-len: many}
  c: {model: smolm2}
  d: {command: "no-such-program --port ${PORT}"}
  e: {engine: vlm, model: x}
  f: {model: second.gguf, gpu: 0}
"""

FAULTS = (
    "Models.a: model is",
    "Write --Models.a.model=PATH",
    "Models.b.max-model-len = 'many'",
    "Models.c: model is 'smolm2', which is not on this machine",
    "Did you mean 'smollm2'?",
    "no program no-such-program",
    "Did you mean 'vllm'?",
    "Write --Models.f.ServiceArgs.resources.gpu=0",
)


@pytest.mark.parametrize(("command", "code"), [("serve m.yaml --dry-run", 2), ("doctor -f m.yaml", 1)])
def test_all_that_is_wrong_with_a_file_is_told_at_once_by_serve_and_doctor(
    run: Run, command: str, code: int
) -> None:
    ended, output = run(*command.split(), m=WRONG)
    unfolded = " ".join(output.split())
    assert [words for words in FAULTS if words not in unfolded] == [], output
    assert ended == code
    assert "Traceback" not in output


def test_each_fault_of_a_file_begins_its_own_line(run: Run) -> None:
    _, output = run("serve", "m.yaml", "--dry-run", m=WRONG)
    assert sum(line.startswith("Error: ") for line in output.splitlines()) == 6, output


def test_the_hint_about_a_models_key_can_be_typed(run: Run) -> None:
    file = "Models: {a.b: {model: second.gguf, max-model-len: 512}}\n"
    code, output = run("serve", "m.yaml", "--dry-run", "--Models.a.b.ServiceArgs.resources.gpu=0", m=file)
    assert code == 0, output


@pytest.mark.parametrize("text", ["memory: 20", "memory: '20'"])
def test_an_amount_without_a_unit_is_asked_about(run: Run, text: str) -> None:
    file = f"Models: {{a: {{model: second.gguf, {text}}}}}\n"
    code, output = run("serve", "m.yaml", "--dry-run", m=file)
    assert code == 2
    assert "20 bytes?" in output
    assert "Write 20GB." in output
    assert "Write 20GB." in run("serve", "m.yaml", "--model-memory", "20")[1]


@pytest.mark.parametrize(
    ("file", "graph"),
    [
        ("agg", "graphs.agg:Frontend"),
        ("disagg", "graphs.disagg:Frontend"),
        ("llamacpp", "graphs.agg:Frontend"),
        ("llamacpp_disagg", "graphs.disagg:Frontend"),
        ("vllm", "graphs.agg:Frontend"),
        ("hello_world", "graphs.hello_world:Frontend"),
    ],
)
def test_a_shipped_file_is_served_with_the_graph_that_it_belongs_to(run: Run, file: str, graph: str) -> None:
    _, output = run("serve", f"{file}.yaml", "--dry-run", "--gpus", "8", "--Common.model=second.gguf")
    assert f"{file}.yaml is the configuration of {graph}" in output
    assert "no such service" not in output


def test_a_file_belongs_to_the_module_of_its_name_beside_it(run: Run, tmp_path: Path) -> None:
    links = "Frontend.link(Processor).link(VllmWorker)\n"
    (tmp_path / "mine.py").write_text(
        f"from dynaplan.components import Frontend, Processor, VllmWorker\n{links}"
    )
    code, output = run("serve", "mine.yaml", "--dry-run", "--gpus", "8", mine="VllmWorker: {engine: sim}\n")
    assert "mine.yaml is the configuration of mine.py" in output
    assert code == 0, output


def test_models_may_be_written_small(run: Run) -> None:
    code, output = run("serve", "m.yaml", "--dry-run", m="models: {a: {model: smollm2}}\n")
    assert code == 0, output
    assert "llamacpp" in output


def test_a_directory_of_gguf_files_is_served_whatever_else_lies_in_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "convert.py").touch()
    code, output = run("serve", str(tmp_path), "--dry-run")
    assert code == 0, output
    assert "second" in output


def test_all_gpus_may_be_asked_for_in_that_word(run: Run) -> None:
    assert run("serve", "agg.yaml", "--dry-run", "--gpus", "all")[0] in (0, 2)
    assert "number" not in run("serve", "agg.yaml", "--dry-run", "--gpus", "all")[1]


def test_simulate_takes_the_same_names_and_refuses_in_the_same_words(run: Run) -> None:
    words = ("simulate", "--trace", "popularity:hours=0.1", "-f", "m.yaml")
    _, output = run(*words, m="Models: {a: {model: smolm2}}\n")
    assert "Models.a: model is 'smolm2', which is not on this machine" in output
