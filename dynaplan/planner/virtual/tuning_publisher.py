"""Publishes what a planner has set of workers besides their number.

Changes of engines' options are for the fleet plugin, and stay. The settings of running workers are for
frontends, under a lease: a planner that ends takes its settings along, and those of one that is killed stay
for ``LEASE_INTERVALS``, until the one that is started in its place has decided.
"""

from __future__ import annotations

import logging
import math

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.option_changes import OPTION_CHANGE, OptionChange
from dynaplan.contract.running_limits import running_limits_prefix
from dynaplan.contract.store_keys import (
    MAX_LOCAL_PREFILL_LENGTH,
    MAX_LOCAL_RUNNING,
    live_settings_prefix,
    scaling_key,
)
from dynaplan.planner.model import Tuning
from dynaplan.store.locks import RenewedLease
from dynaplan.store.port import Store
from dynaplan.util.clock import Clock
from dynaplan.util.errors import DynaplanError

log = logging.getLogger(__name__)

LEASE_INTERVALS = 3
"""Adjustment intervals for which the settings of a planner that was killed stay."""


class TuningPublisher:
    """Writes the tuning of one planner's workers, and changes of options, into the key-value store."""

    def __init__(self, store: Store, settings: PlannerSettings, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._limit_key = f"{running_limits_prefix(settings.namespace)}{settings.decode_component}"
        self._ttl_s = math.ceil(LEASE_INTERVALS * settings.adjustment_interval_s)
        self._live_prefix = live_settings_prefix(settings.namespace)
        self._change_key = scaling_key(settings.namespace, OPTION_CHANGE)
        self._adjusts_knobs = settings.adjust_knobs
        self._left: dict[str, str] = {}
        """The live settings that a person has set, by key: what was said of them is not said again."""
        self._lease: RenewedLease | None = None
        self._published: Tuning | None = Tuning()
        """What the store has as a whole; None where it may have parts of it."""

    async def publish(self, tuning: Tuning) -> None:
        """Write a tuning that is new, or whose lease has ended; a failure is logged and tried again."""
        if tuning == self._published and (self._lease is None or self._lease.is_alive):
            return
        self._published = None
        try:
            if await self._write(tuning):
                self._published = tuning
        except DynaplanError as error:
            log.warning("the settings of running workers are not published: %s", error)

    async def _write(self, tuning: Tuning) -> bool:
        """Write all of it; False where a setting was left to a person."""
        if self._lease is None or not self._lease.is_alive:
            self._lease = await RenewedLease.grant(self._store, self._clock, self._ttl_s)
        lease, limit = self._lease.number, tuning.running_limit
        await self._set(self._limit_key, limit.to_text() if limit else "", lease)
        is_whole = True
        for name, number in (
            (MAX_LOCAL_PREFILL_LENGTH, tuning.max_local_prefill_tokens),
            (MAX_LOCAL_RUNNING, tuning.max_local_running),
        ):
            text = "" if number is None else str(number)
            is_whole &= await self._set_live(self._live_prefix + name, text, lease)
        return is_whole

    async def _set(self, key: str, text: str, lease: int) -> None:
        if text:
            await self._store.put(key, text, lease)
        else:
            await self._store.delete(key)

    async def _set_live(self, key: str, text: str, lease: int) -> bool:
        """Set a live setting, or delete it for an empty text; False where a person's stays.

        A planner's has a lease, which outlives it when it is killed, and a person's has none.
        """
        item = await self._store.get(key)
        if item and not item.lease:
            if text and self._left.get(key) != item.value:
                log.info("%s is %s by a person's will, and stays", key, item.value)
                self._left[key] = item.value
            return not text
        self._left.pop(key, None)
        if text or item:
            await self._set(key, text, lease)
        return True

    async def ask(self, change: OptionChange) -> None:
        """Ask for a change of an engine's option; a failure is logged."""
        try:
            await self._store.put(self._change_key, change.to_text())
        except DynaplanError as error:
            log.warning("%s is not asked for: %s", change, error)

    async def asked(self) -> OptionChange | None:
        """Return the last change of an engine's option that was asked for, with its result.

        None where there is none, its value cannot be read, or options are not changed at all. Raises
        StoreUnavailable.
        """
        item = await self._store.get(self._change_key) if self._adjusts_knobs else None
        try:
            return OptionChange.from_text(item.value) if item else None
        except ValueError as error:
            log.warning("ignoring %s: %s", self._change_key, error)
            return None

    async def close(self) -> None:
        """End the lease of what is published, and so delete it."""
        if self._lease:
            await self._lease.end()
