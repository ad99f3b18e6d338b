"""Unmanaged workers of this host: watched by pidfd, so that their exit deregisters them at once.

No ``serve`` looks after them. Without this a killed one stays registered until its lease ends, ten seconds at
most, unless the store is the one in files: each request for it is refused and sent elsewhere, but the planner
counts on it and ``status`` shows it.
"""

from __future__ import annotations

import asyncio
import logging

from dynaplan.gateway import timing
from dynaplan.process.identity import LeaseOwner
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.store.lease_owners import OwnerWatcher
from dynaplan.store.port import LeaseStore
from dynaplan.util.errors import PermanentError, StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)


class UnmanagedWorkers:
    """Revokes the leases of unmanaged processes of this boot of this machine when they end.

    A managed worker is left to the fleet plugin, which learns of its end as soon. ``me`` is this process.
    """

    def __init__(self, discovery: Discovery, leases: LeaseStore, me: LeaseOwner) -> None:
        self._discovery = discovery
        self._keeper = leases
        self._boot_id = me.process.boot_id
        self._leases_of: dict[LeaseOwner, dict[int, Instance]] = {}
        self._watch = OwnerWatcher(self._revoke_leases)
        self._tasks = BackgroundTasks()
        self._follow()
        self._stop_following = discovery.on_change(self._follow)

    async def close(self) -> None:
        """Stop watching the workers; revocations that are under way are given up."""
        self._stop_following()
        self._watch.close()
        await self._tasks.cancel()

    def _follow(self) -> None:
        # Initial pid namespaces have the same number on every machine, so the boot is compared first.
        self._leases_of = {}
        for each in self._discovery.all():
            if not each.is_managed and each.owner and each.owner.process.boot_id == self._boot_id:
                self._leases_of.setdefault(each.owner, {})[each.instance_id] = each
        self._watch.follow(self._leases_of.keys())

    def _revoke_leases(self, owner: LeaseOwner) -> None:
        for instance in self._leases_of.get(owner, {}).values():
            self._tasks.spawn(self._revoke(instance), f"registration of {instance.worker}")

    async def _revoke(self, instance: Instance) -> None:
        log.info("%s (pid %d) has ended: its registration is removed", instance.worker, instance.pid)
        try:
            async with asyncio.timeout(timing.REVOKE_TIMEOUT_S):
                await self._keeper.revoke(instance.instance_id)
        except (TimeoutError, StoreUnavailable, PermanentError) as error:
            log.debug("lease %x ends by itself: %s", instance.instance_id, error)
