"""The two wire formats of events over NATS: the plain one, and Dynamo's.

Plain: the subject ``{namespace}.{component}.{event}``, the payload as it is, and the header
``Nats-Msg-Id: {publisher in hex}-{sequence}``, by which the server drops what it gets twice. Dynamo's
(1.6) is ``namespace.{namespace}.component.{component}.endpoint.{endpoint}.{topic}``, or without the
endpoint, and an envelope: a msgpack map of ``publisher_id``, ``sequence``, ``published_at`` (Unix,
milliseconds), ``topic`` and ``payload``. What payloads hold is msgpack too, unless their publisher has bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from dynaplan.events.subjects import PARTS, Event, Subject

MESSAGE_ID = "Nats-Msg-Id"

ENDPOINT = "generate"
"""The endpoint that Dynamo publishes events for, and we in its format."""

TOPICS: Mapping[str, str] = {"kv_cache_update": "kv-events"}
"""Events that Dynamo calls otherwise -> its topics."""

_EVENTS = {topic: event for event, topic in TOPICS.items()}
_MAX_NUMBER = 2**64


T = TypeVar("T")


class Envelope(msgspec.Struct, frozen=True):
    """An event with where it comes from; its field names are those on the wire."""

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes


_ENCODER = msgspec.msgpack.Encoder()


def encode_payload(value: object) -> bytes:
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


read_envelope = payload_reader(Envelope)


class WireFormat(Protocol):
    """How subjects and messages are written."""

    def subject(self, subject: Subject) -> str:
        """Return the subject as it is written."""
        ...

    def patterns(self, pattern: str) -> tuple[str, ...]:
        """Return the patterns, in NATS' syntax, that together match what the pattern matches."""
        ...

    def message(self, envelope: Envelope) -> bytes:
        """Return the bytes of the message that carries the envelope."""
        ...

    def event(self, subject: str, data: bytes, message_id: str) -> Event:
        """Read a message; raises ValueError, and nothing else."""
        ...


class PlainFormat:
    """The subject has three words, the message is the payload, and the number is in the message id."""

    def subject(self, subject: Subject) -> str:
        return str(subject)

    def patterns(self, pattern: str) -> tuple[str, ...]:
        """Return the pattern alone: NATS matches it as it is."""
        return (pattern,)

    def message(self, envelope: Envelope) -> bytes:
        """Return the payload alone; number and publisher travel in the message id."""
        return envelope.payload

    def event(self, subject: str, data: bytes, message_id: str) -> Event:
        publisher, sequence = parse_message_id(message_id)
        return Event(subject, data, publisher, sequence)


class DynamoFormat:
    """Dynamo's format; a subject of an endpoint is read as its component's."""

    def subject(self, subject: Subject) -> str:
        scope = f"namespace.{subject.namespace}.component.{subject.component}.endpoint.{ENDPOINT}"
        return f"{scope}.{TOPICS.get(subject.event, subject.event)}"

    def patterns(self, pattern: str) -> tuple[str, ...]:
        """Return Dynamo's patterns for subjects with an endpoint, and for those without."""
        parts = pattern.split(".")
        if parts[-1] == ">":
            parts = parts[:-1] + ["*"] * (PARTS - len(parts) + 1)
        if len(parts) != PARTS:
            return ()
        namespace, component, event = parts
        base, topic = f"namespace.{namespace}.component.{component}", TOPICS.get(event, event)
        return f"{base}.endpoint.*.{topic}", f"{base}.{topic}"

    def message(self, envelope: Envelope) -> bytes:
        """Return the whole envelope in msgpack: payload, number, publisher and time."""
        return encode_payload(envelope)

    def event(self, subject: str, data: bytes, message_id: str) -> Event:
        """Read an envelope and our name of its event; raises ValueError for another form."""
        envelope = read_envelope(data)
        parts = subject.split(".")
        name = _EVENTS.get(parts[-1], parts[-1])
        return Event(
            f"{parts[1]}.{parts[3]}.{name}" if len(parts) > PARTS else subject,
            envelope.payload,
            envelope.publisher_id,
            envelope.sequence,
        )


def message_id(publisher: int, sequence: int) -> str:
    """Return the id by which a server knows an event that it gets twice."""
    return f"{publisher:x}-{sequence}"


def parse_message_id(text: str) -> tuple[int, int]:
    """Return the publisher and the sequence number; zeros for a text that is no id of ours."""
    publisher, _, sequence = text.partition("-")
    try:
        numbers = int(publisher, 16), int(sequence)
    except ValueError:
        return 0, 0
    return numbers if all(0 <= number < _MAX_NUMBER for number in numbers) else (0, 0)
