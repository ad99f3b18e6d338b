"""Tokens counted in passing bytes: recorded streams of engines, and what is known of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.gateway.openai_api import API_PATHS, CHAT_COMPLETIONS
from dynaplan.gateway.stream_tokens import Usage, counted, is_ended, tokens_in, usage_in

RECORDED = Path(__file__).resolve().parents[2] / "fixtures" / "engines"

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
ROLE_AND_TOKEN = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("name", ["chat", "completion"])
@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
def test_a_recorded_stream_has_as_many_tokens_as_it_states(engine: str, name: str) -> None:
    stream = (RECORDED / engine / f"{name}.sse").read_bytes()
    events = [event + b"\n\n" for event in stream.split(b"\n\n") if event]
    stated = usage_in(b"".join(events[-2:]))
    assert stated.output_tokens == 8
    assert stated.input_tokens == {"chat": 40, "completion": 21}[name]
    assert tokens_in(stream) == sum(map(tokens_in, events)) == 8


@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
def test_a_recorded_answer_states_its_usage(engine: str) -> None:
    stated = usage_in((RECORDED / engine / "chat.json").read_bytes())
    assert (stated.input_tokens, stated.output_tokens) == (40, 8)


def test_only_events_with_content_are_tokens() -> None:
    assert tokens_in(ROLE) == 0
    assert tokens_in(ROLE + TOKEN) == 1
    assert tokens_in(ROLE_AND_TOKEN) == 1
    assert tokens_in(ROLE_AND_TOKEN + TOKEN) == 2
    assert tokens_in(TOKEN + TOKEN + END + USAGE + DONE) == 2
    assert tokens_in(b": a comment that keeps the connection alive\n\n") == 0


# SGLang's documents name every field: its protocol's models, written out whole.
SGLANG = b'data: {"id":"x","choices":[{"index":0,"delta":{%b},"finish_reason":null}],"usage":null}\n\n'


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        (b'"role":"assistant","content":"","reasoning_content":null,"tool_calls":null', 0),
        (b'"role":null,"content":"a","reasoning_content":null,"tool_calls":null', 1),
        (b'"role":null,"content":null,"reasoning_content":"a","tool_calls":null', 1),
        (b'"role":null,"content":null,"reasoning_content":null,"tool_calls":[{"index":0}]', 1),
        (b'"role":null,"content":null,"reasoning_content":null,"tool_calls":null', 0),
    ],
)
def test_a_token_is_a_text_a_thought_or_a_call_of_a_tool(delta: bytes, tokens: int) -> None:
    assert tokens_in(SGLANG % delta) == tokens


def test_a_text_that_looks_like_a_usage_is_none() -> None:
    assert usage_in(b'{"text":"\\"usage\\":{\\"completion_tokens\\": 99}"}') == Usage()
    assert usage_in(TOKEN + DONE) == Usage()


def test_the_usage_is_found_far_from_the_answers_end() -> None:
    usage = b'"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": null}'
    assert usage_in(b'{"choices": [], %b, "prompt_logprobs": [%b]}' % (usage, b"1," * 5000)) == Usage(3, 2)


def test_llamacpp_states_its_numbers_without_being_asked() -> None:
    event = (
        b'data: {"choices":[{"finish_reason":"length","index":0,"delta":{}}],"timings":{"cache_n":30,'
        b'"prompt_n":1,"prompt_ms":12.069,"predicted_n":3,"predicted_ms":42.467}}\n\n'
    )
    assert usage_in(event + DONE) == Usage(31, 3, 30)


RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created"}\n\n'
    b'event: response.output_text.delta\ndata: {"delta":"event: response.completed "}\n\n'
    b'event: response.output_text.delta\ndata: {"delta":"b"}\n\n'
)
ENDED = (
    b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":7,"output_tokens":2}}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)


def test_events_with_names_are_counted_by_their_names_and_end_by_them() -> None:
    endpoint = API_PATHS["/v1/responses"]
    assert counted(endpoint, RESPONSES) == 2
    assert not is_ended(endpoint, RESPONSES)
    assert all(is_ended(endpoint, RESPONSES + end) for end in ENDED)
    assert not any(is_ended(CHAT_COMPLETIONS, end) for end in ENDED)
    assert is_ended(CHAT_COMPLETIONS, b"data: [DONE]\n\n")
    assert usage_in(ENDED[0]) == Usage(7, 2, None)


def test_an_answer_without_an_output_states_its_input() -> None:
    assert usage_in(b'{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}') == Usage(8, None, None)
