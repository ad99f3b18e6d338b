"""Other processes of a store in a directory, which tests kill: ``python -m tests.contract.file_store_child``.

Arguments: what to do, the directory, and what that takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynaplan.store.discovery import Discovery
from dynaplan.store.file.store import FileStore
from dynaplan.store.instances import Instance
from dynaplan.store.model import Transaction
from dynaplan.store.registration import Registration
from dynaplan.util.clock import SystemClock

STEPS = ("open", "write", "pwrite", "replace", "rename", "unlink", "mkdir", "ftruncate", "utime")
"""The calls with which a store changes files."""


async def hold(store: FileStore, key: str, ttl_s: str) -> None:
    """Put the key under a lease, say so, and stay without renewing it."""
    lease = await store.grant(int(ttl_s))
    await store.put(key, "held", lease)
    print(lease, flush=True)
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


async def transact(store: FileStore, step: int) -> None:
    """Change several keys in one transaction, but die at the step of that number."""
    old = await store.get("v1/box/old")
    die_at(step)
    changed = {"v1/box/a": "new", "v1/other/b": "new", "c": "new"}
    await store.commit(Transaction({"v1/box/old": old.revision if old else 0}, changed, ("v1/box/old",)))


def transact_for_each_line(directory: str) -> None:
    """Read numbers of steps; for each let a process of its own try the transaction, and tell how it ended."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(transact(FileStore(Path(directory)), int(line)))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print({0: "done", signal.SIGKILL: "killed"}.get(status, status), flush=True)


async def register(store: FileStore, ttl_s: str) -> None:
    """Register an instance; tell when somebody has revoked its lease."""
    discovery = Discovery(store, "box")
    await discovery.start()
    registration = Registration(store, store, SystemClock(), discovery, _instances, int(ttl_s))
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


def die_at(step: int) -> None:
    """Let SIGKILL end this process at the call of that number, from 1, that changes a file; half written."""
    left = step

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if call is write:
                    write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return made

    write = os.write
    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


async def main(what: str, directory: str, *arguments: str) -> None:
    """Run one of them."""
    store = FileStore.from_environment({"DYN_FILE_KV": directory})
    await {"hold": hold, "leave": leave, "count": count, "keep": keep, "register": register}[what](
        store, *arguments
    )


if __name__ == "__main__":
    if sys.argv[1] == "transact":
        transact_for_each_line(sys.argv[2])
    else:
        asyncio.run(main(*sys.argv[1:]))
