"""Answers are counted from when they were due."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.bench_measurement import FleetMonitor, RequestCounters
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.fleet import deployments
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.lab.profiling.load.completions import Answer, AnswerStream, RequestFailed
from dynaplan.planner.model import DecisionRecord, PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.simulation.outcome import Slo
from dynaplan.util.errors import DeploymentError
from tests.unit.planner.rules.situations import interval

ANSWER = Answer(100.9, (101.0, 102.0), prompt_tokens=30, output_tokens=11, cached_tokens=40)
REQUEST = TracedRequest(0.0, 30, 11)


def counters() -> RequestCounters:
    return RequestCounters(Slo(500.0, 50.0), 100.0)


def test_a_latency_counts_from_when_the_request_was_due() -> None:
    counted = counters()
    counted.answered(AnswerStream(), 100.8, ANSWER, REQUEST)
    counted.answered(AnswerStream(), 100.2, ANSWER, REQUEST)
    assert (counted.outcome.ttft_met, counted.outcome.requests) == (1, 2)
    assert counted.outcome.ttft_ms.highest > 799


def test_lengths_that_were_not_asked_for_are_counted() -> None:
    counted = counters()
    counted.answered(AnswerStream(), 100.8, ANSWER, TracedRequest(0.0, 31, 12))
    assert (counted.prompts_of_other_length, counted.answers_of_other_length) == (1, 1)
    assert counted.outcome.hit_rate == 1.0


def test_failures_are_counted_by_their_names_and_lost() -> None:
    counted = counters()
    for said in ("first", "second"):
        counted.failed(AnswerStream(), RequestFailed("503", said))
    assert (counted.failures["503"], counted.outcome.lost, counted.examples) == (2, 2, {"503": "first"})
    assert "2 failed" in counted.line(101.0, 160.0)


def test_the_live_line_has_rates_of_the_last_seconds() -> None:
    counted, stream = counters(), AnswerStream()
    counted.sent(stream, 100.0)
    counted.line(100.0, 160.0)
    counted.answered(AnswerStream(), 100.8, ANSWER, REQUEST)
    stream.event_times_s.extend([101.0] * 60)
    assert counted.line(102.0, 160.0) == (
        "00:02 of 01:00  1 open  0.5 requests/s  30 tokens/s  TTFT p50 200 p95 200 ms  "
        "ITL p50 99.9 p95 99.9 ms"
    )
    counted.failed(stream, RequestFailed("503", "none is there"))
    assert "0 tokens/s" in counted.line(108.0, None)
    assert "waiting for 0 answers" in counted.line(108.0, None)


def test_a_request_that_is_sent_late_is_counted_with_its_delay() -> None:
    counted = counters()
    counted.sent(AnswerStream(), time.perf_counter() - 7.0)
    assert 7.0 <= counted.max_late_s < 60.0
    assert counted.requests_sent == 1


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
    monkeypatch.setattr("dynaplan.cli.bench_measurement.recent_records", lambda directory, last: documents)
    assert monitor.changes().scale_events == 1
