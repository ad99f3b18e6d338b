"""The events of a continuation as a part of the stream that it continues."""

from __future__ import annotations

import json
from typing import Any

from dynaplan.gateway.migration.continuing import Continuation
from dynaplan.gateway.migration.partial_answers import PartialAnswer, document_of


class Splice:
    """Rewrites a continuation's events.

    Its usage counts the first part of the answer as prompt, as the engine saw it; the client is told what
    an uncut answer would have had. The two may differ by a token, where one spans the seam.
    """

    def __init__(self, partial: PartialAnswer, continuation: Continuation) -> None:
        self._partial = partial
        self._tokens = continuation.tokens
        self._left_tokens = continuation.left_tokens
        self._held = continuation.held
        self._is_dropped = False

    def spliced(self, events: bytes) -> bytes:
        """Return these whole events as they go to the client; empty when nothing of them does."""
        return b"".join(self._line(line) for line in events.splitlines(keepends=True))

    def _line(self, line: bytes) -> bytes:
        document = document_of(line)
        if document is None:
            is_end_of_dropped = self._is_dropped and not line.strip()
            self._is_dropped = False
            return b"" if is_end_of_dropped else line
        document["id"], document["created"] = self._partial.answer_id, self._partial.created_s
        choices = document.get("choices")
        usage = document.get("usage")
        if isinstance(usage, dict):
            self._add_up(usage)
        elif choices and not any(self._is_left(each) for each in choices):
            self._is_dropped = True
            return b""
        return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    def _is_left(self, choice: Any) -> bool:
        """Cut from a choice what the client has already; tell whether anything is left of it."""
        if not isinstance(choice, dict):
            return True
        delta = choice.get("delta")
        part, name = (delta, "content") if isinstance(delta, dict) else (choice, "text")
        is_first = part.pop("role", None) is not None and not part.get(name)
        is_passed_on = not is_first and (not part.get(name) or self._is_new(part, name))
        return is_passed_on or bool(choice.get("finish_reason"))

    def _is_new(self, part: dict[str, Any], name: str) -> bool:
        """Cut from a token's text what the client has, or all when it has had its tokens."""
        if self._held:
            part[name] = self._cut(part[name])
            if not part[name]:
                self._tokens -= 1  # it is computed a second time
                return False
        if self._left_tokens == 0:
            self._tokens -= 1
            part[name] = ""
            return False
        if self._left_tokens is not None:
            self._left_tokens -= 1
        return True

    def _cut(self, text: str) -> str:
        """Cut the held white space from the beginning of the text, as far as it is there again."""
        held, common = self._held, 0
        while common < min(len(held), len(text)) and held[common] == text[common]:
            common += 1
        self._held = held[common:] if common == len(text) else ""
        return text[common:]

    def _add_up(self, usage: dict[str, Any]) -> None:
        for name, sign in (("prompt_tokens", -1), ("completion_tokens", 1)):
            if isinstance(usage.get(name), int):
                usage[name] = max(0, usage[name] + sign * self._tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], usage.get("prompt_tokens") or 0)
