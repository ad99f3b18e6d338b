"""Answers in OpenAI's words as they go on to Ollama's clients; tests/integration has the paths."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from dynaplan.gateway.model_routes import OllamaConnection
from dynaplan.gateway.ollama_api import chat_request
from dynaplan.http.messages import Response


class Written:
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    async def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize(
    "document",
    [
        {"error": {"message": "out of memory", "code": 500}},
        {"error": "out of memory"},
        {"object": "error", "message": "out of memory", "code": 500},
        "out of memory",
    ],
)
async def test_an_error_of_any_form_is_told_in_ollamas(document: Any) -> None:
    written, asked = Written(), chat_request({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    connection = OllamaConnection(cast(Any, written), asked, 0.0, is_old=False)
    told = {"error": "out of memory"}
    whole = connection.translated(Response.json(document, 500))
    assert (whole.status, json.loads(whole.body)) == (500, told)
    if isinstance(document, dict):
        await connection.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        assert json.loads(written.data) == told
