"""llama.cpp's fields: all that is let through. It checks few of them, and aborts or stands still on some.

Seen with xllamacpp 2026.10 and a model of 320 tokens, each from one request: ``grammar_triggers`` of an
unknown type ends the process (an assertion), as does a ``grammar`` with 100,000 parentheses (the stack);
``dry_penalty_last_n: 1e9`` took more than 25 s, 50,000 alternatives in a grammar too; ``repeat_last_n: 1e9``
took 10 s, ``n_probs: 100000`` with a real model's vocabulary 6 s.
"""

from __future__ import annotations

from dynaplan.engines.api_rules import (
    EngineApi,
    FieldRule,
    anything,
    entries,
    flag,
    grammar,
    number,
    refused,
    text,
    texts,
    whole,
    wholes,
)
from dynaplan.engines.apis.openai import COMPLETE, FORMS, MOST_LOGPROBS, SCHEMA

MOST_TOKENS = 1_000_000
"""Tokens that a sampler may look back; more than any context."""

_TRIGGERS = refused("llama.cpp sets it by itself, for tools")

_SAMPLING: dict[str, FieldRule] = {
    "n_probs": whole(0, MOST_LOGPROBS),
    "min_keep": whole(0, MOST_LOGPROBS),
    "top_k": whole(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "typical_p": number(0, 1),
    "top_n_sigma": number(-1, 1000),
    "xtc_probability": number(0, 1),
    "xtc_threshold": number(0, 1),
    "dynatemp_range": number(0, 100),
    "dynatemp_exponent": number(0, 100),
    "repeat_penalty": number(0, 100),
    "repeat_last_n": whole(-1, MOST_TOKENS),
    "dry_multiplier": number(0, 100),
    "dry_base": number(0, 100),
    "dry_allowed_length": whole(0, MOST_TOKENS),
    "dry_penalty_last_n": whole(-1, MOST_TOKENS),
    "dry_sequence_breakers": texts(64, 64),
    "mirostat": whole(0, 2),
    "mirostat_tau": number(0, 1000),
    "mirostat_eta": number(0, 1000),
    "adaptive_target": number(-1, 1),
    "adaptive_decay": number(0, 1),
    "samplers": texts(32, 64),
    "ignore_eos": flag(),
    "post_sampling_probs": flag(),
    "backend_sampling": flag(),
}

_GRAMMAR: dict[str, FieldRule] = {
    "grammar": grammar(40_000, most_depth=200),
    "json_schema": SCHEMA,
    "grammar_lazy": FieldRule("false: llama.cpp sets it by itself, for tools", lambda value: value is False),
    "grammar_triggers": _TRIGGERS,
    "grammar_type": _TRIGGERS,
    "preserved_tokens": _TRIGGERS,
}

_ANSWER: dict[str, FieldRule] = {
    "n_predict": whole(-1, 2**31 - 1),
    "n_keep": whole(-1, 2**31 - 1),
    "n_discard": whole(0, 2**31 - 1),
    "n_indent": whole(0, 10_000),
    "n_cmpl": whole(1, 128),
    "t_max_predict_ms": whole(-1, 2**53),
    "t_max_prompt_ms": whole(-1, 2**53),
    "cache_prompt": flag(),
    "return_tokens": flag(),
    "return_progress": flag(),
    "timings_per_token": flag(),
    "include_usage": flag(),
    "response_fields": texts(100, 200),
    "lora": entries(64),
}

_CHAT: dict[str, FieldRule] = {
    "chat_template_kwargs": SCHEMA,
    "add_generation_prompt": flag(),
    "continue_final_message": flag(),
    "enable_thinking": anything(),
    "thinking_budget_tokens": whole(-1, 2**31 - 1),
    "reasoning_budget": whole(-1, 2**31 - 1),
    "reasoning_budget_tokens": whole(-1, 2**31 - 1),
    "reasoning_format": text(64),
    "reasoning_in_content": flag(),
    "parse_tool_calls": flag(),
    "input_extra": entries(1000),
    "input_prefix": text(1_000_000),
    "input_suffix": text(1_000_000),
}

_PASSED_OVER: dict[str, FieldRule] = {
    name: anything()
    for name in (
        *("min_tokens", "repetition_penalty", "length_penalty", "early_stopping", "stop_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"),
        *("include_stop_str_in_output", "return_token_ids", "priority", "request_id"),
    )
}
"""vLLM's fields that clients and load generators send to every server. llama.cpp never reads them, so
they cannot harm it; fields that would change what an answer is (``guided_json``) are refused instead."""

_FIELDS: dict[str, FieldRule] = {**COMPLETE, **_SAMPLING, **_GRAMMAR, **_ANSWER, **_CHAT, **_PASSED_OVER}

_CHAT_FIELDS: dict[str, FieldRule] = {
    **{name: rule for name, rule in _FIELDS.items() if name not in ("messages", "prompt")},
    **FORMS,
}

_RERANK: dict[str, FieldRule] = {
    "model": anything(),
    "query": anything(),
    "documents": anything(),
    "top_n": whole(1, 1_000_000),
    "return_text": flag(),
}

_PATHS: dict[str, dict[str, FieldRule]] = {
    "/v1/responses": {
        **_CHAT_FIELDS,
        "input": anything(),
        "instructions": anything(),
        "truncation": text(64),
        "max_output_tokens": whole(1, 2**31 - 1),
        "max_tool_calls": anything(),
        **{name: anything() for name in ("previous_response_id", "conversation", "background")},
    },
    "/v1/messages": {
        **_CHAT_FIELDS,
        "messages": anything(),
        "system": anything(),
        "stop_sequences": texts(64, 4096),
        "thinking": SCHEMA,
        "container": anything(),
        "cache_control": anything(),
    },
    "/v1/embeddings": {
        "model": anything(),
        "input": anything(),
        "user": anything(),
        "encoding_format": text(16),
        "embd_normalize": whole(-1, 32),
        "dimensions": whole(1, 1_000_000),
    },
    "/v1/rerank": _RERANK,
    "/rerank": _RERANK,
    "/tokenize": {
        "model": anything(),
        "content": anything(),
        "add_special": flag(),
        "parse_special": flag(),
        "with_pieces": flag(),
    },
    "/detokenize": {"model": anything(), "tokens": wholes(1_000_000)},
}
"""The other paths. Responses and messages become chats in the server, with what fields of a chat they have.

Embeddings need ``embedding: true`` and ``pooling`` for the worker, and rerank ``pooling: rank``.
"""

API = EngineApi(
    _FIELDS,
    is_complete=True,
    continuation={},  # it takes a last message of the assistant for a beginning without being told
    paths=_PATHS,
    streams_lists=False,  # the first event is `data: null`, and ends OpenAI's client
)
