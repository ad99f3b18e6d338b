"""Buckets and locks as others see them, and change them: ``etcdctl``, and NATS' own client for Python."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nats.js.kv import KeyValue

from dynaplan.store.buckets import Bucket
from dynaplan.store.etcd import EtcdStore
from dynaplan.store.locks import Locks
from dynaplan.store.nats_store import NatsStore
from dynaplan.store.port import Store
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import LockLost
from tests.fakes.polling import eventually
from tests.fakes.servers import Server


class Etcdctl:
    """etcd's own command-line client."""

    def __init__(self, endpoint: str) -> None:
        beside = Path(sys.executable).parent
        self._program = shutil.which("etcdctl", path=str(beside)) or shutil.which("etcdctl")
        self._endpoint = endpoint

    async def run(self, *arguments: str) -> str:
        if self._program is None:
            pytest.skip("there is no etcdctl")
        command = (self._program, "--endpoints", self._endpoint, *arguments)
        # In a thread: a lost lock may cancel the task before the command that broke it has ended.
        done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, arguments
        return done.stdout

    async def keys(self, prefix: str) -> dict[str, tuple[str, int]]:
        """Key -> value and lease."""
        document = json.loads(await self.run("get", "--prefix", prefix, "-w", "json"))
        return {
            base64.b64decode(each["key"]).decode(): (
                base64.b64decode(each.get("value", "")).decode(),
                each.get("lease", 0),
            )
            for each in document.get("kvs", ())
        }


def locks_of(store: Store) -> Locks:
    return Locks(store, SystemClock(), 10)


async def test_etcdctl_reads_and_writes_a_bucket(etcd: Server, etcd_store: EtcdStore) -> None:
    etcdctl, bucket = Etcdctl(etcd.environment["ETCD_ENDPOINTS"]), Bucket(etcd_store, "v1/things")
    await bucket.put("a/b", "ours ✓".encode())
    assert await etcdctl.keys("v1/things/") == {"v1/things/a/b": ("ours ✓", 0)}
    await etcdctl.run("put", "v1/things/c", "theirs")
    assert (await bucket.list())["c"].value == b"theirs"
    await etcdctl.run("del", "v1/things/a/b")
    assert await bucket.get("a/b") is None


async def test_etcdctl_sees_locks_and_breaks_them(etcd: Server, etcd_store: EtcdStore) -> None:
    etcdctl, locks = Etcdctl(etcd.environment["ETCD_ENDPOINTS"]), locks_of(etcd_store)
    with pytest.raises(LockLost):
        async with await locks.write_lock_with_wait("models/llama") as lock:
            ((key, (_, lease)),) = (await etcdctl.keys("v1/models/llama/")).items()
            assert key == "v1/models/llama/writer"
            assert lock.is_held
            await etcdctl.run("lease", "revoke", f"{lease:x}")
            await eventually(lambda: not lock.is_held)
    await etcdctl.run("put", "v1/models/llama/writer", "an operator")
    assert await locks.try_read_lock("models/llama") is None
    await etcdctl.run("del", "v1/models/llama/writer")
    async with await locks.read_lock_with_wait("models/llama", 10.0):
        (key,) = await etcdctl.keys("v1/models/llama/readers/")
    assert await etcdctl.keys("v1/models/llama/") == {}


async def test_natss_own_client_reads_and_writes_a_bucket(
    nats_store: NatsStore, nats_bucket: KeyValue
) -> None:
    bucket = Bucket(nats_store, "v1/things")
    await bucket.put("a/b", bytes(range(256)))
    assert (await nats_bucket.get("v1.things.a.b")).value == bytes(range(256))
    await nats_bucket.put("v1.things.c", b"theirs")
    assert (await bucket.list())["c"].value == b"theirs"
    await nats_bucket.delete("v1.things.a.b")
    assert await bucket.get("a/b") is None


async def test_natss_own_client_sees_locks_and_breaks_them(
    nats_store: NatsStore, nats_bucket: KeyValue
) -> None:
    locks = locks_of(nats_store)
    with pytest.raises(LockLost):
        async with await locks.write_lock_with_wait("models/llama") as lock:
            keys = await nats_bucket.keys()
            assert "v1.models.llama.writer" in keys
            (lease,) = (each for each in keys if each.startswith("=lease."))
            assert lock.is_held
            await nats_bucket.delete(lease)
            await eventually(lambda: not lock.is_held)
    await nats_bucket.put("v1.models.llama.writer", b"an operator")
    assert await locks.try_read_lock("models/llama") is None
    await nats_bucket.delete("v1.models.llama.writer")
    async with await locks.read_lock_with_wait("models/llama", 10.0) as lock:
        assert lock.is_held
