"""The fields of OpenAI's API that clients send to every engine, and bounds that no honest request meets."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.engines.api_rules import (
    FieldRule,
    anything,
    entries,
    flag,
    number,
    schema,
    text,
    texts,
    whole,
    whole_or_flag,
)

MOST_ANSWERS = 128
"""OpenAI's own limit of ``n``."""

MOST_LOGPROBS = 100
"""Alternatives per token; OpenAI has 20."""

SCHEMA = schema(most_depth=64, most_values=5_000, most_repetitions=5_000)
"""llama.cpp took 7 s for ``maxItems: 100000`` and 18 s for 5000 properties (2026.10)."""

TOOLS = schema(most_depth=64, most_values=50_000, most_repetitions=5_000)
"""The schemas of all tools together; an agent has dozens."""

BOUNDED: Mapping[str, FieldRule] = {
    "n": whole(1, MOST_ANSWERS),
    "best_of": whole(1, MOST_ANSWERS),
    "logprobs": whole_or_flag(0, MOST_LOGPROBS),
    "top_logprobs": whole(0, MOST_LOGPROBS),
    "stop": texts(64, 4096),
    "logit_bias": entries(4096),
    "response_format": SCHEMA,
    "tools": TOOLS,
    "functions": TOOLS,
}
"""Bounds for every engine. SGLang ends for ``top_logprobs`` above its vocabulary (sgl-project/sglang#40076),
and takes 22 GB for ``n: 5000000`` (sgl-project/sglang#36856)."""

FORMS: Mapping[str, FieldRule] = {"text": SCHEMA, "output_config": SCHEMA}
"""The fields of ``/v1/responses`` and ``/v1/messages`` that hold the schema of an answer."""

IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "modalities", "audio", "prediction", "web_search_options", "verbosity"),
    *("function_call", "reasoning", "include", "moderation"),
)
"""Fields of OpenAI's API that mean nothing to an engine of one's own; clients send them all the same."""

COMPLETE: Mapping[str, FieldRule] = {
    **BOUNDED,
    "model": anything(),  # these four are read by the frontend, which checks them
    "messages": anything(),
    "prompt": anything(),
    "stream": anything(),
    "max_tokens": anything(),
    "max_completion_tokens": anything(),
    "stream_options": entries(16),
    "temperature": number(-1, 100),
    "top_p": number(0, 1),
    "seed": whole(-(2**63), 2**64 - 1),
    "presence_penalty": number(-100, 100),
    "frequency_penalty": number(-100, 100),
    "parallel_tool_calls": flag(),
    "tool_choice": anything(),
    "reasoning_effort": text(64),
    "echo": flag(),
    "suffix": text(1_000_000),
    **{name: anything() for name in IGNORED},
}
"""Every field of a completion or a chat."""
