"""What the frontend reads from a request, and adds to it."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from dynaplan.engines.api_rules import EngineApi
from dynaplan.gateway.openai_api import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    SET_BY_SERVER,
    ApiError,
    check_and_loosen_tools,
    check_context,
    parse_call,
)


def test_the_hand_off_is_added_without_touching_the_clients_bytes() -> None:
    body = b'{ "model":"m",\n "prompt": "caf\\u00e9 }", "stream": true } \n'
    extended = parse_call(COMPLETIONS, body).body_with({"id_slot": 2, "file": "}"})
    assert extended.startswith(body.rstrip()[:-1])
    assert json.loads(extended) == {**json.loads(body), "id_slot": 2, "file": "}"}


def test_a_field_of_ours_replaces_the_clients() -> None:
    body = b'{"model": "m", "prompt": "caf\\u00e9", "cache\\u005fprompt": false, "seed": 1}'
    call = parse_call(COMPLETIONS, body)
    assert call.body_with({}) == body
    pairs: list[tuple[str, object]] = []
    json.loads(call.body_with({"id_slot": 2, "cache_prompt": True}), object_pairs_hook=pairs.extend)
    assert sorted(name for name, _ in pairs) == ["cache_prompt", "id_slot", "model", "prompt", "seed"]
    assert dict(pairs) == {"model": "m", "prompt": "caf\u00e9", "cache_prompt": True, "seed": 1, "id_slot": 2}


def test_without_a_hand_off_the_body_is_the_clients() -> None:
    body = b'{ "model":"m", "prompt": "x" } '
    assert parse_call(COMPLETIONS, body).body_with({}) == body


@pytest.mark.parametrize("name", sorted(SET_BY_SERVER))
def test_where_an_engine_takes_entries_from_is_not_for_the_client_to_say(name: str) -> None:
    escaped = name.replace("_", "\\u005f").encode()
    for key in (name.encode(), escaped):
        with pytest.raises(ApiError, match="set by the server"):
            parse_call(COMPLETIONS, b'{"model": "m", "prompt": "x", "%b": null}' % key)


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("four", 1), ("fives", 2), (["four"], 1), ([1, 2, 3], 3), ([[1, 2, 3]], 3)]
)
def test_a_prompt_is_a_text_or_token_ids(prompt: object, tokens: int) -> None:
    call = parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())
    assert call.prompt_tokens == tokens


@pytest.mark.parametrize("most", [-1, 0, 3, 3.0])
def test_a_length_without_a_limit_and_a_whole_number_in_another_form_are_taken(most: float) -> None:
    call = parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": "x", "max_tokens": most}).encode())
    assert call.document["max_tokens"] == most


@pytest.mark.parametrize("most", [-2, 3.5, "4", True, 1e400])
def test_a_length_that_is_none_is_refused(most: object) -> None:
    text = json.dumps({"model": "m", "prompt": "x", "max_tokens": most}).replace("Infinity", "1e400")
    with pytest.raises(ApiError, match="max_tokens"):
        parse_call(COMPLETIONS, text.encode())


@pytest.mark.parametrize(
    ("choice", "is_refused"),
    [
        ("required", True),
        ({"type": "function", "function": {"name": "f"}}, True),
        ({"type": "any"}, True),
        ("auto", False),
        ({"type": "auto"}, False),
        (None, False),
    ],
)
def test_only_a_tool_that_must_be_called_is_refused_where_the_template_has_none(
    choice: object, is_refused: bool
) -> None:
    document = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
    call = parse_call(CHAT_COMPLETIONS, json.dumps({**document, "tool_choice": choice}).encode())
    assert check_and_loosen_tools(call, EngineApi(), {}) == call
    with pytest.raises(ApiError, match="no tools") if is_refused else nullcontext():
        check_and_loosen_tools(call, EngineApi(), {"lacks_tools": True})


@pytest.mark.parametrize("prompt", [None, "", [], 7, ["a", ""], [1, "a"], [-1], [True], [[]], {}])
def test_a_prompt_of_another_shape_is_refused(prompt: object) -> None:
    with pytest.raises(ApiError) as refused:
        parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())
    assert refused.value.status == 400
    assert json.loads(refused.value.to_json())["error"]["param"] == "prompt"


def test_a_stream_is_only_what_asks_for_it() -> None:
    message = [{"role": "user", "content": "x"}]
    for stream, expected in ((None, False), (False, False), (True, True)):
        document = {"model": "m", "messages": message, "stream": stream}
        assert parse_call(CHAT_COMPLETIONS, json.dumps(document).encode()).is_stream is expected


def test_a_prompt_as_long_as_the_context_is_left_to_the_worker_and_a_longer_one_refused() -> None:
    call = parse_call(COMPLETIONS, b'{"model": "m", "prompt": [1, 2, 3]}')
    check_context(call, 3)
    check_context(call, 0)
    with pytest.raises(ApiError, match=r"maximum context length is 2 tokens.* larger context"):
        check_context(call, 2)
