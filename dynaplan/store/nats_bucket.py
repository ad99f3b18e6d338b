"""One bucket of JetStream: the names of its messages, the messages, and reading and writing them.

**Names.** Keys are NATS subjects, readable and reversible, and a prefix of keys is a filter of subjects. A
key is cut at its slashes into the tokens of a subject. In a token every byte of its UTF-8 that is neither a
letter, a digit, ``-`` nor ``_`` is written as ``=`` and two hexadecimal digits; an empty token is ``=``::

    v1/box/planner/decision_id      v1.box.planner.decision_id
    /services/box/Worker/generate   =.services.box.Worker.generate
    v1/vllm-agg.2/Größe             v1.vllm-agg=2E2.Gr=C3=B6=C3=9Fe

Every character is one that key-value clients of NATS allow. The names ``=lease.{id}``, ``=identity`` and
``=guard`` belong to no key: they hold the leases, the identity of the data, and nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dynaplan.store.model import KeyValue
from dynaplan.store.nats_connection import NatsConnection
from dynaplan.store.timing import (
    BUCKET_ANSWER_TIMEOUT_S,
    BUCKET_CALL_TIMEOUT_S,
    BUCKET_CREATE_RETRY_S,
    BUCKET_RECONNECT_POLL_S,
    BUCKET_RECONNECT_S,
    TOMBSTONE_TTL_S,
)
from dynaplan.util.connection import OnFirstUse
from dynaplan.util.errors import PermanentError, QueueUnavailable, StoreUnavailable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

Document = dict[str, Any]
T = TypeVar("T")

BUCKET = "dynaplan"
MIN_SERVER_VERSION = (2, 12)
NAME_IN_USE = 10058
STREAM_NOT_CREATED = 10049
WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
NOT_ENABLED = frozenset({10039, 10076})
# The end of a batch of reads, and nothing found.
END_OF_READS = frozenset({"204", "404"})
MAX_READS = 1_000_000
# What a bucket needs beside the defaults of NATS' own clients; leases live at least as long as marks do.
REQUIRED_CONFIG: Document = {
    "allow_msg_ttl": True,
    "allow_atomic": True,
    "subject_delete_marker_ttl": 1_000_000_000,
    "allow_direct": True,
    "allow_rollup_hdrs": True,
}


IDENTITY = "=identity"
GUARD = "=guard"
LEASES = "=lease"

MAX_NAME_BYTES = 3500
"""Longest name of a key: a line of the protocol, 4096 bytes, holds it and an address for the answer."""

_ESCAPED = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")


def encode_key(key: str) -> str:
    """Return the key's name in the bucket; a character that is no text (surrogateescape) keeps its byte."""
    return ".".join(_token(part) for part in key.split("/"))


def decode_key(name: str) -> str | None:
    """Return the key with that name in the bucket; None for a name that no key has."""
    parts = ["" if token == "=" else _part(token) for token in name.split(".")]
    key = "/".join(parts)
    return key if encode_key(key) == name else None


def subject_filter(prefix: str) -> str:
    """Return the narrowest filter of names that lets every key with the prefix through."""
    whole = prefix.split("/")[:-1]
    return ".".join([*(_token(part) for part in whole), ">"])


def lease_name(lease: int) -> str:
    """Return the name in the bucket under which a lease lives."""
    return f"{LEASES}.{lease:x}"


def parse_lease_name(name: str) -> int | None:
    """Return the lease that lives under the name; None for every other name."""
    first, _, number = name.partition(".")
    if first != LEASES:
        return None
    try:
        return int(number, 16)
    except ValueError:
        return None


def _token(part: str) -> str:
    if not part:
        return "="
    data = part.encode(errors="surrogateescape")
    return _ESCAPED.sub(lambda match: b"=%02X" % match[0][0], data).decode("ascii")


def _part(token: str) -> str:
    data = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), token.encode(errors="surrogateescape"))
    return data.decode(errors="surrogateescape")


OPERATION = "KV-Operation"
GONE = frozenset({"DEL", "PURGE"})
MARKER = "Nats-Marker-Reason"
TTL = "Nats-TTL"
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
LEASE = "Dynaplan-Lease"


@dataclass(frozen=True)
class Entry:
    """The last message under a name of the bucket."""

    name: str
    data: bytes
    sequence: int
    headers: Mapping[str, str]

    @property
    def is_gone(self) -> bool:
        """True for the mark of something deleted, revoked or expired."""
        return self.is_deleted or MARKER in self.headers

    @property
    def is_deleted(self) -> bool:
        """True for the mark of something deleted or revoked: somebody has done it, not the time."""
        return self.headers.get(OPERATION) in GONE

    @property
    def lease(self) -> int:
        """The lease that the entry lives under; 0 without one."""
        try:
            return int(self.headers.get(LEASE, "0"), 16)
        except ValueError:
            return 0

    @property
    def ttl_s(self) -> int:
        """The time to live of a lease, in seconds; 0 when it has none."""
        return int(self.data) if self.data.isdigit() else 0

    @property
    def item(self) -> KeyValue | None:
        """The key with its value; None for a deletion, and for a name that is no key's."""
        key = None if self.is_gone else decode_key(self.name)
        if key is None:
            return None
        return KeyValue(key, self.data.decode(errors="surrogateescape"), self.sequence, self.lease)


@dataclass(frozen=True)
class BucketMessage:
    """A message to be written under a name."""

    name: str
    data: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def expecting_last(self, sequence: int) -> BucketMessage:
        """Return a copy that JetStream rejects unless ``sequence`` is the last one under its own name.

        0 stands for a name without a message.
        """
        return replace(self, headers={**self.headers, EXPECTED: str(sequence)})

    def expecting_last_on(self, subject: str, sequence: int) -> BucketMessage:
        """Return a copy that JetStream rejects unless ``sequence`` is the last one on ``subject``."""
        return replace(self, headers={**self.headers, EXPECTED: str(sequence), EXPECTED_SUBJECT: subject})


def put_message(name: str, value: str, lease: int) -> BucketMessage:
    """Return the message that sets a key; ``lease`` is a lease's id, 0 for none."""
    headers = {LEASE: f"{lease:x}"} if lease else {}
    return BucketMessage(name, value.encode(errors="surrogateescape"), headers)


def tombstone(name: str) -> BucketMessage:
    """Return the message that deletes what is under the name, as NATS' own clients do."""
    return BucketMessage(name, headers={OPERATION: "PURGE", "Nats-Rollup": "sub", TTL: f"{TOMBSTONE_TTL_S}s"})


def lease_message(lease: int, ttl_s: int) -> BucketMessage:
    """Return the message that lets a lease live for that time, in seconds; the server ends it."""
    return BucketMessage(lease_name(lease), str(ttl_s).encode(), {TTL: f"{max(ttl_s, 1)}s"})


def guard(subject: str, sequence: int) -> BucketMessage:
    """Return an empty message that is refused unless that is the last message of the subject."""
    return BucketMessage(GUARD).expecting_last_on(subject, sequence)


class JetStreamRefusal(PermanentError):
    """JetStream refuses the request; ``code`` is its error code."""

    def __init__(self, message: str, code: int = 0, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class StreamNotCreated(StoreUnavailable):
    """The stream's files could not be created: a deleted one's are in the way, or the disk is full."""


class Conflict(Exception):
    """A message is not written: what it expects to be the last message of a subject is not."""


class JetStreamBucket:
    """Reads and writes the messages of one bucket, which is made when it is not there.

    The connection is made at the first call. Every call ends within three seconds: StoreUnavailable when the
    server does not answer, JetStreamRefusal when a retry is useless.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.stream = f"KV_{BUCKET}"
        self.prefix = f"$KV.{BUCKET}."
        self.connection = NatsConnection(options)
        self._connected = OnFirstUse(self._connect)
        self._is_created = False
        self._is_closed = False
        self._timeouts: set[asyncio.Timeout] = set()
        self.connection.on_loss(self._give_up)

    async def read(self, name: str) -> Entry | None:
        """Return the last message under the name, be it the mark of a deletion; None when there is none."""
        async with self.call() as client:
            subject = f"$JS.API.DIRECT.GET.{self.stream}.{self.prefix}{name}"
            return self._entry(await self._request(client, subject))

    async def read_all(self, names: str) -> list[Entry]:
        """Return the last message of each subject that matches the filter ``names``, in stream order.

        One that is overwritten during the read is returned once, with its last value: the result is the state
        at the moment when the end of the stream was read.
        """
        async with self.call() as client:
            found: dict[str, Entry] = {}
            sequence = 1
            while True:
                ask = partial(self._read_from, client, names, sequence)
                entries, left = await self._with_stream(client, ask)
                for entry in entries:
                    found.pop(entry.name, None)
                    found[entry.name] = entry
                    sequence = entry.sequence + 1
                if not left or not entries:
                    return list(found.values())

    async def write(self, message: BucketMessage) -> int:
        """Write the message; return its sequence; raises Conflict when its expectation fails."""
        async with self.call() as client:
            return self._sequence(await self._request(client, *self._message(message)))

    async def write_all(self, messages: Sequence[BucketMessage]) -> None:
        """Write all messages or, when one's expectation fails, none, and raise Conflict.

        A batch whose last message does not come is forgotten by the server after ten seconds.
        """
        async with self.call() as client:
            await self._ensure(client)
            batch = {"Nats-Batch-Id": secrets.token_hex(16)}
            for number, message in enumerate(messages[:-1], 1):
                subject, data, headers = self._message(message)
                headers |= {**batch, "Nats-Batch-Sequence": str(number)}
                await client.publish(subject, data, headers=headers)
            subject, data, headers = self._message(messages[-1])
            headers |= {**batch, "Nats-Batch-Sequence": str(len(messages)), "Nats-Batch-Commit": "1"}
            self._sequence(await self._request(client, subject, data, headers))

    async def follow(self, inbox: str, heartbeat_s: float) -> None:
        """Have the server send every message written from now on to the inbox, and heartbeats in between.

        ``heartbeat_s`` is the longest silence in seconds.
        """
        config = {
            "deliver_subject": inbox,
            "deliver_policy": "new",
            "ack_policy": "none",
            "max_deliver": 1,
            "filter_subject": f"{self.prefix}>",
            "idle_heartbeat": int(heartbeat_s * 1e9),
            "flow_control": True,
            "mem_storage": True,
            "num_replicas": 1,
        }
        request = {"stream_name": self.stream, "config": config}
        async with self.call() as client:
            self._is_created = False
            await self._ensure(client)
            await self._api(client, f"CONSUMER.CREATE.{self.stream}", request)

    def entry(self, message: Msg) -> Entry:
        """Return a message that was sent to an inbox of ``follow``."""
        sequence = int(message.reply.split(".")[-4])
        name = message.subject.removeprefix(self.prefix)
        return Entry(name, message.data, sequence, message.headers or {})

    def subject(self, name: str) -> str:
        """Return the subject of what is under the name."""
        return self.prefix + name

    @asynccontextmanager
    async def call(self) -> AsyncIterator[Client]:
        """The connected client, for one call of at most three seconds; errors become the store's."""
        limit = asyncio.timeout(BUCKET_CALL_TIMEOUT_S)
        try:
            async with limit:
                await self._connected()
                await self._reconnected()
                self._timeouts.add(limit)
                async with self.connection.call() as client:
                    yield client
        except QueueUnavailable as error:
            raise StoreUnavailable(str(error)) from error
        except TimeoutError as error:
            raise StoreUnavailable("NATS did not answer in time, or the connection was lost") from error
        finally:
            self._timeouts.discard(limit)

    async def close(self) -> None:
        """End the connection to NATS and every call that waits."""
        self._is_closed = True
        await self.connection.close()
        await self._connected.close()

    def _give_up(self) -> None:
        """End the calls under way: a connection that is lost does not answer them."""
        for limit in self._timeouts:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def _connect(self) -> NatsConnection:
        if self._is_closed:
            raise QueueUnavailable("the connection to NATS is closed")
        await self.connection.connect()
        return self.connection

    async def _reconnected(self) -> None:
        """Wait a moment for a connection that was lost."""
        left_s = 0.0 if self._is_closed else BUCKET_RECONNECT_S
        while left_s > 0 and not self.connection.is_connected:
            await asyncio.sleep(BUCKET_RECONNECT_POLL_S)
            left_s -= BUCKET_RECONNECT_POLL_S

    async def _request(
        self, client: Client, subject: str, data: bytes = b"", headers: dict[str, str] | None = None
    ) -> Msg:
        ask = partial(client.request, subject, data, timeout=BUCKET_ANSWER_TIMEOUT_S, headers=headers)
        return await self._with_stream(client, ask)

    async def _with_stream(self, client: Client, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer of the stream, which is made first when it is not there."""
        from nats.errors import NoRespondersError

        await self._ensure(client)
        try:
            return await ask()
        except NoRespondersError:
            self._is_created = False
            await self._ensure(client)
            return await ask()

    async def _ensure(self, client: Client) -> None:
        """Make the stream, or give it what it lacks; nothing happens when that is done."""
        if self._is_created:
            return
        version = client.connected_server_version
        if (version.major, version.minor) < MIN_SERVER_VERSION:
            raise JetStreamRefusal(
                f"the NATS server is {version.major}.{version.minor}: it writes several keys one by one only",
                hint="Use nats-server 2.12 or later, or another key-value store.",
            )
        config = {
            "name": self.stream,
            "subjects": [f"{self.prefix}>"],
            "max_msgs_per_subject": 1,
            "storage": "file",
            "discard": "new",
            "deny_delete": True,
            **REQUIRED_CONFIG,
        }
        try:
            await self._create(client, config)
        except JetStreamRefusal as error:
            if error.code != NAME_IN_USE:
                raise
            answer = await self._api(client, f"STREAM.INFO.{self.stream}")
            await self._api(client, f"STREAM.UPDATE.{self.stream}", answer["config"] | REQUIRED_CONFIG)
        self._is_created = True

    async def _create(self, client: Client, config: Document) -> None:
        """Make the stream, once the server has removed the files of one of this name that was deleted."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + BUCKET_CREATE_RETRY_S
        while True:
            try:
                await self._api(client, f"STREAM.CREATE.{self.stream}", config)
                return
            except StreamNotCreated:
                if loop.time() >= give_up_at:
                    raise
            await asyncio.sleep(BUCKET_RECONNECT_POLL_S)

    async def _api(self, client: Client, path: str, body: Document | None = None) -> Document:
        from nats.errors import NoRespondersError

        data = b"" if body is None else json.dumps(body).encode()
        try:
            message = await client.request(f"$JS.API.{path}", data, timeout=BUCKET_ANSWER_TIMEOUT_S)
        except NoRespondersError as error:
            raise _no_jetstream_error() from error
        return _parse_answer(message)

    async def _read_from(self, client: Client, names: str, sequence: int) -> tuple[list[Entry], int]:
        """The entries from the sequence on, and how many are left; the server ends a long answer early."""
        from nats.errors import NoRespondersError

        subscription = await client.subscribe(inbox := client.new_inbox())
        try:
            ask = {"seq": sequence, "batch": MAX_READS, "next_by_subj": self.prefix + names}
            api = f"$JS.API.DIRECT.GET.{self.stream}"
            await client.publish(api, json.dumps(ask).encode(), reply=inbox)
            entries: list[Entry] = []
            while True:
                message = await subscription.next_msg(BUCKET_ANSWER_TIMEOUT_S)
                headers = message.headers or {}
                if headers.get("Status") in END_OF_READS:
                    return entries, int(headers.get("Nats-Num-Pending", 0))
                if (entry := self._entry(message)) is None:
                    raise NoRespondersError
                if int(headers["Nats-Last-Sequence"]) != (entries[-1].sequence if entries else sequence - 1):
                    raise StoreUnavailable("a part of the bucket's answer is lost")
                entries.append(entry)
        finally:
            if client.is_connected:
                await subscription.unsubscribe()

    def _entry(self, message: Msg) -> Entry | None:
        headers = message.headers or {}
        if "Nats-Sequence" not in headers:
            return None
        name = headers["Nats-Subject"].removeprefix(self.prefix)
        return Entry(name, message.data, int(headers["Nats-Sequence"]), headers)

    def _message(self, message: BucketMessage) -> tuple[str, bytes, dict[str, str]]:
        return self.prefix + message.name, message.data, dict(message.headers)

    def _sequence(self, message: Msg) -> int:
        try:
            return int(_parse_answer(message)["seq"])
        except JetStreamRefusal as error:
            if error.code in WRONG_LAST_SEQUENCE:
                raise Conflict from error
            raise


def _parse_answer(message: Msg) -> Document:
    """The answer of JetStream's API; raises StoreUnavailable or JetStreamRefusal for an error."""
    answer: Document = json.loads(message.data)
    if error := answer.get("error"):
        code, text = int(error.get("err_code", 0)), f"JetStream: {error.get('description', error)}"
        if code in NOT_ENABLED:
            raise _no_jetstream_error()
        if code == STREAM_NOT_CREATED:
            raise StreamNotCreated(text)
        if int(error.get("code", 0)) >= 500:
            raise StoreUnavailable(text)
        raise JetStreamRefusal(text, code)
    return answer


def _no_jetstream_error() -> JetStreamRefusal:
    return JetStreamRefusal(
        "the NATS server has no JetStream, and the key-value store needs it",
        hint="Start it with JetStream (nats-server -js), or use another store.",
    )
