"""The part of a streamed answer that the client has got."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

PAGE_BYTES = 64 * 1024
"""Bytes of events, some 300 tokens, that each stream may keep before it asks for more room."""

MOST_PAGES = 512
"""Further pages that all streams of a process have together: 32 MiB."""

MOST_PAGES_OF_ONE = 16
"""Further pages of one stream: to read as many events takes the event loop some 5 ms."""

LARGEST_TEXT_CHARACTERS = 1024 * 1024
"""Characters of an answer that are kept; a longer answer does not migrate."""

_DATA = b"data: "
_END = b"\n\n"
_OTHER_PARTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal", "audio")


_FRAME = re.compile(rb'(.*?"(?:content|text)":")((?:[^"\\]++|\\.)*+)(".*)', re.DOTALL)
"""One event's line around its text."""

_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""The inside of a JSON text."""


@dataclass(frozen=True)
class _Frame:
    """The bytes before and behind the text of an event: engines write the same into nearly all of them.

    Reading by it takes a hundredth of the time of reading each event as JSON.
    """

    head: bytes
    tail: bytes

    @classmethod
    def around(cls, text: str, line: bytes) -> _Frame | None:
        """Return the frame of an event's line with that text; None where it is written in another way."""
        found = _FRAME.fullmatch(line)
        is_text = found is not None and json.loads(b'"%b"' % found[2]) == text
        return cls(found[1], found[3]) if found and is_text else None

    def cut(self, events: bytes) -> tuple[bytes, str, bytes] | None:
        """Cut out the events in this frame; return those before them, their text, and those behind them.

        None where these do not follow each other.
        """
        start, end = events.find(self.head), events.rfind(self.tail + _END) + len(self.tail)
        framed = events[start:end] if start >= 0 else b""
        # At single bytes, and put together again to be compared: to search for more takes ten times as long.
        texts = [each[len(self.head) : -len(self.tail)] for each in framed.split(b"\n")[::2]]
        inside = b"".join(texts)
        if self.head + (self.tail + _END + self.head).join(texts) + self.tail != framed:
            return None
        if not _TEXT.fullmatch(inside):
            return None
        try:
            text = json.loads(b'"%b"' % inside)
        except ValueError:
            return None
        return events[:start], str(text), events[end:]


class UnreadPages:
    """The room that the streams of a process have for events which they have not read."""

    def __init__(self) -> None:
        self._left = MOST_PAGES

    def take(self) -> bool:
        """Take a page; tell whether there was one."""
        if self._left:
            self._left -= 1
            return True
        return False

    def give_back(self, pages: int) -> None:
        """Have that number of pages for others again."""
        self._left += pages


class PartialAnswer:
    """The events of one stream so far, read into their text when it is asked for, or when room runs out.

    ``answer_id`` and ``created_s`` are those of the first event. ``finish_reason`` is empty until an event
    has one. ``oddity`` says what in the answer is no plain text of one choice, empty when all of it is.
    """

    def __init__(self, pages: UnreadPages) -> None:
        self._pages = pages
        self._taken_pages = 0
        self._unread: list[bytes] = []
        self._frame: _Frame | None = None
        self._unread_bytes = 0
        self._room_bytes = PAGE_BYTES
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
        if self._unread_bytes > self._room_bytes:
            if self._taken_pages < MOST_PAGES_OF_ONE and self._pages.take():
                self._taken_pages += 1
                self._room_bytes += PAGE_BYTES
            else:
                self._read()

    def close(self) -> None:
        """Keep nothing any more."""
        self._unread, self._unread_bytes, self._room_bytes = [], 0, PAGE_BYTES
        self._pages.give_back(self._taken_pages)
        self._taken_pages = 0

    def text(self) -> str:
        """Return the text of the answer so far."""
        self._read()
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def _read(self) -> None:
        events, at = b"".join(self._unread), 0
        self.close()
        while self._frame is None and at < len(events):
            end = events.find(b"\n", at) + 1 or len(events)
            self._read_line(events[at:end].rstrip(b"\n"))
            at = end
        self._read_framed(events[at:])
        if self._characters > LARGEST_TEXT_CHARACTERS:
            self._texts, self.oddity = [], f"has more than {LARGEST_TEXT_CHARACTERS} characters"

    def _read_framed(self, events: bytes) -> None:
        """Read the events in the frame as a whole, and each of the others."""
        if self._frame and (parts := self._frame.cut(events)):
            before, text, events = parts
            for line in before.split(b"\n"):
                self._read_line(line)
            self._add_text(text)
        for line in events.split(b"\n"):
            self._read_line(line)

    def _read_line(self, line: bytes) -> None:
        if document := document_of(line):
            self._take(document, line)

    def _add_text(self, text: str) -> None:
        self._texts.append(text)
        self._characters += len(text)

    def _take(self, document: dict[str, Any], line: bytes) -> None:
        if self.answer_id is None:
            self.answer_id, self.created_s = document.get("id"), document.get("created")
        self.has_usage = self.has_usage or isinstance(document.get("usage"), dict)
        for choice in document.get("choices") or ():
            if not isinstance(choice, dict) or choice.get("index"):
                self.oddity = "has several choices"
                return
            text = self._take_choice(choice)
            is_plain = not (self.oddity or self.finish_reason or self.has_usage)
            if self._frame is None and text and is_plain and len(document["choices"]) == 1:
                self._frame = _Frame.around(text, line)

    def _take_choice(self, choice: dict[str, Any]) -> str:
        """Take one choice of an event over; return its text."""
        delta = choice.get("delta")
        part = delta if isinstance(delta, dict) else choice
        if odd := [name for name in _OTHER_PARTS if part.get(name)]:
            self.oddity = f"has {odd[0]}"
        text = part.get("content") if part is delta else part.get("text")
        text = text if isinstance(text, str) else ""
        self._add_text(text)
        self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
        return text


def document_of(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of one line of a stream; None when it holds none."""
    if not line.startswith(_DATA):
        return None
    try:
        document = json.loads(line[len(_DATA) :])
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
