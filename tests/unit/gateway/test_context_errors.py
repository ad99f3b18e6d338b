"""A prompt that is too long is refused in OpenAI's words, with the option's name, by every engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynaplan.engines.sim.api import read_request
from dynaplan.gateway.context_errors import in_openai_words
from dynaplan.util.errors import UserError

RECORDED = Path(__file__).parents[2] / "fixtures" / "engines"


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
    error = json.loads(in_openai_words(400, json.dumps(body).encode()))["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "max-model-len" in error["message"]
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
    assert in_openai_words(status, body) == body
