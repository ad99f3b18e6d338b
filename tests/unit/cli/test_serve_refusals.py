"""What ``dynaplan serve`` refuses before anything starts: exit 2, and a message that names what is wrong."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynaplan.cli.main import main
from tests.e2e.deployment import REPOSITORY


@pytest.fixture
def refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run ``dynaplan serve`` in this process with arguments that it must refuse; its message."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("DYN_LOCAL_STATE_DIR", "DYNAPLAN_NODE_DIR", "XDG_RUNTIME_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("dynaplan.fleet.serve.serve", lambda *_: pytest.fail("it starts"))

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["serve", *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["graphs.disag:Frontend"], "graphs.disag"),
        (["graphs.disagg:Frontent"], "Frontend"),
        (["graphs.disagg:Frontend", "-f", "missing.yaml"], "missing.yaml"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--VllmWorkr.engine=sim"], "VllmWorker"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--VllmWorker.max-num-seq=3"], "max-num-seqs"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--VllmWorker.ServiceArgs.workers=0"], "workers"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--VllmWorker.ServiceArgs.workers=-1"], "workers"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--VllmWorker.ServiceArgs.workers=two"], "two"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--VllmWorker.ServiceArgs.resources.gpu=-1"], "gpu"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--VllmWorker.speedup-ratio=fast"], "speedup-ratio"),
        (
            ["graphs.disagg:Frontend", "--Planner.policy=sla", "--Planner.profile-results-dir=nowhere"],
            "profile-results-dir is 'nowhere'",
        ),
        (
            ["graphs.disagg:Frontend", "-f", "disagg.yaml", "--Planner.adjustment-interval=0"],
            "adjustment-interval",
        ),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--VllmWorker.engine=warp"], "engine"),
        (["graphs.agg:Frontend", "-f", "agg.yaml", "--VllmWorker.engine=lamacpp"], "'llamacpp'"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--prot", "1"], "--prot"),
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "foo.bar"], "foo.bar"),
    ],
)
def test_the_message_names_what_is_wrong(
    refuse: Callable[..., str], arguments: list[str], expected: str
) -> None:
    assert expected in refuse(*arguments)


CUT_GGUF = (
    b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Qs", 1, b"t") + struct.pack("<IQIQ", 1, 999, 0, 0)
)
"""A header that tells of one tensor of 999 numbers, and nothing behind it."""


@pytest.mark.parametrize(
    ("engine", "model", "expected"),
    [
        ("llamacpp", "missing.gguf", "does not exist"),
        ("llamacpp", "page.gguf", "is no GGUF file"),
        ("llamacpp", "cut.gguf", "is cut off"),
        ("llamacpp", "empty-directory", "is a directory"),
        ("vllm", "empty-directory", "has no config.json"),
        ("vllm", "whole.gguf", "engine llamacpp"),
        ("sglang", "./missing", "does not exist"),
    ],
)
def test_a_model_that_the_engine_cannot_load_is_refused_before_anything_starts(
    refuse: Callable[..., str], tmp_path: Path, engine: str, model: str, expected: str
) -> None:
    (tmp_path / "empty-directory").mkdir()
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html>")
    (tmp_path / "cut.gguf").write_bytes(CUT_GGUF)
    (tmp_path / "whole.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    before = {path.name for path in tmp_path.iterdir()}
    arguments = ["graphs.agg:Frontend", "-f", "agg.yaml", f"--Common.engine={engine}"]
    path = model if model.startswith(".") else str(tmp_path / model)
    message = refuse(*arguments, f"--Common.model={path}")
    assert expected in message
    assert "VllmWorker: model is" in message
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_model_for_one_side_of_a_hand_off_only_is_refused(
    refuse: Callable[..., str], tmp_path: Path
) -> None:
    for name in ("one.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    arguments = ["graphs.disagg:Frontend", "-f", "disagg.yaml", "--Common.engine=llamacpp"]
    arguments += [f"--Common.model={tmp_path}/one.gguf", f"--VllmWorker.model={tmp_path}/other.gguf"]
    assert "--Common.model=" in refuse(*arguments)


def test_an_option_that_llamacpp_does_not_have_is_refused(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    arguments = ["graphs.agg:Frontend", "-f", "agg.yaml", "--Common.engine=llamacpp"]
    message = refuse(*arguments, f"--Common.model={tmp_path}/m.gguf", "--VllmWorker.ctx-sise=512")
    assert "ctx-size" in message
    assert "passed on" not in message, "an error is not remarked upon as well"


def test_a_parallel_size_that_is_not_the_gpus_is_refused(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = ["graphs.agg:Frontend", "-f", "vllm.yaml", f"--Common.model={tmp_path}", "--gpus", "8"]
    arguments += ["--VllmWorker.tensor-parallel-size=2", "--VllmWorker.ServiceArgs.resources.gpu=4"]
    message = refuse(*arguments)
    assert "tensor-parallel-size" in message
    assert "resources.gpu" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "bad.yaml"),
        ("- a\n- b\n", "bad.yaml"),
        ("just text\n", "bad.yaml"),
        ("Frontend: [\n", "bad.yaml"),
        ("1: {}\n", "bad.yaml"),
        ("VllmWorker: 3\n", "VllmWorker"),
        ("VllmWorker: {ServiceArgs: 3}\n", "ServiceArgs"),
    ],
)
def test_a_yaml_that_is_not_a_configuration(
    refuse: Callable[..., str], tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert expected in refuse("graphs.disagg:Frontend", "-f", str(path))


def test_a_graph_that_cannot_be_imported_names_the_reason(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nonexistent_module_of_mine\n")
    assert "nonexistent_module_of_mine" in refuse("broken:Frontend", "--working-dir", str(tmp_path))


def test_a_refused_start_leaves_nothing_open(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "dev", "-m", "dynaplan", "serve", "graphs.agg:Frontent"]
    environment = os.environ | dict.fromkeys(("HOME", "DYNAPLAN_NODE_DIR"), str(tmp_path))
    refused = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "ResourceWarning" not in refused.stderr
