"""For how long ``dynaplan scale`` waits, and what it shows meanwhile."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.scaling import waiting
from dynaplan.cli.scaling.waiting import ScaleTimes, longest_s, times_of, watcher
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.scale_progress import scale_progress
from dynaplan.fleet.startup_times import StartupTimesFile, startup_key
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.util.progress import ProgressLine
from tests.unit.fleet.rules.graphs import DRAINING, READY, STARTING, worker

TIMES = ScaleTimes(125.0, 600.0)
ONE = worker("VllmWorker", READY)


def found(*workers: Worker) -> Any:
    return SimpleNamespace(workers=workers, statefile=Path("/nonexistent"), runtime_dir=Path("/nonexistent"))


@pytest.mark.parametrize(
    ("times", "starts", "leaves", "longest"),
    [
        (TIMES, True, False, 375.0),
        (TIMES, False, True, 610.0),
        (TIMES, True, True, 985.0),
        (TIMES, False, False, 120.0),
        (ScaleTimes(2.0, 30.0), True, False, 120.0),
        (ScaleTimes(None, 30.0), True, False, 600.0),
    ],
)
def test_three_usual_starts_and_a_drain_are_waited_for(
    times: ScaleTimes, starts: bool, leaves: bool, longest: float
) -> None:
    assert times.longest_s(starts=starts, leaves=leaves) == longest


@pytest.mark.parametrize(
    ("workers", "wanted", "longest"),
    [
        ((ONE,), 2, 375.0),
        ((ONE,), 1, 120.0),
        ((replace(ONE, state=STARTING),), 1, 375.0),
        ((ONE, worker("VllmWorker_1", READY)), 1, 610.0),
        ((ONE, worker("VllmWorker_1", DRAINING)), 2, 985.0),
    ],
)
def test_the_workers_of_now_tell_whether_some_start_or_leave(
    workers: tuple[Worker, ...], wanted: int, longest: float
) -> None:
    assert longest_s(found(*workers), {Role.DECODE: wanted}, TIMES) == longest


def test_without_the_launch_nothing_is_learnt() -> None:
    assert times_of(found(ONE), {Role.DECODE: 2}) == ScaleTimes(None, 600.0)


def test_the_learnt_time_of_the_engine_and_its_drain_deadline_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"model": "m", "engine": "sim", "drain-deadline": 45}
    key = startup_key(ONE, settings)
    launch = SimpleNamespace(
        settings_of=lambda _: settings, leave_timeout_of=lambda _: 45.0, leave_timeout_s=600.0
    )
    (tmp_path / "launch.json").write_text("{}")
    monkeypatch.setattr(Launch, "from_json", lambda _: launch)
    monkeypatch.setattr(
        StartupTimesFile, "beside", lambda _: SimpleNamespace(read=lambda: {key: [100.0, 125.0, 130.0]})
    )
    deployment = found(ONE)
    deployment.runtime_dir = tmp_path
    assert times_of(deployment, {Role.DECODE: 2}) == ScaleTimes(125.0, 45.0)


def test_the_progress_tells_what_is_missing_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now_s[0])
    shown = io.StringIO()
    watch = watcher(TIMES, ProgressLine(shown, 30.0, lambda: now_s[0]))
    starting = worker("VllmWorker_1", STARTING)
    for at_s, workers in (
        (1.0, (ONE, starting)),
        (2.0, (ONE, starting)),
        (130.0, (ONE, starting)),
        (131.0, (ONE, replace(starting, state=READY))),
        (132.0, (ONE, worker("VllmWorker_1", READY), worker("VllmWorker_2", DRAINING))),
    ):
        now_s[0] = at_s
        watch(scale_progress({Role.DECODE: 2}, workers))
    first, late, draining = shown.getvalue().splitlines()
    assert first == "00:01, about 02:04 left: 1 of 2 decode workers ready, dynamo_VllmWorker_1 starting"
    assert late.startswith("02:10, usually 02:05: ")
    assert draining.startswith("02:12, at most 07:48 left: ")
