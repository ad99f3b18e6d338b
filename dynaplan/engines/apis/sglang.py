"""SGLang's fields that are refused or bounded; all others are its own affair.

From one request, its scheduler and so the whole server ended over ``top_logprobs`` above the vocabulary
(sgl-project/sglang#40076), ``n`` in millions and token ids beyond the vocabulary
(sgl-project/sglang#36856).
"""

from __future__ import annotations

from dynaplan.engines.api_rules import EngineApi, refused, text, texts, whole, wholes
from dynaplan.engines.apis.openai import BOUNDED, FORMS, MOST_LOGPROBS, SCHEMA

_SET_BY_SERVER = refused("it is set by the server")

API = EngineApi(
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
        "session_params": _SET_BY_SERVER,
        "data_parallel_rank": _SET_BY_SERVER,
        "routed_dp_rank": _SET_BY_SERVER,
        "disagg_prefill_dp_rank": _SET_BY_SERVER,
        "return_hidden_states": refused("hidden states are not given to clients"),
    },
    death_marks=("Scheduler hit an exception",),
    continuation={"continue_final_message": True},
)
