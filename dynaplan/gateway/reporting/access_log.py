"""The line that a frontend logs for each request, when it is asked to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dynaplan.gateway.answering import Exchange
from dynaplan.gateway.stream_tokens import Usage
from dynaplan.util.log_lines import FIELDS
from dynaplan.worker.named_requests import name_of

log = logging.getLogger("dynaplan.access")


class AccessLog:
    """Logs each request: ``request ID: ok, model M at worker W, 12 + 64 tokens, TTFT 48 ms, 512 ms in all``.

    As JSON these are fields of their own.
    """

    def ended(self, exchange: Exchange, stated: Usage, outcome: str, duration_s: float) -> None:
        """Log an accepted request; ``outcome`` is the ``error_type`` of the metrics, empty when answered."""
        record, call = exchange.record, exchange.call
        prompt = call.prompt_tokens if stated.input_tokens is None else stated.input_tokens
        answer = record.output_tokens if stated.output_tokens is None else stated.output_tokens
        fields = {
            "request_id": name_of(exchange.request),
            "outcome": outcome or "ok",
            "endpoint": call.endpoint.name,
            "model": call.model,
            "worker": exchange.worker or None,
            "input_tokens": prompt,
            "output_tokens": answer,
            "ttft_ms": None if record.ttft_s is None else round(1000 * record.ttft_s, 1),
            "duration_ms": round(1000 * duration_s, 1),
        }
        log.info("%s", in_words(fields), extra={FIELDS: fields})

    def refused(self, request_id: str, endpoint: str, outcome: str) -> None:
        """Log a request that was answered with an error before it was accepted."""
        fields = {"request_id": request_id, "outcome": outcome, "endpoint": endpoint}
        log.info("request %s: %s, refused", request_id, outcome, extra={FIELDS: fields})


def in_words(fields: Mapping[str, Any]) -> str:
    """Return the line for a person."""
    parts = [f"request {fields['request_id']}: {fields['outcome']}"]
    at = f" at {fields['worker']}" if fields["worker"] else ""
    parts.append(f"model {fields['model']}{at}")
    parts.append(f"{fields['input_tokens']} + {fields['output_tokens']} tokens")
    if fields["ttft_ms"] is not None:
        parts.append(f"TTFT {fields['ttft_ms']:g} ms")
    parts.append(f"{fields['duration_ms']:g} ms in all")
    return ", ".join(parts)
