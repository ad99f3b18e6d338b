"""Messages and durable work queues on a NATS server with JetStream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from dynaplan.events.messaging.jetstream import JetStreamQueue
from dynaplan.events.messaging_port import WorkQueue
from dynaplan.store.nats_connection import NatsConnection

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)


class NatsMessenger(NatsConnection):
    """``dynaplan.events.messaging_port.Messenger`` on NATS; made by ``from_environment``."""

    async def subscribe(self, subject: str, receive: Callable[[str, bytes], None]) -> None:
        """Call ``receive(subject, payload)`` for every message from now on, also after an outage."""

        async def handle(message: Msg) -> None:
            try:
                receive(message.subject, message.data)
            except Exception:
                log.exception("the receiver of %s failed", subject)

        await self.add_subscription(subject, handle)

    async def queue(self, stream: str, taker: str = "") -> WorkQueue:
        """The durable work queue of that stream, or a lane in it, made (or adopted) when not ours yet."""
        return await JetStreamQueue.opened(self, stream, taker)
