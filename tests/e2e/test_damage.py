"""Damaged data of the embedded servers, under load: no request is lost, and what was there comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from dynaplan.store.etcd import EtcdStore
from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.test_kills import is_whole, process_of
from tests.e2e.traces import in_torture
from tests.fakes.load import Load
from tests.fakes.polling import eventually

SETTING = "/dynamo/disagg_router/max_local_prefill_length"
QUIET = ("--Planner.no-operation=true",)


@in_torture
async def test_damaged_data_of_etcd_is_set_aside_and_all_that_it_held_is_written_again(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    held = await asyncio.to_thread(deployment.run, "scale", "decode=2", "--hold")
    assert held.returncode == 0, held.stderr
    store, setting = (
        EtcdStore.from_environment(deployment.clients_environment()),
        {"max_local_prefill_length": "7"},
    )
    await store.put(SETTING, "7")
    await eventually(lambda: deployment.statefile().get("live_settings") == setting)
    root = Path(deployment.statefile()["addresses"]["runtime_dir"])
    kept = deployment.statefile()["planner_keys"]
    pids = {name: worker["pid"] for name, worker in deployment.workers().items()}
    async with Load(deployment.url, MODEL, clients=3, tokens=30) as load:
        await eventually(lambda: len(load.outcomes) > 3, 30)
        (root / "etcd/data/member/snap/db").write_bytes(os.urandom(65536))
        process_of(deployment, "etcd --name").kill()
        await eventually(lambda: "set aside as" in deployment.text, 40)
        await eventually(lambda: "was reset and is empty" in deployment.text, 40)
        await eventually(lambda: is_whole(deployment), 40)
        await load.stop()
    assert load.incomplete == []
    assert (root / "etcd/data.damaged").is_dir()
    assert {name: worker["pid"] for name, worker in deployment.workers().items()} == pids
    assert deployment.statefile()["planner_keys"] == kept
    status = await asyncio.to_thread(deployment.run, "status")
    assert "decode is held at 2" in status.stdout
    await asyncio.to_thread(deployment.scale, prefill=2)
    item = await store.get(SETTING)
    assert item
    assert (item.value, deployment.statefile()["live_settings"]) == ("7", setting)
    await store.delete(SETTING)
    await eventually(lambda: deployment.statefile()["live_settings"] == {})
    assert await store.get(SETTING) is None
    await store.close()
