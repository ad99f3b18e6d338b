"""Keeping a stream's events, and reading them when its worker dies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynaplan.gateway import migration
from dynaplan.gateway.migration import PartialAnswer, UnreadPages


def event(**choice: Any) -> bytes:
    document = {"id": "a1", "created": 5, "choices": [{"index": 0, **choice}]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def of(*events: bytes) -> PartialAnswer:
    partial = PartialAnswer(UnreadPages())
    for each in events:
        partial.add(each)
    return partial


def test_the_text_of_a_chat_and_of_a_completion_is_put_together() -> None:
    chat = of(event(delta={"role": "assistant", "content": ""}), event(delta={"content": "He"}) * 2)
    assert (chat.text(), chat.oddity, chat.finish_reason) == ("HeHe", "", "")
    assert of(event(text="a"), b": a comment\n\n", event(text="b", finish_reason="stop")).text() == "ab"
    assert (chat.answer_id, chat.created_s) == ("a1", 5)


def test_a_long_answer_is_kept_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "PAGE_BYTES", 100)
    partial = of(*[event(text=f"{number} ") for number in range(50)])
    assert partial.text() == "".join(f"{number} " for number in range(50))


def test_events_are_read_when_there_is_no_room_for_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one = event(text="1 ")
    monkeypatch.setattr(migration, "PAGE_BYTES", len(one))
    monkeypatch.setattr(migration, "MAX_PAGES", 3)
    monkeypatch.setattr(migration, "MAX_PAGES_OF_REQUEST", 2)
    pages = UnreadPages()
    first, second = PartialAnswer(pages), PartialAnswer(pages)
    for _ in range(3):
        first.add(one)
        second.add(one)
    assert first.answer_id is None, "nothing of it was read: it has three pages, two of them taken"
    assert second.answer_id == "a1", "the third page was the last"
    first.add(one)
    assert first.answer_id == "a1", "as many as one stream may have"
    assert (first.text(), second.text()) == ("1 " * 4, "1 " * 3)


def test_a_stream_that_ends_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    one = event(text="1 ")
    monkeypatch.setattr(migration, "PAGE_BYTES", len(one))
    monkeypatch.setattr(migration, "MAX_PAGES", 1)
    pages = UnreadPages()
    for _ in range(3):
        partial = PartialAnswer(pages)
        partial.add(one * 2)
        assert not pages.take()
        partial.close()
        assert pages.take()
        pages.give_back(1)


def test_an_answer_beyond_the_bound_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MAX_TEXT_CHARACTERS", 10)
    partial = of(event(text="12345678901"))
    assert partial.text() == ""
    assert "more than 10 characters" in partial.oddity
    partial.add(event(text="more"))
    assert partial.text() == ""


@pytest.mark.parametrize(
    ("choice", "oddity"),
    [
        ({"delta": {"tool_calls": [{"index": 0}]}}, "tool_calls"),
        ({"delta": {"reasoning_content": "Hm"}}, "reasoning_content"),
        ({"index": 1, "delta": {"content": "b"}}, "several choices"),
    ],
)
def test_what_is_no_plain_text_is_named(choice: dict[str, Any], oddity: str) -> None:
    partial = of(event(delta={"content": "a"}), event(**choice))
    partial.text()
    assert oddity in partial.oddity


def test_empty_parts_are_nothing_odd_and_what_is_no_json_is_passed_over() -> None:
    partial = of(event(delta={"content": "a", "tool_calls": [], "reasoning": None}), b"data: {broken\n\n")
    assert (partial.text(), partial.oddity) == ("a", "")


def test_the_end_and_the_usage_are_noted() -> None:
    partial = of(
        event(text="a", finish_reason="length"), b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
    )
    partial.text()
    assert (partial.finish_reason, partial.has_usage) == ("length", True)


@pytest.mark.parametrize(
    "texts",
    [
        ["a ", "b", "", 'he said "no"', "back\\slash", "end\\", "\n", "\u00e9\u4e2d", "c"],
        ['"', '"', "plain", "\\", "\\\\", "}]}", '","content":"x'],
    ],
)
@pytest.mark.parametrize("more", [{}, {"logprobs": {"content": [{"token": "x"}]}, "finish_reason": None}])
def test_events_that_differ_in_their_text_only_are_read_as_any_others(
    texts: list[str], more: dict[str, Any]
) -> None:
    partial = of(
        event(delta={"role": "assistant", "content": ""}),
        *[event(delta={"content": text}, **more) for text in texts],
        event(delta={}, finish_reason="stop"),
    )
    assert (partial.text(), partial.finish_reason, partial.oddity) == ("".join(texts), "stop", "")
    assert of(*[event(text=text, **more) for text in texts]).text() == "".join(texts)


def test_an_odd_event_among_those_that_differ_in_their_text_only_is_seen() -> None:
    partial = of(event(delta={"content": "a"}) * 3, event(delta={"content": "", "reasoning": "b"}))
    assert (partial.text(), partial.oddity) == ("aaa", "has reasoning")


def test_a_line_with_a_text_that_is_no_json_is_passed_over() -> None:
    plain = event(delta={"content": "a"})
    spoilt = [plain.replace(b'"a"', text) for text in (b'"\\x"', b'"\xff"', b'"')]
    assert of(plain, *spoilt, plain).text() == "aa"
