"""``dynaplan models`` and the commands that move them: what they show, and what they write."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.models import model_of, wait_for_model
from dynaplan.cli.timing import WORKERS_POLL_S
from dynaplan.contract.model_keys import MODELS_FIELD, ModelReport
from dynaplan.contract.model_orders import change_order, load_order, unload_order
from dynaplan.contract.store_keys import fleet_key, scaling_key
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, DeploymentError, TemporaryError


def found(config: str) -> Any:
    return SimpleNamespace(namespace="ns", document={"environment": {"DYNAMO_SERVICE_CONFIG": config}})


def test_a_model_goes_by_its_name_and_its_aliases() -> None:
    deployment = found('{"Models": {"ant": {"aliases": ["emmet"]}, "bee": {}}}')
    assert (model_of(deployment, "emmet"), model_of(deployment, "bee")) == ("ant", "bee")
    with pytest.raises(ConfigError, match="no model 'cow'"):
        model_of(deployment, "cow")
    with pytest.raises(DeploymentError, match="no models that are loaded on request"):
        model_of(found("{}"), "ant")


async def test_an_order_changes_one_model_and_what_cannot_be_read_is_replaced() -> None:
    store = MemoryStore(SystemClock())
    key = scaling_key("ns", "models")
    await store.put(key, "[]")
    await change_order(store, "ns", "ant", load_order(5.0, 60.0))
    await change_order(store, "ns", "bee", unload_order(7.0))
    item = await store.get(key)
    assert item
    assert '"keep_until_unix_s":65.0,"is_pinned":null' in item.value
    assert '"unload_unix_s":7.0' in item.value


async def _publish(store: MemoryStore, report: ModelReport) -> None:
    await store.put(fleet_key("ns"), json.dumps({MODELS_FIELD: {"ant": report.to_json()}}))


async def test_waiting_for_a_model_ends_when_it_fails_after_that_and_not_for_a_failure_before() -> None:
    store, now_s = MemoryStore(SystemClock()), time.time()
    failure = ModelReport("Ant", "failed", since_unix_s=now_s - 60, why="out of memory")
    await _publish(store, failure)
    waiting = asyncio.create_task(wait_for_model(store, "ns", "ant", "ready", 60.0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 2 * WORKERS_POLL_S)
    await _publish(store, replace(failure, since_unix_s=time.time() + 0.1))
    with pytest.raises(TemporaryError, match="ant has failed: out of memory\n  `dynaplan logs Ant`"):
        await waiting
