"""The paths about models: those of llama.cpp, of llama-swap and of Ollama."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.contract.model_keys import MODEL_ORDERS, ModelOrders, ModelReport
from dynaplan.contract.store_keys import fleet_key, scaling_key
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.polling import eventually


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Stage]:
    """A frontend of the models ``ant``, which is ``emmet`` as well, and ``bee``."""
    models = (
        ServedModel("ant", "VllmWorker", OnDemandSettings(aliases=["emmet"])),
        ServedModel("bee", "Bee"),
    )
    async with stage(models=models, **options) as here:
        here.runtime.instance_id = await here.store.grant(60)
        yield here


async def report(here: Stage, state: str) -> None:
    """The fleet plugin publishes that ``ant`` is in that state, and the frontend has heard of it."""
    document = {"roles": {}, "models": {"ant": ModelReport("VllmWorker", state, 1.0, load_s=2.0).to_json()}}
    await here.store.put(fleet_key("ns"), json.dumps(document))

    async def is_known() -> bool:
        return (await states(here))["ant"] == WORDS.get(state, "unloaded")

    await eventually(is_known)


WORDS = {"loading": "loading", "ready": "loaded", "draining": "loaded", "asleep": "sleeping"}


async def states(here: Stage, path: str = "/models") -> dict[str, str]:
    _, text = await here.get(path)
    return {each["id"]: each["status"]["value"] for each in json.loads(text)["data"]}


async def orders(here: Stage) -> ModelOrders:
    item = await here.store.get(scaling_key("ns", MODEL_ORDERS))
    return ModelOrders.from_text(item.value if item else "")


async def test_models_are_loaded_and_put_away_by_llama_cpps_paths() -> None:
    async with serving() as here:
        assert await here.post("/models/load", model="emmet") == (200, '{"success": true}')
        assert (await orders(here)).of("ant").load_unix_s > 0
        assert await here.post("/models/unload", model="ant") == (200, '{"success": true}')
        assert (await orders(here)).of("ant").unload_unix_s > 0
        assert (await here.post("/models/load", model="cow"))[0] == 404


async def test_an_unlisted_model_is_shown_to_who_knows_its_name() -> None:
    models = (ServedModel("ant", "VllmWorker"), ServedModel("mole", "Mole", OnDemandSettings(unlisted=True)))
    async with stage(models=models) as here:
        listed = json.loads((await here.get("/v1/models"))[1])["data"]
        assert [each["id"] for each in listed] == ["ant"]
        status, text = await here.get("/v1/models/mole")
        assert (status, json.loads(text).get("id")) == (200, "mole")


@pytest.mark.parametrize("state", [*WORDS, "failed", "one of a later version"])
async def test_both_lists_of_models_tell_the_same_of_a_model(state: str) -> None:
    async with serving() as here:
        await report(here, state)
        assert (await states(here, "/v1/models"))["ant"] == WORDS.get(state, "unloaded")


async def test_a_model_that_the_fleet_has_not_reported_is_unloaded() -> None:
    async with serving() as here:
        await here.worker()
        for path in ("/models", "/v1/models"):
            assert set((await states(here, path)).values()) == {"unloaded"}


async def test_llama_swaps_paths_show_and_end_what_runs() -> None:
    async with serving() as here:
        await report(here, "ready")
        running = json.loads((await here.get("/running"))[1])["running"]
        assert [(each["model"], each["state"]) for each in running] == [("ant", "ready")]
        assert await here.get("/unload") == (200, "OK")
        assert (await orders(here)).of("ant").unload_unix_s > 0
        assert (await orders(here)).of("bee").unload_unix_s == 0
        await here.worker()
        assert (await here.post("/upstream/ant/v1/completions", model="ant", prompt="a"))[0] == 200


async def test_no_client_moves_a_model_that_its_owner_has_pinned() -> None:
    async with serving() as here:
        pinned = ModelReport("VllmWorker", "ready", is_pinned=True).to_json()
        await here.store.put(fleet_key("ns"), json.dumps({"roles": {}, "models": {"ant": pinned}}))

        async def is_known() -> bool:
            return (await here.post("/models/unload", model="ant"))[0] == 409

        await eventually(is_known)
        before = await orders(here)
        assert (await here.post("/api/models/unload/ant"))[0] == 409
        assert await here.get("/unload") == (200, "OK")
        assert await orders(here) == before


async def test_a_change_of_a_models_state_is_an_event() -> None:
    async with serving() as here, here.client.get(here.url + "/models/sse") as response:
        first = [await response.content.readline() for _ in range(4)]
        assert b'"ant"' in first[0]
        changing = asyncio.create_task(report(here, "loading"))
        assert b'"loading"' in await response.content.readline()
        await changing


async def test_who_probes_for_ollama_finds_it() -> None:
    async with serving() as here:
        assert await here.get("/") == (200, "Ollama is running")
        async with here.client.head(here.url + "/") as response:
            assert (response.status, await response.text()) == (200, "")


async def test_a_body_for_ollama_has_the_limits_of_every_other() -> None:
    async with serving(max_body_bytes=1000, body_timeout=0.1) as here:
        status, text = await here.post("/api/chat", model="ant", messages=["x" * 1000])
        assert (status, "larger than 1000 bytes" in json.loads(text)["error"]) == (413, True)
        reader, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
        writer.write(b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("text", ['{"model": "ant", "keep_alive": NaN}', "[]", '{"model": "ant"'])
async def test_a_body_for_ollama_is_json_as_every_other(text: str) -> None:
    async with serving() as here:
        for data in (text.encode(), text.replace("NaN", "5").encode("utf-16")):
            async with here.client.post(here.url + "/api/chat", data=data) as response:
                assert response.status == 400
                assert "The body" in (await response.json())["error"]


CALL = '{"function": {"name": "f", "arguments": {"a": DEEP}}}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
@pytest.mark.parametrize(
    "fields",
    [
        '"messages": [{"role": "user", "content": "hi"}], "tools": DEEP',
        f'"messages": [{{"role": "assistant", "content": "", "tool_calls": [{CALL}]}}]',
    ],
)
async def test_a_body_of_any_depth_is_passed_on_or_refused(path: str, fields: str) -> None:
    async with serving() as here:
        await here.worker()
        statuses = set()
        for depth in range(700, 1000):  # the limit counts the frames of whatever runs the tests, too
            text = f'{{"model": "emmet", "stream": false, {fields}}}'
            text = text.replace("DEEP", "[" * depth + "]" * depth)
            async with here.client.post(here.url + path, data=text) as response:
                statuses.add(response.status)
        assert statuses == {200, 400}


async def test_who_has_no_key_sees_and_moves_nothing() -> None:
    models = (ServedModel("ant", "VllmWorker"),)
    async with stage(models=models, api_key="secret") as here:
        for path in ("/models", "/running", "/unload", "/api/tags", "/api/ps", "/models/sse"):
            assert (await here.get(path))[0] == 401, path
        for path in ("/models/load", "/api/chat", "/api/show", "/api/models/unload/ant"):
            assert (await here.post(path, model="ant"))[0] == 401, path
