"""A publisher keeps its last events, and who follows it delivers them in order, each at most once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.events.envelope import Envelope
from dynaplan.events.replay import ChannelFollower, ReplayBuffer


def event(number: int, size: int = 1, at_ms: int = 0) -> Envelope:
    return Envelope(7, number, at_ms, "topic", bytes(size))


def filled(count: int, most: int = 1000, most_bytes: int = 10**6, age_ms: int = 10**6) -> ReplayBuffer:
    buffer = ReplayBuffer(most, most_bytes, age_ms)
    for number in range(count):
        buffer.append(event(number, 10, number * 100))
    return buffer


def numbers(events: list[Envelope]) -> list[int]:
    return [each.sequence for each in events]


def test_the_buffer_is_bounded_by_number_bytes_and_age() -> None:
    assert numbers(filled(10, most=3).since(0, 100)) == [7, 8, 9]
    assert numbers(filled(10, most_bytes=25).since(0, 100)) == [8, 9]
    assert numbers(filled(10, age_ms=250).since(0, 100)) == [7, 8, 9]
    buffer = filled(10)
    buffer.expire(10**9)
    assert buffer.since(0, 100) == []
    assert buffer.next_sequence == 10


def test_events_are_found_by_number_and_by_time() -> None:
    buffer = filled(10, most=5)
    assert numbers(buffer.since(7, 2)) == [7, 8]
    assert buffer.since(10, 2) == []
    assert [buffer.number_at(at_ms) for at_ms in (0, 650, 700, 10_000)] == [5, 7, 7, 10]


def test_live_events_are_delivered_as_they_come_unless_one_is_missing() -> None:
    heard: list[str] = []
    follower: ChannelFollower[str] = ChannelFollower(heard.append)
    follower.live(3, "3")
    follower.live(3, "again")
    follower.live(5, "5")
    assert (heard, follower.has_gap, follower.next) == (["3"], True, 4)
    follower.replayed(4, "4")
    assert (heard, follower.has_gap) == (["3", "4", "5"], False)
    follower.replayed(4, "again")
    assert heard == ["3", "4", "5"]


def test_what_the_publisher_no_longer_has_is_given_up() -> None:
    heard: list[str] = []
    follower: ChannelFollower[str] = ChannelFollower(heard.append, 0)
    follower.live(4, "4")
    follower.live(8, "8")
    follower.replayed(6, "6")
    assert heard == ["4", "6"]
    follower.replayed_until(9)
    assert (heard, follower.next) == (["4", "6", "8"], 9)
    follower.replayed_until(5)
    assert follower.next == 9


def test_a_follower_that_awaits_a_replay_holds_live_events_back_until_its_first_answer() -> None:
    heard: list[str] = []
    follower: ChannelFollower[str] = ChannelFollower(heard.append, awaits_replay=True)
    follower.live(6, "6")
    assert heard == []
    follower.replayed(5, "5")
    assert heard == ["5", "6"]
    idle: ChannelFollower[str] = ChannelFollower(heard.append, awaits_replay=True)
    idle.replayed_until(3)
    idle.live(3, "3")
    assert heard[-1] == "3"


def test_an_event_that_is_held_and_replayed_is_delivered_once() -> None:
    heard: list[str] = []
    follower: ChannelFollower[str] = ChannelFollower(heard.append, 0)
    follower.live(1, "1")
    follower.replayed(1, "1")
    assert heard == ["1"]


def test_with_too_many_events_held_back_the_earlier_ones_are_given_up() -> None:
    heard: list[int] = []
    follower: ChannelFollower[int] = ChannelFollower(heard.append, 0, most_held=2)
    for number in (3, 4, 6):
        follower.live(number, number)
    assert heard == [3, 4]


@given(
    count=st.integers(0, 40),
    most=st.integers(1, 40),
    lost=st.sets(st.integers(0, 39)),
    asks=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 9)), max_size=8),
    start=st.none() | st.integers(0, 20),
)
def test_whatever_is_lost_and_whenever_it_asks_numbers_rise_and_what_is_kept_arrives(
    count: int, most: int, lost: set[int], asks: list[tuple[int, int]], start: int | None
) -> None:
    heard: list[int] = []
    follower: ChannelFollower[int] = ChannelFollower(heard.append, start, awaits_replay=True)
    buffer = ReplayBuffer(most, 10**6, 10**6)

    def ask(batch: int) -> None:
        found = buffer.since(follower.next or 0, batch)
        for each in found:
            follower.replayed(each.sequence, each.sequence)
        follower.replayed_until(found[-1].sequence + 1 if len(found) == batch else buffer.next_sequence)

    for number in range(count):
        buffer.append(event(number))
        if number not in lost:
            follower.live(number, number)
        for at, batch in asks:
            if at == number:
                ask(batch)
    for _ in range(count + 1):
        ask(7)
    assert heard == sorted(set(heard))
    assert set(heard) >= {each.sequence for each in buffer.since(start or 0, count)}
    assert not follower.has_gap
