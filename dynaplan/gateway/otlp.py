"""Spans through OpenTelemetry's SDK, sent by OTLP over HTTP. Imported only where they are asked for.

Its variables are read too: ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``,
``OTEL_EXPORTER_OTLP_HEADERS`` and the rest. A client's trace that is not sampled is not sampled here either.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dynaplan.gateway.tracing import Attributes, Span, Tracer

EXPORT_WITHIN_S = 2
"""Seconds for which sending one batch is tried, so that a collector that is away holds no process up."""

TRACES_PATH = "/v1/traces"
"""The path of OTLP over HTTP, for an address that has none."""

_W3C = TraceContextTextMapPropagator()


class OtlpSpan:
    """``ports.tracing.Span`` over a span of the SDK's."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span)

    def begin(self, name: str) -> Span:
        span = self._tracer.start_span(name, context=self._context, kind=trace.SpanKind.CLIENT)
        return OtlpSpan(self._tracer, span)

    def headers(self) -> Mapping[str, str]:
        """Return ``traceparent`` with this span as the parent, and ``tracestate``."""
        headers: dict[str, str] = {}
        _W3C.inject(headers, context=self._context)
        return headers

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class OtlpTracer:
    """``ports.tracing.Tracer`` with a provider of its own; ``processor`` takes the spans that have ended."""

    def __init__(self, processor: Any) -> None:
        resource = Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "dynaplan"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("dynaplan")

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        context = _W3C.extract(headers)
        return OtlpSpan(
            self._tracer, self._tracer.start_span(name, context=context, kind=trace.SpanKind.SERVER)
        )

    def close(self) -> None:
        """Send the spans that the collector does not have yet, and end the sending thread."""
        self._provider.shutdown()


def open_tracer(url: str) -> Tracer:
    """Return a tracer that sends to the collector at that address, in a thread of its own."""
    address = url if urlsplit(url).path.strip("/") else url.rstrip("/") + TRACES_PATH
    return OtlpTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=address, timeout=EXPORT_WITHIN_S)))
