"""Tokens counted in the bytes of passing answers, without parsing them.

The patterns that look for a key cannot match inside a JSON text, where the quotes are escaped.
"""

from __future__ import annotations

import re

_EVENT = b"data: {"
_NOT_TOKENS = (b'"choices":[]', b'"delta":{}')
_FIRST_TEXT = re.compile(rb'"role":"assistant"[^{}]*"content":"[^"]|"content":"[^"][^{}]*"role":')
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


def tokens_in(events: bytes, *, is_beginning: bool) -> int:
    """How many tokens these events of a stream hold: one per event that has content.

    A chat begins with an event that has the role, with or without the first token.
    """
    tokens = events.count(_EVENT) - sum(map(events.count, _NOT_TOKENS))
    is_role_alone = is_beginning and b'"role":' in events and not _FIRST_TEXT.search(events)
    return tokens - 1 if is_role_alone else tokens


def output_tokens_in(tail: bytes) -> int | None:
    """The number of output tokens that the end of an answer states, if it does."""
    stated = _USAGE.findall(tail)
    return int(stated[-1]) if stated else None
