"""Traces of requests: the interface to what collects them. ``otlp`` implements it with OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
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
