"""Keeps keys of the store in the statefile: written down when they change, written again when they were lost.

Level-triggered, like the reconciler. Which key is lost and which was deleted is decided in
``fleet/rules/lost_keys.py``.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from dynaplan.fleet.rules.lost_keys import PERSONS_KEYS, STORE_ID, Comparison, PersistedKeys, compare
from dynaplan.util.errors import StatefileUnwritable

if TYPE_CHECKING:
    from dynaplan.fleet.plugin.document import Statefile
    from dynaplan.fleet.plugin.ports import Terminal
    from dynaplan.fleet.plugin.store_link import StoreLink

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds between two comparisons while something has to be mended, or a hold ends by the clock."""

RESYNC_S = 5.0
"""Longest time between two comparisons, in seconds: a change of the keys causes one at once."""


class KeyPersistence:
    """Copies counts, holds, reservations and live settings from store to statefile, and back when lost.

    Also ends holds and reservations whose deadline has passed.
    """

    def __init__(
        self,
        link: StoreLink,
        statefile: Statefile,
        terminal: Terminal,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._statefile = statefile
        self._terminal = terminal
        self._unix_time_s = unix_time_s
        self._ended: dict[str, str] = {}
        self._reported: PersistedKeys | None = None

    async def run(self) -> None:
        changed = asyncio.Event()
        self._link.on_persisted_change(changed.set)
        while True:
            changed.clear()
            is_settled = await self.sync()
            try:
                async with asyncio.timeout(RESYNC_S if is_settled else RETRY_S):
                    await changed.wait()
            except TimeoutError:
                continue

    async def sync(self) -> bool:
        """Compare the store with the statefile once, and mend what differs.

        Return whether nothing is left to do until a key changes.
        """
        found, before = self._link.persisted, self._recorded
        if found is None:
            return False
        seen = compare(before, found)
        if seen.lost or STORE_ID not in found.planner or before.live.keys() - found.live.keys():
            # What is followed may be out of date, and the two kinds of keys differently so.
            fresh = await self._link.read_persisted()
            if fresh is None:
                return False
            seen = compare(before, fresh)
            await self._mend(seen, fresh)
        else:
            self._reported = None
        self._write_down(seen.kept)
        are_timed = {self._end(name, seen.kept.planner.get(name, "")) for name in PERSONS_KEYS}
        return not any(are_timed) and not seen.lost and seen.kept == self._recorded

    @property
    def _recorded(self) -> PersistedKeys:
        return PersistedKeys(self._statefile.planner_keys, self._statefile.live_settings)

    async def _mend(self, seen: Comparison, found: PersistedKeys) -> None:
        """Write what the store has lost, and its id if it has none yet."""
        lost = seen.lost
        if lost and lost != self._reported:
            self._terminal.report(_loss(seen))
        self._reported = lost
        if STORE_ID not in found.planner and STORE_ID not in lost.planner:
            lost = PersistedKeys({**lost.planner, STORE_ID: uuid.uuid4().hex}, lost.live)
        if lost:
            await self._link.restore(lost)

    def _write_down(self, kept: PersistedKeys) -> None:
        if kept == self._recorded:
            return
        try:
            self._statefile.record_keys(kept.planner, kept.live)
        except StatefileUnwritable as error:
            log.warning("the store's keys are not in the statefile yet: %s", error)

    def _end(self, name: str, text: str) -> bool:
        """Release holds or reservations that are over: a clock which is set back does not revive them.

        Return whether the clock has to be checked again.
        """
        now_s = self._unix_time_s()
        try:
            before = PERSONS_KEYS[name](text)
        except ValueError:
            return False
        lasting = before.lasting(now_s)
        if before == lasting:
            return any(entry.until_s for entry in lasting.sentences.values())
        self._link.replace(name, text, lasting.to_text())
        if text != self._ended.get(name):
            self._ended[name] = text
            for sentence in before.sentences.keys() - lasting.sentences.keys():
                self._terminal.report(f"{sentence}: that is over.")
        return True


def _loss(seen: Comparison) -> str:
    names = ", ".join([*(name for name in seen.lost.planner if name != STORE_ID), *seen.lost.live])
    if not seen.is_new_store:
        return f"The key-value store has lost {names}: written again."
    again = f" Written again: {names}." if names else ""
    return f"The key-value store has lost all that it held. Workers register again by themselves.{again}"
