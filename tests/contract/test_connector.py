"""What every connector promises; run over the virtual connector and its twin in memory."""

from __future__ import annotations

import json

import pytest

from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.holds import HOLDS, Hold, RoleHolds
from dynaplan.contract.store_keys import (
    DesiredCounts,
    fleet_key,
    planner_prefix,
    scaling_key,
)
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model import Decision
from dynaplan.planner.virtual.connector import VirtualConnector
from dynaplan.store.memory import MemoryStore
from dynaplan.util.errors import StoreUnavailable, TemporaryError
from tests.fakes.clock import LoopClock
from tests.fakes.connector import MemoryConnector
from tests.fakes.registrations import FakeRegistrations

NAMES = ("num_prefill_workers", "num_decode_workers", "decision_id", "scaled_decision_id")


class InMemory:
    def __init__(self) -> None:
        self.connector = MemoryConnector()

    async def ask(self, desired: DesiredCounts) -> None:
        self.connector.set_desired(desired)

    async def hold(self, holds: RoleHolds) -> None:
        self.connector.set_holds(holds)

    async def publish(self, fleet: FleetCounts) -> None:
        self.connector.set_fleet(fleet)

    def go_away(self) -> None:
        self.connector.is_available = False


class OverKeys:
    """The store's other side: what a supervisor, an operator or another planner writes."""

    def __init__(self) -> None:
        self.store = MemoryStore(LoopClock())
        self.registered = FleetCounts()
        self.connector = VirtualConnector(self.store, "ns", FakeRegistrations(lambda: self.registered))

    async def ask(self, desired: DesiredCounts) -> None:
        for name in NAMES:
            if getattr(desired, name) >= 0:
                await self.store.put(planner_prefix("ns") + name, str(getattr(desired, name)))

    async def hold(self, holds: RoleHolds) -> None:
        await self.store.put(scaling_key("ns", HOLDS), holds.to_text())

    async def publish(self, fleet: FleetCounts) -> None:
        roles = {
            role: {
                state: getattr(counts, state)
                for state in ("starting", "ready", "draining", "backoff", "failed")
            }
            for role, counts in (("prefill", fleet.prefill), ("decode", fleet.decode))
        }
        gpus = {"prefill": fleet.prefill.gpus, "decode": fleet.decode.gpus}
        document = {"roles": roles, "gpus_total": fleet.gpus_total, "gpus_per_worker": gpus}
        await self.store.put(fleet_key("ns"), json.dumps(document))

    def go_away(self) -> None:
        self.store.is_available = False


@pytest.fixture(params=[InMemory, OverKeys])
async def deployment(request):
    return request.param()


@pytest.fixture
async def keys():
    return OverKeys()


def to(prefill: int, decode: int, before: tuple[int, int] = (1, 1)) -> Decision:
    return Decision(PoolSizes(*before), PoolSizes(prefill, decode))


async def test_nothing_is_desired_at_first(deployment):
    assert await deployment.connector.desired() == DesiredCounts()


async def test_what_is_applied_is_desired_and_pending(deployment):
    identifier = await deployment.connector.apply(to(1, 2))
    desired = await deployment.connector.desired()
    assert desired == DesiredCounts(1, 2, identifier, -1)
    assert desired.is_pending


async def test_ids_continue_above_every_id_in_use(deployment):
    await deployment.ask(DesiredCounts(1, 1, 4, 7))
    assert await deployment.connector.apply(to(1, 2)) == 8
    assert (await deployment.connector.desired()).is_pending


async def test_a_decision_that_somebody_else_overtook_is_refused(deployment):
    await deployment.ask(DesiredCounts(1, 3, 5, 5))
    with pytest.raises(TemporaryError):
        await deployment.connector.apply(to(1, 2))
    assert await deployment.connector.desired() == DesiredCounts(1, 3, 5, 5)


async def test_an_aggregated_deployment_is_not_asked_for_prefill_workers(deployment):
    await deployment.connector.apply(to(0, 2, (0, 1)))
    assert (await deployment.connector.desired()).num_prefill_workers == -1


async def test_zero_prefill_workers_can_be_asked_for(deployment):
    await deployment.ask(DesiredCounts(1, 1, 0, 0))
    await deployment.connector.apply(to(0, 1))
    assert (await deployment.connector.desired()).num_prefill_workers == 0


async def test_zero_prefill_workers_can_be_asked_for_where_some_are_and_nothing_was_asked_yet(deployment):
    await deployment.connector.apply(to(0, 1))
    assert (await deployment.connector.desired()).num_prefill_workers == 0


async def test_the_fleet_is_as_published(deployment):
    fleet = FleetCounts(WorkerCounts(1, 2, 3, 4, 5, gpus=1), WorkerCounts(0, 1, gpus=2), gpus_total=8)
    await deployment.publish(fleet)
    assert await deployment.connector.fleet() == fleet


async def test_holds_are_as_a_person_made_them(deployment):
    assert await deployment.connector.holds() == RoleHolds()
    holds = RoleHolds(decode=Hold(3, 3, by="alice"))
    await deployment.hold(holds)
    assert await deployment.connector.holds() == holds


async def test_a_decision_that_a_hold_made_meanwhile_does_not_allow_is_refused(deployment):
    await deployment.ask(DesiredCounts(1, 2, 5, 5))
    await deployment.hold(RoleHolds(decode=Hold(2, 2)))
    with pytest.raises(TemporaryError, match="hold"):
        await deployment.connector.apply(to(1, 1, (1, 2)))
    await deployment.connector.apply(to(2, 2, (1, 2)))
    assert (await deployment.connector.desired()).num_prefill_workers == 2


async def test_away_is_a_temporary_error(deployment):
    deployment.go_away()
    for call in (deployment.connector.fleet, deployment.connector.desired, deployment.connector.holds):
        with pytest.raises(StoreUnavailable):
            await call()
    with pytest.raises(StoreUnavailable):
        await deployment.connector.apply(to(1, 2))


async def test_without_a_supervisor_registrations_are_counted(keys):
    keys.registered = FleetCounts(decode=WorkerCounts(ready=3))
    assert await keys.connector.fleet() == keys.registered


async def test_a_fleet_that_cannot_be_read_is_counted_by_registrations(keys):
    keys.registered = FleetCounts(decode=WorkerCounts(ready=3))
    for nonsense in ("", "[]", '{"roles": {"decode": 7}}', '{"gpus_total": "many"}'):
        await keys.store.put(fleet_key("ns"), nonsense)
        assert await keys.connector.fleet() == keys.registered


async def test_a_hold_whose_deadline_has_passed_is_not_in_force(keys):
    keys.connector = VirtualConnector(
        keys.store, "ns", FakeRegistrations(lambda: keys.registered), lambda: 1000.0
    )
    await keys.hold(RoleHolds(Hold(2, until_s=999.0), Hold(3, until_s=1001.0)))
    assert [hold.at_least for hold in (await keys.connector.holds()).by_role.values()] == [3]


async def test_a_hold_for_hours_is_in_force_while_they_are_open(keys):
    office = Hold(3, 3, at="09:00-17:00", zone="UTC")
    await keys.hold(RoleHolds(decode=office))
    for at_s, held in ((12 * 3600.0, {Role.DECODE: office}), (18 * 3600.0, {})):
        keys.connector = VirtualConnector(
            keys.store, "ns", FakeRegistrations(lambda: keys.registered), lambda at_s=at_s: at_s
        )
        assert (await keys.connector.holds()).by_role == held


@pytest.mark.parametrize("lost_for_s", [60.0, 0.0])
async def test_holds_that_a_store_has_lost_are_waited_for_and_not_for_ever(keys, lost_for_s):
    keys.connector = VirtualConnector(
        keys.store, "ns", FakeRegistrations(lambda: keys.registered), lost_for_s=lost_for_s
    )
    await keys.hold(RoleHolds(decode=Hold(3)))
    await keys.connector.holds()
    keys.store.wipe()
    if lost_for_s:
        for call in (keys.connector.holds(), keys.connector.apply(to(1, 1))):
            with pytest.raises(TemporaryError, match="lost"):
                await call
    else:
        assert await keys.connector.holds() == RoleHolds()


async def test_holds_that_cannot_be_read_hold_nothing_and_are_named_once(keys, caplog):
    for _ in range(3):
        await keys.store.put(scaling_key("ns", HOLDS), '{"decode": 7}')
        assert await keys.connector.holds() == RoleHolds()
    assert [record.message for record in caplog.records] == [
        "ignoring v1/ns/planner_extensions/holds: 'decode' is 7: expected a JSON object"
    ]


async def test_the_counts_are_decimal_text_written_in_one_transaction(keys):
    await keys.connector.apply(to(2, 3))
    items = await keys.store.list(planner_prefix("ns"))
    assert {item.key.removeprefix(planner_prefix("ns")): item.value for item in items} == {
        "num_prefill_workers": "2",
        "num_decode_workers": "3",
        "decision_id": "0",
    }
    assert len({item.revision for item in items}) == 1


async def test_a_write_between_reading_and_writing_makes_apply_fail_whole(keys, monkeypatch):
    await keys.ask(DesiredCounts(1, 1, 0, 0))
    read = keys.store.list

    async def read_then_overtaken(prefix: str):
        items = await read(prefix)
        await keys.store.put(planner_prefix("ns") + "num_decode_workers", "5")
        return items

    monkeypatch.setattr(keys.store, "list", read_then_overtaken)
    with pytest.raises(TemporaryError):
        await keys.connector.apply(to(1, 2))
    monkeypatch.undo()
    assert (await keys.connector.desired()).num_decode_workers == 5
