"""A frontend that routes by prefix tells the fleet plugin what the workers' caches are worth."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dynaplan.fleet.store_keys import CACHE_WORTH, worth_text
from dynaplan.gateway.kv_routing.cache_worth import CacheWorth
from dynaplan.store.model import Transaction
from dynaplan.util.errors import PermanentError, StoreUnavailable

if TYPE_CHECKING:
    from dynaplan.worker.process import WorkerRuntime

log = logging.getLogger(__name__)

TELL_EVERY_S = 5.0
"""Seconds between two tellings; what has not changed is not written again."""

STORE_ANSWER_S = 3.0
"""Seconds after which a call to the store counts as unanswered."""


class CacheWorthNotice:
    """Keeps the key ``cache_worth`` of this frontend, under its lease, up to date."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._worth = CacheWorth()
        self._told: tuple[str, str] | None = None

    def served(self, instance_id: int, tokens: int) -> None:
        """Note tokens of a prompt that came out of the cache of this instance."""
        if instance_id:
            self._worth.served(instance_id, tokens, self._runtime.clock.now_s())

    async def run(self) -> None:
        """Tell every ``TELL_EVERY_S`` what has changed, until cancelled."""
        while True:
            await self._runtime.clock.sleep(TELL_EVERY_S)
            try:
                async with asyncio.timeout(STORE_ANSWER_S):
                    await self.tell()
            except (TimeoutError, StoreUnavailable, PermanentError) as error:
                log.debug("the worth of caches is not told: %s", error or "no answer")

    async def tell(self) -> None:
        """Write what the caches are worth now, unless that is there already, or nothing was ever served."""
        runtime = self._runtime
        text = worth_text(self._worth.tokens(runtime.clock.now_s()))
        wanted = (CACHE_WORTH.key(runtime.namespace, runtime.instance_id), text)
        is_news = wanted != self._told and (self._told or text != worth_text({}))
        if not (is_news and runtime.instance_id):
            return
        await runtime.store.commit(Transaction(puts={wanted[0]: text}, lease=runtime.instance_id))
        self._told = wanted
