"""The form of an event on the wire, as Dynamo 1.6 writes it.

An envelope is a msgpack map: ``publisher_id``, ``sequence``, ``published_at`` (Unix, milliseconds),
``topic`` and ``payload``. Over NATS it is the whole message. Over ZMQ a message has four frames: the topic,
the publisher and the sequence number (each 64 bits, big endian), and a body: the byte 1, the envelope's
length (32 bits, big endian), and the envelope.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

FRAMES = 4
VERSION = 1
_HEAD = struct.Struct(">BI")
_NUMBER = struct.Struct(">Q")


class Envelope(msgspec.Struct, frozen=True):
    """An event with where it comes from; its field names are those on the wire."""

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes


T = TypeVar("T")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def envelope_bytes(envelope: Envelope) -> bytes:
    """Write the envelope as Dynamo does: a msgpack map of its fields."""
    return _ENCODER.encode(envelope)


def read_envelope(data: bytes) -> Envelope:
    """Read an envelope; raises ValueError, and nothing else."""
    return _read(_DECODER, data)


def frames_of(envelope: Envelope) -> list[bytes]:
    """Return the four frames of a ZMQ message."""
    body = _ENCODER.encode(envelope)
    return [
        envelope.topic.encode(),
        _NUMBER.pack(envelope.publisher_id),
        _NUMBER.pack(envelope.sequence),
        _HEAD.pack(VERSION, len(body)) + body,
    ]


def read_frames(frames: Sequence[bytes]) -> Envelope:
    """Read the four frames of a ZMQ message; raises ValueError, and nothing else."""
    if len(frames) != FRAMES:
        raise ValueError(f"it has {len(frames)} frames: expected {FRAMES}")
    body = frames[-1]
    if len(body) < _HEAD.size:
        raise ValueError(f"its last frame has {len(body)} bytes: expected at least {_HEAD.size}")
    version, length = _HEAD.unpack_from(body)
    if version != VERSION or length != len(body) - _HEAD.size:
        raise ValueError(
            f"its head says version {version} and {length} bytes: expected {VERSION} and the rest"
        )
    return read_envelope(body[_HEAD.size :])


def written(value: object) -> bytes:
    """Return the msgpack form of a value: what msgpack has, dataclasses and ``msgspec.Struct``.

    Raises TypeError for any other.
    """
    return _ENCODER.encode(value)


def payload_reader(kind: type[T]) -> Callable[[bytes], T]:
    """Return a reader of msgpack payloads as values of that type; it raises ValueError, and nothing else."""
    decoder = msgspec.msgpack.Decoder(kind)
    return lambda payload: _read(decoder, payload)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ValueError(str(error) or type(error).__name__) from None
