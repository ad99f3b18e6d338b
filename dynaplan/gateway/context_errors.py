"""A prompt that is longer than the context, said in one way whatever the engine: OpenAI's.

Engines say it in their own words: llama.cpp with the type ``exceed_context_size_error``, vLLM with "maximum
context length is N tokens" and no code, the simulated engine with a prompt that "leaves no room". Clients
look for the code ``context_length_exceeded``, and an operator for the option to change.
"""

from __future__ import annotations

import json
import re

from dynaplan.gateway.openai_api import CONTEXT_ADVICE, CONTEXT_CODE, bad_request

_MARK = re.compile(
    rb"exceed_context_size_error|maximum context length is \d+ tokens|leaves no room|"
    rb"longer than the model's context length"
)


def in_openai_words(status: int, body: bytes) -> bytes:
    """Return the body of an engine's answer; of an error 400 over the context's length, OpenAI's error."""
    if status != 400 or not _MARK.search(body):
        return body
    try:
        error = json.loads(body)
        error = error.get("error", error)
        message, param = error["message"], error.get("param")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return body
    if not isinstance(message, str):
        return body
    text = f"{message.rstrip('. ')}. {CONTEXT_ADVICE}"
    return bad_request(text, param=param if isinstance(param, str) else None, code=CONTEXT_CODE).to_json()
