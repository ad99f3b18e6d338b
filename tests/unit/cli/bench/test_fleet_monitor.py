"""GPU-hours and changes of a deployment while it is measured."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.bench.measurement import FleetMonitor
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet import deployments
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.planner.model import DecisionRecord, PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.util.errors import DeploymentError
from tests.unit.planner.rules.situations import interval


def found(tmp_path: Any, *states: WorkerState) -> Any:
    workers = [Worker(f"w{n}", "VllmWorker", Role.DECODE, state, (n,)) for n, state in enumerate(states)]
    frontend = Worker("f", "Frontend", Role.FRONTEND, WorkerState.READY)
    return SimpleNamespace(namespace="ns", log_dir=tmp_path, workers=(*workers, frontend))


def test_gpu_seconds_are_those_that_workers_hold_and_end_with_the_deployment(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, failed = WorkerState.READY, WorkerState.FAILED
    seen = [found(tmp_path, ready, ready, failed)]
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: seen[0])
    monitor = FleetMonitor(found(tmp_path, ready), 10.0)
    monitor.sample(12.0)
    assert monitor.gpu_s == 2.0
    monitor.sample(13.0)
    assert monitor.gpu_s == 4.0

    def gone(namespace: str) -> Any:
        raise DeploymentError("no deployment ns is running here")

    monkeypatch.setattr(deployments, "find_deployment", gone)
    monitor.sample(14.0)
    monitor.sample(99.0)
    assert monitor.gpu_s == 6.0


def test_changes_are_the_planners_since_the_beginning(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, seen = PlannerSettings(), interval(0, 2, kv=0.0)
    state, decision = decide(settings, PlannerState(), seen)
    assert decision.is_change

    def record(at: datetime) -> dict[str, Any]:
        return DecisionRecord(at.isoformat(), settings, PlannerState(), seen, decision, state).to_json()

    monitor = FleetMonitor(found(tmp_path), 0.0)
    now = datetime.now().astimezone()
    documents = [record(now - timedelta(hours=1)), record(now + timedelta(seconds=1)), {"broken": True}]
    monkeypatch.setattr("dynaplan.cli.bench.measurement.recent_records", lambda directory, last: documents)
    assert monitor.changes().scale_events == 1
