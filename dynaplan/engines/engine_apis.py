"""The fields of requests that each engine takes, with bounds, as data for the frontends.

An engine has a list of what is refused or bounded, because it was seen to end or to stand still over it.
Every other field is the engine's own affair: it reads, refuses or ignores it, as it does without a frontend
before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.engines.api_rules import (
    MAX_REPETITIONS,
    EngineApi,
    ErrorRule,
    FieldRule,
    biases,
    boolean,
    collection,
    forbidden,
    grammar,
    integer,
    integer_or_boolean,
    integers,
    number,
    schema,
    string,
    strings,
)

MAX_ANSWERS = 128
"""OpenAI's own limit of ``n``."""

MAX_LOGPROBS = 100
"""Alternatives per token; OpenAI has 20."""

SCHEMA = schema(max_depth=64, max_values=5_000, max_repetitions=5_000)
"""llama.cpp took 7 s for ``maxItems: 100000`` and 18 s for 5000 properties (2026.10)."""

TOOLS = schema(max_depth=64, max_values=50_000, max_repetitions=MAX_REPETITIONS)
"""The schemas of all tools together; an agent has dozens."""

BOUNDED_FIELDS: Mapping[str, FieldRule] = {
    "n": integer(1, MAX_ANSWERS),
    "best_of": integer(1, MAX_ANSWERS),
    "logprobs": integer_or_boolean(0, MAX_LOGPROBS),
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "stop": strings(64, 4096),
    "logit_bias": biases(4096, 10_000),
    "response_format": SCHEMA,
    "tools": TOOLS,
    "functions": TOOLS,
}
"""Bounds for every engine. SGLang ends for ``top_logprobs`` above its vocabulary (sgl-project/sglang#40076),
and takes 22 GB for ``n: 5000000`` (sgl-project/sglang#36856)."""

ANSWER_SCHEMAS: Mapping[str, FieldRule] = {"text": SCHEMA, "output_config": SCHEMA}
"""The fields of ``/v1/responses`` and ``/v1/messages`` that hold the schema of an answer."""

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

LLAMACPP_API = EngineApi(
    _FIELDS,
    continuation={},  # it takes a last message of the assistant for a beginning without any field
    paths=_PATHS,
    errors=_ERRORS,
    streams_lists=False,  # the first event is `data: null`, and ends OpenAI's client
)


# -- SGLang: what is refused or bounded; all other fields are its own affair ----------------------------
#
# From one request, its scheduler and so the whole server ended over ``top_logprobs`` above the vocabulary
# (sgl-project/sglang#40076), ``n`` in millions and token ids beyond the vocabulary
# (sgl-project/sglang#36856).

_SET_BY_SGLANG = forbidden("it is set by the server")

SGLANG_API = EngineApi(
    {
        **BOUNDED_FIELDS,
        **ANSWER_SCHEMAS,
        "top_logprobs_num": integer(0, MAX_LOGPROBS),
        "top_k": integer(-1, 2**31 - 1),
        "stop_token_ids": integers(4096),
        "stop_regex": strings(16, 1024),
        "regex": string(8_192),
        "ebnf": string(40_000),
        "json_schema": string(100_000),
        "chat_template_kwargs": SCHEMA,
        "custom_logit_processor": forbidden("code is not taken from clients"),
        "input_embeds": forbidden("embeddings are not taken from clients"),
        "session_params": _SET_BY_SGLANG,
        "data_parallel_rank": _SET_BY_SGLANG,
        "routed_dp_rank": _SET_BY_SGLANG,
        "disagg_prefill_dp_rank": _SET_BY_SGLANG,
        "return_hidden_states": forbidden("hidden states are not given to clients"),
    },
    death_marks=("Scheduler hit an exception",),
    continuation={"continue_final_message": True},
)


# -- TensorRT-LLM: what is refused or bounded; all other fields are its own affair ----------------------

TRTLLM_API = EngineApi(
    {
        **BOUNDED_FIELDS,
        **ANSWER_SCHEMAS,
        "prompt_logprobs": integer(0, 100),
        "top_k": integer(-1, 2**31 - 1),
        "stop_token_ids": integers(4096),
        "bad": strings(4096, 4096),
        "beam_width": integer(1, 16),
        "guided_decoding": SCHEMA,
        "chat_template": forbidden("the model has its own"),
        "chat_template_kwargs": SCHEMA,
        "mm_processor_kwargs": forbidden("they are not taken from clients"),
        "lora_request": forbidden("it names files of the server"),
        "conversation_params": forbidden("it is set by the server"),
    },
    death_marks=("RequestError: executor", "The executor has been shut down"),
)


# -- vLLM: what is refused or bounded; it answers other wrong fields with 400 itself ---------------------
#
# One request has ended or halted releases of it: by a template (CVE-2025-61620, CVE-2025-62426), by
# embeddings in place of a prompt (CVE-2025-62164), by a wrong regular expression (vllm-project/vllm#19270).

MAX_GRAMMAR_LENGTH = 40_000
"""The length of a grammar or a list of choices as text."""

MAX_PATTERN_LENGTH = 8_192
"""The length of a regular expression."""


def _is_plain_template(value: object) -> bool:
    """Tell whether the arguments for the chat template leave the template and its tokenizing alone."""
    return (
        isinstance(value, dict) and SCHEMA.accepts(value) and not value.keys() & {"chat_template", "tokenize"}
    )


VLLM_API = EngineApi(
    {
        **BOUNDED_FIELDS,
        **ANSWER_SCHEMAS,
        "prompt_logprobs": integer(-1, 100),
        "top_k": integer(-1, 2**31 - 1),
        "stop_token_ids": integers(4096),
        "allowed_token_ids": integers(1_000_000),
        "bad_words": strings(4096, 4096),
        "truncate_prompt_tokens": integer(-1, 2**31 - 1),
        "structured_outputs": SCHEMA,
        "guided_json": SCHEMA,
        "guided_choice": strings(4096, MAX_GRAMMAR_LENGTH),
        "guided_regex": string(MAX_PATTERN_LENGTH),
        "guided_grammar": string(MAX_GRAMMAR_LENGTH),
        "chat_template": forbidden("the model has its own; set chat-template for the worker"),
        "chat_template_kwargs": FieldRule(
            f"an object without chat_template and tokenize, {SCHEMA.expected}", _is_plain_template
        ),
        "prompt_embeds": forbidden("embeddings are not taken from clients"),
        "mm_processor_kwargs": forbidden("set mm-processor-kwargs for the worker"),
        "media_io_kwargs": forbidden("set media-io-kwargs for the worker"),
        "ec_transfer_params": forbidden("it is set by the server"),
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
    "command": EngineApi(is_unknown=True),
}
"""The API of each engine by its name."""
