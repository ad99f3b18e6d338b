"""A request that does not fit an endpoint: what its sender is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.util.errors import UserError
from dynaplan.worker.endpoints import ServedEndpoint, call_endpoint


async def generate(request: dict[str, Any]) -> Any:
    """Answer as an author's own endpoint does."""
    yield {"n": 1, "echo": request, "text": request["text"]}


async def collected(endpoint: ServedEndpoint, request: Any) -> list[Any]:
    return [item async for item in call_endpoint(endpoint, request)]


async def test_a_missing_field_is_answered_with_its_name_and_the_signature() -> None:
    with pytest.raises(UserError) as raised:
        await collected(ServedEndpoint("generate", generate), {"txet": "a"})
    assert str(raised.value).startswith("the request has no field 'text'\n")
    assert "generate(request: dict[str, Any]) -> Any" in str(raised.value)


async def test_the_request_is_a_dict_as_it_was_sent() -> None:
    sent = {"text": "a", "more": {"b": [1]}}
    assert await collected(ServedEndpoint("generate", generate), sent) == [
        {"n": 1, "echo": sent, "text": "a"}
    ]


async def test_an_author_may_catch_the_key_error_of_a_missing_field() -> None:
    async def lenient(request: dict[str, Any]) -> str:
        try:
            return str(request["text"])
        except KeyError:
            return str(request.get("other", "nothing"))

    assert await collected(ServedEndpoint("lenient", lenient), {}) == ["nothing"]


async def test_a_key_error_of_the_authors_own_stays_one() -> None:
    async def broken(_request: dict[str, Any]) -> str:
        table: dict[str, str] = {}
        return table["text"]

    with pytest.raises(KeyError) as raised:
        await collected(ServedEndpoint("broken", broken), {})
    assert not isinstance(raised.value, UserError)


async def test_a_dataclass_that_lacks_a_field_names_the_signature_too() -> None:
    @dataclass
    class Asked:
        text: str

    async def typed(request: Asked) -> str:
        return request.text

    with pytest.raises(UserError, match=r"'text'\n.*typed\(request: Asked\)"):
        await collected(ServedEndpoint("typed", typed, Asked), {})


class Model:
    """A request model as pydantic's are: made from plain data, or from its own JSON."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def model_validate(cls, given: dict[str, str]) -> Model:
        return cls(**given)

    @classmethod
    def model_validate_json(cls, given: str) -> Model:
        return cls(**json.loads(given))


@pytest.mark.parametrize("sent", [{"text": "a"}, '{"text": "a"}'])
async def test_a_model_is_made_of_plain_data_or_of_its_own_json(sent: Any) -> None:
    async def typed(request: Model) -> str:
        return request.text

    assert await collected(ServedEndpoint("typed", typed, Model), sent) == ["a"]


async def test_a_response_object_with_a_body_to_iterate_over_streams_it() -> None:
    async def body() -> Any:
        yield "a"
        yield "b"

    async def streaming() -> Any:
        return SimpleNamespace(body_iterator=body())

    assert await collected(ServedEndpoint("streaming", streaming), None) == ["a", "b"]
