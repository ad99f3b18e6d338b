"""A frontend with a file of keys: who gets in, for what, how much, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.gateway import timing
from dynaplan.gateway.keys.usage import read_usage
from tests.fakes.frontend_runtime import Stage, body, stage
from tests.fakes.keys import bearer, write_keys
from tests.fakes.openai_worker import MODEL
from tests.fakes.polling import eventually

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def with_keys(
    tmp_path: Path, keys: Mapping[str, Mapping[str, Any]], **options: Any
) -> AsyncIterator[Stage]:
    async with stage(api_keys=str(write_keys(tmp_path / "keys.yaml", keys)), **options) as here:
        await here.worker()
        yield here


async def ask(
    here: Stage, name: str = "", path: str = CHAT, **changes: Any
) -> tuple[int, Any, Mapping[str, str]]:
    """Status, document and headers of a request with the key of that name."""
    headers = bearer(name) if name else {}
    async with here.client.post(here.url + path, json=body(path, **changes), headers=headers) as response:
        return response.status, await response.json(), response.headers


async def test_a_key_of_the_file_lets_in_and_no_other(tmp_path: Path) -> None:
    async with with_keys(tmp_path, {"alice": {}, "old": {"expires": "2020-01-01"}}) as here:
        assert (await ask(here, "alice"))[0] == 200
        for name, code in {"": "missing_api_key", "eve": "invalid_api_key", "old": "expired_api_key"}.items():
            status, document, headers = await ask(here, name)
            assert (status, document["error"]["code"]) == (401, code)
            assert headers["WWW-Authenticate"] == "Bearer"


async def test_the_key_of_the_environment_goes_on_beside_the_file(tmp_path: Path) -> None:
    async with with_keys(tmp_path, {"alice": {}}, api_key="sk-boss") as here:
        assert (await ask(here, "boss"))[0] == (await ask(here, "alice"))[0] == 200


async def test_a_changed_file_holds_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timing, "KEYS_POLL_S", 0.01)
    file = tmp_path / "keys.yaml"

    async def is_answered(name: str, status: int) -> bool:
        return (await ask(here, name))[0] == status

    async with with_keys(tmp_path, {"alice": {}}) as here:
        write_keys(file, {"bob": {}})
        await eventually(lambda: is_answered("bob", 200))
        assert await is_answered("alice", 401)
        write_keys(file, {"bob": {"concurrency": "many"}, "alice": {}})
        await eventually(lambda: "the keys stay as they were" in caplog.text)
        assert await is_answered("bob", 200)
        assert await is_answered("alice", 401)


async def test_a_key_is_for_its_models_alone(tmp_path: Path) -> None:
    keys = {"alice": {"models": ["emmet"]}, "bob": {"models": ["other"]}}
    models = (
        ServedModel("ant", "VllmWorker", OnDemandSettings(aliases=["emmet"])),
        ServedModel("bee", "Bee"),
    )
    async with with_keys(tmp_path, keys, models=models) as here:
        here.runtime.instance_id = await here.store.grant(60)
        assert (await ask(here, "alice", model="ant"))[0] == 200
        status, document, _ = await ask(here, "alice", model="bee")
        assert (status, document["error"]["code"]) == (403, "model_not_allowed")
        assert document["error"]["message"].endswith("not for the model 'bee', but for: emmet")
        status, document, _ = await ask(here, "alice", "/v1/messages", model="bee", max_tokens=1)
        assert (status, document["error"]["type"]) == (403, "permission_error")
        status, document, _ = await ask(here, "alice", "/api/chat", model="bee")
        assert (status, list(document)) == (403, ["error"])
        for path in ("/v1/models", "/models"):
            async with here.client.get(here.url + path, headers=bearer("alice")) as response:
                names = {each["id"] for each in (await response.json())["data"]}
                assert names <= {"ant", "emmet"}
                assert names
        async with here.client.get(f"{here.url}/v1/models/bee", headers=bearer("alice")) as response:
            assert response.status == 403
        async with here.client.get(f"{here.url}/api/tags", headers=bearer("bob")) as response:
            assert await response.json() == {"models": []}


@pytest.mark.parametrize(
    ("method", "path", "document"),
    [
        ("POST", "/models/load", {"model": "ant"}),
        ("POST", "/models/unload", {"model": "ant"}),
        ("POST", "/api/models/unload/ant", {}),
        ("GET", "/unload", None),
        ("GET", "/logs", None),
        ("GET", "/logs/stream/ant", None),
        ("GET", "/api/events", None),
        ("GET", "/api/metrics", None),
        ("GET", "/upstream/ant/slots", None),
        ("POST", "/infill", {"model": "ant"}),
        ("POST", "/api/generate", {"model": "ant", "keep_alive": 0}),
    ],
)
async def test_moving_models_and_seeing_engines_is_for_admins(
    tmp_path: Path, method: str, path: str, document: Any
) -> None:
    models = (ServedModel("ant", "VllmWorker"),)
    async with with_keys(tmp_path, {"alice": {}}, models=models) as here:
        here.runtime.instance_id = await here.store.grant(60)
        async with here.client.request(
            method, here.url + path, json=document, headers=bearer("alice")
        ) as answer:
            assert answer.status == 403, await answer.text()
            assert "admin" in await answer.text()


async def test_an_admin_may(tmp_path: Path) -> None:
    models = (ServedModel("ant", "VllmWorker"),)
    async with with_keys(tmp_path, {"root": {"admin": True}}, models=models) as here:
        here.runtime.instance_id = await here.store.grant(60)
        async with here.client.get(f"{here.url}/unload", headers=bearer("root")) as answer:
            assert answer.status == 200


async def test_requests_beyond_a_limit_by_the_minute_are_told_when_to_come_again(tmp_path: Path) -> None:
    async with with_keys(tmp_path, {"alice": {"requests-per-minute": 2}, "bob": {}}) as here:
        for left in ("1", "0"):
            status, _, headers = await ask(here, "alice", stream=False)
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, left)
            assert headers["x-ratelimit-limit-requests"] == "2"
        status, document, headers = await ask(here, "alice")
        assert (status, document["error"]["code"], document["error"]["type"]) == (
            *(429, "rate_limit_exceeded"),
            "requests",
        )
        assert 0 < int(headers["Retry-After"]) <= 120
        status, document, _ = await ask(here, "alice", "/v1/messages", max_tokens=1)
        assert (status, document["error"]["type"]) == (429, "rate_limit_error")
        assert (await ask(here, "bob"))[0] == 200


async def test_tokens_of_prompts_and_answers_count(tmp_path: Path) -> None:
    async with with_keys(tmp_path, {"alice": {"tokens-per-minute": 40}}) as here:
        _, document, headers = await ask(here, "alice")
        used = document["usage"]["total_tokens"]
        assert int(headers["x-ratelimit-remaining-tokens"]) < 40
        while used <= 40:
            status, document, _ = await ask(here, "alice")
            if status == 429:
                break
            used += document["usage"]["total_tokens"]
        assert (await ask(here, "alice"))[1]["error"]["type"] == "tokens"
        status, document, headers = await ask(
            here, "alice", messages=[{"role": "user", "content": "word " * 200}]
        )
        assert (status, headers["X-Should-Retry"]) == (429, "false")


async def test_a_stream_has_the_headers_too_and_openais_client_waits_as_told(tmp_path: Path) -> None:
    async with (
        with_keys(tmp_path, {"alice": {"requests-per-minute": 1}}) as here,
        openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="sk-alice", max_retries=0) as client,
    ):
        create = client.chat.completions.with_raw_response.create
        chat: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        raw = await create(**chat, stream=True)
        assert raw.headers["x-ratelimit-limit-requests"] == "1"
        async for _ in raw.parse():
            pass
        with pytest.raises(openai.RateLimitError) as refusal:
            await create(**chat)
        waits_s = client._parse_retry_after_header(refusal.value.response.headers)
        assert waits_s
        assert 60 < waits_s <= 120


async def test_requests_at_a_time_are_bounded_and_one_that_ended_makes_room(tmp_path: Path) -> None:
    async with with_keys(tmp_path, {"alice": {"concurrency": 1}}) as here:
        here.workers[0].act = "hold_before"
        first = asyncio.create_task(ask(here, "alice"))
        await eventually(lambda: here.workers[0].in_flight == 1)
        status, document, headers = await ask(here, "alice")
        assert (status, document["error"]["type"], headers["Retry-After"]) == (429, "concurrency", "1")
        here.workers[0].go_on.set()
        assert (await first)[0] == 200
        assert (await ask(here, "alice"))[0] == 200


async def test_metrics_and_files_name_the_holder_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAPLAN_LOG_DIR", str(tmp_path))
    async with with_keys(tmp_path, {"alice": {"requests-per-minute": 1}}) as here:
        _, document, _ = await ask(here, "alice")
        await ask(here, "alice")
        _, text = await here.get("/metrics")
        of_alice = f'{{dynamo_namespace="ns",key="alice",model="{MODEL}"'
        assert f'dynamo_frontend_key_requests_total{of_alice},status="success"}} 1.0' in text
        assert f'dynamo_frontend_key_requests_total{of_alice},status="refused"}} 1.0' in text
        answer = document["usage"]["completion_tokens"]
        assert f'dynamo_frontend_key_tokens_total{of_alice},type="answer"}} {answer:.1f}' in text
        assert "sk-alice" not in text
    (file,) = (tmp_path / "usage").glob("*.csv")
    assert list(read_usage(file)) == [("alice", MODEL)]


async def test_without_a_file_metrics_have_no_word_of_keys() -> None:
    async with stage() as here:
        assert "key_requests" not in (await here.get("/metrics"))[1]


async def test_a_full_waiting_room_still_lets_in_who_has_little_there(tmp_path: Path) -> None:
    async with with_keys(tmp_path, {"script": {}, "person": {}}, max_waiting_requests=4) as here:
        here.workers[0].act = "hold_before"
        script = [asyncio.create_task(ask(here, "script")) for _ in range(6)]
        await eventually(lambda: sum(each.done() for each in script) == 2)
        assert {(await each)[0] for each in script if each.done()} == {429}
        person = asyncio.create_task(ask(here, "person"))
        await eventually(lambda: here.workers[0].in_flight == 5)
        here.workers[0].go_on.set()
        assert (await person)[0] == 200
        assert sorted([(await each)[0] for each in script]) == [200] * 4 + [429] * 2


async def test_keys_take_turns_at_a_worker_with_few_places_and_the_frontend_tells(tmp_path: Path) -> None:
    async with with_keys(tmp_path, {"script": {}, "person": {}}) as here:
        pass
    async with stage(api_keys=str(tmp_path / "keys.yaml")) as here:
        await here.worker("hold_before", card={"request_slots": 2})
        order: list[str] = []

        async def one(name: str) -> None:
            assert (await ask(here, name))[0] == 200
            order.append(name)

        tasks = [asyncio.create_task(one("script")) for _ in range(6)]
        await eventually(lambda: here.workers[0].in_flight == 2)
        turns = here.frontend._router.turns
        assert turns
        await eventually(lambda: [each.waiting for each in turns.of_keys()] == [4])
        tasks.append(asyncio.create_task(one("person")))
        await eventually(lambda: len(turns.of_keys()) == 2)
        here.workers[0].go_on.set()
        await asyncio.gather(*tasks)
        assert "person" in order[:4]
        assert not any(each.waiting + each.running for each in turns.of_keys())
