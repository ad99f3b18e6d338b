"""Count tokens in the bytes of passing answers, without parsing the JSON.

Parsing every event would cost more CPU time than passing it on. The patterns that look for a key cannot match
inside a JSON text, where the quotes are escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynaplan.gateway.openai_api import ApiPath

_EVENT = b"data: {"
_PLAIN_TOKEN = b'"delta":{"content":"'
_MAYBE_NONE = (b'"role":"assistant"', b'"content":null', b'"choices":[]', b'"delta":{}', b'"timings":{')
"""Marks of the events without a token: a stream's first and last ones, and its usage, for all engines.

An event with such a mark may hold a token all the same; ``_TEXT`` tells.
"""

_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)":"[^"]|"tool_calls":\[\{')
_NUMBER = re.compile(rb'"(prompt|completion|cached|input|output)_tokens":\s*(\d{1,15})(?!\d)')
_NAMED_DELTA = re.compile(rb"^event: \S*delta\r?\n", re.MULTILINE)
_NAMED_END = re.compile(
    rb"^event: (?:message_stop|response\.(?:completed|incomplete|failed))\r?\n",
    re.MULTILINE,
)
_DONE = b"[DONE]"
_END_BYTES = 16
"""Bytes at the end of a stream in which ``[DONE]`` stands: the mark itself and some white space."""
_TIMINGS = re.compile(rb'"cache_n":(\d{1,15}),"prompt_n":(\d{1,15}),.*?"predicted_n":(\d{1,15})(?!\d)')
_USAGE_BYTES = 1024


@dataclass(frozen=True)
class Usage:
    """The numbers of tokens that an answer states; None for a number that it does not state."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


def tokens_in(events: bytes) -> int:
    """Return the number of tokens in these whole events of a stream: one per event that is not a frame.

    A frame is an event without a token. vLLM's events with an empty text are tokens: parts of a character.
    """
    count = events.count(_EVENT)
    if count == events.count(_PLAIN_TOKEN):
        return count
    return count - len(_frames(events))


def counted(endpoint: ApiPath, events: bytes) -> int:
    """Return the number of tokens in these whole events of a stream of that path.

    Responses and messages name their events; what brings text or a thought ends in ``delta``. A line of its
    own cannot be part of a JSON text.
    """
    return len(_NAMED_DELTA.findall(events)) if endpoint.inputs else tokens_in(events)


def is_ended(endpoint: ApiPath, events: bytes) -> bool:
    """Tell whether the last events of a stream of that path end it."""
    return _DONE in events[-_END_BYTES:] or bool(endpoint.inputs and _NAMED_END.search(events))


def _frames(events: bytes) -> set[int]:
    """Return the offsets, in bytes, at which the frames begin."""
    found = set()
    for mark in _MAYBE_NONE:
        at = events.find(mark)
        while at >= 0:
            begin, end = events.rfind(b"\n", 0, at) + 1, events.find(b"\n", at)
            end = len(events) if end < 0 else end
            if events.startswith(_EVENT, begin) and not _TEXT.search(events, begin, end):
                found.add(begin)
            at = events.find(mark, end)
    return found


def usage_in(answer: bytes) -> Usage:
    """Return the usage that the answer, or the end of a stream, states last.

    llama.cpp, when it is not asked for the usage, states the same numbers as ``timings``.
    """
    begin = answer.rfind(b'"usage":')
    stated = dict(_NUMBER.findall(answer[begin : begin + _USAGE_BYTES])) if begin >= 0 else {}
    named = {b"input": b"prompt", b"output": b"completion"}
    stated = {named.get(name, name): digits for name, digits in stated.items()}
    if b"completion" in stated or b"prompt" in stated:
        return Usage(*(_number(stated.get(name)) for name in (b"prompt", b"completion", b"cached")))
    begin = answer.rfind(b'"timings":{')
    timings = _TIMINGS.search(answer, begin) if begin >= 0 else None
    if not timings:
        return Usage()
    cached, computed, predicted = map(int, timings.groups())
    return Usage(cached + computed, predicted, cached)


def _number(digits: bytes | None) -> int | None:
    return None if digits is None else int(digits)
