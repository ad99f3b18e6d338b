"""Other processes of a store in a directory, which tests kill: ``python -m tests.contract.file_store_child``.

Arguments: what to do, the directory, and what that takes.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time

from dynaplan.store.discovery import Discovery
from dynaplan.store.file_store import FileStore
from dynaplan.store.instances import Instance
from dynaplan.store.model import Transaction
from dynaplan.store.registration import Registration
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import StoreUnavailable


async def hold(store: FileStore, key: str, ttl_s: str) -> None:
    """Put the key under a lease, tell both and when it was asked for, and stay without renewing it."""
    asked_s = time.monotonic()
    lease = await store.grant(int(ttl_s))
    await store.put(key, "held", lease)
    print(lease, asked_s, flush=True)
    await asyncio.Event().wait()


async def leave(store: FileStore, key: str, ttl_s: str) -> None:
    """Put the key under a lease, and end as a program does that knows it will."""
    lease = await store.grant(int(ttl_s))
    await store.put(key, "left", lease)
    await store.close()
    print(lease, flush=True)


async def count(store: FileStore, prefix: str, keys: str, rounds: str) -> None:
    """Write each key that number of times, once a line has come; end with the last values."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for value in range(int(rounds)):
        for number in range(int(keys)):
            await store.put(f"{prefix}{number}", str(value))


async def transact(store: FileStore, *keys: str) -> None:
    """Write the same value to these keys, and the next one, and so on."""
    print("ready", flush=True)
    for value in itertools.count():
        try:
            await store.commit(Transaction(puts=dict.fromkeys(keys, str(value))))
        except StoreUnavailable:
            continue


async def register(store: FileStore, ttl_s: str) -> None:
    """Register an instance; tell when somebody has revoked its lease."""
    discovery = Discovery(store, "box")
    await discovery.start()
    registration = Registration(store, SystemClock(), discovery, _instances, int(ttl_s))
    await registration.start()
    print("registered", flush=True)
    await registration.revoked.wait()
    print("revoked", flush=True)


def _instances(lease: int) -> list[Instance]:
    return [Instance("box", "backend", "generate", lease, "http://127.0.0.1:1")]


async def keep(store: FileStore, lease: str) -> None:
    """Keep the lease alive once, say so, and stay."""
    print(await store.keep_alive(int(lease)), flush=True)
    await asyncio.Event().wait()


async def main(what: str, directory: str, *arguments: str) -> None:
    """Run one of them."""
    store = FileStore.from_environment({"DYN_FILE_KV": directory})
    works = (hold, leave, count, transact, keep, register)
    await next(work for work in works if work.__name__ == what)(store, *arguments)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
