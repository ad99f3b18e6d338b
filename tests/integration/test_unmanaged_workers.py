"""UnmanagedWorkers: the registrations of unmanaged workers of this host end with their processes."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from dynaplan.gateway.routing.unmanaged_watch import UnmanagedWorkers
from dynaplan.process.identity import LeaseOwner
from dynaplan.process.process_table import identity_of
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.store.lease_owners import this_process
from tests.fakes.polling import consistently, eventually
from tests.fakes.store import FakeStore

ME = this_process()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    store = FakeStore()
    discovery = Discovery(store, "box")
    await discovery.start()
    neighbours = UnmanagedWorkers(discovery, store, ME)
    yield store
    await neighbours.close()
    await discovery.close()
    for timer in store.leases.values():
        timer.cancel()


async def registered(store: FakeStore, owner: LeaseOwner | None, *, is_managed: bool = False) -> int:
    lease = await store.grant(3600)
    url = "http://127.0.0.1:1"
    instance = Instance("box", "W", "generate", lease, url, "w", is_managed=is_managed, owner=owner)
    await store.put(instance.key, instance.to_json(), lease)
    return lease


def owner_of(process: subprocess.Popen[bytes]) -> LeaseOwner:
    return LeaseOwner(identity_of(process.pid), ME.pid_namespace)


async def test_every_lease_of_a_killed_process_is_revoked_at_once(
    store: FakeStore, process: subprocess.Popen[bytes]
) -> None:
    leases = {await registered(store, owner_of(process)) for _ in range(2)}
    await registered(store, ME)
    process.kill()
    await eventually(lambda: not leases & store.leases.keys())
    assert len(store.leases) == 1


async def test_one_that_is_dead_already_is_revoked_when_it_is_seen(
    store: FakeStore, process: subprocess.Popen[bytes]
) -> None:
    owner = owner_of(process)
    process.kill()
    process.wait()
    lease = await registered(store, owner)
    await eventually(lambda: lease not in store.leases)


async def test_a_process_of_another_boot_or_pid_namespace_or_of_serve_is_left_to_its_lease(
    store: FakeStore, process: subprocess.Popen[bytes]
) -> None:
    owner = owner_of(process)
    elsewhere = replace(owner, process=replace(owner.process, boot_id="another machine"))
    contained = replace(owner, pid_namespace=owner.pid_namespace + 1)
    leases = {await registered(store, each) for each in (elsewhere, contained, None)}
    leases.add(await registered(store, owner, is_managed=True))
    ours = await registered(store, owner)
    process.kill()
    process.wait()
    await eventually(lambda: ours not in store.leases)
    await consistently(lambda: leases == store.leases.keys(), 0.2)


async def test_a_store_that_is_away_is_left_to_end_the_lease_by_itself(
    store: FakeStore, process: subprocess.Popen[bytes]
) -> None:
    lease = await registered(store, owner_of(process))
    store.go_away()
    process.kill()
    process.wait()
    await consistently(lambda: lease in store.leases, 0.2)
