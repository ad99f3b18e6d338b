"""The bounds of the fields that llama.cpp's server takes, and its errors that are a wrong request's fault."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.engines.api_rules import (
    ANSWER_SCHEMAS,
    BOUNDED_FIELDS,
    MAX_LOGPROBS,
    SCHEMA,
    EngineApi,
    ErrorRule,
    FieldRule,
    boolean,
    collection,
    forbidden,
    grammar,
    integer,
    integers,
    number,
    string,
    strings,
)

OPENAI_FIELDS: Mapping[str, FieldRule] = {
    **BOUNDED_FIELDS,
    "stream_options": collection(16),
    "temperature": number(-1, 100),
    "top_p": number(0, 1),
    "seed": integer(-(2**63), 2**64 - 1),
    "presence_penalty": number(-100, 100),
    "frequency_penalty": number(-100, 100),
    "parallel_tool_calls": boolean(),
    "reasoning_effort": string(64),
    "echo": boolean(),
    "suffix": string(1_000_000),
}
"""Fields of a completion or a chat that an engine may not check."""

# -- llama.cpp: what is refused or bounded ---------------------------------------------------------------
#
# It ignores fields that it does not know, checks few of its own, and aborts or stands still on some. Seen
# with xllamacpp 2026.10 and a model of 320 tokens, each from one request: ``grammar_triggers`` of an
# unknown type ends the process (an assertion), as does a ``grammar`` with 100,000 parentheses (the stack);
# ``dry_penalty_last_n: 1e9`` took more than 25 s, 50,000 alternatives in a grammar too; ``repeat_last_n:
# 1e9`` took 10 s, ``n_probs: 100000`` with a real model's vocabulary 6 s.

MAX_LOOKBACK_TOKENS = 1_000_000
"""Tokens that a sampler may look back; more than any context."""

_TRIGGERS = forbidden("llama.cpp sets it by itself, for tools")

_SAMPLING: dict[str, FieldRule] = {
    "n_probs": integer(0, MAX_LOGPROBS),
    "min_keep": integer(0, MAX_LOGPROBS),
    "top_k": integer(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "typical_p": number(0, 1),
    "top_n_sigma": number(-1, 1000),
    "xtc_probability": number(0, 1),
    "xtc_threshold": number(0, 1),
    "dynatemp_range": number(0, 100),
    "dynatemp_exponent": number(0, 100),
    "repeat_penalty": number(0, 100),
    "repeat_last_n": integer(-1, MAX_LOOKBACK_TOKENS),
    "dry_multiplier": number(0, 100),
    "dry_base": number(0, 100),
    "dry_allowed_length": integer(0, MAX_LOOKBACK_TOKENS),
    "dry_penalty_last_n": integer(-1, MAX_LOOKBACK_TOKENS),
    "dry_sequence_breakers": strings(64, 64),
    "mirostat": integer(0, 2),
    "mirostat_tau": number(0, 1000),
    "mirostat_eta": number(0, 1000),
    "adaptive_target": number(-1, 1),
    "adaptive_decay": number(0, 1),
    "samplers": strings(32, 64),
    "ignore_eos": boolean(),
    "post_sampling_probs": boolean(),
    "backend_sampling": boolean(),
}

_GRAMMAR: dict[str, FieldRule] = {
    "grammar": grammar(40_000, max_depth=200),
    "json_schema": SCHEMA,
    "grammar_lazy": FieldRule("false: llama.cpp sets it by itself, for tools", lambda value: value is False),
    "grammar_triggers": _TRIGGERS,
    "grammar_type": _TRIGGERS,
    "preserved_tokens": _TRIGGERS,
}

_ANSWER: dict[str, FieldRule] = {
    "n_predict": integer(-1, 2**31 - 1),
    "n_keep": integer(-1, 2**31 - 1),
    "n_discard": integer(0, 2**31 - 1),
    "n_indent": integer(0, 10_000),
    "n_cmpl": integer(1, 128),
    "t_max_predict_ms": integer(-1, 2**53),
    "t_max_prompt_ms": integer(-1, 2**53),
    "cache_prompt": boolean(),
    "return_tokens": boolean(),
    "return_progress": boolean(),
    "timings_per_token": boolean(),
    "include_usage": boolean(),
    "response_fields": strings(100, 200),
    "lora": collection(64),
}

_CHAT: dict[str, FieldRule] = {
    "chat_template_kwargs": SCHEMA,
    "add_generation_prompt": boolean(),
    "continue_final_message": boolean(),
    "thinking_budget_tokens": integer(-1, 2**31 - 1),
    "reasoning_budget": integer(-1, 2**31 - 1),
    "reasoning_budget_tokens": integer(-1, 2**31 - 1),
    "reasoning_format": string(64),
    "reasoning_in_content": boolean(),
    "parse_tool_calls": boolean(),
    "input_extra": collection(1000),
    "input_prefix": string(1_000_000),
    "input_suffix": string(1_000_000),
}

_FIELDS: dict[str, FieldRule] = {
    **OPENAI_FIELDS,
    **_SAMPLING,
    **_GRAMMAR,
    **_ANSWER,
    **_CHAT,
}

_CHAT_FIELDS: dict[str, FieldRule] = {**_FIELDS, **ANSWER_SCHEMAS}

_RERANK: dict[str, FieldRule] = {
    "top_n": integer(1, 1_000_000),
    "return_text": boolean(),
}

_MESSAGES: dict[str, FieldRule] = {
    **_CHAT_FIELDS,
    "stop_sequences": strings(64, 4096),
    "thinking": SCHEMA,
}

_PATHS: dict[str, dict[str, FieldRule]] = {
    "/v1/responses": {
        **_CHAT_FIELDS,
        "truncation": string(64),
        "max_output_tokens": integer(1, 2**31 - 1),
    },
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/embeddings": {
        "encoding_format": string(16),
        "embd_normalize": integer(-1, 32),
        "dimensions": integer(1, 1_000_000),
    },
    "/v1/rerank": _RERANK,
    "/rerank": _RERANK,
    "/tokenize": {
        "add_special": boolean(),
        "parse_special": boolean(),
        "with_pieces": boolean(),
    },
    "/detokenize": {"tokens": integers(1_000_000)},
}
"""The other paths. Responses and messages become chats in the server, with what fields of a chat they have.

Embeddings need ``embedding: true`` and ``pooling`` for the worker, and rerank ``pooling: rank``.
"""

_ERRORS = (
    ErrorRule("' is required"),
    ErrorRule("json.exception."),
    ErrorRule("is too large to process", code="context_length_exceeded"),
    ErrorRule("Failed to parse tools"),
    ErrorRule("Failed to parse messages"),
    ErrorRule("Unknown reasoning format"),
    ErrorRule("vector::_M_range_check", advice="'tokens' has one that the model's vocabulary lacks."),
    ErrorRule(
        "input is not supported",
        advice="The model here takes no such images, sounds or videos.",
        code="no_media",
    ),
    ErrorRule(
        "does not support embeddings",
        501,
        "This model is not served for embeddings: its worker needs `embedding: true` and `pooling: mean`.",
        "not_supported",
    ),
    ErrorRule(
        "does not support reranking",
        501,
        "This model is not served for ranking: its worker needs `embedding: true` and `pooling: rank`.",
        "not_supported",
    ),
)
"""Its errors of status 500 over a request that is wrong, and of status 501 with flags of llama-server."""

API = EngineApi(
    _FIELDS,
    continuation={},  # it takes a last message of the assistant for a beginning without any field
    paths=_PATHS,
    errors=_ERRORS,
    streams_lists=False,  # the first event is `data: null`, and ends OpenAI's client
)
