"""Processes on one socket have as many connections each, and one that hangs holds nobody up."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from dynaplan.http.accept_turns import MOST_LEFT, AcceptTurns, FairPart


@pytest.mark.parametrize(
    ("own", "others", "leaves"),
    [
        (0, [], False),
        (5, [5, 9], False),
        (6, [5, 9], True),
        (16, [15, 15], False),  # a sixteenth more is equal enough
        (17, [15, 15], True),
        (160, [150, 200], False),
    ],
)
def test_who_has_clearly_more_than_the_fewest_leaves_the_next(
    own: int, others: list[int], leaves: bool
) -> None:
    assert FairPart().leaves_next(own, others) is leaves


def test_so_many_are_left_to_one_that_takes_none_and_none_before_it_has_taken_one() -> None:
    part = FairPart()
    assert [part.leaves_next(3, [1]) for _ in range(MOST_LEFT + 2)] == [True] * MOST_LEFT + [False] * 2
    assert not part.leaves_next(4, [1])
    assert part.leaves_next(4, [2])


def test_processes_see_each_others_connections_until_one_leaves(tmp_path: Path) -> None:
    with mock.patch("dynaplan.http.accept_turns.OTHER_ACCEPTORS_POLL_S", 0):
        first, second = AcceptTurns(tmp_path), AcceptTurns(tmp_path)
        assert not first.leaves_next(0)
        assert second.leaves_next(1)
        first.close()
        assert not second.leaves_next(1)
        second.close()
