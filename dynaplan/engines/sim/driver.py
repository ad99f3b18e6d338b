"""Drives the engine model in real time: begins a step, waits for its duration, reports its end.

Timers of the event loop do it, not a task: an engine without requests has no timer and costs nothing. The end
of a step is counted from the end of the step before, so that late timers do not slow the engine down.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from dynaplan.engines.timing_model.model import EngineModel

INSTANT_SLICE_S = 0.001
"""Seconds of instant steps after which the event loop gets its turn."""

FOLD_S = 0.001
"""Decode steps are done several at once up to this many seconds together."""

MOST_LATE_S = 0.05
"""Seconds of a late timer that are made up for by shorter waits; later than that the engine slows down."""


class StepDriver:
    """Steps a model. ``on_progress`` is called when tokens are due, ``on_failure`` when the model raised.

    ``speedup_ratio`` divides the durations; with 0 steps take no time, and the event loop gets its turn
    after every millisecond of them. Decode steps shorter than a millisecond are done several at once.
    """

    def __init__(
        self,
        model: EngineModel,
        speedup_ratio: float,
        on_progress: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._model = model
        self._speedup_ratio = speedup_ratio
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0
        self._is_step_pending = False

    def wake(self) -> None:
        """Go on stepping, after a change in the model, if there is work to do."""
        if self._timer is None and not self._model.is_idle:
            self._due_s = self._loop.time()
            self._timer = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Cancel the next step; requests in the model stay where they are."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        try:
            self._timer = self._step() if self._speedup_ratio else self._step_instantly()
        except Exception as error:
            self._on_failure(error)

    def _step(self) -> asyncio.Handle | None:
        """End the step that is due and begin the next; returns the timer of its end, None without a step."""
        if self._is_step_pending:
            self._is_step_pending = False
            self._on_progress()
        if self._model.is_idle:
            return None
        result = self._model.step(FOLD_S * self._speedup_ratio)
        if result.is_empty:
            return None
        self._is_step_pending = True
        earliest_s = self._loop.time() - MOST_LATE_S
        self._due_s = max(self._due_s, earliest_s) + result.duration_s / self._speedup_ratio
        return self._loop.call_at(self._due_s, self._turn)

    def _step_instantly(self) -> asyncio.Handle | None:
        """Step for a slice of time; returns the handle of the next slice, None when no work is left."""
        end_s = self._loop.time() + INSTANT_SLICE_S
        is_stuck = False
        while not self._model.is_idle and not is_stuck and self._loop.time() < end_s:
            is_stuck = self._model.step(math.inf).is_empty
        self._on_progress()
        return None if is_stuck or self._model.is_idle else self._loop.call_soon(self._turn)
