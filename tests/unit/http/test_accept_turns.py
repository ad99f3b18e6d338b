"""Processes on one socket have as many connections each, and one that hangs holds nobody up."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from dynaplan.http.accept_turns import MOST_LEFT, AcceptTurns, FairPart, Shared


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
    assert FairPart().leaves_next(own, [Shared(each, 7) for each in others]) is leaves


def test_so_many_are_left_to_one_that_takes_none_and_none_before_it_looks() -> None:
    part = FairPart()
    hung = Shared(1, 7)
    assert [part.leaves_next(3, [hung]) for _ in range(MOST_LEFT + 2)] == [True] * MOST_LEFT + [False] * 2
    assert not part.leaves_next(4, [hung])
    assert part.leaves_next(4, [Shared(2, 8)])


def test_one_whose_connections_are_short_is_not_taken_for_hung(tmp_path: Path) -> None:
    with mock.patch("dynaplan.http.accept_turns.OTHER_ACCEPTORS_POLL_S", 0):
        streams, short = AcceptTurns(tmp_path), AcceptTurns(tmp_path)
        for _ in range(2 * MOST_LEFT):
            assert streams.leaves_next(3)
            assert not short.leaves_next(0)
        for each in (streams, short):
            each.close()


def test_processes_see_each_others_connections_until_one_leaves(tmp_path: Path) -> None:
    with mock.patch("dynaplan.http.accept_turns.OTHER_ACCEPTORS_POLL_S", 0):
        first, second = AcceptTurns(tmp_path), AcceptTurns(tmp_path)
        assert not first.leaves_next(0)
        assert second.leaves_next(1)
        first.close()
        assert not second.leaves_next(1)
        second.close()
