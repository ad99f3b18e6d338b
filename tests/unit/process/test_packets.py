"""A message arrives whole, in its order and with its descriptors, or its sender learns that it cannot."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from dynaplan.process.packets import END, MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, PacketSocket

Pair = tuple[PacketSocket, PacketSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = PacketSocket(ours.detach()), PacketSocket(theirs.detach())
    yield made
    for each in made:
        each.close()


def post_until_full(sender: PacketSocket) -> int:
    """Post numbered messages until one has to wait; return the number of all."""
    count = 0
    while not sender.has_unsent:
        sender.post((count, b"x" * 10_000))
        count += 1
    return count


def receive_all(
    sender: PacketSocket, receiver: PacketSocket
) -> Iterator[tuple[tuple[object, ...], list[int]]]:
    while (packet := receiver.receive()) is not None:
        yield packet
        sender.flush()


def test_the_longest_message_arrives_whole_and_a_longer_one_is_refused_and_costs_no_other(pair: Pair) -> None:
    sender, receiver = pair
    longest = b"x" * (MAX_MESSAGE_BYTES - 10)
    sender.post((longest,))
    assert receiver.receive() == ((longest,), [])
    count = post_until_full(sender)
    for deliver in (sender.post, sender.send):
        with pytest.raises(ValueError, match="too long"):
            deliver((b"x" * MAX_MESSAGE_BYTES,))
        with pytest.raises(ValueError, match="too long"):
            deliver((), [0] * (MAX_DESCRIPTORS + 1))
    assert [message[0] for message, _ in receive_all(sender, receiver)] == list(range(count))


def test_the_descriptors_of_a_message_that_waits_may_be_closed(pair: Pair) -> None:
    sender, receiver = pair
    count = post_until_full(sender)
    read_end, write_end = os.pipe()
    sender.post(("pipe",), [write_end])
    os.close(write_end)
    *before, (message, [received]) = receive_all(sender, receiver)
    assert (len(before), message) == (count, ("pipe",))
    assert not os.get_inheritable(received)
    os.write(received, b"here")
    os.close(received)
    assert (os.read(read_end, 9), os.read(read_end, 9)) == (b"here", b""), "no copy is left open"
    os.close(read_end)


def test_a_message_that_is_waited_for_does_not_overtake_those_that_wait(pair: Pair) -> None:
    sender, receiver = pair
    sender.post((1,))
    sender._queue((2,), ())
    sender.send((3,))
    assert [message for message, _ in receive_all(sender, receiver)] == [(1,), (2,), (3,)]


def test_when_the_other_end_is_gone_sending_says_so_and_posting_leaves_it_to_receiving(pair: Pair) -> None:
    sender, receiver = pair
    post_until_full(sender)
    receiver.close()
    sender.post((1,))
    assert not sender.has_unsent
    with pytest.raises(OSError):
        sender.send((2,))
    assert sender.receive() == (END, [])
