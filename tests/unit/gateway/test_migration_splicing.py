"""A continuation's events as a part of the stream that they continue."""

from __future__ import annotations

import json
from typing import Any

from dynaplan.gateway.migration import Continuation, PartialAnswer, Splice, UnreadPages
from dynaplan.gateway.openai_api import CHAT_COMPLETIONS, parse_call

CALL = parse_call(CHAT_COMPLETIONS, b'{"model":"m","messages":[{"role":"user","content":"Why?"}]}')


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "b2", "created": 9, **fields}).encode() + b"\n\n"


def choice(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "finish_reason": None, **fields}])


def splice(held: str = "", left_tokens: int | None = None) -> Splice:
    partial = PartialAnswer(UnreadPages())
    partial.add(b'data: {"id":"a1","created":5,"choices":[{"index":0,"text":"a"}]}\n\n')
    partial.text()
    return Splice(partial, Continuation(CALL, 3, held, left_tokens))


def read(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in events.splitlines() if line]


def test_the_answer_keeps_its_id_and_time() -> None:
    (document,) = read(splice().splice(choice(delta={"content": "b"})))
    assert (document["id"], document["created"]) == ("a1", 5)


def test_the_second_role_is_left_out_with_its_whole_event() -> None:
    events = choice(delta={"role": "assistant", "content": ""}) + choice(delta={"content": "b"})
    spliced = splice().splice(events)
    assert [each["choices"][0]["delta"] for each in read(spliced)] == [{"content": "b"}]
    assert spliced.count(b"\n") == 2


def test_a_role_beside_a_text_is_cut_out() -> None:
    (document,) = read(splice().splice(choice(delta={"role": "assistant", "content": "b"})))
    assert document["choices"][0]["delta"] == {"content": "b"}


def test_log_probabilities_stay_with_their_token() -> None:
    logprobs = {"content": [{"token": "b", "logprob": -0.5, "top_logprobs": []}]}
    events = choice(delta={"role": "assistant", "content": ""}, logprobs=None)
    events += choice(delta={"content": "b"}, logprobs=logprobs)
    (document,) = read(splice().splice(events))
    assert document["choices"][0]["logprobs"] == logprobs


def test_white_space_that_the_client_has_is_cut_from_the_beginning() -> None:
    spliced = splice(" \n")
    texts = [" ", "\n", "\n", " b"]
    events = [spliced.splice(choice(text=text)) for text in texts]
    assert [each["choices"][0]["text"] for each in read(b"".join(events))] == ["\n", " b"]


def test_a_token_that_begins_with_known_white_space_keeps_its_rest() -> None:
    spliced = splice(" ")
    assert read(spliced.splice(choice(text=" b")))[0]["choices"][0]["text"] == "b"
    assert read(spliced.splice(choice(text=" c")))[0]["choices"][0]["text"] == " c"


def test_other_white_space_than_the_known_is_passed_on() -> None:
    assert read(splice("\n").splice(choice(text=" b")))[0]["choices"][0]["text"] == " b"


def test_the_end_is_passed_on_though_its_text_is_known_or_empty() -> None:
    (document,) = read(splice(" ").splice(choice(text=" ", finish_reason="stop")))
    assert document["choices"][0]["finish_reason"] == "stop"
    assert read(splice().splice(choice(delta={}, finish_reason="stop")))


def test_empty_texts_that_are_tokens_are_passed_on() -> None:
    assert read(splice().splice(choice(text="")))


def test_the_usage_is_what_an_uncut_answer_has() -> None:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 9},
    }
    (document,) = read(splice().splice(event(choices=[], usage=usage)))
    assert document["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 7,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


def test_a_token_that_was_computed_twice_is_counted_once() -> None:
    spliced = splice(" ")
    assert spliced.splice(choice(text=" ")) == b""
    usage = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
    (document,) = read(spliced.splice(event(choices=[], usage=usage)))
    assert document["usage"] == {"prompt_tokens": 8, "completion_tokens": 6, "total_tokens": 14}


def test_no_more_tokens_than_asked_for_are_passed_on_though_one_came_with_known_white_space() -> None:
    spliced = splice(" ", left_tokens=1)
    assert read(spliced.splice(choice(text=" b")))[0]["choices"][0]["text"] == "b"
    (last,) = read(spliced.splice(choice(text=" c", finish_reason="length")))
    assert last["choices"][0] == {"index": 0, "finish_reason": "length", "text": ""}


def test_what_is_no_event_of_the_answer_passes_unchanged() -> None:
    assert splice().splice(b": ping\n\ndata: [DONE]\n\n") == b": ping\n\ndata: [DONE]\n\n"
