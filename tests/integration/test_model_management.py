"""The management paths of llama.cpp's router mode and of llama-swap, at a real frontend."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.fleet.model_keys import MODEL_ORDERS, ModelOrder, ModelOrders, ModelReport
from dynaplan.fleet.store_keys import fleet_key, planner_prefix
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL
from tests.fakes.polling import eventually


@asynccontextmanager
async def serving(**states: str) -> AsyncIterator[Stage]:
    """A frontend of the models ``ant`` and ``bee``, in these states; ``pinned`` is ready and pinned."""
    models = tuple(
        ServedModel(name, name.title(), OnDemandSettings(ttl_s=60.0, aliases=[f"{name}-x"]))
        for name in ("ant", "bee")
    )
    reports = {
        name: ModelReport(
            name.title(), "ready" if state == "pinned" else state, is_pinned=state == "pinned"
        ).to_json()
        for name, state in states.items()
    }
    async with stage(models=models) as here:
        await here.store.put(fleet_key("ns"), json.dumps({"roles": {}, "models": reports}))

        async def is_told() -> bool:
            listed = json.loads((await here.get("/v1/models"))[1])["data"]
            loaded = {each["id"] for each in listed if each["status"]["value"] != "unloaded"}
            return all((name in loaded) == (state != "unloaded") for name, state in states.items())

        await eventually(is_told)
        yield here


async def order(here: Stage, name: str) -> ModelOrder:
    item = await here.store.get(planner_prefix("ns") + MODEL_ORDERS)
    return ModelOrders.from_text(item.value if item else "").of(name)


async def post(here: Stage, path: str, document: Any = None) -> tuple[int, str]:
    async with here.client.post(here.url + path, json=document) as response:
        return response.status, await response.text()


async def test_a_load_and_an_unload_are_orders_as_the_command_line_writes_them() -> None:
    async with serving(ant="unloaded", bee="ready") as here:
        assert await post(here, "/models/load", {"model": "ant-x"}) == (200, '{"success": true}')
        assert (await order(here, "ant")).load_unix_s > 0
        assert await post(here, "/models/unload", {"model": "bee"}) == (200, '{"success": true}')
        assert (await order(here, "bee")).unload_unix_s > 0
        assert await order(here, "ant") == ModelOrder(load_unix_s=(await order(here, "ant")).load_unix_s)


async def test_models_are_listed_with_their_status_under_llama_cpps_path_too() -> None:
    async with serving(ant="loading") as here:
        assert await here.get("/models") == await here.get("/v1/models")
        assert '"value": "loading"' in (await here.get("/models"))[1]


async def test_running_models_are_listed_in_llama_swaps_words() -> None:
    async with serving(ant="ready", bee="unloaded") as here:
        _, text = await here.get("/running")
    (running,) = json.loads(text)["running"]
    assert (running["model"], running["state"], running["ttl"]) == ("ant", "ready", 60)
    assert running.keys() == {"model", "state", "cmd", "proxy", "ttl", "name", "description"}


async def test_one_model_or_all_loaded_ones_are_unloaded_by_llama_swaps_paths() -> None:
    async with serving(ant="ready", bee="unloaded") as here:
        assert await post(here, "/api/models/unload/bee") == (200, "OK")
        assert (await order(here, "bee")).unload_unix_s > 0
        assert (await order(here, "ant")).unload_unix_s == 0
        assert await here.get("/unload") == (200, "OK")
        first = (await order(here, "ant")).unload_unix_s
        assert first > 0
        assert await post(here, "/api/models/unload") == (200, "OK")
        assert (await order(here, "ant")).unload_unix_s > first


@pytest.mark.parametrize(
    ("path", "document", "status"),
    [
        ("/models/load", {"model": "nobody"}, 404),
        ("/models/load", {"name": "ant"}, 400),
        ("/models/load", ["ant"], 400),
        ("/models/unload", {"model": "ant"}, 400),
        ("/api/models/unload/nobody", None, 404),
    ],
    ids=["unknown", "no model", "no object", "pinned", "unknown by path"],
)
async def test_what_cannot_be_done_is_refused(path: str, document: Any, status: int) -> None:
    async with serving(ant="pinned") as here:
        assert (await post(here, path, document))[0] == status
        assert (await order(here, "ant")) == ModelOrder()


async def test_a_deployment_of_one_model_has_it_loaded_for_ever() -> None:
    async with stage() as here:
        await here.worker()
        assert await post(here, "/models/load", {"model": MODEL}) == (200, '{"success": true}')
        assert (await post(here, "/models/unload", {"model": MODEL}))[0] == 400
        (running,) = json.loads((await here.get("/running"))[1])["running"]
        assert (running["model"], running["state"]) == (MODEL, "ready")
        assert await here.get("/unload") == (200, "OK")


@pytest.mark.parametrize("path", ["/running", "/unload", "/models"])
async def test_all_of_it_is_behind_the_key(path: str) -> None:
    async with stage(api_key="sk-1") as here:
        assert (await here.get(path))[0] == 401
        assert (await post(here, "/models/load", {"model": "x"}))[0] == 401
        assert (await post(here, "/api/models/unload/x"))[0] == 401
