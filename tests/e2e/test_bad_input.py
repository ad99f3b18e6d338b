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

from tests.e2e.deployment import REPOSITORY, Deployment, dynaplan, refusal


def test_a_state_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    assert "state" in refusal(tmp_path)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refusal(tmp_path, "graphs.disagg:Frontend", "disagg.yaml", "--port", str(port))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_directory_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o500)
    assert "state" in refusal(tmp_path)


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
