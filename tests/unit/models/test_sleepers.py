"""Which workers sleep, fall asleep or wake, by the keys of the store."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.models.model import ModelState
from dynaplan.models.sleepers import ASSUMED_WAKING_S, Sleepers
from tests.unit.fleet.rules.graphs import worker

WORKER = replace(worker("ant"), instance_id=7)


def state(sleepers: Sleepers) -> tuple[ModelState, str]:
    progress = sleepers.of(WORKER)
    assert progress
    return progress.state, progress.level


def test_a_worker_that_is_to_sleep_drains_then_sleeps_and_loads_once_it_was_asked_to_wake() -> None:
    sleepers = Sleepers()
    sleepers = sleepers.follow({}, {7: "1"}, 0.0)
    assert state(sleepers) == (ModelState.DRAINING, "1")
    sleepers = sleepers.follow({7: ""}, {7: "1"}, 1.0)
    assert state(sleepers) == (ModelState.ASLEEP, "1")
    sleepers = sleepers.with_wake_order(7)
    sleepers = sleepers.follow({7: ""}, {7: "1"}, 2.0)
    assert state(sleepers)[0] is ModelState.LOADING
    sleepers = sleepers.follow({}, {}, 3.0)
    assert state(sleepers)[0] is ModelState.READY


def test_a_worker_that_is_seen_asleep_before_the_order_to_sleep_does_not_wake() -> None:
    """Two watches of the store, one for each prefix, tell in any order what happened one after the other."""
    sleepers = Sleepers()
    sleepers = sleepers.with_sleep_order(7, "1")
    sleepers = sleepers.follow({7: ""}, {}, 0.0)
    assert state(sleepers) == (ModelState.ASLEEP, "1")
    sleepers = sleepers.follow({7: ""}, {7: "1"}, 1.0)
    assert state(sleepers) == (ModelState.ASLEEP, "1")


def test_a_worker_that_woke_and_fell_asleep_again_between_two_looks_does_not_wake() -> None:
    sleepers = Sleepers()
    sleepers = sleepers.follow({7: ""}, {7: "1"}, 0.0)
    sleepers = sleepers.with_wake_order(7)
    sleepers = sleepers.with_sleep_order(7, "1")
    sleepers = sleepers.follow({7: ""}, {7: "1"}, 1.0)
    assert state(sleepers)[0] is ModelState.ASLEEP


def test_a_sleeper_whose_order_was_taken_back_wakes() -> None:
    sleepers = Sleepers()
    sleepers = sleepers.with_sleep_order(7, "1")
    sleepers = sleepers.follow({7: ""}, {7: "1"}, 0.0)
    sleepers = sleepers.follow({7: ""}, {}, 1.0)
    assert state(sleepers)[0] is ModelState.LOADING


def test_whoever_begins_while_a_worker_wakes_sees_that_it_does() -> None:
    begun_since = Sleepers()
    begun_since = begun_since.follow({7: ""}, {}, 0.0)
    assert state(begun_since)[0] is ModelState.LOADING
    begun_since = begun_since.follow({7: ""}, {}, ASSUMED_WAKING_S - 1)
    assert state(begun_since)[0] is ModelState.LOADING
    for at_s in (ASSUMED_WAKING_S, ASSUMED_WAKING_S + 1):
        begun_since = begun_since.follow({7: ""}, {}, at_s)
        assert state(begun_since) == (ModelState.ASLEEP, ""), "nobody has asked it to wake"


def test_a_sleeper_that_cannot_be_woken_is_none_that_wakes() -> None:
    sleepers = Sleepers()
    sleepers = sleepers.follow({7: "it has no weights"}, {}, 0.0)
    assert state(sleepers)[0] is ModelState.ASLEEP
