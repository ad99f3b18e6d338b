"""The second socket of a ZMQ publisher: a subscriber asks it for events that it has not had.

A request is a msgpack map: ``from`` (the first number wanted), ``since_ms`` (the first time wanted, Unix), or
neither: then it asks only for the number of the next event. The answer is the events as four frames each, and
at its end four frames with an empty topic, the publisher, the number up to which the answer is complete, and
the number of the publisher's next event (64 bits, big endian).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from dynaplan.events.envelope import FRAMES, frames_of, payload_reader, written
from dynaplan.events.replay import ReplayBuffer

BATCH = 500
"""Events of one answer at most."""

_NUMBER = struct.Struct(">Q")


class ReplayRequest(msgspec.Struct, omit_defaults=True, rename={"first": "from"}):
    """A request for events from a number on, or from a time on."""

    first: int | None = None
    since_ms: int | None = None


_READER = payload_reader(ReplayRequest)


def request_bytes(first: int | None, since_ms: int | None) -> bytes:
    """Return the message of a request."""
    return written(ReplayRequest(first, since_ms))


def answers(request: bytes, buffer: ReplayBuffer, publisher: int) -> list[list[bytes]]:
    """Return the messages that answer a request; raises ValueError, and nothing else, when it is none."""
    wanted = _READER(request)
    first = wanted.first
    if first is None:
        first = buffer.next_sequence if wanted.since_ms is None else buffer.number_at(wanted.since_ms)
    events = buffer.since(first, BATCH)
    until = events[-1].sequence + 1 if len(events) == BATCH else buffer.next_sequence
    end = [b"", _NUMBER.pack(publisher), _NUMBER.pack(until), _NUMBER.pack(buffer.next_sequence)]
    return [*map(frames_of, events), end]


def read_end(frames: Sequence[bytes]) -> tuple[int, int] | None:
    """Return the number up to which an answer is complete, and that of the publisher's next event.

    None for frames that are no end of an answer.
    """
    if len(frames) != FRAMES or frames[0] or any(len(frame) != _NUMBER.size for frame in frames[1:]):
        return None
    return _NUMBER.unpack(frames[2])[0], _NUMBER.unpack(frames[3])[0]
