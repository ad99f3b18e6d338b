"""The request for the rest of an answer, and the requests that have none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from dynaplan.engines.api_rules import EngineApi
from dynaplan.gateway import migration
from dynaplan.gateway.migration import (
    PartialAnswer,
    UnreadPages,
    find_obstacle,
    is_complete,
    make_continuation,
    may_migrate,
)
from dynaplan.gateway.openai_api import CHAT_COMPLETIONS, COMPLETIONS, Call, parse_call

API = EngineApi(continuation={"continue_final_message": True})
QUESTION = {"role": "user", "content": "Why?"}


def chat(**fields: Any) -> Call:
    body = {"model": "m", "stream": True, "messages": [QUESTION], **fields}
    return parse_call(CHAT_COMPLETIONS, json.dumps(body).encode())


def completion(**fields: Any) -> Call:
    return parse_call(
        COMPLETIONS, json.dumps({"model": "m", "stream": True, "prompt": "Once", **fields}).encode()
    )


def partial(text: str, **choice: Any) -> PartialAnswer:
    answer = PartialAnswer(UnreadPages())
    document = {"id": "a1", "created": 5, "choices": [{"index": 0, "text": text, **choice}]}
    answer.add(b"data: " + json.dumps(document).encode() + b"\n\n")
    return answer


def test_a_chat_goes_on_in_a_last_message_of_the_assistant() -> None:
    rest = make_continuation(chat(max_tokens=10), "Because", 3, API)
    assert rest.call.document["messages"] == [QUESTION, {"role": "assistant", "content": "Because"}]
    assert rest.call.document["continue_final_message"] is True
    assert rest.call.document["max_tokens"] == 7
    assert json.loads(rest.call.body) == rest.call.document
    assert rest.call.prompt == parse_call(CHAT_COMPLETIONS, rest.call.body).prompt


def test_a_completion_goes_on_at_the_end_of_its_prompt() -> None:
    rest = make_continuation(completion(max_tokens=10, min_tokens=2), " upon", 1, API)
    assert (rest.call.document["prompt"], rest.call.prompt) == ("Once upon", "Once upon")
    assert (rest.call.document["max_tokens"], rest.call.document["min_tokens"]) == (9, 1)
    assert "continue_final_message" not in rest.call.document


def test_white_space_at_the_seam_is_held_and_its_token_computed_again() -> None:
    rest = make_continuation(chat(max_tokens=10), "Because \n", 3, API)
    assert rest.call.document["messages"][-1]["content"] == "Because"
    assert (rest.held, rest.tokens, rest.left_tokens) == (" \n", 3, 7)
    assert rest.call.document["max_tokens"] == 9  # 7, and one for each white space


def test_an_answer_of_nothing_but_white_space_is_begun_anew() -> None:
    asked = chat(max_tokens=10)
    rest = make_continuation(asked, "\n", 1, API)
    assert (rest.call.document, rest.tokens, rest.held) == (asked.document, 0, "\n")


def test_a_message_that_the_client_began_is_gone_on_with() -> None:
    begun = [QUESTION, {"role": "assistant", "content": "Be"}]
    asked = chat(messages=begun, continue_final_message=True)
    assert may_migrate(asked, API)
    assert make_continuation(asked, "cause", 1, API).call.document["messages"][-1]["content"] == "Because"
    assert not may_migrate(chat(messages=begun), API)


def test_a_large_body_is_read_again() -> None:
    asked = replace(completion(), document={"model": "m", "stream": True}, is_whole=False)
    assert may_migrate(asked, API)
    assert make_continuation(asked, " upon", 1, API).call.document["prompt"] == "Once upon"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "several answers"),
        ({"seed": 7}, "seed"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"tools": [{}], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_request_whose_rest_depends_on_more_than_its_text_does_not_migrate(
    fields: dict[str, Any], words: str
) -> None:
    assert not may_migrate(chat(**fields), API)
    assert words in find_obstacle(chat(**fields), partial("a"), 1, API)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"seed": 7, "temperature": 0},
        {"response_format": {"type": "text"}},
        {"tools": [{}]},
        {"tools": [{}], "tool_choice": "auto"},
        {"logprobs": True},
        {"stop": ["x"]},
    ],
)
def test_a_request_whose_rest_follows_from_its_text_migrates(fields: dict[str, Any]) -> None:
    assert may_migrate(chat(**fields), API)
    assert find_obstacle(chat(**fields), partial("a"), 1, API) == ""


def test_with_log_probabilities_the_rest_begins_at_a_whole_token() -> None:
    asked = chat(logprobs=True, top_logprobs=2)
    assert find_obstacle(asked, partial("Once"), 1, API) == ""
    assert "log probabilities" in find_obstacle(asked, partial("Once "), 1, API)
    assert find_obstacle(chat(logprobs=False), partial("Once "), 1, API) == ""


@pytest.mark.parametrize(
    "fields", [{"prompt": [1, 2]}, {"echo": True}, {"logprobs": 1}, {"prompt": ["Once"]}]
)
def test_a_completion_that_is_more_than_a_text_does_not_migrate(fields: dict[str, Any]) -> None:
    assert not may_migrate(completion(**fields), API)


def test_what_is_no_stream_and_what_the_engine_cannot_do_does_not_migrate() -> None:
    assert not may_migrate(chat(stream=False), API)
    assert not may_migrate(chat(), EngineApi())


def test_a_body_beyond_the_bound_does_not_migrate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MAX_BODY_BYTES", 10)
    assert "bytes" in find_obstacle(chat(), partial("a"), 1, API)


def test_an_answer_at_its_limit_or_its_end_has_no_rest() -> None:
    assert "all its tokens" in find_obstacle(chat(max_tokens=3), partial("abc"), 3, API)
    assert not find_obstacle(chat(max_tokens=-1), partial("abc"), 3, API)
    assert "has ended" in find_obstacle(chat(), partial("abc", finish_reason="stop"), 3, API)


def test_an_answer_is_complete_with_its_finish_reason_and_the_usage_if_asked_for() -> None:
    ended = partial("a", finish_reason="stop")
    assert is_complete(chat(), ended)
    assert not is_complete(chat(), partial("a"))
    asked = chat(stream_options={"include_usage": True})
    assert not is_complete(asked, ended)
    ended.add(b'data: {"choices":[],"usage":{}}\n\n')
    assert is_complete(asked, ended)
