"""A request that does not fit an endpoint: what its sender is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dynaplan.domain.errors import UserError
from dynaplan.runtime.endpoints import ServedEndpoint, items_of


async def generate(request: dict[str, Any]) -> Any:
    """Answer as an author's own endpoint does."""
    yield {"n": 1, "echo": request, "text": request["text"]}


async def collected(endpoint: ServedEndpoint, request: Any) -> list[Any]:
    return [item async for item in items_of(endpoint, request)]


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
