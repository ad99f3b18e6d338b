"""The lease of one process, and the registrations that live under it.

A deliberate revocation drains a process, and a lease that merely expired makes it register again:

===============================================  ==========================================
what is seen                                     what it means
===============================================  ==========================================
the store's identity changed                     it came back empty: register again
lease gone, last renewal younger than its TTL    somebody revoked it: drain
lease gone, last renewal older than its TTL      it lapsed while the store was away or this
                                                 process stood still: register again
own key gone, lease alive                        somebody deleted the key: put it again
===============================================  ==========================================

A renewal counts from the moment it was sent, so the store never lets a lease lapse earlier than assumed here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from dynaplan.config.settings.servers import LEASE_TTL_S
from dynaplan.graph.lifecycle import Role
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance, dynamo_keys
from dynaplan.store.model import Transaction
from dynaplan.store.port import Store
from dynaplan.store.timing import CALL_RETRY_MAX_S, CALL_RETRY_MIN_S, STORE_CALL_TIMEOUT_S
from dynaplan.util.backoff import Backoff
from dynaplan.util.clock import Clock
from dynaplan.util.errors import DynaplanError, PermanentError, StoreUnavailable

log = logging.getLogger(__name__)


T = TypeVar("T")


class Registration:
    """Registers the instances of ``instances(lease)`` and keeps them registered until ``deregister``.

    ``revoked`` is set when somebody revoked the lease on purpose. The own keys are watched by ``discovery``,
    which has been started. Each instance is registered in Dynamo's layout too, in the same transaction;
    ``role`` says as which component.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        discovery: Discovery,
        instances: Callable[[int], Iterable[Instance]],
        ttl_s: int = LEASE_TTL_S,
        role: Role | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._discovery = discovery
        self._instances = instances
        self._ttl_s = ttl_s
        self._role = role
        self._lease = 0
        self._is_complete = False
        self._expires_at_s = 0.0
        self._identity = ""
        self._keys: dict[str, str] = {}
        self._dynamo_keys: dict[str, str] = {}
        self._seen: set[str] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.revoked = asyncio.Event()
        self._unsubscribe = discovery.on_change(self._check_own_keys)

    @property
    def instance_id(self) -> int:
        """The id of the lease that the registrations live under; 0 while there is none."""
        return self._lease if self._is_complete else 0

    @property
    def task(self) -> asyncio.Task[None]:
        """The task that keeps the lease alive; it ends by itself only after a revocation, or on a bug."""
        if self._task is None:
            raise RuntimeError("not started")
        return self._task

    async def start(self) -> None:
        """Register, whenever the store answers, and keep registered from then on."""
        await self._register()
        self._task = asyncio.create_task(self._keep_registered(), name="registration")

    async def deregister(self, timeout_s: float = 2.0) -> None:
        """Revoke the own lease, so that every router drops this process immediately.

        Bounded: when the store is away the lease is left to expire.
        """
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._unsubscribe()
        if not self._lease or self.revoked.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._store.revoke(self._lease)
        except (TimeoutError, DynaplanError) as error:
            log.warning("lease %x not revoked (%s); it expires by itself", self._lease, error or "no answer")

    async def _keep_registered(self) -> None:
        while not self.revoked.is_set():
            await self._pause(max(0.0, self._expires_at_s - self._clock.now_s()) / 2)
            left_s = await self._renew()
            answered_s = self._clock.now_s()
            if left_s:
                await self._restore_deleted_keys()
            elif await self._call_store(self._store.identity) != self._identity:
                log.warning("the store came back empty: registering again")
                await self._register()
            elif answered_s < self._expires_at_s:
                log.info("lease %x was revoked", self._lease)
                self.revoked.set()
            else:
                log.warning("lease %x lapsed: registering again", self._lease)
                await self._register()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than until an own key is missed."""
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        woken = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({sleep, woken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            woken.cancel()
            self._wake.clear()

    async def _renew(self) -> float:
        """Renew the lease, whenever the store answers.

        Return its time to live in seconds, 0 when it is gone.
        """
        sent_s = 0.0

        def renew() -> Awaitable[float]:
            nonlocal sent_s
            sent_s = self._clock.now_s()
            return self._store.keep_alive(self._lease)

        left_s = await self._call_store(renew)
        if left_s:
            self._expires_at_s = sent_s + left_s
        return left_s

    async def _restore_deleted_keys(self) -> None:
        missing = {key: value for key, value in self._keys.items() if not self._discovery.has(key)}
        if not missing:
            return
        log.warning("own registration is missing: putting it again: %s", ", ".join(missing))
        # Who deleted this key may have deleted everything, and with it what identifies the store.
        self._identity = await self._call_store(self._store.identity)
        if not await self._commit(self._dynamo_keys | missing):
            self._wake.set()

    async def _register(self) -> None:
        """Make a new lease, and put every key under it in one transaction."""
        self._is_complete = False
        self._seen = set()
        while not self._is_complete:
            self._identity = await self._call_store(self._store.identity)
            asked_s = self._clock.now_s()
            self._lease = await self._call_store(lambda: self._store.grant(self._ttl_s))
            self._expires_at_s = asked_s + self._ttl_s
            self._build_keys()
            self._is_complete = await self._commit(self._dynamo_keys | self._keys)
            if not self._is_complete:
                await self._clock.sleep(CALL_RETRY_MIN_S)
        log.info("registered as %x: %s", self._lease, ", ".join(self._keys))

    def _build_keys(self) -> None:
        """Set the keys and values to register, in both layouts, for the instances of the present lease."""
        self._keys, self._dynamo_keys = {}, {}
        for instance in self._instances(self._lease):
            self._keys[instance.key] = instance.to_json()
            self._dynamo_keys |= dynamo_keys(instance, self._role)

    async def _commit(self, keys: dict[str, str]) -> bool:
        """Write the keys under the lease; False when the lease is gone meanwhile."""
        try:
            return await self._call_store(
                lambda: self._store.commit(Transaction(puts=keys, lease=self._lease))
            )
        except PermanentError as error:
            log.warning("lease %x is gone: %s", self._lease, error)
            return False

    async def _call_store(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the store's answer, asked for again and again while it is away."""
        backoff = Backoff(CALL_RETRY_MIN_S, CALL_RETRY_MAX_S, self._clock.sleep)
        while True:
            try:
                async with asyncio.timeout(STORE_CALL_TIMEOUT_S):
                    return await call()
            except (TimeoutError, StoreUnavailable) as error:
                if backoff.is_first:
                    log.warning("the store does not answer, trying on: %s", error or "no answer in time")
                await backoff.pause()

    def _check_own_keys(self) -> None:
        """Wake the keep-alive task when one of our registered keys has been deleted."""
        there = {key for key in self._keys if self._discovery.has(key)}
        if self._seen - there:
            self._wake.set()
        self._seen = there
