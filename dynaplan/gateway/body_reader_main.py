"""The process that reads large bodies, a helper (``dynaplan.process.helper``).

A question is ``{"path": ...}`` and a body. It is answered with one of these:

- ``{"model": ..., "is_stream": ..., "prompt_tokens": ..., "document": {...}, "is_text": ..., ...}``, the
  fields of its ``Call``, and the beginning of the prompt, as UTF-8 or as 64-bit token ids. ``document`` is
  the body without its prompt.
- The fields of a ``Translation``, and its body in OpenAI's terms, if the question has the names of models
  that are ``known``: then the path is one of Ollama's.
- ``{"status": 400 or 413, "error": {...}}`` for a request that is refused, in OpenAI's form.

It has one job, a bounded memory, and a lower priority than the frontend.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dynaplan.gateway.ollama_api import translate
from dynaplan.gateway.openai_api import (
    API_PATHS,
    ApiError,
    Call,
    bad_request,
    nested_too_deep,
    parse_call,
)
from dynaplan.process.helper_main import become_helper

PROMPT_CHARACTERS = 1024 * 1024
PROMPT_IDS = 256 * 1024
"""The beginning of the prompt that is answered: enough for a router to know it by its first KV blocks."""

DOCUMENT_BYTES = 256 * 1024
"""Largest document without the prompt, in bytes of JSON: all of it is checked by the engine's rules."""

LEFT_OUT = "(left out)"
"""The value of the prompt in the document."""

NICENESS = 5

_PROMPT_FIELDS = ("messages", "prompt")


def make_answer(question: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the answer for one body: the object, and the beginning of its prompt or the translated body."""
    path: str = question["path"]
    try:
        if question.get("is_ollama"):
            asked, translated = translate(path, body)
            return vars(asked), translated
        return _describe(parse_call(API_PATHS[path], body))
    except ApiError as error:
        return _refusal(error)
    except MemoryError:
        return _refusal(ApiError(413, "The body takes too much memory to read", code="body_too_complex"))
    except RecursionError:
        return _refusal(nested_too_deep())


def light_document(
    document: Mapping[str, Any], prompt_fields: Collection[str] = _PROMPT_FIELDS
) -> dict[str, Any]:
    """Return the document with ``LEFT_OUT`` for its prompt; ApiError (400) when the rest is large."""
    light = {name: LEFT_OUT if name in prompt_fields else value for name, value in document.items()}
    if len(json.dumps(light)) > DOCUMENT_BYTES:
        raise bad_request(f"The fields beside the prompt take more than {DOCUMENT_BYTES} bytes")
    return light


def _refusal(error: ApiError) -> tuple[dict[str, Any], bytes]:
    return {"status": error.status, **json.loads(error.to_json())}, b""


def _describe(call: Call) -> tuple[dict[str, Any], bytes]:
    if isinstance(call.prompt, str):
        prompt = call.prompt[:PROMPT_CHARACTERS].encode("utf-8", "surrogatepass")
    else:
        prompt = array("Q", call.prompt[:PROMPT_IDS]).tobytes()
    described = {
        "model": call.model,
        "is_stream": call.is_stream,
        "prompt_tokens": call.prompt_tokens,
        "document": light_document(call.document, call.endpoint.inputs or _PROMPT_FIELDS),
        "is_text": isinstance(call.prompt, str),
        "prompts": call.prompts,
        "address": call.address,
        "has_media": call.has_media,
    }
    return described, prompt


def main(arguments: Sequence[str]) -> None:
    channel, _ = become_helper(arguments)
    os.nice(NICENESS)
    gc.disable()  # a document has no cycles, and looking for them in millions of lists takes seconds
    for question, body in channel:
        channel.answer(*make_answer(question, body))


if __name__ == "__main__":
    main(sys.argv[1:])
