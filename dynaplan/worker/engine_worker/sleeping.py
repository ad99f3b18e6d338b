"""A worker whose engine sleeps says so, and wakes it when somebody asks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dynaplan.store.instances import ASLEEP, WAKE
from dynaplan.store.model import Transaction
from dynaplan.util.errors import PermanentError, StoreUnavailable

if TYPE_CHECKING:
    from dynaplan.engines.port import Engine
    from dynaplan.worker.process import WorkerRuntime

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds between two looks whether the engine sleeps; its metrics, which say so, are read as often."""

LOOK_ASLEEP_S = 0.5
"""Seconds between two looks whether somebody wants a sleeping engine awake."""

STORE_ANSWER_S = 3.0
"""Seconds after which a call to the store counts as unanswered."""


class SleepNotice:
    """Keeps the key ``asleep`` of this worker's instance, under its lease, as long as its engine sleeps."""

    def __init__(self, runtime: WorkerRuntime, engine: Engine) -> None:
        self._runtime = runtime
        self._engine = engine
        self._reason = ""
        self._told: tuple[str, str] | None = None

    async def run(self) -> None:
        """Look again and again, until cancelled, whether the engine sleeps and somebody wants it awake."""
        while True:
            try:
                async with asyncio.timeout(STORE_ANSWER_S):
                    is_wanted = await self._look()
                if is_wanted:
                    await self._wake()
            except (TimeoutError, StoreUnavailable, PermanentError) as error:
                log.debug("the store does not hear whether the engine sleeps: %s", error or "no answer")
            await self._runtime.clock.sleep(LOOK_ASLEEP_S if self._told else LOOK_EVERY_S)

    async def _look(self) -> bool:
        """Say whether the engine sleeps; return whether it does and somebody wants it awake."""
        namespace, instance_id = self._runtime.namespace, self._runtime.instance_id
        is_asleep = self._engine.load().is_asleep and instance_id != 0
        if not is_asleep:
            self._reason = ""
        wanted = (ASLEEP.key(namespace, instance_id), self._reason) if is_asleep else None
        await self._tell(wanted)
        if not is_asleep:
            return False
        key = WAKE.key(namespace, instance_id)
        if await self._runtime.store.get(key) is None:
            return False
        await self._runtime.store.delete(key)
        return True

    async def _tell(self, wanted: tuple[str, str] | None) -> None:
        if wanted == self._told:
            return
        if self._told and (wanted is None or wanted[0] != self._told[0]):
            await self._runtime.store.delete(self._told[0])
            self._told = None
        if wanted:
            key, reason = wanted
            lease = self._runtime.instance_id
            await self._runtime.store.commit(Transaction(puts={key: reason}, lease=lease))
        log.info("the engine %s", "sleeps" if wanted else "is awake")
        self._told = wanted

    async def _wake(self) -> None:
        self._reason = await self._engine.wake()
        if self._reason:
            log.warning("the engine cannot be woken: %s", self._reason)
