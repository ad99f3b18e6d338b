"""One connection to a NATS server, which messages, the work queue, events and the key-value store share.

nats-py connects again by itself after most losses; this adds what it leaves out: subscriptions that outlive a
connection that it has given up, an error at once for a call while the server is away, and in two seconds for
one that is frozen.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from dynaplan.store.timing import (
    NATS_CONNECT_TIMEOUT_S,
    NATS_PING_INTERVAL_S,
    NATS_RECONNECT_WAIT_S,
    NATS_REQUEST_TIMEOUT_S,
)
from dynaplan.util.errors import PermanentError, QueueUnavailable
from dynaplan.util.tasks import BackgroundTasks

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js import JetStreamManager

log = logging.getLogger(__name__)

DEFAULT_SERVER = "nats://localhost:4222"
UNLIMITED = -1
DAMAGED_CODES = frozenset({10012, 10077, 10104})
"""JetStream's error codes for a stream whose files are damaged or gone: nothing can be stored in it."""

EMPTY_STATUSES = frozenset({"404", "408"})
"""The statuses that end a pull from a consumer that has no more messages."""

COMMON_OPTIONS: dict[str, Any] = {
    "connect_timeout": 1,
    "reconnect_time_wait": NATS_RECONNECT_WAIT_S,
    "ping_interval": NATS_PING_INTERVAL_S,
    "max_outstanding_pings": 2,
    # Without a connection a publish fails; it does not wait in a buffer.
    "pending_size": 0,
}
"""Options of nats-py that all connections have."""


class NatsConnection:
    """A connection to NATS; made by ``from_environment``.

    After an outage it reconnects by itself, without end unless ``max_reconnects`` is 0 or more: then it
    gives up after that many attempts. Its subscriptions continue. While the server is away, calls
    raise QueueUnavailable at once; when it is frozen, within two seconds. Nothing that failed is sent later.
    """

    def __init__(self, options: Mapping[str, Any], max_reconnects: int = UNLIMITED) -> None:
        self._options = dict(options)
        self._max_reconnects = max_reconnects
        self._client: Client | None = None
        self._numbers = itertools.count()
        self._handlers: dict[int, tuple[str, Callable[[Msg], Awaitable[None]]]] = {}
        self._subscriptions: dict[int, Subscription] = {}
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_loss: list[Callable[[], None]] = []
        self._tasks = BackgroundTasks(_log_quietly)
        self._lost = asyncio.Event()
        self._is_closed = False
        self._last_error = ""

    @classmethod
    async def from_environment(cls, environ: Mapping[str, str], max_reconnects: int = UNLIMITED) -> Self:
        """Connect to ``NATS_SERVER``, with ``NATS_AUTH_TOKEN`` or ``NATS_AUTH_USERNAME`` and ``_PASSWORD``.

        Raises QueueUnavailable when it cannot be reached within five seconds, PermanentError when it does
        not let us in.
        """
        connection = cls(connect_options(environ), max_reconnects)
        await connection.connect()
        return connection

    async def connect(self) -> None:
        """Connect, and subscribe to everything subscribed to before."""
        from dynaplan.store.nats_client import Client, errors  # before any other import of nats-py

        client = Client()

        async def closed() -> None:
            # nats-py gives up for good on some errors of the server (a slow consumer, a late sign-in).
            if client is self._client and not self._is_closed:
                self._lost.set()
                if self._max_reconnects == 0 or isinstance(client.last_error, errors.NoServersError):
                    self._give_up()
                else:
                    self._tasks.spawn(self._reconnect())

        try:
            async with (
                asyncio.timeout(NATS_CONNECT_TIMEOUT_S),
                _reraise_lost_cancellation() as raise_if_cancelled,
            ):

                async def on_error(error: Exception) -> None:
                    await self._on_error(error)
                    if client is not self._client:
                        raise_if_cancelled()  # else nats-py tries again, for ever

                await client.connect(
                    **(COMMON_OPTIONS | self._options),
                    error_cb=on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=closed,
                    max_reconnect_attempts=self._max_reconnects,
                    # Allowed below: the first connect raises its error instead of hiding it.
                    allow_reconnect=False,
                )
        except (errors.Error, OSError, TimeoutError) as error:
            await client.close()
            raise self._not_connected(error) from error
        except asyncio.CancelledError:
            await client.close()  # else its socket stays open, half connected
            raise
        client.options["allow_reconnect"] = self._max_reconnects != 0
        self._client = client
        self._subscriptions = {
            number: await client.subscribe(subject, cb=handler)
            for number, (subject, handler) in list(self._handlers.items())
        }
        await self._on_reconnected()

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send the payload to the present subscribers; return when the server has it."""
        async with self.call() as client:
            await client.publish(subject, payload)
            await self._round_trip(client)

    async def add_subscription(self, subject: str, handler: Callable[[Msg], Awaitable[None]]) -> int:
        """Subscribe with a handler of whole NATS messages; return the number by which to ``unsubscribe``."""
        number = next(self._numbers)
        try:
            async with self.call() as client:
                self._subscriptions[number] = await client.subscribe(subject, cb=handler)
                self._handlers[number] = subject, handler
                await self._round_trip(client)
        except BaseException:  # nobody has the number
            self.unsubscribe_soon(number)
            raise
        return number

    def unsubscribe_soon(self, number: int) -> None:
        """End a subscription in the background; a cancelled caller's wait could be cancelled once more."""
        self._tasks.spawn(self.unsubscribe(number))

    async def unsubscribe(self, number: int) -> None:
        """End a subscription, also while the server is away."""
        self._handlers.pop(number, None)
        subscription = self._subscriptions.pop(number, None)
        if subscription is not None:
            with suppress(QueueUnavailable):
                async with self.call():
                    await subscription.unsubscribe()

    async def round_trip(self) -> None:
        """Return when the server has got everything sent so far."""
        async with self.call() as client:
            await self._round_trip(client)

    async def close(self) -> None:
        """End every subscription and the connection; when this returns, the server sends us nothing more.

        Otherwise it could still give us work that was asked for earlier, and that would be late.
        """
        try:
            async with self.call() as client:
                for subscription in list(self._subscriptions.values()):
                    await subscription.unsubscribe()
                await self._round_trip(client, timeout_s=0.5)
        except (QueueUnavailable, PermanentError) as error:
            log.debug("closing without the server: %s", error)
        finally:
            self._is_closed = True
            await self._tasks.cancel()
            if self._client is not None:
                await self._client.close()

    @property
    def is_connected(self) -> bool:
        """True while there is a connection, as far as is known.

        nats-py reports a connection a moment before it reports the reconnect; until then the loss stands.
        """
        is_up = self._client is not None and self._client.is_connected
        return is_up and not self._lost.is_set() and not self._is_closed

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after every later connect, as a new server knows nothing of what the old one promised.

        Return the function that ends it.
        """
        self._on_reconnect.append(callback)
        return lambda: self._on_reconnect.remove(callback)

    def publish_soon(self, subject: str, payload: bytes = b"") -> None:
        """Publish in the background; nothing happens when the server is away."""

        async def send() -> None:
            async with self.call() as client:
                await client.publish(subject, payload)

        self._tasks.spawn(send())

    @property
    def max_payload_bytes(self) -> int:
        """The size of the largest message that the server takes, as far as is known."""
        return int(self._client.max_payload) if self._client else 2**20

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call back whenever the connection is lost: what was asked of the server stays unanswered."""
        self._on_loss.append(callback)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[Client]:
        """The connected client, for one call; what goes wrong becomes QueueUnavailable or PermanentError."""
        from nats import errors
        from nats.js.errors import APIError, ServiceUnavailableError

        if self._client is None or not self.is_connected:
            raise QueueUnavailable(f"NATS is not connected: {self._last_error or 'closed'}")
        try:
            async with asyncio.timeout(2 * NATS_REQUEST_TIMEOUT_S), _reraise_lost_cancellation():
                yield self._client
        except (errors.MaxPayloadError, errors.BadSubjectError) as error:
            raise PermanentError(f"NATS refuses this message: {error}") from error
        except ServiceUnavailableError as error:
            raise QueueUnavailable("NATS has no JetStream, or it is not ready yet") from error
        except (errors.Error, APIError, OSError, TimeoutError) as error:
            raise QueueUnavailable(f"NATS did not answer: {error or type(error).__name__}") from error

    async def _round_trip(self, client: Client, timeout_s: float = NATS_REQUEST_TIMEOUT_S) -> None:
        """Return when the server has got everything sent so far.

        The ping is left to its own end after a timeout: nats-py stops reading, with a traceback, when the
        answer comes to a ping that was cancelled.
        """
        ping = self._tasks.spawn(client.flush(timeout=60))
        lost = self._tasks.spawn(self._lost.wait())
        try:
            await asyncio.wait({ping, lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if not ping.done():
            raise QueueUnavailable("NATS did not answer a ping")
        ping.result()

    def _not_connected(self, error: BaseException) -> QueueUnavailable | PermanentError:
        reason = str(error) or self._last_error or type(error).__name__
        kind = PermanentError if "authorization" in reason.lower() else QueueUnavailable
        return kind(f"NATS cannot be connected to: {reason}")

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        log.debug("NATS: %s", self._last_error)
        client = self._client
        if client and client._transport and not client.is_connected:
            # A frozen server lets us connect and sends nothing. nats-py forgets that connection, open, and
            # makes the next.
            client._transport.close()  # type: ignore[no-untyped-call]

    async def _on_disconnected(self) -> None:
        self._lost.set()
        if self._client is not None:
            # nats-py would send what it still holds on the next connection, before a caller sends again what
            # was lost on its way on this one: out of order.
            self._client._pending.clear()
            self._client._pending_data_size = 0
        for callback in self._on_loss:
            callback()
        if not self._is_closed:
            log.warning("the connection to NATS is lost")

    async def _on_reconnected(self) -> None:
        self._lost = asyncio.Event()
        for callback in list(self._on_reconnect):
            callback()

    def _give_up(self) -> None:
        self._last_error = f"it did not come back in {self._max_reconnects} attempts"
        log.error("NATS is given up: %s", self._last_error)

    async def _reconnect(self) -> None:
        while not self._is_closed:
            try:
                await self.connect()
                return
            except (QueueUnavailable, PermanentError) as error:
                log.debug("%s", error)
                await asyncio.sleep(NATS_RECONNECT_WAIT_S)


@asynccontextmanager
async def _reraise_lost_cancellation() -> AsyncIterator[Callable[[], None]]:
    """If the task was cancelled in the block, raise CancelledError at its end, or in place of its error.

    nats-py waits by ``asyncio.wait_for``, which in Python 3.11 loses a cancellation that coincides with a
    result or an error. The function that the block is given raises it at once, in this task.
    """
    task = asyncio.current_task()
    assert task
    cancellations = task.cancelling()

    def raise_if_cancelled() -> None:
        if asyncio.current_task() is task and task.cancelling() > cancellations:
            raise asyncio.CancelledError

    try:
        yield raise_if_cancelled
    finally:
        raise_if_cancelled()


async def remove_damaged_stream(manager: JetStreamManager, name: str, why: object) -> None:
    """Delete a stream that is damaged, to be made again: what was in it is lost."""
    from nats.js.errors import NotFoundError

    log.warning("the stream %s is damaged, and made again: %s", name, why)
    with suppress(NotFoundError):
        await manager.delete_stream(name)


def connect_options(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return where the server is and how to sign in, as nats-py takes it; see ``from_environment``."""
    servers = environ.get("NATS_SERVER") or DEFAULT_SERVER
    options: dict[str, Any] = {"servers": [server.strip() for server in servers.split(",")]}
    if token := environ.get("NATS_AUTH_TOKEN"):
        options["token"] = token
    if user := environ.get("NATS_AUTH_USERNAME"):
        options |= {"user": user, "password": environ.get("NATS_AUTH_PASSWORD", "")}
    return options


def _log_quietly(_: asyncio.Task[Any], error: BaseException) -> None:
    log.debug("NATS: %s", error)
