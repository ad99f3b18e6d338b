"""The newest decision outlives the planner in a ConfigMap, written over what was read or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.intent import Change, Intent, IntentMap
from dynaplan.util.errors import ClusterConflict
from tests.fakes.kube_api import KubeApi

COUNTS = DesiredCounts(-1, 3, 7, 6)


@pytest.fixture
def api():
    return KubeApi()


@pytest.fixture
def intents(api):
    return IntentMap(api.client(), "My_Box")


def data_of(api: KubeApi) -> dict[str, str]:
    return api.objects["/api/v1", "configmaps", "dynaplan-my-box"]["data"]


async def test_without_a_config_map_nothing_was_decided(intents):
    assert await intents.read() == Intent()
    assert not Intent().is_open


async def test_what_is_written_is_read_and_a_person_can_read_it_too(api, intents):
    changes = {Role.DECODE: Change(2, 3)}
    written = await intents.write(Intent(COUNTS, changes))
    assert await intents.read() == written
    assert data_of(api) == {
        "num_decode_workers": "3",
        "decision_id": "7",
        "scaled_decision_id": "6",
        "unfinished": '{"decode": {"from": 2, "to": 3}}',
    }
    done = await intents.write(replace(written, unfinished={}, counts=replace(COUNTS, scaled_decision_id=7)))
    assert (done.is_open, data_of(api)["unfinished"]) == (False, "")


async def test_a_decision_over_another_version_is_a_conflict(api, intents):
    first = await intents.write(Intent(COUNTS))
    await intents.write(first)
    for late in (Intent(COUNTS), first):
        with pytest.raises(ClusterConflict):
            await intents.write(late)
    now = await intents.read()
    api.remove("/api/v1", "configmaps", intents.name)
    with pytest.raises(ClusterConflict):
        await intents.write(now)


async def test_holds_stay_when_a_decision_is_written(api, intents):
    written = await intents.write(Intent(COUNTS))
    api.change("/api/v1", "configmaps", intents.name, data={"holds": '{"decode": {"at_least": 2}}'})
    found = await intents.read()
    assert found.holds
    assert (await intents.write(found)).holds == found.holds
    assert data_of(api)["holds"] == found.holds
    assert written.holds == ""


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"decode": 7}', '{"decode": {"from": "x"}}'])
async def test_changes_that_cannot_be_read_are_none(api, intents, text):
    await intents.write(Intent(COUNTS))
    api.change("/api/v1", "configmaps", intents.name, data={"unfinished": text})
    assert (await intents.read()).unfinished == {}


def test_a_number_on_the_way_belongs_to_a_change() -> None:
    assert [number for number in range(6) if Change(4, 2).includes(number)] == [2, 3, 4]


@pytest.mark.parametrize(("namespace", "name"), [("dynamo", "dynaplan-dynamo"), ("___", "dynaplan-planner")])
def test_its_name_is_one_that_kubernetes_takes(api, namespace, name):
    assert IntentMap(api.client(), namespace).name == name
