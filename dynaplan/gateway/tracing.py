"""Traces of requests: the interface to what collects them. ``otlp`` implements it with OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from dynaplan.util.errors import ConfigError

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """One step of a trace, from its beginning to its end."""

    def begin(self, name: str) -> Span:
        """Begin a step within this one, towards another process."""
        ...

    def headers(self) -> Mapping[str, str]:
        """Return the headers by which the steps of another process become part of this one."""
        ...

    def note(self, attributes: Attributes) -> None:
        """Add what is known about the step."""
        ...

    def end(self, error: str = "") -> None:
        """End the step; ``error`` says how it failed, empty when it did not."""
        ...


class Tracer(Protocol):
    """Sends the spans of one process to a collector."""

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """Begin the first step here, in the trace that the client's headers name, or in a new one."""
        ...

    def close(self) -> None:
        """Send what has ended and was not sent; blocks, for some seconds at most."""
        ...


class RequestTrace:
    """A request's span, and the span of the ``step`` that is under way in it; between steps its own."""

    def __init__(self, request: Span) -> None:
        self.request = request
        self.step = request

    def end(self, error: str, attributes: Attributes) -> None:
        self.request.note(attributes)
        self.request.end(error)


class TraceStep:
    """A step (span) of a trace, as long as its ``with`` block; an exception of the block is its error."""

    def __init__(self, trace: RequestTrace, name: str, attributes: Attributes) -> None:
        self._trace = trace
        self._name = name
        self._attributes = attributes

    def __enter__(self) -> None:
        self._trace.step = self._trace.request.begin(self._name)
        self._trace.step.note(self._attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        step, self._trace.step = self._trace.step, self._trace.request
        step.end(kind.__name__ if kind else "")


def open_tracer(url: str) -> Tracer:
    """Return what sends spans to the collector at that address; raises ConfigError where it cannot."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp-traces-endpoint is {url!r}", hint="Expected an address such as http://127.0.0.1:4318."
        )
    try:
        from dynaplan.gateway import otlp
    except ImportError as error:
        raise ConfigError(
            f"otlp-traces-endpoint needs OpenTelemetry's SDK: {error}",
            hint="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        ) from None
    return otlp.open_tracer(url)
