"""The part of a streamed answer that the client has got."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

LARGEST_UNREAD_BYTES = 64 * 1024
"""Bytes of events that are kept before they are read into text: some 300 tokens."""

LARGEST_TEXT_CHARACTERS = 1024 * 1024
"""Characters of an answer that are kept; a longer answer does not migrate."""

_DATA = b"data: "
_OTHER_PARTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal", "audio")


class PartialAnswer:
    """The events of one stream so far, read into their text when it is asked for.

    ``answer_id`` and ``created_s`` are those of the first event. ``finish_reason`` is empty until an event
    has one. ``oddity`` says what in the answer is no plain text of one choice, empty when all of it is.
    """

    def __init__(self) -> None:
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._texts: list[str] = []
        self._characters = 0
        self.answer_id: Any = None
        self.created_s: Any = None
        self.finish_reason = ""
        self.has_usage = False
        self.oddity = ""

    def add(self, events: bytes) -> None:
        """Keep whole events that are being passed on."""
        if self.oddity:
            return
        self._unread.append(events)
        self._unread_bytes += len(events)
        if self._unread_bytes > LARGEST_UNREAD_BYTES:
            self._read()

    def text(self) -> str:
        """Return the text of the answer so far."""
        self._read()
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def _read(self) -> None:
        events, self._unread, self._unread_bytes = b"".join(self._unread), [], 0
        for document in documents_in(events):
            self._take(document)
        if self._characters > LARGEST_TEXT_CHARACTERS:
            self._texts, self.oddity = [], f"has more than {LARGEST_TEXT_CHARACTERS} characters"

    def _take(self, document: dict[str, Any]) -> None:
        if self.answer_id is None:
            self.answer_id, self.created_s = document.get("id"), document.get("created")
        self.has_usage = self.has_usage or isinstance(document.get("usage"), dict)
        for choice in document.get("choices") or ():
            if not isinstance(choice, dict) or choice.get("index"):
                self.oddity = "has several choices"
                return
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        part = delta if isinstance(delta, dict) else choice
        if odd := [name for name in _OTHER_PARTS if part.get(name)]:
            self.oddity = f"has {odd[0]}"
        text = part.get("content") if part is delta else part.get("text")
        if isinstance(text, str):
            self._texts.append(text)
            self._characters += len(text)
        self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)


def documents_in(events: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of these whole events; lines that hold none are passed over."""
    for line in events.split(b"\n"):
        if document := document_of(line):
            yield document


def document_of(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of one line of a stream; None when it holds none."""
    if not line.startswith(_DATA):
        return None
    try:
        document = json.loads(line[len(_DATA) :])
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
