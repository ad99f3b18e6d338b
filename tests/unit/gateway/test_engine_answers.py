"""Tokens, usage and failures in passing bytes: recorded answers of engines, and what is known of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynaplan.engines.sim.api import read_request
from dynaplan.gateway.engine_answers import (
    Usage,
    count_chat_tokens,
    count_tokens,
    find_failure,
    find_usage,
    is_aborted,
    is_ended,
    rewrite_context_error,
)
from dynaplan.gateway.error_forms import as_event
from dynaplan.gateway.openai_api import API_PATHS, CHAT_COMPLETIONS
from dynaplan.util.errors import UserError

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
    stated = find_usage(b"".join(events[-2:]))
    assert stated.output_tokens == 8
    assert stated.input_tokens == {"chat": 40, "completion": 21}[name]
    assert count_chat_tokens(stream) == sum(map(count_chat_tokens, events)) == 8


@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
def test_a_recorded_answer_states_its_usage(engine: str) -> None:
    stated = find_usage((RECORDED / engine / "chat.json").read_bytes())
    assert (stated.input_tokens, stated.output_tokens) == (40, 8)


def test_only_events_with_content_are_tokens() -> None:
    assert count_chat_tokens(ROLE) == 0
    assert count_chat_tokens(ROLE + TOKEN) == 1
    assert count_chat_tokens(ROLE_AND_TOKEN) == 1
    assert count_chat_tokens(ROLE_AND_TOKEN + TOKEN) == 2
    assert count_chat_tokens(TOKEN + TOKEN + END + USAGE + DONE) == 2
    assert count_chat_tokens(b": a comment that keeps the connection alive\n\n") == 0


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
    assert count_chat_tokens(SGLANG % delta) == tokens


def test_a_text_that_looks_like_a_usage_is_none() -> None:
    assert find_usage(b'{"text":"\\"usage\\":{\\"completion_tokens\\": 99}"}') == Usage()
    assert find_usage(TOKEN + DONE) == Usage()


def test_the_usage_is_found_far_from_the_answers_end() -> None:
    usage = b'"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": null}'
    assert find_usage(b'{"choices": [], %b, "prompt_logprobs": [%b]}' % (usage, b"1," * 5000)) == Usage(3, 2)


def test_llamacpp_states_its_numbers_without_being_asked() -> None:
    event = (
        b'data: {"choices":[{"finish_reason":"length","index":0,"delta":{}}],"timings":{"cache_n":30,'
        b'"prompt_n":1,"prompt_ms":12.069,"predicted_n":3,"predicted_ms":42.467}}\n\n'
    )
    assert find_usage(event + DONE) == Usage(31, 3, 30)


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
    assert count_tokens(endpoint, RESPONSES) == 2
    assert count_tokens(endpoint, b"event: response.output_text.delta\n") == 1
    assert not is_ended(endpoint, RESPONSES)
    assert all(is_ended(endpoint, RESPONSES + end) for end in ENDED)
    assert not any(is_ended(CHAT_COMPLETIONS, end) for end in ENDED)
    assert is_ended(CHAT_COMPLETIONS, b"data: [DONE]\n\n")
    assert find_usage(ENDED[0]) == Usage(7, 2, None)


def test_an_answer_without_an_output_states_its_input() -> None:
    assert find_usage(b'{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}') == Usage(8, None, None)


OPEN_TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
ABORTS = [
    b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n',
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}\n\n',
]
ERROR = b'data: {"error": {"message": "cannot go on", "type": "Internal", "code": 500}}\n\n'


@pytest.mark.parametrize("abort", ABORTS)
def test_an_abort_is_a_failure_after_the_events_before_it(abort: bytes) -> None:
    failure = find_failure(OPEN_TOKEN + OPEN_TOKEN + abort + DONE)
    assert failure
    assert (failure.good, failure.body, failure.is_clients_fault) == (OPEN_TOKEN + OPEN_TOKEN, b"", False)


def test_an_error_event_is_a_failure_to_pass_on() -> None:
    failure = find_failure(OPEN_TOKEN + ERROR + DONE)
    assert failure
    assert (failure.good, as_event("/v1/completions", failure.body)) == (OPEN_TOKEN, ERROR)
    assert failure.status == 500


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error":{"message":"too long","code":400}}\n\n', 400),
        (b'data: {"object":"error","message":"too long","code":400}\n\n', 400),
        (b'data: {"error":{"message":"too long","code":"odd"}}\n\n', 500),
        (b'data: {"error":"too long"}\n\n', 500),
        (b'data: {"error"\n\n', 500),
    ],
)
def test_an_error_event_says_whose_fault_it_is(event: bytes, status: int) -> None:
    failure = find_failure(event)
    assert failure
    assert failure.status == status
    assert failure.to_api_error().status == (400 if status == 400 else 502)


@pytest.mark.parametrize(
    "text", ['"finish_reason":"abort"', 'data: {"error": {}}', '\ndata: {"error": {}}', '"abort" "error"']
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_text_that_looks_like_a_failure_is_none(text: str, separators: tuple[str, str]) -> None:
    choice = {"delta": {"content": text}, "finish_reason": None}
    event = b"data: " + json.dumps({"choices": [choice]}, separators=separators).encode() + b"\n\n"
    assert find_failure(OPEN_TOKEN + event) is None
    assert not is_aborted(event)


def test_a_whole_answer_is_aborted_when_one_of_its_choices_is() -> None:
    choices = [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "abort"}]
    assert is_aborted(json.dumps({"choices": choices}).encode())
    assert not is_aborted(json.dumps({"choices": choices[:1]}).encode())


def said_by_sim() -> str:
    try:
        read_request({"prompt": list(range(9))}, is_chat=False, model="m", context_tokens=8)
    except UserError as error:
        return str(error)
    raise AssertionError


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang", "sim"])
def test_each_engines_own_error_becomes_openais(engine: str) -> None:
    path = RECORDED / engine / "error_too_long.json"
    if engine == "sim":
        body: object = {"error": {"message": said_by_sim()}}
    elif path.exists():
        body = json.loads(path.read_text())["body"]
    else:  # the words of SGLang's tokenizer_manager.py
        words = "The input (9 tokens) is longer than the model's context length (8 tokens)."
        body = {"object": "error", "message": words, "type": "BadRequestError", "code": 400}
    error = json.loads(rewrite_context_error(400, json.dumps(body).encode()))["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "larger context" in error["message"]
    assert ".." not in error["message"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b'{"error": {"message": "exceed_context_size_error"}}'),
        (400, b'{"error": {"message": "temperature is wrong"}}'),
        (400, b"exceed_context_size_error"),
        (400, b'["exceed_context_size_error"]'),
        (400, b'{"error": "exceed_context_size_error"}'),
        (400, b'{"error": {"type": "exceed_context_size_error"}}'),
        (400, b'{"error": {"message": 7, "type": "exceed_context_size_error"}}'),
    ],
)
def test_whatever_else_an_engine_says_is_passed_on(status: int, body: bytes) -> None:
    assert rewrite_context_error(status, body) == body
