"""TensorRT-LLM's fields that are refused or bounded; all others are its own affair."""

from __future__ import annotations

from dynaplan.engines.api_rules import EngineApi, refused, texts, whole, wholes
from dynaplan.engines.apis.openai import BOUNDED, FORMS, SCHEMA

API = EngineApi(
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
