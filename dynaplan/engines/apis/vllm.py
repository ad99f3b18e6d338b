"""vLLM's fields that are refused or bounded; all others are its own affair. It answers wrong ones with 400.

One request has ended or halted releases of it: by a template (CVE-2025-61620, CVE-2025-62426), by
embeddings in place of a prompt (CVE-2025-62164), by a wrong regular expression (vllm-project/vllm#19270).
"""

from __future__ import annotations

from dynaplan.engines.api_rules import EngineApi, FieldRule, refused, text, texts, whole, wholes
from dynaplan.engines.apis.openai import BOUNDED, FORMS, SCHEMA

MOST_CHARACTERS = 40_000
"""The length of a grammar or a list of choices as text."""

MOST_OF_A_PATTERN = 8_192
"""The length of a regular expression."""


_TEMPLATES = frozenset({"chat_template", "tokenize"})


def _is_plain_template(value: object) -> bool:
    """Tell whether the arguments for the chat template leave the template and its tokenizing alone."""
    return (
        isinstance(value, dict) and SCHEMA.accepts(value) and not value.keys() & {"chat_template", "tokenize"}
    )


API = EngineApi(
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
