"""Messages wait in order up to a bound; then the oldest go."""

from __future__ import annotations

from dynaplan.events.nats_publisher import Outbox, Outgoing


def message(number: int, size: int = 1) -> Outgoing:
    return Outgoing("a.b.c", bytes(size), str(number))


def waiting(outbox: Outbox) -> list[str]:
    return [outbox.pop().message_id for _ in range(len(outbox))]


def test_the_oldest_are_dropped_beyond_the_bound_and_counted() -> None:
    outbox = Outbox(most=3)
    for number in range(5):
        outbox.push(message(number))
    assert outbox.dropped == 2
    assert waiting(outbox) == ["2", "3", "4"]


def test_bytes_are_bounded_too_but_one_message_is_always_kept() -> None:
    outbox = Outbox(most_bytes=100)
    outbox.push(message(0, 60))
    outbox.push(message(1, 60))
    assert waiting(outbox) == ["1"]
    outbox.push(message(2, 500))
    assert waiting(outbox) == ["2"]
    outbox.push(message(3, 60))
    assert (waiting(outbox), outbox.dropped) == (["3"], 1)


def test_what_is_put_back_comes_first_and_in_its_order() -> None:
    outbox = Outbox(most=3)
    for number in range(3):
        outbox.push(message(number))
    taken = [outbox.pop(), outbox.pop()]
    outbox.push(message(3))
    outbox.put_back(taken)
    assert outbox.dropped == 1
    assert waiting(outbox) == ["1", "2", "3"]


def test_half_of_either_bound_is_half_full() -> None:
    outbox = Outbox(most=4, most_bytes=100)
    outbox.push(message(0))
    assert not outbox.is_half_full
    outbox.push(message(1, 50))
    assert outbox.is_half_full
    outbox = Outbox(most=2, most_bytes=100)
    outbox.push(message(0))
    outbox.push(message(1))
    assert outbox.is_half_full
