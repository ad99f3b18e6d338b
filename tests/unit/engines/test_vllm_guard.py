"""The middleware in vLLM's process: the key is asked for everywhere but at health and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest

from dynaplan.engines.vllm import GUARD_DIRECTORY

Send = Callable[[dict[str, Any]], Awaitable[None]]


async def server(scope: dict[str, Any], receive: Any, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})


async def answers(scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    spec = spec_from_file_location("guard", GUARD_DIRECTORY / "dynaplan_vllm_guard.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await module.Guard(server)({"headers": [], **scope}, None, send)
    return sent


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/invocations", b"", 401),
        ("/v1/completions", b"", 401),
        ("/tokenize", b"Bearer other", 401),
        ("/tokenize", b"Basic key", 401),
        ("/healthy", b"", 401),
        ("/invocations", b"bearer key", 200),
        ("/health", b"", 200),
        ("/metrics/", b"", 200),
    ],
)
async def test_the_key_opens_every_path_and_only_health_and_metrics_need_none(
    path: str, given: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = [(b"authorization", given)] if given else []
    sent = await answers({"type": "http", "path": path, "headers": headers}, monkeypatch)
    assert sent[0]["status"] == status


async def test_a_websocket_without_the_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    (sent,) = await answers({"type": "websocket", "path": "/v1/realtime"}, monkeypatch)
    assert sent["type"] == "websocket.close"


async def test_what_is_no_request_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await answers({"type": "lifespan"}, monkeypatch))[0]["status"] == 200
