"""Addresses that an engine would fetch are refused in every disguise; data, and honest media, pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.frontend_runtime import stage
from tests.fakes.openai_worker import MODEL

CHAT = "/v1/chat/completions"
INSIDE = "http://169.254.169.254/latest/meta-data"
DATA = "data:image/png;base64,AAAA"
ADDRESSES = (
    INSIDE,
    "HTTPS://example.com/x.png",
    "hTtP://127.0.0.1:2379/v3/kv/range",
    "file:///etc/passwd",
    "FILE:/etc/passwd",
    "/etc/passwd",
    "//example.com/x.png",
    " data:image/png;base64,AAAA",
    "\tdata:image/png,http://x/",
    "ftp://example.com/x",
    "s3://bucket/x",
    "unix:/run/docker.sock",
    "AAAA",
    "",
)


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]}


def image(address: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def item(part: Any) -> dict[str, Any]:
    return {"input": [{"type": "message", "role": "user", "content": [part]}]}


DISGUISES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, user({"type": "image_url", "image_url": INSIDE})),
    (CHAT, user({"type": "audio_url", "audio_url": {"url": INSIDE}})),
    (CHAT, user({"type": "video_url", "video_url": {"url": INSIDE}})),
    (CHAT, user({"type": "input_audio", "input_audio": {"data": INSIDE, "format": "wav"}})),
    (CHAT, user({"type": "image", "image": INSIDE})),
    (CHAT, user({"type": "file", "file": {"file_url": INSIDE}})),
    (CHAT, user({"type": "text", "text": "x", "image_url": {"url": INSIDE}})),
    (CHAT, user(image(DATA), image(INSIDE))),
    (CHAT, {"messages": [{"role": "tool", "tool_call_id": "1", "content": [image(INSIDE)]}]}),
    ("/v1/responses", item({"type": "input_image", "image_url": INSIDE})),
    ("/v1/responses", item({"type": "input_file", "file_url": INSIDE})),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"image_url": INSIDE}]}]},
    ),
    ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_label": "a", "server_url": INSIDE}]}),
    ("/v1/responses", {"input": "x", "previous_input_messages": [{"content": [image(INSIDE)]}]}),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"url": INSIDE}}]}]},
    ),
    ("/v1/embeddings", {"input": [{"text": "x", "image": INSIDE}]}),
    ("/v1/embeddings", user(image(INSIDE))),
    ("/pooling", user([[{"deep": [image(INSIDE)]}]]) | {"messages": [[[image(INSIDE)]]]}),
    ("/v1/score", {"text_1": "x", "text_2": {"content": [image(INSIDE)]}}),
    ("/v1/rerank", {"query": "x", "documents": {"content": [image(INSIDE)]}}),
    ("/tokenize", user(image(INSIDE))),
]


async def refused(path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The error that refuses the request before a worker sees it."""
    async with stage(**options) as here:
        worker = await here.worker()
        async with here.client.post(here.url + path, json={"model": MODEL, **body}) as response:
            assert response.status == 400
            error: dict[str, Any] = json.loads(await response.read())["error"]
        assert not worker.bodies
        return error


@pytest.mark.parametrize("address", ADDRESSES)
async def test_only_data_is_no_address(address: str) -> None:
    error = await refused(CHAT, user(image(address)))
    assert error["code"] == "media_address"


@pytest.mark.parametrize(("path", "body"), DISGUISES)
async def test_an_address_is_found_wherever_an_engine_would_find_it(path: str, body: dict[str, Any]) -> None:
    error = await refused(path, body)
    assert error.get("code", "media_address") == "media_address"  # Anthropic's form has no code
    assert INSIDE in error["message"]


@pytest.mark.parametrize("address", ADDRESSES[3:])
async def test_what_is_no_web_address_is_refused_even_where_those_are_allowed(address: str) -> None:
    assert (await refused(CHAT, user(image(address)), allow_media_urls=True))["code"] == "media_address"


@pytest.mark.parametrize("hidden", ["file:///etc/passwd", ""])
async def test_a_file_behind_an_allowed_address_is_found(hidden: str) -> None:
    allowed = image("https://example.com/x.png")
    error = await refused(CHAT, user(allowed, image(hidden), allowed), allow_media_urls=True)
    assert error["code"] == "media_address"
    tools = [{"type": "mcp", "server_label": "a", "server_url": "file:///x"}]
    await refused("/v1/responses", item(allowed) | {"tools": tools}, allow_media_urls=True)


async def test_a_large_body_is_looked_through_as_well() -> None:
    padding = "data:image/png;base64," + "A" * 1_000_000
    error = await refused(CHAT, user(image(padding), image(INSIDE)))
    assert error["code"] == "media_address"


@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"])
async def test_an_engines_own_numbers_are_refused_with_and_without_their_type(kind: str) -> None:
    assert "not taken from clients" in (await refused(CHAT, user({"type": kind, kind: "AAAA"})))["message"]
    await refused("/v1/responses", item({kind: "AAAA"}))


async def test_data_and_allowed_addresses_reach_the_engine_as_they_are() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "UklGR", "format": "wav"}}
    async with stage(allow_media_urls=True) as here:
        worker = await here.worker()
        honest = (image("DATA:image/png;base64,AAAA"), sound, image("https://example.com/x.png"))
        assert (await here.post(CHAT, **user(*honest)))[0] == 200
        assert worker.bodies[0]["messages"] == user(*honest)["messages"]
