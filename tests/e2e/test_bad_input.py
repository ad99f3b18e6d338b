"""Bad input: one clear message, exit 2, no traceback, nothing started, nothing lost.

What is found before anything is touched is in tests/unit/cli/test_serve_refusals.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.deployment import REPOSITORY, Deployment, dynaplan


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


def test_a_state_directory_that_is_a_file(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    assert "state" in refuse("graphs.agg:Frontend", "-f", "agg.yaml", "--port", "0")


def test_a_taken_port_is_refused_before_anything_starts(refuse: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refuse("graphs.disagg:Frontend", "-f", "disagg.yaml", "--port", str(port))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_directory_without_write_permission(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o500)
    assert "state" in refuse("graphs.agg:Frontend", "-f", "agg.yaml", "--port", "0")


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


def test_a_torn_statefile_is_set_aside_and_serving_starts(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "dynamo.json").write_text('{"namespace": "dyn')
    deployment = deploy("graphs.agg:Frontend", "agg.yaml")
    assert "dynamo.json" in deployment.text
    assert deployment.workers()["dynamo_VllmWorker"]["state"] == "ready"
