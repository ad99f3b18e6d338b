"""Processes on one socket have as many connections each, and one that hangs holds nobody up."""

from __future__ import annotations

from pathlib import Path
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.http.accept_shares import MAX_LEFT_TO_SILENT, AcceptShares, EqualPart, Shared


def shared(*connections: int, looks: int = 7) -> dict[str, Shared]:
    return {f"{number}": Shared(each, looks) for number, each in enumerate(connections)}


@pytest.mark.parametrize(
    ("own", "waiting", "others", "lacking"),
    [
        (0, 40, [], 40),
        (0, 0, [3], 0),
        (6, 1, [5, 9], 1),  # 21 in all: 7 each
        (7, 1, [4, 9], 0),
        (0, 64, [0, 0, 0], 16),
        (16, 48, [0, 0, 0], 0),
        (64, 64, [64, 64, 0], 0),
        (0, 64, [64, 64, 64], 64),
        (10, 3, [11, 12, 13], 3),  # no more than wait
    ],
)
def test_a_process_takes_what_it_lacks_to_an_equal_part_of_all_connections(
    own: int, waiting: int, others: list[int], lacking: int
) -> None:
    assert EqualPart().lacking(own, waiting, shared(*others)) == lacking


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 300), st.randoms())
def test_in_whatever_order_they_look_some_process_takes_of_what_waits_and_none_more_than_its_part(
    connections: list[int], waiting: int, random: Random
) -> None:
    part = -(-(sum(connections) + waiting) // len(connections))
    most = [max(part, each) for each in connections]
    while waiting:
        waited = waiting
        for index in random.sample(range(len(connections)), len(connections)):
            others = shared(*connections[:index], *connections[index + 1 :])
            taken = min(16, EqualPart().lacking(connections[index], waiting, others))
            connections[index] += taken
            waiting -= taken
        assert waiting < waited
    assert all(now <= then for now, then in zip(connections, most, strict=True))


def test_so_many_are_left_to_one_that_takes_none_and_none_before_it_looks() -> None:
    part = EqualPart()
    hung = shared(1)
    assert [part.lacking(3, 1, hung) for _ in range(MAX_LEFT_TO_SILENT + 2)] == [0] * MAX_LEFT_TO_SILENT + [
        1
    ] * 2
    assert part.lacking(4, 1, hung) == 1
    assert part.lacking(4, 1, shared(2, looks=8)) == 0


def test_those_beside_one_that_hangs_have_equal_parts_of_what_it_does_not_take() -> None:
    part, hung = EqualPart(), Shared(1, 7)
    for looks in range(MAX_LEFT_TO_SILENT):
        assert part.lacking(30, 1, {"hung": hung, "awake": Shared(30, looks)}) == 0
    assert part.lacking(30, 20, {"hung": hung, "awake": Shared(30, MAX_LEFT_TO_SILENT)}) == 10


def test_one_whose_connections_are_short_is_not_taken_for_hung(tmp_path: Path) -> None:
    with mock.patch("dynaplan.http.accept_shares.OTHER_ACCEPTORS_POLL_S", 0):
        streams, short = AcceptShares(tmp_path), AcceptShares(tmp_path)
        for _ in range(2 * MAX_LEFT_TO_SILENT):
            assert not streams.lacking(3, waiting=1)
            assert short.lacking(0, waiting=1)
        for each in (streams, short):
            each.close()


def test_one_that_always_looks_when_others_have_taken_all_is_not_taken_for_hung(tmp_path: Path) -> None:
    quick, slow = AcceptShares(tmp_path), AcceptShares(tmp_path)
    for _ in range(2 * MAX_LEFT_TO_SILENT):
        assert not quick.lacking(3, waiting=1)
        assert not slow.lacking(0, waiting=0)
    for each in (quick, slow):
        each.close()


def test_processes_see_each_others_connections_until_one_leaves(tmp_path: Path) -> None:
    with mock.patch("dynaplan.http.accept_shares.OTHER_ACCEPTORS_POLL_S", 0):
        first, second = AcceptShares(tmp_path), AcceptShares(tmp_path)
        first.publish(9)
        assert second.lacking(1, waiting=12) == 10
        first.publish(0)
        assert not second.lacking(1, waiting=1)
        first.close()
        assert second.lacking(1, waiting=1)
        second.close()
