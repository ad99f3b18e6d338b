"""Bad input: one clear message, exit 2, no traceback, nothing started, nothing lost."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.deployment import REPOSITORY, Deployment, dynaplan
from tests.e2e.traces import in_torture


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., str]:
    """Run ``dynaplan serve`` with arguments that it must refuse; its message."""

    def run(*arguments: str, environment: dict[str, str] | None = None) -> str:
        result = subprocess.run(
            [dynaplan(), "serve", *arguments],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "HOME": str(tmp_path),
                "DYN_LOCAL_STATE_DIR": str(tmp_path / "state"),
                "DYNAPLAN_NODE_DIR": str(tmp_path / "node"),
                "XDG_RUNTIME_DIR": str(tmp_path),
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert result.returncode == 2, result.stdout + result.stderr
        assert "Traceback" not in result.stdout + result.stderr
        return result.stderr

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
        (["graphs.disagg:Frontend", "-f", "disagg.yaml", "--gpus", "1"], "GPU"),
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


def test_a_state_directory_that_is_a_file(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    assert "state" in refuse("graphs.agg:Frontend", "-f", "agg.yaml", "--port", "0")


def test_a_taken_port_is_refused_before_anything_starts(refuse: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refuse("graphs.disagg:Frontend", "-f", "disagg.yaml", "--port", str(port))


def test_a_graph_that_cannot_be_imported_names_the_reason(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nonexistent_module_of_mine\n")
    assert "nonexistent_module_of_mine" in refuse("broken:Frontend", "--working-dir", str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_directory_without_write_permission(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o500)
    assert "state" in refuse("graphs.agg:Frontend", "-f", "agg.yaml", "--port", "0")


def test_two_of_one_namespace_are_refused(deploy: Callable[..., Deployment]) -> None:
    first = deploy("graphs.agg:Frontend", "agg.yaml")
    result = first.run(*first.command[1:])
    assert result.returncode == 2
    assert str(first.process.pid if first.process else "") in result.stderr
    assert first.workers()


@in_torture
def test_two_namespaces_never_share_a_gpu(deploy: Callable[..., Deployment]) -> None:
    first = deploy("graphs.agg:Frontend", "agg.yaml", "--gpus", "2", namespace="one")
    second = deploy("graphs.agg:Frontend", "agg.yaml", "--gpus", "2", namespace="two")
    gpus = [
        gpu
        for each in (first, second)
        for gpu in each.workers()[f"{each.namespace}_VllmWorker"]["resources"]["allocated_gpus"]
    ]
    assert sorted(gpus) == [0, 1]
    third = first.run(*first.command[1:5], "--gpus", "2", "--namespace", "three", "-f", "agg.yaml")
    assert third.returncode == 2
    assert "GPU" in third.stderr


DRY_RUN = ("--dry-run", "--show-env", "--gpus", "4")


def test_dry_run_validates_and_prints_the_gpu_map(tmp_path: Path) -> None:
    result = subprocess.run(
        [*(dynaplan(), "serve", "graphs.disagg:Frontend", "-f", "disagg.yaml"), *DRY_RUN],
        cwd=REPOSITORY,
        env={**os.environ, "DYNAPLAN_NODE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "Service Configuration:" in result.stdout
    assert "DYNAMO_SERVICE_CONFIG=" in result.stdout
    assert "GPU-SIM-1" in result.stdout
    exported = result.stdout.split("DYNAMO_SERVICE_CONFIG=")[1].splitlines()[0]
    assert "VllmWorker" in json.loads(exported)


@pytest.mark.parametrize("torn", ["", '{"namespace": "dyn', "[]", "\x00\x00"])
def test_a_torn_statefile_is_set_aside_and_serving_starts(
    deploy: Callable[..., Deployment], tmp_path: Path, torn: str
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "dynamo.json").write_text(torn)
    deployment = deploy("graphs.agg:Frontend", "agg.yaml")
    assert "dynamo.json" in deployment.text
    assert deployment.workers()["dynamo_VllmWorker"]["state"] == "ready"
