"""Messages and durable work queues on NATS: a queue is one stream of JetStream.

Work is delivered again, to anybody, unless it is acknowledged in time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from dynaplan.events.port import WorkQueue
from dynaplan.events.timing import (
    PULL_GRACE_S,
    QUEUE_ACK_WAIT_S,
    QUEUE_CALL_TIMEOUT_S,
    QUEUE_LANE_IDLE_S,
    QUEUE_MAX_AGE_S,
    QUEUE_PULL_MIN_S,
    QUEUE_PUT_TIMEOUT_S,
    QUEUE_RETRY_S,
)
from dynaplan.store.nats_connection import (
    DAMAGED_CODES,
    EMPTY_STATUSES,
    NatsConnection,
    remove_damaged_stream,
)
from dynaplan.util.errors import QueueUnavailable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.api import ConsumerConfig, StreamConfig

log = logging.getLogger(__name__)

CONSUMER = "worker-group"
MAX_ACK_PENDING = 100_000
# JetStream's error codes: no message found, sequence not found, message delete failed.
NO_SUCH_MESSAGE = frozenset({10037, 10043, 10057})


class NatsWorkItem:
    """One delivery of one piece of work; see ``dynaplan.events.port.WorkItem``."""

    def __init__(self, connection: NatsConnection, message: Msg, queue: JetStreamQueue) -> None:
        self.payload: bytes = message.data
        self._connection = connection
        self._message = message
        self._queue = queue

    @property
    def sequence(self) -> int:
        """The number that ``put`` returned for this work."""
        return int(self._message.metadata.sequence.stream)

    @property
    def deliveries(self) -> int:
        return int(self._message.metadata.num_delivered or 1)

    async def ack(self) -> None:
        """The work is done; returns when the server has noted it.

        A server that was killed meanwhile may have forgotten this delivery, and answers nothing: then the
        work itself is taken out of the stream.
        """
        from nats.errors import NoRespondersError
        from nats.errors import TimeoutError as NoAnswer

        async with self._connection.call() as client:
            try:
                await client.request(self._message.reply, b"+ACK", timeout=QUEUE_CALL_TIMEOUT_S / 2)
                return
            except (NoAnswer, NoRespondersError):
                pass
        await self._queue.remove(self.sequence)

    async def in_progress(self) -> None:
        await self._connection.publish(self._message.reply, b"+WPI")


class JetStreamQueue:
    """A ``dynaplan.events.port.WorkQueue`` on one stream; made by ``open``.

    Stream ``{stream}``, subject ``{stream}.queue``, durable pull consumer ``worker-group``: the names of
    Dynamo, whose workers may take from it too. A taker (worker) has a queue of its own besides, its lane: the
    subject ``{stream}.queue.{taker}`` with a consumer of its own. A delivery whose ``get`` was cancelled goes
    back at once, and does not wait for its time to run out.
    """

    def __init__(self, connection: NatsConnection, stream: str, taker: str = "") -> None:
        self.stream, self._taker = _token(stream), _token(taker)
        self._shared = f"{self.stream}.queue"
        self._subject = f"{self._shared}.{self._taker}" if taker else self._shared
        self._consumer = f"lane-{self._taker}" if taker else CONSUMER
        self._connection = connection
        self._keeps_acknowledged = False
        self._last_unanswered = -1
        self._pulls = PullRequests(connection, self.stream, self._consumer)

    @classmethod
    async def open(cls, connection: NatsConnection, stream: str, taker: str = "") -> JetStreamQueue:
        """Return the stream's shared queue, or the lane of ``taker``; made when missing."""
        queue = cls(connection, stream, taker)
        await queue._ensure()
        if not taker:  # most who open a lane only put work into it
            await queue._pulls.open()
        return queue

    async def put(self, payload: bytes) -> int:
        for may_ensure in (True, False):
            async with self._connection.call() as client:
                from nats.errors import TimeoutError as NoAnswer
                from nats.js.errors import APIError, NoStreamResponseError

                try:
                    answer = await client.jetstream().publish(
                        self._subject, payload, timeout=QUEUE_PUT_TIMEOUT_S
                    )
                    self._last_unanswered = -1
                    return int(answer.seq)
                except NoAnswer as error:
                    if not may_ensure or not await self._is_stuck(client):
                        raise
                    await self._remove_damaged(client, error)
                except NoStreamResponseError:
                    if not may_ensure:
                        raise
                except APIError as error:
                    if not may_ensure or error.err_code not in DAMAGED_CODES:
                        raise
                    await self._remove_damaged(client, error)
            await self._ensure()
        raise AssertionError("unreachable")

    async def get(self, timeout_s: float) -> NatsWorkItem | None:
        """The next piece of work, or None when there is none in that time; waits through a short outage."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            try:
                if not self._pulls.is_open:
                    await self._pulls.open()
                message = await self._pulls.pull(max(deadline_s - loop.time(), 0.0))
                if message is None:
                    return None
                if message.reply:
                    return NatsWorkItem(self._connection, message, self)
                # A status: stream or consumer are gone, or the server is about to go.
                await self._ensure()
            except QueueUnavailable:
                if deadline_s - loop.time() <= QUEUE_RETRY_S:
                    raise
                await asyncio.sleep(QUEUE_RETRY_S)
            else:
                if deadline_s <= loop.time():
                    return None

    async def remove(self, sequence: int) -> None:
        from nats.js.errors import APIError, NotFoundError

        async with self._connection.call() as client:
            try:
                await client.jsm().delete_msg(self.stream, sequence)
            except NotFoundError:
                pass
            except APIError as error:
                if error.err_code not in NO_SUCH_MESSAGE:
                    raise

    async def depth(self) -> int:
        async with self._connection.call() as client:
            if not self._keeps_acknowledged:
                # The consumer's own count can be a moment behind a put.
                only = self._subject if self._taker else None
                state = (await client.jsm().stream_info(self.stream, subjects_filter=only)).state
                return sum((state.subjects or {}).values()) if only else int(state.messages)
            infos = await client.jsm().consumers_info(self.stream)
            counted = [info for info in infos if not self._taker or info.name == self._consumer]
            return sum(int(info.num_pending or 0) + int(info.num_ack_pending or 0) for info in counted)

    async def clear(self) -> None:
        async with self._connection.call() as client:
            await client.jsm().purge_stream(self.stream, subject=self._subject if self._taker else None)

    async def _ensure(self) -> None:
        from nats.js.errors import APIError

        async with self._connection.call() as client:
            self._keeps_acknowledged = not await self._ensure_work_queue(client)
            try:
                await self._ensure_consumers(client)
            except APIError as error:
                if error.err_code not in DAMAGED_CODES:
                    raise
                await self._remove_damaged(client, error)
                self._keeps_acknowledged = not await self._ensure_work_queue(client)
                await self._ensure_consumers(client)

    async def _ensure_consumers(self, client: Client) -> None:
        """Make the shared consumer take nothing out of lanes, and the lane's own, if this is one."""
        await client.jsm().add_consumer(self.stream, _consumer(CONSUMER, self._shared))
        if self._taker:
            await client.jsm().add_consumer(
                self.stream, _consumer(self._consumer, self._subject, QUEUE_LANE_IDLE_S)
            )

    async def _is_stuck(self, client: Client) -> bool:
        """Tell whether two puts in a row went unanswered by a server that answers, and nothing was stored."""
        state = (await client.jsm().stream_info(self.stream)).state
        before, self._last_unanswered = self._last_unanswered, int(state.last_seq)
        return before == self._last_unanswered

    async def _remove_damaged(self, client: Client, why: Exception) -> None:
        """Delete the stream, to be made again: the work in it is lost, and its senders do it themselves."""
        self._last_unanswered = -1
        await remove_damaged_stream(client.jsm(), self.stream, why)

    async def _ensure_work_queue(self, client: Client) -> bool:
        """Make the stream; False when Dynamo's own is in use, which keeps work that is acknowledged."""
        from nats.js.api import RetentionPolicy, StreamConfig
        from nats.js.errors import NotFoundError

        manager = client.jsm()
        try:
            found = await manager.stream_info(self.stream)
        except NotFoundError:
            pass
        else:
            if found.config.retention == RetentionPolicy.WORK_QUEUE or found.state.messages:
                await self._widen(client, found.config)
                return found.config.retention == RetentionPolicy.WORK_QUEUE
            await manager.delete_stream(self.stream)
        await manager.add_stream(
            StreamConfig(
                name=self.stream,
                subjects=[self._shared, self._lanes],
                retention=RetentionPolicy.WORK_QUEUE,
                max_age=QUEUE_MAX_AGE_S,
            )
        )
        return True

    @property
    def _lanes(self) -> str:
        return f"{self._shared}.>"

    async def _widen(self, client: Client, found: StreamConfig) -> None:
        """Add the subjects of lanes to a stream that was made without them; what it holds stays."""
        subjects = found.subjects or []
        if self._lanes not in subjects:
            await client.jsm().update_stream(found.evolve(subjects=[*subjects, self._lanes]))


class PullRequests:
    """Asks a consumer for messages, one each; work whose ``pull`` was cancelled goes back at once.

    nats-py's ``fetch`` keeps such work until its time has run out, and waits through a lost connection for
    an answer that cannot come.
    """

    def __init__(self, connection: NatsConnection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._inbox = ""
        self._tokens = itertools.count(1)
        # Requests that the server has not answered yet, in the order in which it will.
        self._open: dict[str, asyncio.Future[Msg | None]] = {}

    @property
    def is_open(self) -> bool:
        """True once ``open`` has subscribed to the inbox of answers."""
        return bool(self._inbox)

    async def open(self) -> None:
        """Listen on an inbox of its own, to which the server sends; raises QueueUnavailable."""
        async with self._connection.call() as client:
            inbox = client.new_inbox()
        await self._connection.add_subscription(f"{inbox}.*", self._on_message)
        self._inbox = inbox
        self._connection.on_reconnect(self._on_reconnect)

    async def pull(self, timeout_s: float) -> Msg | None:
        """Ask for one message: the message, None when there is none, or a status without reply subject.

        A request that is given up stays open here, as it does at the server, until that has answered it.
        """
        token = str(next(self._tokens))
        future: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        wait_s = max(timeout_s, QUEUE_PULL_MIN_S)
        self._open[token] = future
        try:
            async with self._connection.call() as client:
                ask = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
                body = json.dumps({"batch": 1, "expires": int(wait_s * 1e9)}).encode()
                await client.publish(ask, body, reply=f"{self._inbox}.{token}")
            async with asyncio.timeout(wait_s + PULL_GRACE_S):
                return await future
        except TimeoutError as error:
            self._open.pop(token, None)
            raise QueueUnavailable("NATS did not answer a request for work") from error
        except QueueUnavailable:
            self._open.pop(token, None)
            raise

    async def _on_message(self, message: Msg) -> None:
        """Hand an arrived message to the request that waits for it; give work back when none waits any more.

        A status comes to the request's own subject; work comes under the stream's subject, to the requests
        in their order.
        """
        status = (message.headers or {}).get("Status")
        token = message.subject.rpartition(".")[2] if status else next(iter(self._open), "")
        future = self._open.pop(token, None)
        if future is not None and not future.done():
            future.set_result(None if status in EMPTY_STATUSES else message)
        elif status is None:
            try:
                await self._connection.publish(message.reply, b"-NAK")
            except QueueUnavailable:
                return  # it comes back by itself when its time has run out

    def _on_reconnect(self) -> None:
        """Fail the open requests, so that they are sent again: the server has forgotten them."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(QueueUnavailable("the connection was lost; asking again"))
        self._open.clear()


def _token(name: str) -> str:
    """Return the name as one token of a subject."""
    return re.sub(r"[\s/\\.*>]", "_", name)


def _consumer(name: str, subject: str, idle_s: float | None = None) -> ConsumerConfig:
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

    return ConsumerConfig(
        durable_name=name,
        filter_subject=subject,
        inactive_threshold=idle_s,
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=QUEUE_ACK_WAIT_S,
        max_ack_pending=MAX_ACK_PENDING,
    )


class NatsMessenger(NatsConnection):
    """``dynaplan.events.port.Messenger`` on NATS; made by ``from_environment``."""

    async def subscribe(self, subject: str, receive: Callable[[str, bytes], None]) -> None:
        """Call ``receive(subject, payload)`` for every message from now on, also after an outage."""

        async def handle(message: Msg) -> None:
            try:
                receive(message.subject, message.data)
            except Exception:
                log.exception("the receiver of %s failed", subject)

        await self.add_subscription(subject, handle)

    async def queue(self, stream: str, taker: str = "") -> WorkQueue:
        """Return the durable work queue of that stream, or a taker's lane in it; made when missing.

        A stream of that name with other settings is replaced if it is empty, and used as it is if not.
        """
        return await JetStreamQueue.open(self, stream, taker)
