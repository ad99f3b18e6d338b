"""What a web page in a browser gets of every path of the public port, over loopback sockets.

The rule is in ``http/browser_policy.py``; its unit tests have the headers. Here each path has a decision: a
new one fails until it has one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping

import pytest

from dynaplan.config.settings.models import ServedModel
from tests.fakes.frontend_runtime import Stage, stage

FREE, CHANGES, CHANGES_BY_GET = "reads", "changes or computes", "changes by GET"

DECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("/", "/health", "/live", "/metrics", "/metrics/all", "/metrics/history"), FREE),
    **dict.fromkeys(("/v1/models", "/models", "/models/sse", "/running"), FREE),
    **dict.fromkeys(("/api/version", "/api/tags", "/api/ps"), FREE),
    **dict.fromkeys(("/upstream", "/logs", "/logs/stream", "/logs/stream/*"), FREE),
    **dict.fromkeys(("/api/events", "/api/metrics"), FREE),
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses"), CHANGES),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), CHANGES),
    **dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank"), CHANGES),
    **dict.fromkeys(("/v1/score", "/score", "/reranking", "/v1/reranking", "/chat/completions"), CHANGES),
    **dict.fromkeys(("/v/chat/completions", "/v/completions", "/v/responses", "/v/messages"), CHANGES),
    **dict.fromkeys(("/v/embeddings", "/v/rerank"), CHANGES),
    **dict.fromkeys(("/tokenize", "/detokenize", "/pooling", "/classify"), CHANGES),
    **dict.fromkeys((f"/v1/audio/{each}" for each in ("speech", "transcriptions", "translations")), CHANGES),
    **dict.fromkeys(
        ("/models/load", "/models/unload", "/api/models/unload", "/api/models/unload/*"), CHANGES
    ),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"), CHANGES),
    **dict.fromkeys(
        (f"/api/{each}" for each in ("create", "copy", "delete", "pull", "push", "blobs")), CHANGES
    ),
    **dict.fromkeys(("/unload", "/upstream/*"), CHANGES_BY_GET),
}

FOREIGN = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
IMAGE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
NEIGHBOUR = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}
"""An image of a page on another port of this machine."""

APP = "http://localhost:3000"


@pytest.fixture
async def here() -> AsyncIterator[Stage]:
    async with stage(models=(ServedModel("ant", "VllmWorker"),), worker_wait=0.05) as found:
        yield found


def concrete(path: str) -> str:
    return path.replace("*", "ant")


async def status(here: Stage, method: str, path: str, headers: Mapping[str, str], data: bytes = b"{}") -> int:
    async with here.client.request(
        method, here.url + path, headers=dict(headers), data=data, allow_redirects=False
    ) as response:
        return response.status


async def test_every_path_of_the_routes_has_a_decision(here: Stage) -> None:
    assert here.frontend._routes.paths.keys() == DECISIONS.keys()


@pytest.mark.parametrize("path", DECISIONS)
async def test_a_page_of_another_site_gets_nothing_and_changes_nothing(here: Stage, path: str) -> None:
    for method in here.frontend._routes.paths[path]:
        text = {**FOREIGN, "Content-Type": "text/plain"}
        assert await status(here, method, concrete(path), text) == 403
        assert await status(here, method, concrete(path), {**text, "Origin": "null"}) == 403
        rebound = {"Host": "evil.example", "Sec-Fetch-Site": "same-origin"}
        assert await status(here, method, concrete(path), rebound) == 403
    preflight = {**FOREIGN, "Access-Control-Request-Method": "POST"}
    assert await status(here, "OPTIONS", concrete(path), preflight) == 403
    assert await status(here, "GET", concrete(path), IMAGE) == 403


@pytest.mark.parametrize("path", DECISIONS)
async def test_a_page_of_this_machine_may_send_what_it_asks_for_first(here: Stage, path: str) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-a"}
    async with here.client.options(here.url + concrete(path), headers={"Origin": APP, **wanted}) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == APP
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,x-a"
        assert "Access-Control-Allow-Credentials" not in response.headers
        assert "Content-Length" not in response.headers


@pytest.mark.parametrize("path", [path for path, decision in DECISIONS.items() if decision == CHANGES_BY_GET])
async def test_what_changes_something_is_no_image_of_any_page(here: Stage, path: str) -> None:
    assert await status(here, "GET", concrete(path), NEIGHBOUR) == 403
    assert await status(here, "GET", concrete(path), {"Sec-Fetch-Site": "none"}) != 403
    assert await status(here, "GET", concrete(path), {}) != 403


async def test_answers_and_errors_and_streams_are_readable_by_a_page_of_this_machine(here: Stage) -> None:
    await here.worker()
    for path, body in {
        "/v1/chat/completions": {
            "model": "ant",
            "stream": True,
            "messages": [{"role": "user", "content": "a"}],
        },
        "/v1/completions": {"model": "none", "prompt": "a"},
        "/api/show": {"model": "none"},
    }.items():
        async with here.client.post(here.url + path, json=body, headers={"Origin": APP}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == APP
            assert await response.read()
    async with here.client.get(here.url + "/v1/models") as response:
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_body_of_a_page_says_that_it_is_json(here: Stage) -> None:
    body = json.dumps({"model": "ant"}).encode()
    own = {"Origin": APP, "Content-Type": "text/plain"}
    assert await status(here, "POST", "/models/load", own, body) == 415
    assert await status(here, "POST", "/models/load", {"Content-Type": "text/plain"}, body) == 200
    assert (
        await status(here, "POST", "/models/load", {**own, "Content-Type": "application/json"}, body) == 200
    )


async def test_a_name_or_an_origin_can_be_allowed() -> None:
    async with stage(
        allowed_hosts="llm.example, b.example", allowed_origins=["https://evil.example"]
    ) as here:
        await here.worker()
        assert await status(here, "GET", "/v1/models", {"Host": "llm.example"}, b"") == 200
        assert await status(here, "GET", "/v1/models", {"Host": "c.example"}, b"") == 403
        assert await status(here, "GET", "/v1/models", FOREIGN, b"") == 200


async def test_with_a_key_every_name_and_origin_is_answered_that_has_it() -> None:
    async with stage({"DYNAPLAN_API_KEY": "secret"}) as here:
        await here.worker()
        bearer = {"Authorization": "Bearer secret"}
        assert await status(here, "GET", "/v1/models", {**bearer, "Host": "llm.example"}, b"") == 200
        assert await status(here, "GET", "/v1/models", {**bearer, **FOREIGN}, b"") == 200
        assert await status(here, "GET", "/v1/models", FOREIGN, b"") == 401
