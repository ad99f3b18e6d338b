"""Senders: they empty an outbox onto a NATS server, in order, and wait while it is away."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import TYPE_CHECKING

from dynaplan.events.nats_stream import DAMAGED, ensure_stream, remove_stream
from dynaplan.events.publishing import Outbox, Outgoing
from dynaplan.events.wires import MESSAGE_ID
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import QueueUnavailable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from dynaplan.store.nats_connection import NatsConnection

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 1.0
ANSWER_S = 2.0
BATCH = 256
WINDOW = 512
"""Events on their way that the server has not answered for."""


class NatsSender:
    """Sends events to the present subscribers; what is on its way when the connection breaks is lost."""

    def __init__(self, connection: NatsConnection) -> None:
        self.outbox = Outbox()
        self._connection = connection
        self._busy = 0

    @property
    def waiting(self) -> int:
        """The number of events that are not sent yet."""
        return len(self.outbox) + self._busy

    async def run(self) -> None:
        """Send what comes into the outbox, for ever."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)
        while True:
            await self.outbox.filled.wait()
            self.outbox.filled.clear()
            try:
                while self.waiting:
                    await self.send()
                    backoff.reset()
            except QueueUnavailable as error:
                if backoff.is_first:
                    log.warning("events wait for NATS: %s", error)
                self.outbox.filled.set()
                await backoff.pause()

    async def send(self) -> None:
        """Send a batch, and wait until the server has it; raises QueueUnavailable."""
        try:
            async with self._connection.call() as client:
                while self.outbox and self._busy < BATCH:
                    self._busy += 1
                    await self._publish(client, self.outbox.pop())
                await self._connection.round_trip()
        finally:
            self._busy = 0

    async def _publish(self, client: Client, message: Outgoing, reply: str = "") -> bool:
        """Send one message; False, and it is dropped, when no server would take it."""
        from nats.errors import BadSubjectError, MaxPayloadError

        try:
            headers = {MESSAGE_ID: message.message_id}
            await client.publish(message.subject, message.data, reply=reply, headers=headers)
        except (MaxPayloadError, BadSubjectError) as error:
            self.outbox.dropped += 1
            log.warning("an event of %s is dropped: %s", message.subject, error)
            return False
        return True


class StreamSender(NatsSender):
    """Sends events to a stream, each until the server has stored it.

    The server drops an event that it gets twice, by its id. An event without an answer is sent again unless a
    later one is stored: then it is given up, since what is stored has to be in order.
    """

    def __init__(self, connection: NatsConnection, stream: str, age_s: float) -> None:
        super().__init__(connection)
        self._stream = stream
        self._age_s = age_s
        self._inbox = ""
        self._numbers = itertools.count(1)
        self._open: dict[int, Outgoing] = {}
        self._answered = asyncio.Event()
        self._stored = 0
        self._fault: Exception | None = None
        self._subjects: set[str] = set()
        self._is_damaged = False
        connection.on_reconnect(self._on_reconnect)

    @property
    def waiting(self) -> int:
        """The number of events that are not stored yet."""
        return len(self.outbox) + len(self._open)

    async def send(self) -> None:
        """Send and wait until all is stored, or raise QueueUnavailable, with the rest back in the outbox."""
        if not self._inbox:
            await self._listen()
        window, self._fault = 1, None  # One at first: the next ones only when the stream is surely there.
        try:
            while self.waiting:
                async with self._connection.call() as client:
                    while self.outbox and len(self._open) < window:
                        await self._send_next(client)
                await self._progress()
                window = WINDOW
        finally:
            self._take_back()

    async def _listen(self) -> None:
        async with self._connection.call() as client:
            inbox = client.new_inbox()
        await self._connection.add_subscription(f"{inbox}.*", self._on_answer)
        self._inbox = inbox

    async def _send_next(self, client: Client) -> None:
        message = self.outbox.pop()
        number = next(self._numbers)
        self._open[number] = message
        if message.subject not in self._subjects or self._is_damaged:
            await self._ensure(message.subject)
        if not await self._publish(client, message, f"{self._inbox}.{number}"):
            del self._open[number]

    async def _ensure(self, subject: str) -> None:
        if self._is_damaged:
            await remove_stream(self._connection, self._stream, self._fault)
            self._is_damaged = False
        await ensure_stream(self._connection, self._stream, subject, self._age_s)
        self._subjects.add(subject)

    async def _progress(self) -> None:
        """Wait for an answer; raises QueueUnavailable when none comes, or a refusal."""
        self._answered.clear()
        if self._fault is None and self._open:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._answered.wait()
            except TimeoutError:
                self._fault = QueueUnavailable("NATS does not answer for events")
        if self._fault is not None:
            raise QueueUnavailable(str(self._fault)) from self._fault

    async def _on_answer(self, message: Msg) -> None:
        number = int(message.subject.rpartition(".")[2])
        if number not in self._open:
            return
        fault = self._refusal(message)
        if fault is None:
            del self._open[number]
            self._stored = max(self._stored, number)
        else:
            self._fault = fault
            self._subjects.clear()
        self._answered.set()

    def _refusal(self, message: Msg) -> Exception | None:
        """The reason for which the server has not stored an event; None when it has."""
        if (message.headers or {}).get("Status"):
            return QueueUnavailable("no stream takes the events")
        if b'"error"' not in message.data:
            return None
        error = json.loads(message.data).get("error", {})
        self._is_damaged = error.get("err_code") in DAMAGED
        return QueueUnavailable(f"NATS does not store events: {error.get('description', error)}")

    def _on_reconnect(self) -> None:
        """Let what was sent on the old connection be sent again."""
        self._subjects.clear()
        self._fault = QueueUnavailable("the connection was lost")
        self._answered.set()

    def _take_back(self) -> None:
        """Put what has no answer back into the outbox; what a later event has overtaken is given up."""
        left = sorted(self._open.items())
        self._open.clear()
        again = [message for number, message in left if number > self._stored]
        self.outbox.dropped += len(left) - len(again)
        self.outbox.put_back(again)
