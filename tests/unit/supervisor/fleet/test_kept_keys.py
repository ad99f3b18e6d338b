"""Holds outlive the store: they are in the statefile too, and are written again when they were lost."""

from __future__ import annotations

import logging

import pytest

from dynaplan.domain.errors import StatefileUnwritable
from dynaplan.domain.planning.holds import Hold, RoleHolds
from dynaplan.supervisor.fleet.kept_keys import KeptKeys

AT_2 = RoleHolds(decode=Hold(2, 2, by="alice")).to_text()
UNTIL_100 = RoleHolds(Hold(1), Hold(2, 2, until_s=100.0, until="noon", by="alice"))


class Link:
    """The plugin's link to the store; ``planner_keys`` None is "has not answered yet"."""

    def __init__(self) -> None:
        self.planner_keys: dict[str, str] | None = None
        self.restored: list[dict[str, str]] = []
        self.replaced: list[tuple[str, str, str]] = []

    def restore(self, keys: dict[str, str]) -> None:
        self.restored.append(keys)

    def replace(self, name: str, before: str, after: str) -> None:
        self.replaced.append((name, before, after))


class Document:
    """The statefile in memory."""

    def __init__(self, keys: dict[str, str] | None = None) -> None:
        self.planner_keys = keys or {}
        self.writes = 0
        self.is_full = False

    def record_planner_keys(self, keys: dict[str, str]) -> None:
        if self.is_full:
            raise StatefileUnwritable("no space left")
        self.planner_keys = dict(keys)
        self.writes += 1


class World:
    def __init__(self, kept: dict[str, str] | None = None) -> None:
        self.link, self.document, self.said = Link(), Document(kept), list[str]()
        self.now_s = 50.0
        self.keys = KeptKeys(self.link, self.document, self.said.append, lambda: self.now_s)

    def look(self, **found: str) -> None:
        self.link.planner_keys = {"scaled_decision_id": "2", **found}
        self.keys.look()


def test_nothing_is_done_before_the_store_has_answered() -> None:
    world = World({"holds": AT_2})
    world.keys.look()
    assert (world.link.restored, world.document.writes) == ([], 0)


def test_a_hold_is_written_down_once() -> None:
    world = World()
    world.look()
    world.look(holds=AT_2)
    world.look(holds=AT_2)
    assert world.document.planner_keys == {"holds": AT_2}
    assert world.document.writes == 1


def test_a_lost_hold_is_written_again_and_a_released_one_is_not() -> None:
    world = World({"holds": AT_2})
    world.look()
    assert world.link.restored == [{"holds": AT_2}]
    world.look(holds="{}")
    assert world.document.planner_keys == {"holds": "{}"}
    assert len(world.link.restored) == 1


def test_what_cannot_be_read_is_not_written_down() -> None:
    world = World({"holds": AT_2})
    world.look(holds='{"decode": 7}')
    assert world.document.planner_keys == {"holds": AT_2}
    assert world.link.restored == []
    spoilt = World({"holds": "{"})
    spoilt.look(holds="{}")
    assert spoilt.document.planner_keys == {"holds": "{}"}


def test_a_statefile_that_cannot_be_written_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.document.is_full = True
    with caplog.at_level(logging.WARNING):
        world.look(holds=AT_2)
    assert "no space left" in caplog.text
    world.document.is_full = False
    world.look(holds=AT_2)
    assert world.document.planner_keys == {"holds": AT_2}


def test_a_hold_whose_time_is_over_is_released_and_said_once() -> None:
    world, text = World(), UNTIL_100.to_text()
    world.look(holds=text)
    assert world.link.replaced == []
    world.now_s = 100.0
    world.look(holds=text)
    world.look(holds=text)
    assert set(world.link.replaced) == {("holds", text, RoleHolds(Hold(1)).to_text())}
    assert world.said == ["decode was held at 2 by alice until noon: that is over."]


def test_a_clock_that_is_set_back_does_not_revive_a_hold() -> None:
    world = World()
    world.now_s = 200.0
    world.look(holds=UNTIL_100.to_text())
    [(_, _, after)] = world.link.replaced
    world.now_s = 0.0
    world.look(holds=after)
    assert RoleHolds.from_text(world.document.planner_keys["holds"]) == RoleHolds(Hold(1))


def test_desired_counts_that_the_store_has_lost_are_written_again() -> None:
    world = World()
    world.look(num_decode_workers="3", decision_id="8")
    world.look()
    assert world.link.restored == [{"num_decode_workers": "3", "decision_id": "8"}]
    world.look(num_decode_workers="--5", decision_id="8")
    assert world.document.planner_keys == {"num_decode_workers": "3", "decision_id": "8"}
