from __future__ import annotations

import json
from typing import Any

import pytest

from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest

REQUEST = RemotePrefillRequest("a", body={"prompt": "hello"}, reply_to="ns.answers")
ANSWER = PrefillAnswer("a", "worker", {"kv_transfer_params": {}}, release_to="ns.release")


def test_a_request_and_its_answer_are_read_as_they_were_written() -> None:
    assert RemotePrefillRequest.from_json(REQUEST.to_json()) == REQUEST
    assert PrefillAnswer.from_json(ANSWER.to_json()) == ANSWER


def test_an_answer_may_say_what_of_its_prompt_was_cached() -> None:
    stated = PrefillAnswer("a", "worker", cached_tokens=96)
    assert PrefillAnswer.from_json(stated.to_json()) == stated
    for nonsense in (-1, "many", 1.5, True):
        with pytest.raises(ValueError, match="cached_tokens"):
            PrefillAnswer.from_json(_changed(stated.to_json(), cached_tokens=nonsense))


def test_a_body_is_put_into_a_request_as_it_stands() -> None:
    payload = REQUEST.to_json_around(b'{"prompt" : "hello"}\n')
    assert b'{"prompt" : "hello"}' in payload
    assert RemotePrefillRequest.from_json(payload) == REQUEST


def test_a_request_brings_its_trace_along_unless_it_is_none() -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    told = RemotePrefillRequest("a", trace=trace)
    assert RemotePrefillRequest.from_json(told.to_json()) == told
    payload = _changed(REQUEST.to_json(), trace={"traceparent": "none", "host": "x"})
    assert RemotePrefillRequest.from_json(payload).trace == {}


@pytest.mark.parametrize("reply_to", ["ns.>", "ns.*", "two words"])
def test_a_subject_that_would_reach_others_is_refused(reply_to: str) -> None:
    with pytest.raises(ValueError, match="reply_to"):
        RemotePrefillRequest.from_json(_changed(REQUEST.to_json(), reply_to=reply_to))
    with pytest.raises(ValueError, match="release_to"):
        PrefillAnswer.from_json(_changed(ANSWER.to_json(), release_to=reply_to))


@pytest.mark.parametrize(
    ("status", "is_fine"), [(0, True), (400, True), (599, True), (200, False), (700, False)]
)
def test_the_status_of_an_answer_is_that_of_an_error(status: int, is_fine: bool) -> None:
    payload = _changed(ANSWER.to_json(), status=status)
    if is_fine:
        assert PrefillAnswer.from_json(payload).status == status
        return
    with pytest.raises(ValueError, match="status"):
        PrefillAnswer.from_json(payload)


def _changed(payload: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(payload), **fields}).encode()
