"""Facts that a running engine states: its model, its context, its KV cache, its request slots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from dynaplan.planner import factory
from dynaplan.util.errors import PermanentError

ANSWER_S = 10.0
"""Seconds that the Frontend may take to answer."""

POLL_S = 0.2
"""Seconds between two questions to the worker."""

LATE_S = 10.0
"""Seconds to wait for the size of the KV cache: some engines state it only after their first requests."""

CONTEXT_METRIC, BLOCK_METRIC = "model_context_length", "model_kv_cache_block_size"
"""The ends of the names of the Frontend's gauges of a model."""

KV_TOTAL_IN_TOKENS = frozenset({"sglang"})
"""Engines that state the size of their KV cache in tokens, not in blocks."""


@dataclass(frozen=True)
class EngineFacts:
    """``model`` is the name that clients use; ``context_tokens`` and ``request_slots`` are 0 if unknown."""

    model: str
    context_tokens: int
    max_kv_tokens: int
    request_slots: int

    def to_document(self) -> dict[str, Any]:
        """Map each field's name to its value, for JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> EngineFacts:
        """Read ``to_document``'s form; raises KeyError or ValueError when it is something else."""
        return cls(
            str(document["model"]),
            *(int(document[key]) for key in ("context_tokens", "max_kv_tokens", "request_slots")),
        )


async def served_model(url: str) -> str:
    """Return the name that clients use for the model; PermanentError when the Frontend knows none."""
    async with _session() as session, session.get(f"{url}/v1/models", raise_for_status=True) as response:
        models = (await response.json())["data"]
    if not models:
        raise PermanentError("the deployment serves no model", hint="Expected Frontend.served_model_name.")
    return str(models[0]["id"])


async def engine_facts(
    url: str, worker_url: str, engine: str, max_kv_tokens: int | None = None
) -> EngineFacts:
    """Ask the Frontend and the worker; ``max_kv_tokens`` is for an engine that does not state it.

    Ask after the first requests. Raises PermanentError when the size of the KV cache stays unknown.
    """
    model = await served_model(url)
    gauges = await _model_gauges(url, model)
    block_tokens = 1 if engine in KV_TOTAL_IN_TOKENS else gauges.get(BLOCK_METRIC, 0)
    metrics = factory.worker_metrics()
    deadline_s = monotonic() + LATE_S
    try:
        while True:
            (load,) = await metrics.loads((worker_url,))
            slots = load.request_slots if load else 0
            known = max_kv_tokens or (load.kv_total_blocks * block_tokens if load else 0)
            if known:
                return EngineFacts(model, gauges.get(CONTEXT_METRIC, 0), known, slots)
            if monotonic() > deadline_s:
                raise PermanentError(
                    f"{engine} does not say how many tokens its KV cache holds",
                    hint="Add --max-kv-tokens N; engines print it when they start.",
                )
            await asyncio.sleep(POLL_S)
    finally:
        await metrics.close()


async def _model_gauges(url: str, model: str) -> dict[str, int]:
    """Read the Frontend's gauges of the model, by the end of their names."""
    async with _session() as session, session.get(f"{url}/metrics", raise_for_status=True) as response:
        text = await response.text()
    return {
        name: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for name in (CONTEXT_METRIC, BLOCK_METRIC)
        if sample.name.endswith(name) and sample.labels.get("model") == model
    }


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))
