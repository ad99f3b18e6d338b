"""Keeps keys of the store in the statefile: saved when they change, restored when the store has lost them.

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

from dynaplan.fleet.rules.lost_keys import STORE_ID, USER_SET_KEYS, Comparison, PersistedKeys, compare
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.process_table import is_alive
from dynaplan.util.errors import StatefileUnwritable

if TYPE_CHECKING:
    from dynaplan.fleet.plugin.document import Statefile
    from dynaplan.fleet.plugin.ports import Terminal
    from dynaplan.fleet.plugin.store_link import StoreLink

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds between two comparisons while a repair is pending, or a hold has an expiry time."""

RESYNC_S = 5.0
"""Longest time between two comparisons, in seconds: a changed key triggers one at once."""


class KeyPersistence:
    """Copies counts, holds, reservations and live settings from store to statefile, and back when lost.

    Also deletes expired holds and reservations, and holds and loans of GPUs of processes that have ended.
    """

    def __init__(
        self,
        link: StoreLink,
        statefile: Statefile,
        terminal: Terminal,
        unix_time_s: Callable[[], float] = time.time,
        is_alive: Callable[[ProcessIdentity], bool] = is_alive,
    ) -> None:
        self._link = link
        self._statefile = statefile
        self._terminal = terminal
        self._unix_time_s = unix_time_s
        self._is_alive = is_alive
        self._reported_expired: dict[str, str] = {}
        self._reported_lost: PersistedKeys | None = None

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
        """Compare the store with the statefile once, and repair what differs.

        Return True when there is nothing to do until a key changes.
        """
        in_store, before = self._link.persisted, self._saved
        if in_store is None:
            return False
        diff = compare(before, in_store)
        if diff.lost or STORE_ID not in in_store.planner or before.live.keys() - in_store.live.keys():
            # The watched copies may lag, each of the two watches differently: read both again.
            reread = await self._link.read_persisted()
            if reread is None:
                return False
            diff = compare(before, reread)
            await self._restore_lost(diff, reread)
        else:
            self._reported_lost = None
        self._save(diff.kept)
        needs_clock_check = {self._expire(name, diff.kept.planner.get(name, "")) for name in USER_SET_KEYS}
        return not any(needs_clock_check) and not diff.lost and diff.kept == self._saved

    @property
    def _saved(self) -> PersistedKeys:
        return PersistedKeys(self._statefile.planner_keys, self._statefile.live_settings)

    async def _restore_lost(self, diff: Comparison, in_store: PersistedKeys) -> None:
        """Write what the store has lost, and its id if it has none yet."""
        lost = diff.lost
        if lost and lost != self._reported_lost:
            self._terminal.report(_loss_message(diff))
        self._reported_lost = lost
        if STORE_ID not in in_store.planner and STORE_ID not in lost.planner:
            lost = PersistedKeys({**lost.planner, STORE_ID: uuid.uuid4().hex}, lost.live)
        if lost:
            await self._link.restore(lost)

    def _save(self, kept: PersistedKeys) -> None:
        if kept == self._saved:
            return
        try:
            self._statefile.record_keys(kept.planner, kept.live)
        except StatefileUnwritable as error:
            log.warning("cannot save the store's keys to the statefile, will retry: %s", error)

    def _expire(self, name: str, text: str) -> bool:
        """Delete expired holds or reservations, so that setting the clock back does not bring them back.

        Return whether entries are left that end by themselves, so that this has to be called again.
        """
        now_s = self._unix_time_s()
        try:
            before = USER_SET_KEYS[name](text)
        except ValueError:
            return False
        remaining = before.without_expired(now_s).without_ended(self._is_alive)
        if before == remaining:
            return any(entry.until_s or entry.holder for entry in remaining.descriptions.values())
        self._link.replace(name, text, remaining.to_text())
        if text != self._reported_expired.get(name):
            self._reported_expired[name] = text
            for description, entry in before.descriptions.items():
                if description not in remaining.descriptions:
                    self._terminal.report(f"{description}: {'it has ended' if entry.holder else 'expired'}.")
        return True


def _loss_message(diff: Comparison) -> str:
    names = ", ".join([*(name for name in diff.lost.planner if name != STORE_ID), *diff.lost.live])
    if not diff.is_new_store:
        return f"The key-value store lost {names}; restored from the statefile."
    restored = f" Restored from the statefile: {names}." if names else ""
    return f"The key-value store was reset and is empty. Workers register again by themselves.{restored}"
