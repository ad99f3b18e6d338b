"""``dynaplan models`` and the commands that move them: what they show, and what they write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.models import model_of
from dynaplan.cli.models_view import SavedKv, model_rows, models_table
from dynaplan.contract.model_keys import ModelDemand, ModelReport, PoolReport, Refusal
from dynaplan.contract.model_orders import change_order, load_order, unload_order
from dynaplan.contract.store_keys import scaling_key
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, DeploymentError

REPORTS = {
    "ant": ModelReport("ant", "ready", 0.0, 4.0, "load: asked", False, 5 * 10**9, (0, 1), 1060.0),
    "bee": ModelReport("bee", "loading", 990.0, 41.0, is_pinned=True),
    "cow": ModelReport("cow", "unloaded", refusal=Refusal(409, "no room beside bee: pinned", 1000.0)),
}


def test_the_table_says_state_memory_who_waits_and_when_each_leaves() -> None:
    text = models_table(model_rows(REPORTS, {"cow": ModelDemand(3, 970.0, 0, 0.0)}), 1000.0, 100)
    ant, bee, cow, note = text.splitlines()[1:]
    assert ant.split() == ["ant", "ready", "5.0", "GB", "0,1", "0", "0", "in", "01:00"]
    assert bee.split() == ["bee", "loading", "00:10", "(usually", "00:41)", "-", "-", "0", "0", "pinned"]
    assert cow.split() == ["cow", "unloaded", "-", "-", "0", "3", "(00:30)", "-"]
    assert note == "cow: no room beside bee: pinned"
    assert model_rows(REPORTS, {})["ant"]["state"] == "ready"


def test_what_a_model_saved_of_its_kv_entries_is_said_below_the_table() -> None:
    saved = {"cow": SavedKv(2, 3210, 74_000_000), "gone": SavedKv(1, 1, 1)}
    text = models_table(model_rows(REPORTS, {}, saved), 1000.0, 100)
    assert text.splitlines()[-1] == "cow: 2 prompts of 3210 tokens saved for its next load, 74 MB"
    assert model_rows(REPORTS, {}, saved)["cow"]["saved_kv"]["tokens"] == 3210


def test_workers_have_a_column_where_a_model_may_have_several() -> None:
    several = ModelReport("ant", "ready", workers={"ready": 1, "starting": 1, "draining": 1}, max_workers=3)
    reports = {"ant": several, "bee": ModelReport("bee", "unloaded")}
    heading, ant, bee = models_table(model_rows(reports, {}), 1000.0, 100).splitlines()
    assert heading.split()[:3] == ["MODEL", "STATE", "WORKERS"]
    assert ant.split()[:5] == ["ant", "ready", "2", "of", "3"]
    assert bee.split()[:5] == ["bee", "unloaded", "0", "of", "1"]
    assert "WORKERS" not in models_table(model_rows(REPORTS, {}), 1000.0, 100)


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


def test_prefill_workers_are_shown_beside_the_others() -> None:
    pair = ModelReport("ant", "ready", workers={"ready": 1}, prefill=PoolReport({"ready": 2}, 3))
    reports = {"ant": pair, "bee": ModelReport("bee", "unloaded")}
    _, ant, bee = models_table(model_rows(reports, {}), 1000.0, 100).splitlines()
    assert "1 of 1, prefill 2 of 3" in ant
    assert "0 of 1" in bee
