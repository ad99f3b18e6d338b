"""One worker's engine in virtual time: an engine model and the clock it has reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dynaplan.core.engine.model import EngineModel
from dynaplan.core.engine.request import EngineRequest

Told = Callable[[str, float], None]
"""Told of a request, by its id, and of the moment, in virtual seconds."""


class SimulatedEngine:
    """Advances its model only as far as it is asked to: between two questions nothing can change.

    ``started`` is told of first tokens, ``finished`` of last ones; both may be told up to one step ahead of
    the moment that was asked for, because a step that has begun cannot be changed any more.
    """

    __slots__ = ("_awaiting_first", "_finished", "_started", "busy_s", "model", "now_s")

    def __init__(self, model: EngineModel, started: Told, finished: Told) -> None:
        self.model = model
        self.now_s = 0.0
        self.busy_s = 0.0
        self._started = started
        self._finished = finished
        self._awaiting_first: deque[EngineRequest] = deque()

    def submit(self, request: EngineRequest, at_s: float) -> None:
        """Queue the request; an idle engine begins with it at that moment. ValueError as the model's."""
        self.model.submit(request)
        self.now_s = max(self.now_s, at_s)
        if request.is_remote:
            self._awaiting_first.append(request)

    def advance(self, until_s: float) -> None:
        """Do every step that begins before that moment."""
        model = self.model
        while self.now_s < until_s and not model.is_idle:
            if not self.step(until_s - self.now_s):
                return

    def step(self, horizon_s: float = 0.0) -> bool:
        """One step, or several that only decode, as ``EngineModel.step``; False when nothing can go on."""
        result = self.model.step(horizon_s)
        if result.is_empty:
            return False
        begun_s = self.now_s
        self.busy_s += result.duration_s
        self.now_s = end_s = begun_s + result.duration_s
        for request in result.started:
            self._started(request.request_id, end_s)
        if self._awaiting_first and result.decode_steps:
            self._tell_taken_over(begun_s + result.duration_s / result.decode_steps)
        for request in result.finished:
            self._finished(request.request_id, end_s)
        return True

    def _tell_taken_over(self, first_s: float) -> None:
        """Requests whose prompt was computed elsewhere emit their first token in their first decode step.

        They do so in the order in which they came: that is how the model admits them.
        """
        emitted, awaiting = self.model.emitted_tokens, self._awaiting_first
        while awaiting and emitted(awaiting[0]):
            self._started(awaiting.popleft().request_id, first_s)
