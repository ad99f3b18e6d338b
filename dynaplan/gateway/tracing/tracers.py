"""The tracer of a frontend, made when tracing is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.gateway.tracing.port import Tracer


def open_tracer(url: str) -> Tracer:
    """Return what sends spans to the collector at that address; raises ConfigError where it cannot."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp-traces-endpoint is {url!r}", hint="Expected an address such as http://127.0.0.1:4318."
        )
    try:
        from dynaplan.gateway.tracing import otlp
    except ImportError as error:
        raise ConfigError(
            f"otlp-traces-endpoint needs OpenTelemetry's SDK: {error}",
            hint="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        ) from None
    return otlp.open_tracer(url)
