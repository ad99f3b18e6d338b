"""The trace of one request: the steps between its arrival and the end of its answer, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from dynaplan.gateway.tracing.port import Attributes, Span


class RequestTrace:
    """A request's span, and the step that is under way in it.

    ``queue`` is the wait for a worker, ``prefill`` a remote prefill, or the decision for a local one, and
    ``decode`` an attempt of a worker to answer; after a death there are several of each.
    """

    def __init__(self, request: Span) -> None:
        self._request = request
        self._step = request

    def step(self, name: str, attributes: Attributes) -> TraceStep:
        """Return a step, which lasts as long as a ``with`` block."""
        return TraceStep(self, name, attributes)

    def headers(self) -> Mapping[str, str]:
        """Return the headers that name the step under way as the parent of another process's."""
        return self._step.headers()

    def note(self, attributes: Attributes) -> None:
        """Add what is known about the step under way."""
        self._step.note(attributes)

    def end(self, error: str, attributes: Attributes) -> None:
        """End the request's span."""
        self._request.note(attributes)
        self._request.end(error)

    def enter(self, name: str, attributes: Attributes) -> None:
        """Begin a span below the request's; ``headers`` and ``note`` are about it until ``leave``."""
        self._step = self._request.begin(name)
        self._step.note(attributes)

    def leave(self, error: str) -> None:
        """End the span of the present step; an ``error`` that is not empty marks it as failed."""
        step, self._step = self._step, self._request
        step.end(error)


class TraceStep:
    """One step, inside a ``with`` block; an exception is its error."""

    def __init__(self, trace: RequestTrace, name: str, attributes: Attributes) -> None:
        self._trace = trace
        self._name = name
        self._attributes = attributes

    def __enter__(self) -> None:
        self._trace.enter(self._name, self._attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._trace.leave(kind.__name__ if kind else "")
