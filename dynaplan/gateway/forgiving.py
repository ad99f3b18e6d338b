"""Tells the fleet plugin which crashes requests have caused, so that no worker is held to have failed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from dynaplan.store.instance_keys import FORGIVEN_CRASHES
from dynaplan.store.model import Transaction
from dynaplan.store.port import KeyValueStore, LeaseKeeper
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import PermanentError, StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

TOLD_FOR_S = 120
"""Seconds for which a crash is named: longer than the plugin remembers one."""

MOST_TOLD = 1000
"""Dead instances that are remembered as named already."""

TRY_FOR_S = 30.0
"""Seconds for which telling is tried while the store is away."""

RETRY_FIRST_S = 0.1
RETRY_LONGEST_S = 2.0


class ForgivenCrashes:
    """Writes one key for each dead instance, under a lease, in the background."""

    def __init__(
        self, store: KeyValueStore, leases: LeaseKeeper, namespace: str, background: BackgroundTasks
    ) -> None:
        self._store = store
        self._leases = leases
        self._namespace = namespace
        self._background = background
        self._told: OrderedDict[int, None] = OrderedDict()

    def forgive(self, dead: frozenset[int]) -> None:
        """Name these instances, each once: a refused request may be sent a thousand times a second."""
        new = dead - self._told.keys()
        if not new:
            return
        self._told.update(dict.fromkeys(new))
        while len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)
        self._background.spawn(self._tell(new), "forgiven crashes")

    async def _tell(self, dead: frozenset[int]) -> None:
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)
        try:
            async with asyncio.timeout(TRY_FOR_S):
                while not await self._is_told(dead):
                    await backoff.pause()
        except TimeoutError:
            log.warning("the store is away: %d crashes over requests count as the workers' own", len(dead))

    async def _is_told(self, dead: frozenset[int]) -> bool:
        try:
            lease = await self._leases.grant(TOLD_FOR_S)
            puts = {FORGIVEN_CRASHES.key(self._namespace, instance_id): "" for instance_id in dead}
            return await self._store.commit(Transaction(puts=puts, lease=lease))
        except (StoreUnavailable, PermanentError) as error:
            log.debug("forgiven crashes not told: %s", error)
            return False
