"""One worker's engine in virtual time: an engine model and the moment that it has reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dynaplan.engines.timing_model.model import EngineModel
from dynaplan.engines.timing_model.request import EngineRequest
from dynaplan.gateway.kv_routing.index import KvIndex

OnRequest = Callable[[str, float], None]
"""Called with the id of a request and the moment, in virtual seconds, at which something happened to it."""


class CacheChanges:
    """The changes of one engine's cache that nobody has been told of yet; its model's ``BlockListener``.

    A router hears of them at the end of their step, as a live engine publishes them.
    """

    __slots__ = ("_steps", "_this_step")

    def __init__(self) -> None:
        self._this_step: list[tuple[bool, list[int]]] = []
        self._steps: deque[tuple[float, list[tuple[bool, list[int]]]]] = deque()

    def stored(self, block: int) -> None:
        """Note a block that the engine has published."""
        self._changed(block, is_stored=True)

    def removed(self, block: int) -> None:
        """Note a block whose place the engine needed."""
        self._changed(block, is_stored=False)

    def end_step(self, at_s: float) -> None:
        """Let the changes since the last call be heard from ``at_s`` seconds on."""
        if self._this_step:
            self._steps.append((at_s, self._this_step))
            self._this_step = []

    def tell(self, index: KvIndex, worker: int, now_s: float) -> None:
        """Tell the index what is heard by now."""
        while self._steps and self._steps[0][0] <= now_s:
            for is_stored, blocks in self._steps.popleft()[1]:
                (index.add if is_stored else index.remove)(worker, blocks)

    def _changed(self, block: int, *, is_stored: bool) -> None:
        runs = self._this_step
        if not runs or runs[-1][0] is not is_stored:
            runs.append((is_stored, []))
        runs[-1][1].append(block)


class SimulatedEngine:
    """Advances its model only when asked to: between two questions nothing from outside can change it.

    ``on_first_token`` and ``on_end`` are called up to one step ahead of the moment that was asked for,
    because a step that has begun cannot be changed any more. ``changes`` is the listener of the model, if it
    has one.
    """

    __slots__ = ("_awaiting_first", "_changes", "_on_end", "_on_first_token", "model", "now_s")

    def __init__(
        self,
        model: EngineModel,
        on_first_token: OnRequest,
        on_end: OnRequest,
        changes: CacheChanges | None = None,
    ) -> None:
        self.model = model
        self._changes = changes
        self.now_s = 0.0
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._awaiting_first: deque[EngineRequest] = deque()

    def submit(self, request: EngineRequest, at_s: float) -> None:
        """Queue the request; an idle engine begins with it at that moment. Raises ValueError as the model."""
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
        """Do one step, or several that only decode, as ``EngineModel.step``; False when nothing can go on."""
        result = self.model.step(horizon_s)
        if result.is_empty:
            return False
        begun_s = self.now_s
        self.now_s = end_s = begun_s + result.duration_s
        if self._changes:
            # Of several steps in one result all but the last are over when somebody asks.
            self._changes.end_step(begun_s + result.duration_s / max(1, result.decode_steps))
        for request in result.started:
            self._on_first_token(request.request_id, end_s)
        if self._awaiting_first and result.decode_steps:
            self._note_remote_first_tokens(begun_s + result.duration_s / result.decode_steps)
        for request in result.finished:
            self._on_end(request.request_id, end_s)
        return True

    def tell_changes(self, index: KvIndex, worker: int, now_s: float) -> None:
        """Tell the index, under the worker's number, of the cache's changes that are heard by now."""
        if self._changes:
            self._changes.tell(index, worker, now_s)

    def _note_remote_first_tokens(self, first_s: float) -> None:
        """Note the first tokens of requests whose prompt came from elsewhere: in their first decode step.

        They emit them in the order in which they came, because the model admits them in that order.
        """
        emitted, awaiting = self.model.emitted_tokens, self._awaiting_first
        while awaiting and emitted(awaiting[0]):
            self._on_first_token(awaiting.popleft().request_id, first_s)
