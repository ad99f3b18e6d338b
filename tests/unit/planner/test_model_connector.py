"""Planners of models: what they see of a model, what they say of it, and what of that counts."""

from __future__ import annotations

import json

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.model_keys import MODEL_WORKERS, ModelReport, PoolReport
from dynaplan.contract.store_keys import fleet_key, scaling_key
from dynaplan.planner.model import Decision
from dynaplan.planner.ports import NothingToPlan
from dynaplan.planner.virtual.model_connector import ModelConnector
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import StoreUnavailable, TemporaryError
from tests.fakes.registrations import FakeRegistrations

KEY = scaling_key("ns", MODEL_WORKERS)


class Box:
    """What the fleet plugin publishes of two models, and a planner's connector for each."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.ant, self.bee = (
            ModelConnector(self.store, "ns", name, FakeRegistrations()) for name in ("ant", "bee")
        )

    async def publish(self, gpus: float = 1.0, **workers: int) -> None:
        report = ModelReport("ant", "ready", load_s=4.0, workers=workers, gpus_each=gpus)
        unloaded = ModelReport("bee", "unloaded")
        models = {"ant": report.to_json(), "bee": unloaded.to_json()}
        await self.store.put(fleet_key("ns"), json.dumps({"roles": {}, "gpus_total": 8, "models": models}))

    async def wanted(self) -> str:
        item = await self.store.get(KEY)
        return item.value if item else ""


def asks(workers: int) -> Decision:
    return Decision(PoolSizes(0, 1), PoolSizes(0, workers))


async def test_the_fleet_of_a_model_is_its_own_workers_on_the_gpus_of_the_box() -> None:
    box = Box()
    await box.publish(ready=2, starting=1, stopped=7)
    fleet = await box.ant.fleet()
    assert (fleet.decode.ready, fleet.decode.starting, fleet.decode.gpus) == (2, 1, 1.0)
    assert (fleet.decode.startup_s, fleet.gpus_total, fleet.prefill.present) == (4.0, 8, 0)
    await box.publish(gpus=0.0, ready=1)
    assert (await box.ant.fleet()).gpus_total == 0, "a worker in the machine's memory needs no GPU"


async def test_what_a_model_wants_is_written_beside_what_others_want_and_taken_back_when_it_is_gone() -> None:
    box = Box()
    await box.store.put(KEY, '{"bee":3,"cow":2}')
    await box.publish(ready=1)
    assert await box.ant.apply(asks(2)) == 1
    assert await box.wanted() == '{"ant":2,"bee":3,"cow":2}'
    with pytest.raises(NothingToPlan, match="the model bee is unloaded: it has no workers to plan for"):
        await box.bee.fleet()
    assert await box.wanted() == '{"ant":2,"cow":2}'


async def test_a_wish_is_pending_while_workers_start_and_not_while_memory_is_waited_for() -> None:
    box = Box()
    await box.publish(ready=1)
    assert (await box.ant.desired()).num_decode_workers == -1
    await box.ant.apply(asks(3))
    desired = await box.ant.desired()
    assert (desired.num_decode_workers, desired.is_pending) == (3, False)
    await box.publish(ready=1, starting=1)
    desired = await box.ant.desired()
    assert (desired.num_decode_workers, desired.is_pending) == (3, True)


async def test_without_a_word_of_the_fleet_plugin_nothing_is_planned() -> None:
    box = Box()
    with pytest.raises(NothingToPlan, match="nothing is known of the model ant yet"):
        await box.ant.fleet()
    await box.store.put(fleet_key("ns"), "no document")
    with pytest.raises(TemporaryError, match="cannot be read"):
        await box.ant.fleet()


async def test_what_cannot_be_read_is_written_anew_and_others_writing_all_the_time_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    box = Box()
    await box.store.put(KEY, "[]")
    await box.ant.apply(asks(2))
    assert await box.wanted() == '{"ant":2}'

    async def never(transaction: object) -> bool:
        return False

    monkeypatch.setattr(box.store, "commit", never)
    with pytest.raises(TemporaryError, match="other planners") as raised:
        await box.ant.apply(asks(3))
    assert not isinstance(raised.value, StoreUnavailable)


async def test_persons_hold_no_model_and_its_components_are_those_that_registered() -> None:
    box = Box()
    await box.publish(ready=1)
    assert (await box.ant.holds()).by_role == {}
    assert (await box.ant.components()).missing == ""


async def test_a_disaggregated_model_has_two_pools_and_a_number_wanted_of_each() -> None:
    box = Box()
    prefill = PoolReport(workers={"ready": 1, "starting": 1}, max_workers=4, gpus_each=2.0, load_s=9.0)
    report = ModelReport("ant", "ready", load_s=4.0, workers={"ready": 1}, gpus_each=1.0, prefill=prefill)
    document = {"roles": {}, "gpus_total": 8, "models": {"ant": report.to_json()}}
    await box.store.put(fleet_key("ns"), json.dumps(document))
    fleet = await box.ant.fleet()
    assert (fleet.prefill.ready, fleet.prefill.starting, fleet.prefill.gpus) == (1, 1, 2.0)
    assert (fleet.prefill.startup_s, fleet.decode.ready) == (9.0, 1)
    assert fleet.gpus_total == 8
    await box.store.put(fleet_key("ns"), json.dumps({**document, "gpus_total": 1}))
    assert (await box.ant.fleet()).gpus_total == 5, "they share the one that there is, and may stay"
    await box.store.put(KEY, '{"bee":3}')
    await box.ant.apply(Decision(PoolSizes(2, 1), PoolSizes(3, 2)))
    assert await box.wanted() == '{"ant":2,"ant (prefill)":3,"bee":3}'
    desired = await box.ant.desired()
    assert (desired.num_prefill_workers, desired.num_decode_workers, desired.is_pending) == (3, 2, True)
    unloaded = {"models": {"ant": ModelReport("ant", "unloaded", prefill=PoolReport()).to_json()}}
    await box.store.put(fleet_key("ns"), json.dumps(unloaded))
    with pytest.raises(NothingToPlan):
        await box.ant.fleet()
    assert await box.wanted() == '{"bee":3}'
