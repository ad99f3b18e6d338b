"""The wait of ``dynaplan scale``: its longest time, and its progress.

A start usually takes the time that was learnt of this engine, model and number of GPUs: the median of the
last five. A cold page cache or a compilation can double it, and a crash on the way starts it anew, so three
times that is waited for. A draining worker may take its whole drain deadline, and a start may need its GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynaplan.graph.lifecycle import Role, WorkerState
from dynaplan.util.durations import clock
from dynaplan.util.progress import ProgressLine, left_words

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.scale_progress import ScaleProgress

USUAL_STARTS = 3
"""Learnt start-up times that are waited for."""

LEAST_S = 120.0
"""Least time that is waited, seconds."""

UNKNOWN_START_S = 600.0
"""Time for a start of which nothing was learnt, seconds: a large model comes from a slow disk."""

DRAINED_S = 10.0
"""Time from a drain's end to the release of the GPUs, seconds: the engine ends, and its session."""


@dataclass(frozen=True)
class ScaleTimes:
    """The times of carrying out, in seconds: ``start_s`` usually, None when unknown; ``leave_s`` at most."""

    start_s: float | None
    leave_s: float

    def longest_s(self, *, starts: bool, leaves: bool) -> float:
        """Return the longest time to wait for workers that start, and for others that leave."""
        start_s = UNKNOWN_START_S if self.start_s is None else USUAL_STARTS * self.start_s
        leave_s = self.leave_s + DRAINED_S if leaves else 0.0
        return max(LEAST_S, (start_s if starts else 0.0) + leave_s)


def times_of(found: RunningDeployment, wanted: Mapping[Role, int]) -> ScaleTimes:
    """Return the learnt and configured times of the wanted roles; the longest of several."""
    from dynaplan.config.settings.worker import ProcessSettings
    from dynaplan.fleet.launch import read_launch
    from dynaplan.fleet.startup_times import StartupTimesFile, median_startup_s, startup_key
    from dynaplan.util.errors import UserError

    try:
        launch = read_launch(found.runtime_dir)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return ScaleTimes(None, ProcessSettings.drain_deadline_s)
    learnt = StartupTimesFile.beside(found.statefile).read()
    own = [worker for worker in found.workers if worker.role in wanted]
    keys = {startup_key(worker, launch.settings_of(worker.component)) for worker in own}
    usual = [seconds for key in keys if (seconds := median_startup_s(learnt, key)) is not None]
    leave_s = [launch.leave_timeout_of(worker.component) for worker in own]
    return ScaleTimes(max(usual, default=None), max(leave_s, default=launch.leave_timeout_s))


def longest_s(found: RunningDeployment, wanted: Mapping[Role, int], times: ScaleTimes) -> float:
    """Return the longest time to wait until the wanted numbers are there, by the workers there are now."""
    starts = leaves = False
    for role, number in wanted.items():
        states = [worker.state for worker in found.workers if worker.role is role]
        starts |= states.count(WorkerState.READY) < number
        leaves |= len(states) > number or WorkerState.DRAINING in states
    return times.longest_s(starts=starts, leaves=leaves)


def watcher(times: ScaleTimes, line: ProgressLine) -> Callable[[ScaleProgress], None]:
    """Return the function that shows the progress, with the time that is left, until it is carried out."""
    begun_s = time.monotonic()

    def watch(progress: ScaleProgress) -> None:
        if progress.missing:
            news = "; ".join(progress.missing)
            passed_s = time.monotonic() - begun_s
            line.show(f"{clock(passed_s)}{_left(progress, times, passed_s)}: {news}", news)

    return watch


def _left(progress: ScaleProgress, times: ScaleTimes, passed_s: float) -> str:
    """Return the time left in words after a comma; empty when nothing is known."""
    if WorkerState.DRAINING in progress.under_way:
        return f", at most {clock(times.leave_s - passed_s)} left"
    if WorkerState.STARTING not in progress.under_way or times.start_s is None:
        return ""
    left_s = times.start_s - passed_s
    return f", {left_words(left_s)}" if left_s > 0 else f", usually {clock(times.start_s)}"
