"""The fields of requests that each engine takes, with bounds, as data for the frontends.

An engine that checks for itself (vLLM, SGLang, TensorRT-LLM) has a list of what is refused or bounded, so
that every other field of its own works. llama.cpp has a list of all that is let through: it aborts on some.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.engines.api_rules import (
    EngineApi,
    FieldRule,
    anything,
    entries,
    flag,
    grammar,
    number,
    refused,
    schema,
    text,
    texts,
    whole,
    whole_or_flag,
    wholes,
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

# -- llama.cpp: all that is let through -----------------------------------------------------------------
#
# It checks few fields, and aborts or stands still on some. Seen with xllamacpp 2026.10 and a model of 320
# tokens, each from one request: ``grammar_triggers`` of an unknown type ends the process (an assertion), as
# does a ``grammar`` with 100,000 parentheses (the stack); ``dry_penalty_last_n: 1e9`` took more than 25 s,
# 50,000 alternatives in a grammar too; ``repeat_last_n: 1e9`` took 10 s, ``n_probs: 100000`` with a real
# model's vocabulary 6 s.

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

LLAMACPP_API = EngineApi(
    _FIELDS,
    is_complete=True,
    continuation={},  # it takes a last message of the assistant for a beginning without being told
    paths=_PATHS,
    streams_lists=False,  # the first event is `data: null`, and ends OpenAI's client
)


# -- SGLang: what is refused or bounded; all other fields are its own affair ----------------------------
#
# From one request, its scheduler and so the whole server ended over ``top_logprobs`` above the vocabulary
# (sgl-project/sglang#40076), ``n`` in millions and token ids beyond the vocabulary
# (sgl-project/sglang#36856).

_SET_BY_SGLANG = refused("it is set by the server")

SGLANG_API = EngineApi(
    {
        **BOUNDED,
        **FORMS,
        "top_logprobs_num": whole(0, MOST_LOGPROBS),
        "top_k": whole(-1, 2**31 - 1),
        "stop_token_ids": wholes(4096),
        "stop_regex": texts(16, 1024),
        "regex": text(8_192),
        "ebnf": text(40_000),
        "json_schema": text(100_000),
        "chat_template_kwargs": SCHEMA,
        "custom_logit_processor": refused("code is not taken from clients"),
        "input_embeds": refused("embeddings are not taken from clients"),
        "session_params": _SET_BY_SGLANG,
        "data_parallel_rank": _SET_BY_SGLANG,
        "routed_dp_rank": _SET_BY_SGLANG,
        "disagg_prefill_dp_rank": _SET_BY_SGLANG,
        "return_hidden_states": refused("hidden states are not given to clients"),
    },
    death_marks=("Scheduler hit an exception",),
    continuation={"continue_final_message": True},
)


# -- TensorRT-LLM: what is refused or bounded; all other fields are its own affair ----------------------

TRTLLM_API = EngineApi(
    {
        **BOUNDED,
        **FORMS,
        "prompt_logprobs": whole(0, 100),
        "top_k": whole(-1, 2**31 - 1),
        "stop_token_ids": wholes(4096),
        "bad": texts(4096, 4096),
        "beam_width": whole(1, 16),
        "guided_decoding": SCHEMA,
        "chat_template": refused("the model has its own"),
        "chat_template_kwargs": SCHEMA,
        "mm_processor_kwargs": refused("they are not taken from clients"),
        "lora_request": refused("it names files of the server"),
        "conversation_params": refused("it is set by the server"),
    },
    death_marks=("RequestError: executor", "The executor has been shut down"),
)


# -- vLLM: what is refused or bounded; it answers other wrong fields with 400 itself ---------------------
#
# One request has ended or halted releases of it: by a template (CVE-2025-61620, CVE-2025-62426), by
# embeddings in place of a prompt (CVE-2025-62164), by a wrong regular expression (vllm-project/vllm#19270).

MOST_CHARACTERS = 40_000
"""The length of a grammar or a list of choices as text."""

MOST_OF_A_PATTERN = 8_192
"""The length of a regular expression."""


def _is_plain_template(value: object) -> bool:
    """Tell whether the arguments for the chat template leave the template and its tokenizing alone."""
    return (
        isinstance(value, dict) and SCHEMA.accepts(value) and not value.keys() & {"chat_template", "tokenize"}
    )


VLLM_API = EngineApi(
    {
        **BOUNDED,
        **FORMS,
        "prompt_logprobs": whole(-1, 100),
        "top_k": whole(-1, 2**31 - 1),
        "stop_token_ids": wholes(4096),
        "allowed_token_ids": wholes(1_000_000),
        "bad_words": texts(4096, 4096),
        "truncate_prompt_tokens": whole(-1, 2**31 - 1),
        "structured_outputs": SCHEMA,
        "guided_json": SCHEMA,
        "guided_choice": texts(4096, MOST_CHARACTERS),
        "guided_regex": text(MOST_OF_A_PATTERN),
        "guided_grammar": text(MOST_CHARACTERS),
        "chat_template": refused("the model has its own; set chat-template for the worker"),
        "chat_template_kwargs": FieldRule(
            f"an object without chat_template and tokenize, {SCHEMA.expected}", _is_plain_template
        ),
        "prompt_embeds": refused("embeddings are not taken from clients"),
        "mm_processor_kwargs": refused("set mm-processor-kwargs for the worker"),
        "media_io_kwargs": refused("set media-io-kwargs for the worker"),
        "ec_transfer_params": refused("it is set by the server"),
    },
    death_marks=("EngineCore encountered an issue", "EngineDeadError"),
    continuation={"continue_final_message": True, "add_generation_prompt": False},
)


# -- The simulated engine checks every field itself, and continues an answer as vLLM does ----------------

SIM_API = EngineApi(continuation={"continue_final_message": True, "add_generation_prompt": False})

ENGINE_APIS: Mapping[str, EngineApi] = {
    "sim": SIM_API,
    "llamacpp": LLAMACPP_API,
    "vllm": VLLM_API,
    "sglang": SGLANG_API,
    "trtllm": TRTLLM_API,
}
"""The API of each engine by its name."""
