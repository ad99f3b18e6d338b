"""The request that asks another worker for the rest of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynaplan.engines.api_rules import EngineApi
from dynaplan.engines.timing_model.tokens import count_tokens
from dynaplan.gateway.migration.partial_answers import PartialAnswer
from dynaplan.gateway.openai_api import Call

LARGEST_BODY_BYTES = 1024 * 1024
"""Bytes of a request that migrates at most: its body is parsed and written anew in the event loop."""

_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
"""Fields that bound the answer's length from above, in tokens."""

_GRAMMARS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("grammar", "json_schema", "regex", "ebnf", "structural_tag"),
)
"""Fields that bind the answer to a grammar, which an engine follows from the answer's beginning only."""

_BOUND_TO_THE_WHOLE = ("echo", "suffix", "prompt_logprobs", "use_beam_search", "return_token_ids", "audio")
"""Fields whose effect is on the prompt, or on the answer as a whole."""


@dataclass(frozen=True)
class Continuation:
    """A request for the rest of an answer.

    ``tokens`` are those of the answer so far, as far as they were sent. ``held`` is the white space at the
    end of the text so far, which was not sent and may come again: in tokens of its own, for which the
    request leaves room, or in one with more. ``left_tokens`` is the number that the client may still get,
    None without a limit.
    """

    call: Call
    tokens: int
    held: str
    left_tokens: int | None = None


def may_migrate(call: Call, api: EngineApi) -> bool:
    """Tell whether the stream is worth keeping: ``obstacle`` finds nothing yet."""
    return call.is_stream and not _obstacle_in(call, call.document, api)


def is_complete(call: Call, partial: PartialAnswer) -> bool:
    """Tell whether nothing but the mark of its end is missing from the answer."""
    partial.text()
    options = call.document.get("stream_options")
    is_usage_asked_for = isinstance(options, dict) and bool(options.get("include_usage"))
    is_plain = not partial.oddity
    return is_plain and bool(partial.finish_reason) and (partial.has_usage or not is_usage_asked_for)


def obstacle(call: Call, partial: PartialAnswer, tokens: int, api: EngineApi) -> str:
    """Return why no other worker can go on with the answer of ``tokens`` so far, empty when one can."""
    partial.text()
    if partial.oddity:
        return f"the answer {partial.oddity}"
    if partial.finish_reason:
        return "the answer has ended, but for its usage"
    document = whole_document(call)
    if any(isinstance(document.get(name), int) and document[name] <= tokens for name in _LIMITS):
        return "the answer has all its tokens"
    return _obstacle_in(call, document, api)


def continuation(call: Call, text: str, tokens: int, api: EngineApi) -> Continuation:
    """Ask for what follows ``text``, the answer of ``tokens`` that the client has got."""
    sent = text.rstrip()
    held = text[len(sent) :]
    tokens = tokens if sent else 0
    document = {**whole_document(call)}
    limits = {name: document[name] for name in _LIMITS if isinstance(document.get(name), int)}
    left_tokens = min((limit for limit in limits.values() if limit > 0), default=None)
    if left_tokens is not None:
        left_tokens -= tokens
    room_tokens = len(held) if sent else 0
    document |= {name: limit - tokens + room_tokens for name, limit in limits.items() if limit > 0}
    if isinstance(document.get("min_tokens"), int):
        document["min_tokens"] = max(0, document["min_tokens"] - tokens)
    if sent and call.endpoint.is_chat:
        document |= {"messages": _continued(document["messages"], sent), **(api.continuation or {})}
    elif sent:
        document["prompt"] += sent
    prompt = call.prompt + sent if isinstance(call.prompt, str) else call.prompt
    return Continuation(
        replace(
            call,
            body=json.dumps(document).encode(),
            document=document,
            prompt=prompt,
            prompt_tokens=call.prompt_tokens + count_tokens(sent),
            is_whole=True,
        ),
        tokens,
        held,
        left_tokens,
    )


def whole_document(call: Call) -> Mapping[str, Any]:
    """Return the request as a JSON object, with the prompt that a large body's ``document`` lacks."""
    document: Mapping[str, Any] = call.document if call.is_whole else json.loads(call.body)
    return document


def _continued(messages: list[Any], text: str) -> list[Any]:
    """Add the text to the messages: as one more, or to the unfinished one that the client has sent."""
    if _is_unfinished(messages):
        return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]
    return [*messages, {"role": "assistant", "content": text}]


def _is_unfinished(messages: list[Any]) -> bool:
    return isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


def _obstacle_in(call: Call, document: Mapping[str, Any], api: EngineApi) -> str:
    """Return the reason that lies in the request; ``document`` may lack the prompt of a large body."""
    if api.continuation is None:
        return "its engine cannot continue an answer"
    if call.endpoint.inputs or call.prompts > 1:
        return "it is no chat, and no completion of one prompt"
    if len(call.body) > LARGEST_BODY_BYTES:
        return f"its body has more than {LARGEST_BODY_BYTES} bytes"
    if any((document.get(name) or 1) != 1 for name in ("n", "best_of", "n_cmpl")):
        return "several answers were asked for"
    if document.get("seed") is not None and document.get("temperature") != 0:
        return "it has a seed"
    if bound := _bound_by(document):
        return f"it has {bound!r}"
    return _obstacle_in_chat(document) if call.endpoint.is_chat else _obstacle_in_prompt(document, call)


def _bound_by(document: Mapping[str, Any]) -> str:
    """Return the field that binds the answer's form as a whole, or none."""
    form = document.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        return "response_format"
    if document.get("tools") and document.get("tool_choice") not in (None, "auto", "none"):
        return "tool_choice"
    return next((name for name in (*_GRAMMARS, *_BOUND_TO_THE_WHOLE) if document.get(name)), "")


def _obstacle_in_chat(document: Mapping[str, Any]) -> str:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages or not _is_unfinished(messages):
        return ""
    is_to_be_continued = document.get("continue_final_message") and isinstance(
        messages[-1].get("content"), str
    )
    return "" if is_to_be_continued else "its last message is the assistant's"


def _obstacle_in_prompt(document: Mapping[str, Any], call: Call) -> str:
    if document.get("logprobs") is not None:
        return "its log probabilities are counted from the answer's beginning"
    return (
        ""
        if isinstance(call.prompt, str) and isinstance(document.get("prompt", ""), str)
        else ("its prompt is a list")
    )
