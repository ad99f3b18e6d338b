"""Holds and settings outlive the store: they are in the statefile too, and are written again when lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from dynaplan.contract.holds import RESERVATIONS, Hold, ReservedGpus, RoleHolds
from dynaplan.fleet.plugin import key_persistence
from dynaplan.fleet.plugin.key_persistence import KeyPersistence
from dynaplan.fleet.rules.lost_keys import STORE_ID, PersistedKeys
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import StatefileUnwritable
from tests.fakes.circus import FakeTerminal
from tests.fakes.polling import eventually

AT_2 = RoleHolds(decode=Hold(2, 2, by="alice")).to_text()
UNTIL_100 = RoleHolds(Hold(1), Hold(2, 2, until_s=100.0, until="noon", by="alice"))
LENGTH = {"max_local_prefill_length": "10"}


class Link:
    """The plugin's link to the store; ``kept`` None is "has not answered yet".

    What was restored is there from then on, unless the store ``is_away``; ``stale`` is what is followed where
    that lags behind.
    """

    def __init__(self) -> None:
        self.store: PersistedKeys | None = None
        self.stale: PersistedKeys | None = None
        self.is_away = False
        self.restored: list[PersistedKeys] = []
        self.tell: Callable[[], None] = lambda: None
        self.replaced: list[tuple[str, str, str]] = []

    def on_persisted_change(self, callback: Callable[[], None]) -> None:
        self.tell = callback

    @property
    def persisted(self) -> PersistedKeys | None:
        return self.stale or self.store

    async def read_persisted(self) -> PersistedKeys | None:
        return None if self.is_away else self.store

    async def restore(self, lost: PersistedKeys) -> None:
        assert self.store is not None
        self.restored.append(lost)
        self.store = PersistedKeys({**self.store.planner, **lost.planner}, {**self.store.live, **lost.live})

    def replace(self, name: str, before: str, after: str) -> None:
        self.replaced.append((name, before, after))


class Document:
    """The statefile in memory."""

    def __init__(self, kept: PersistedKeys) -> None:
        self.planner_keys, self.live_settings = dict(kept.planner), dict(kept.live)
        self.writes = 0
        self.is_full = False

    def record_keys(self, planner_keys: dict[str, str], live_settings: dict[str, str]) -> None:
        if self.is_full:
            raise StatefileUnwritable("no space left")
        self.planner_keys, self.live_settings = dict(planner_keys), dict(live_settings)
        self.writes += 1


class World:
    """A statefile and a store of the id 1, both with what is given."""

    def __init__(self, kept: dict[str, str] | None = None, live: dict[str, str] | None = None) -> None:
        known = PersistedKeys({STORE_ID: "1", **(kept or {})}, live or {})
        self.link, self.document, self.terminal = Link(), Document(known), FakeTerminal()
        self.now_s = 50.0
        link, document = cast(Any, self.link), cast(Any, self.document)
        self.keys = KeyPersistence(link, document, self.terminal, lambda: self.now_s)

    @property
    def said(self) -> list[str]:
        return self.terminal.lines

    async def look(self, live: dict[str, str] | None = None, **found: str) -> bool:
        """Look at a store with these keys, and with its id; return whether nothing is left to do."""
        self.link.store = PersistedKeys({"scaled_decision_id": "2", STORE_ID: "1", **found}, live or {})
        return await self.keys.sync()

    async def look_at_an_empty_one(self) -> None:
        self.link.store = PersistedKeys()
        await self.keys.sync()


async def test_nothing_is_done_before_the_store_has_answered() -> None:
    world = World({"holds": AT_2})
    await world.keys.sync()
    assert (world.link.restored, world.document.writes) == ([], 0)


async def test_a_store_without_an_id_is_given_one_which_is_written_down_once_it_is_there() -> None:
    world = World()
    world.document.planner_keys = {}
    await world.look_at_an_empty_one()
    [given] = world.link.restored
    assert world.said == []
    assert world.document.planner_keys == {}
    await world.keys.sync()
    assert world.document.planner_keys == given.planner
    assert len(given.planner[STORE_ID]) == 32


async def test_a_hold_is_written_down_once() -> None:
    world = World()
    await world.look()
    await world.look(holds=AT_2)
    await world.look(holds=AT_2)
    assert world.document.planner_keys == {STORE_ID: "1", "holds": AT_2}
    assert world.document.writes == 1


async def test_a_lost_hold_is_written_again_and_a_released_one_is_not() -> None:
    world = World({"holds": AT_2})
    await world.look()
    assert world.link.restored == [PersistedKeys({"holds": AT_2})]
    await world.look(holds="{}")
    assert world.document.planner_keys["holds"] == "{}"
    assert len(world.link.restored) == 1


async def test_what_cannot_be_read_is_not_written_down() -> None:
    world = World({"holds": AT_2})
    await world.look(holds='{"decode": 7}')
    assert world.document.planner_keys["holds"] == AT_2
    assert world.link.restored == []
    spoilt = World({"holds": "{"})
    await spoilt.look(holds="{}")
    assert spoilt.document.planner_keys["holds"] == "{}"


async def test_a_statefile_that_cannot_be_written_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.document.is_full = True
    with caplog.at_level(logging.WARNING):
        await world.look(holds=AT_2)
    assert "no space left" in caplog.text
    world.document.is_full = False
    await world.look(holds=AT_2)
    assert world.document.planner_keys["holds"] == AT_2


async def test_a_hold_whose_time_is_over_is_released_and_said_once() -> None:
    world, text = World(), UNTIL_100.to_text()
    await world.look(holds=text)
    assert world.link.replaced == []
    world.now_s = 100.0
    await world.look(holds=text)
    await world.look(holds=text)
    assert set(world.link.replaced) == {("holds", text, RoleHolds(Hold(1)).to_text())}
    assert world.said == ["decode was held at 2 by alice until noon: expired."]


async def test_a_clock_that_is_set_back_does_not_revive_a_hold() -> None:
    world = World()
    world.now_s = 200.0
    await world.look(holds=UNTIL_100.to_text())
    [(_, _, after)] = world.link.replaced
    world.now_s = 0.0
    await world.look(holds=after)
    assert RoleHolds.from_text(world.document.planner_keys["holds"]) == RoleHolds(Hold(1))


async def test_desired_counts_that_the_store_has_lost_are_written_again_and_every_loss_is_told_once() -> None:
    world, counts = World(), {"num_decode_workers": "3", "decision_id": "8"}
    await world.look(**counts)
    for _ in range(2):
        await world.look()
        await world.look()
        await world.look(**counts)
    assert world.link.restored == [PersistedKeys(counts)] * 4
    line = "The key-value store lost num_decode_workers, decision_id; restored from the statefile."
    assert world.said == [line] * 2
    await world.look(num_decode_workers="--5", decision_id="8")
    assert world.document.planner_keys == {STORE_ID: "1", **counts}


async def test_a_live_setting_that_somebody_deletes_stays_deleted() -> None:
    world = World()
    await world.look(LENGTH)
    assert world.document.live_settings == LENGTH
    await world.look()
    assert (world.document.live_settings, world.link.restored, world.said) == ({}, [], [])


async def test_live_settings_come_back_in_a_store_that_has_lost_everything() -> None:
    world = World({"decision_id": "8"}, LENGTH)
    await world.look_at_an_empty_one()
    await world.keys.sync()
    assert world.link.restored == [PersistedKeys({STORE_ID: "1", "decision_id": "8"}, LENGTH)]
    assert world.document.live_settings == LENGTH
    [line] = world.said
    assert "was reset and is empty" in line
    assert line.endswith("Restored from the statefile: decision_id, max_local_prefill_length.")


async def test_a_setting_is_not_taken_for_deleted_while_the_store_is_away_or_what_is_known_is_old() -> None:
    world = World({}, LENGTH)
    world.link.is_away = True
    await world.look()
    assert world.document.live_settings == LENGTH
    world.link.is_away = False
    world.link.store, world.link.stale = (
        PersistedKeys({STORE_ID: "1"}, LENGTH),
        PersistedKeys({STORE_ID: "1"}),
    )
    await world.keys.sync()
    assert (world.document.live_settings, world.link.restored) == (LENGTH, [])


async def test_a_change_is_written_down_when_it_is_told_and_holds_end_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_persistence, "RESYNC_S", 3600.0)
    world = World()
    await world.look()
    task = asyncio.create_task(world.keys.run())
    try:
        await asyncio.sleep(0)  # it has looked once, and waits
        world.link.store = PersistedKeys({STORE_ID: "1", "holds": UNTIL_100.to_text()})
        world.link.tell()
        await eventually(lambda: "holds" in world.document.planner_keys)
        world.now_s = 100.0
        await eventually(lambda: world.link.replaced)
    finally:
        task.cancel()


async def test_nothing_is_left_to_do_but_for_what_is_lost_cannot_be_written_or_ends_by_the_clock() -> None:
    world = World({"holds": AT_2})
    assert not await world.look()
    assert await world.look(holds=AT_2)
    assert not await world.look(holds=UNTIL_100.to_text())
    world.document.is_full = True
    assert not await world.look(holds=AT_2)
    world.document.is_full = False
    assert await world.look(holds=AT_2)


async def test_holds_with_hours_and_reservations_whose_time_is_over_are_released_and_said() -> None:
    world = World()
    ending = {"until_s": 100.0, "until": "noon", "by": "alice"}
    two = {"at_least": 2, "at_most": 2, "at": "09:00-17:00", "zone": "UTC", **ending}
    hours = RoleHolds(decode=Hold.from_json(two)).to_text()
    reserved = json.dumps({"7": ending})
    world.now_s = 100.0
    await world.look(holds=hours, reservations=reserved)
    assert set(world.link.replaced) == {("holds", hours, "{}"), ("reservations", reserved, "{}")}
    assert world.said == [
        "decode was held at 2 by alice at 09:00-17:00 (UTC) until noon: expired.",
        "GPU 7 was reserved by alice until noon: expired.",
    ]


async def test_a_hold_for_a_restart_ends_with_the_command_that_was_killed() -> None:
    holder = ProcessIdentity(4711, 99, "boot")
    made = RoleHolds(prefill=Hold(1, 1, by="bob"), decode=Hold(2, 2, by="alice", holder=holder))
    world, alive = World({"holds": made.to_text()}), {holder}
    world.keys = KeyPersistence(
        cast(Any, world.link), cast(Any, world.document), world.terminal, is_alive=alive.__contains__
    )
    await world.look(holds=made.to_text())
    assert world.link.replaced == []
    alive.clear()
    await world.look(holds=made.to_text())
    left = RoleHolds(prefill=Hold(1, 1, by="bob"))
    assert world.link.replaced == [("holds", made.to_text(), left.to_text())]


async def test_a_loan_ends_with_the_process_that_holds_it() -> None:
    holder = ProcessIdentity(4711, 99, "boot")
    loan = Hold(by="alice", command="train", holder=holder)
    text = ReservedGpus({0: loan, 1: Hold(by="bob")}).to_text()
    world = World({RESERVATIONS: text})
    alive = {holder}
    world.keys = KeyPersistence(
        cast(Any, world.link), cast(Any, world.document), world.terminal, is_alive=alive.__contains__
    )
    assert not await world.look(**{RESERVATIONS: text})  # it is looked at again soon
    assert world.link.replaced == []
    alive.clear()
    await world.look(**{RESERVATIONS: text})
    assert world.link.replaced == [(RESERVATIONS, text, ReservedGpus({1: Hold(by="bob")}).to_text())]
    assert world.said == ["GPU 0 was lent to alice for `train` (pid 4711) until it ends: it has ended."]
