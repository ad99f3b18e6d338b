"""Requests for messages of a JetStream consumer, each for one, that outlive an outage and lose nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING

from dynaplan.util.errors import QueueUnavailable

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from dynaplan.store.nats_connection import NatsMessenger

# How much later than the server we give up waiting: its own word is always better than our clock.
GRACE_S = 1.0
# The server's consumer learns of a put a moment after it was answered, and would say that there is nothing.
SHORTEST_WAIT_S = 0.1
EMPTY_STATUSES = frozenset({"404", "408"})


class PullRequests:
    """Asks a consumer of a stream for messages. Work whose ``pull`` was cancelled goes back at once."""

    def __init__(self, messenger: NatsMessenger, stream: str, consumer: str) -> None:
        self._messenger = messenger
        self._stream = stream
        self._consumer = consumer
        self._inbox = ""
        self._tokens = itertools.count(1)
        # Requests that the server has not answered yet, in the order in which it will.
        self._open: dict[str, asyncio.Future[Msg | None]] = {}

    @property
    def is_open(self) -> bool:
        """True once answers are listened for."""
        return bool(self._inbox)

    async def open(self) -> None:
        """Listen on an inbox of its own, to which the server sends; raises QueueUnavailable."""
        async with self._messenger.call() as client:
            inbox = client.new_inbox()
        self._number = await self._messenger.listen(f"{inbox}.*", self._on_message)
        self._inbox = inbox
        self._forget = self._messenger.on_reconnect(self._on_reconnect)

    async def close(self) -> None:
        """Give the inbox up: the server delivers to others what was sent here too late."""
        self._forget()
        await self._messenger.unlisten(self._number)

    async def pull(self, timeout_s: float) -> Msg | None:
        """Ask for one message: the message, None when there is none, or a status without reply subject.

        A request that is given up stays open here, as it does at the server, until that has answered it.
        """
        token = str(next(self._tokens))
        future: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        wait_s = max(timeout_s, SHORTEST_WAIT_S)
        self._open[token] = future
        try:
            async with self._messenger.call() as client:
                ask = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
                body = json.dumps({"batch": 1, "expires": int(wait_s * 1e9)}).encode()
                await client.publish(ask, body, reply=f"{self._inbox}.{token}")
            async with asyncio.timeout(wait_s + GRACE_S):
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
                await self._messenger.publish(message.reply, b"-NAK")
            except QueueUnavailable:
                return  # it comes back by itself when its time has run out

    def _on_reconnect(self) -> None:
        """The new connection gets no answers to what was asked on the old one."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(QueueUnavailable("the connection was lost; asking again"))
        self._open.clear()
