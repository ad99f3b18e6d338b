"""A stream is timed by its tokens, and everything but a whole answer is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynaplan.lab.profiling.load.completions import AnswerStream, RequestFailed, refusal

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def event(text: str | None = None, reason: str | None = None, **more: Any) -> bytes:
    """One event of vLLM's completions."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": reason}]
    document = {"id": "cmpl-1", "choices": choices, **more}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_stream_is_timed_from_its_first_token_to_its_last() -> None:
    stream = AnswerStream()
    stream.take(event("a"), 1.0)
    assert stream.tokens == 1
    stream.take(event("b"), 2.0)
    stream.take(event("", "length"), 9.0)
    stream.take(event(usage=USAGE) + DONE, 10.0)
    answer = stream.answer()
    assert (answer.first_s, answer.last_s) == (1.0, 2.0)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 3, 4)
    assert answer.itl_s == 0.5


def test_a_token_without_text_is_a_token() -> None:
    """Half of a character has no text yet."""
    stream = AnswerStream()
    stream.take(event(""), 1.0)
    stream.take(event("é", "length") + DONE, 2.0)
    assert stream.answer().first_s == 1.0


def test_events_that_arrive_in_pieces_or_together_are_counted_once() -> None:
    stream = AnswerStream()
    whole = event("a") + event("b")
    stream.take(whole[:10], 1.0)
    assert stream.tokens == 0
    stream.take(whole[10:], 2.0)
    assert list(stream.event_times_s) == [2.0, 2.0]


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    stream = AnswerStream()
    stream.take(event("a", "length") + DONE, 1.0)
    assert stream.answer().itl_s is None


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (event("a"), "broke off"),
        (DONE, "no tokens"),
        (event("a") + event(error={"code": 500, "message": "gone"}) + DONE, "broke off: 500"),
        (b"data: {nothing}\n" + DONE, "broke off"),
    ],
)
def test_a_stream_that_is_no_whole_answer_is_named(sent: bytes, kind: str) -> None:
    stream = AnswerStream()
    stream.take(sent, 1.0)
    with pytest.raises(RequestFailed) as raised:
        stream.answer()
    assert raised.value.kind == kind


@pytest.mark.parametrize(
    ("body", "named", "said"),
    [
        ('{"error": {"message": "none", "code": "no_worker"}}', "503 no_worker", "none"),
        ('{"object": "error", "message": "m", "type": "T", "code": 503}', "503", "m"),
        ("<html>", "503", "<html>"),
        ("[]", "503", "[]"),
    ],
)
def test_a_refusal_is_named_by_its_status_and_code(body: str, named: str, said: str) -> None:
    failure = refusal(503, body)
    assert (failure.kind, failure.message) == (named, said)
