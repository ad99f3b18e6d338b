"""Publishes what a planner has set of running workers, for frontends that follow it.

Under a lease: a planner that ends takes its settings along, and those of one that is killed stay for
``LEASE_INTERVALS``, until the one that is started in its place has decided.
"""

from __future__ import annotations

import logging
import math

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.running_limits import running_limits_prefix
from dynaplan.planner.model import Tuning
from dynaplan.store.locks import RenewedLease
from dynaplan.store.port import Store
from dynaplan.util.clock import Clock
from dynaplan.util.errors import DynaplanError

log = logging.getLogger(__name__)

LEASE_INTERVALS = 3
"""Adjustment intervals for which the settings of a planner that was killed stay."""


class TuningPublisher:
    """Writes the tuning of one planner's workers into the key-value store."""

    def __init__(self, store: Store, settings: PlannerSettings, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._limit_key = f"{running_limits_prefix(settings.namespace)}{settings.decode_component}"
        self._ttl_s = math.ceil(LEASE_INTERVALS * settings.adjustment_interval_s)
        self._lease: RenewedLease | None = None
        self._published = Tuning()

    async def publish(self, tuning: Tuning) -> None:
        """Write what is new; what cannot be written now is tried again with the next decision."""
        if tuning == self._published and (self._lease is None or self._lease.is_alive):
            return
        try:
            await self._write(tuning)
        except DynaplanError as error:
            log.warning("the settings of running workers are not published: %s", error)

    async def _write(self, tuning: Tuning) -> None:
        if self._lease is None or not self._lease.is_alive:
            self._lease = await RenewedLease.grant(self._store, self._clock, self._ttl_s)
        if tuning.running_limit:
            await self._store.put(self._limit_key, tuning.running_limit.to_text(), self._lease.number)
        else:
            await self._store.delete(self._limit_key)
        self._published = tuning

    async def close(self) -> None:
        """Take back what is published."""
        if self._lease:
            await self._lease.end()
