"""What a subscriber has missed, by the numbers of what came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.events.nats_subscriber import Sequences


def test_the_events_between_two_numbers_were_missed() -> None:
    sequences = Sequences()
    assert [sequences.missed(7, number) for number in (0, 1, 4, 4, 3, 5)] == [0, 0, 2, None, None, 0]


def test_each_publisher_counts_by_itself() -> None:
    sequences = Sequences()
    assert [sequences.missed(publisher, 5) for publisher in (1, 2, 1)] == [5, 5, None]


def test_the_publishers_heard_last_are_remembered() -> None:
    sequences = Sequences(most=2)
    for publisher in (1, 2, 1, 3):
        sequences.missed(publisher, sequences_of.get(publisher, 0))
    assert sequences.missed(1, 9) is not None
    assert sequences.missed(2, 0) == 0  # forgotten


sequences_of = {1: 0}


@given(st.lists(st.integers(0, 50), max_size=50))
def test_missed_and_taken_add_up_to_the_highest_number(numbers: list[int]) -> None:
    sequences = Sequences()
    missed = [sequences.missed(1, number) for number in numbers]
    taken = [each for each in missed if each is not None]
    assert sum(taken) + len(taken) == max(numbers, default=-1) + 1
