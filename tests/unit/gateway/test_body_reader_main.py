"""The process that reads large bodies answers with all that a router needs, and with nothing large."""

from __future__ import annotations

import json
from array import array
from typing import Any
from unittest import mock

import pytest

from dynaplan.engines.llamacpp.request_fields import API as LLAMACPP
from dynaplan.engines.timing_model.tokens import count_tokens
from dynaplan.gateway.body_reader_main import (
    DOCUMENT_BYTES,
    LEFT_OUT,
    PROMPT_CHARACTERS,
    PROMPT_IDS,
    light_document,
    make_answer,
)
from dynaplan.gateway.openai_api import ApiError


def asked(document: object, path: str = "/v1/completions") -> tuple[dict[str, Any], bytes]:
    """The answer to one body."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return make_answer({"path": path}, body)


def test_a_text_is_answered_with_its_length_and_its_beginning() -> None:
    text = "ä" * (PROMPT_CHARACTERS + 5) + "\ud800"
    answer, prompt = asked({"model": "m", "prompt": text, "stream": True, "max_tokens": 3})
    assert answer["prompt_tokens"] == count_tokens(text)
    assert prompt.decode("utf-8", "surrogatepass") == text[:PROMPT_CHARACTERS]
    assert answer["is_stream"] is True
    assert answer["is_text"] is True
    assert answer["document"] == {"model": "m", "prompt": LEFT_OUT, "stream": True, "max_tokens": 3}


def test_token_ids_are_answered_with_their_number_and_their_beginning() -> None:
    ids = [7, 2**32 - 1, *range(PROMPT_IDS)]
    answer, prompt = asked({"model": "m", "prompt": ids})
    assert answer["prompt_tokens"] == len(ids)
    assert array("Q", prompt).tolist() == [7, 2**32 - 1, *range(PROMPT_IDS - 2)]


def test_a_chat_is_answered_without_its_messages() -> None:
    answer, prompt = asked(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "/v1/chat/completions"
    )
    assert answer["document"] == {"model": "m", "messages": LEFT_OUT}
    assert b"hi" in prompt


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        ({"model": ""}, "'model'"),
        ({"model": "m", "prompt": ""}, "'prompt'"),
        ({"model": "m", "prompt": "x", "kv_slot_file": "x"}, "set by the server"),
    ],
)
def test_a_fault_is_answered_as_it_is_for_small_bodies(body: object, says: str) -> None:
    answer, prompt = asked(body)
    assert answer["status"] == 400
    assert says in answer["error"]["message"]
    assert prompt == b""


@pytest.mark.parametrize(("fault", "status"), [(MemoryError, 413), (RecursionError, 400)])
def test_a_body_that_is_too_much_to_read_is_refused(fault: type[BaseException], status: int) -> None:
    with mock.patch("dynaplan.gateway.body_reader_main.parse_call", side_effect=fault):
        assert asked({})[0]["status"] == status


def test_every_field_but_the_prompt_stays_whole_for_the_rules_of_the_engine() -> None:
    schema = {"properties": {str(index): {"type": "string"} for index in range(5000)}}
    document = {"messages": [{}], "response_format": schema, "user": None}
    assert light_document(document) == {**document, "messages": LEFT_OUT}
    assert LLAMACPP.fault(light_document(document))


@pytest.mark.parametrize(
    "document",
    [{str(index): 1 for index in range(DOCUMENT_BYTES + 1)}, {"x" * DOCUMENT_BYTES: 1}],
    ids=["number", "size"],
)
def test_too_many_fields_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="fields beside the prompt"):
        light_document(document)
