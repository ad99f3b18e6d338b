from __future__ import annotations

from dynaplan.worker.calls.round_robin import in_turn


def test_a_round_begins_above_the_last_one_and_goes_on_from_the_lowest() -> None:
    assert in_turn((5, 1, 9), -1) == (1, 5, 9)
    assert in_turn((5, 1, 9), 1) == (5, 9, 1)
    assert in_turn((5, 1, 9), 9) == (1, 5, 9)


def test_an_instance_that_has_gone_leaves_its_turn_to_the_next() -> None:
    assert in_turn((1, 9), 5) == (9, 1)
    assert in_turn((), 5) == ()
