"""What is reported of each request: metrics, a line of the access log, a line of recorded traffic.

A ``RequestReport`` counts an accepted request and observes it; ``end`` writes all three.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from dynaplan.gateway.client import Client
from dynaplan.gateway.engine_answers import NO_USAGE, Usage
from dynaplan.gateway.keys.keyring import KeyHolder, KeyUse
from dynaplan.gateway.keys.usage import REFUSED
from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.gateway.openai_api import NO_BLOCKS, ApiPath, Call, PromptBlocks
from dynaplan.gateway.recording import TrafficRecording
from dynaplan.util.log_lines import FIELDS

access_log = logging.getLogger("dynaplan.access")

MAX_RECENT = 1000
"""Requests that are kept, as many as llama-swap's ``metricsMaxInMemory``."""

CANCELLED = "cancelled"
"""The ``error_type`` of a request whose client has left."""


class Ending(Struct, frozen=True):
    """The end of a request. ``error_type`` is the label of the metrics, empty for one that was answered.

    ``prompt_tokens`` is the frontend's estimate, or exact where the router knows the tokens; ``usage`` what
    the answer states, ``worker`` the last one that was tried, ``blocks`` the prompt's.
    """

    error_type: str
    prompt_tokens: int
    usage: Usage = NO_USAGE
    worker: str = ""
    blocks: PromptBlocks = NO_BLOCKS


class Reports:
    """The reports of one frontend; ``recording`` is None where it is not wanted."""

    def __init__(
        self,
        metrics: FrontendMetrics,
        recording: TrafficRecording | None,
        *,
        logs_requests: bool,
    ) -> None:
        self.metrics = metrics
        self.recording = recording
        self.logs_requests = logs_requests
        self.recent: deque[Mapping[str, Any]] | None = None
        self.requests = 0

    def keep_recent(self) -> None:
        """Keep the last requests that ended, as llama-swap's clients read them."""
        self.recent = deque(maxlen=MAX_RECENT)

    def refuse(
        self,
        client: Client,
        endpoint: ApiPath,
        error_type: str,
        model: str,
        holder: KeyHolder | None = None,
    ) -> None:
        """Report a request that was answered with an error, or whose client left, before it was accepted."""
        self.metrics.count_refusal(endpoint.name, error_type, model)
        if error_type == CANCELLED:
            self.metrics.count_disconnect()
        if holder:
            holder.usage.add(holder.name, model, REFUSED)
        if self.logs_requests:
            fields = {"request_id": client.request_id, "outcome": error_type, "endpoint": endpoint.name}
            access_log.info(
                "request %s: %s, not accepted", client.request_id, error_type, extra={FIELDS: fields}
            )


class RequestReport:
    """The report of one request, from its acceptance until ``end``; ``use`` is that of its key.

    ``record`` observes its tokens for the metrics.
    """

    __slots__ = ("_call", "_client", "_reports", "record", "use")

    def __init__(self, reports: Reports, client: Client, call: Call, use: KeyUse | None = None) -> None:
        self._reports = reports
        self._client = client
        self._call = call
        self.use = use
        self.record = reports.metrics.record(call.model, call.endpoint.name, call.is_stream)

    def end(self, ending: Ending) -> None:
        reports, record, usage = self._reports, self.record, ending.usage
        if ending.error_type == CANCELLED:
            reports.metrics.count_disconnect()
        record.finish(ending.error_type, ending.prompt_tokens, usage)
        prompt = ending.prompt_tokens if usage.input_tokens is None else usage.input_tokens
        answer = record.output_tokens if usage.output_tokens is None else usage.output_tokens
        if reports.recording and self._call.endpoint.streams and (answer or not ending.error_type):
            reports.recording.add(record.begun_s, prompt, answer, ending.blocks)
        if self.use:
            self.use.end(prompt, answer, is_error=bool(ending.error_type))
        if not (reports.logs_requests or reports.recent is not None):
            return
        fields = self._fields(ending, prompt, answer)
        if reports.recent is not None:
            reports.recent.append(_recent(reports.requests, fields, usage))
            reports.requests += 1
        if reports.logs_requests:
            access_log.info("%s", format_fields(fields), extra={FIELDS: fields})

    def _fields(self, ending: Ending, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        ttft_s, duration_s = self.record.ttft_s, self._reports.metrics.now_s() - self.record.begun_s
        return {
            "request_id": self._client.request_id,
            "outcome": ending.error_type or "ok",
            "endpoint": self._call.endpoint.name,
            "model": self._call.model,
            "worker": ending.worker or None,
            **({"key": self.use.holder.name} if self.use else {}),
            "input_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "ttft_ms": None if ttft_s is None else round(1000 * ttft_s, 1),
            "duration_ms": round(1000 * duration_s, 1),
        }


def _recent(number: int, fields: Mapping[str, Any], usage: Usage) -> Mapping[str, Any]:
    """Return a request as llama-swap lists it. Speeds are in tokens a second, -1 where they are not known."""
    ttft_ms, duration_ms = fields["ttft_ms"], fields["duration_ms"]
    decode_ms = duration_ms - (ttft_ms or 0.0)
    prompt, answer = fields["input_tokens"], fields["output_tokens"]
    return {
        "id": number,
        "timestamp": datetime.now(UTC).isoformat(),
        "model": fields["model"],
        "cache_tokens": -1 if usage.cached_tokens is None else usage.cached_tokens,
        "input_tokens": prompt,
        "output_tokens": answer,
        "prompt_per_second": round(1000 * prompt / ttft_ms, 2) if ttft_ms else -1,
        "tokens_per_second": round(1000 * answer / decode_ms, 2) if answer and decode_ms > 0 else -1,
        "duration_ms": round(duration_ms),
        "has_capture": False,
    }


def format_fields(fields: Mapping[str, Any]) -> str:
    """Return the access log's line.

    ``request ID: ok, model M at worker W, 12 + 64 tokens, TTFT 48 ms, 512 ms in all``
    """
    parts = [f"request {fields['request_id']}: {fields['outcome']}"]
    at = f" at {fields['worker']}" if fields["worker"] else ""
    of = f" for {fields['key']}" if "key" in fields else ""
    parts.append(f"model {fields['model']}{at}{of}")
    parts.append(f"{fields['input_tokens']} + {fields['output_tokens']} tokens")
    if fields["ttft_ms"] is not None:
        parts.append(f"TTFT {fields['ttft_ms']:g} ms")
    parts.append(f"{fields['duration_ms']:g} ms in all")
    return ", ".join(parts)
