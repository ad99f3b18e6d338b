"""The numbers of workers of a running deployment, and how long they take to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.fleet.startup_times import StartupTimesFile, startup_key
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.kubernetes.sources import running_counts, running_source
from dynaplan.util.errors import DeploymentError
from tests.unit.kubernetes.deployments import disagg


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))


def test_a_worker_that_leaves_is_not_exported() -> None:
    workers = [
        Worker("a", "VllmWorker", Role.DECODE, WorkerState.READY),
        Worker("b", "VllmWorker", Role.DECODE, WorkerState.BACKOFF),
        Worker("c", "VllmWorker", Role.DECODE, WorkerState.DRAINING),
    ]
    counts = running_counts(disagg().spec, workers)
    assert (counts[Role.DECODE], counts[Role.PREFILL], counts[Role.FRONTEND]) == (2, 0, 1)


def test_the_slower_role_tells_how_long_a_start_takes_on_this_box(tmp_path: Path) -> None:
    times = StartupTimesFile.beside(tmp_path / "box.json")
    worker = Worker("w", "VllmWorker", Role.DECODE, gpus=(0,))
    key = startup_key(worker, {"model": "meta-llama/Llama-3.1-8B-Instruct", "engine": "sim"})
    assert disagg().startup_s is None
    times.learn(str(key), 42.0)
    assert disagg().startup_s == 42.0


def test_without_a_running_deployment_the_way_out_is_told() -> None:
    with pytest.raises(DeploymentError, match="no deployment is running here"):
        running_source(None, [])
