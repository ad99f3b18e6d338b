"""What the key-value store in NATS promises beyond every store's contract, and who else reads it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats as nats_py
import pytest
from nats import errors
from nats.aio.client import Client
from nats.js.kv import KeyValue as Bucket

from dynaplan.store import nats_connection
from dynaplan.store.model import Deleted, Snapshot, Transaction
from dynaplan.store.nats_connection import NatsConnection
from dynaplan.store.nats_store import NatsStore
from dynaplan.util.errors import PermanentError, QueueUnavailable, StoreUnavailable
from tests.contract.stores import Watched
from tests.fakes.polling import consistently, eventually
from tests.fakes.servers import Server, start_nats


@pytest.fixture
def store(nats_store: NatsStore) -> NatsStore:
    """A store on a server of its own, to be killed."""
    return nats_store


@pytest.fixture
async def other(nats: Server) -> AsyncIterator[NatsStore]:
    """Another process' store on the same server."""
    other = NatsStore.from_environment(nats.environment)
    yield other
    await other.close()


@pytest.fixture
async def watch(store: NatsStore) -> AsyncIterator[Watched]:
    watched = Watched(store, "watched/")
    yield watched


@pytest.fixture
def bucket(nats_bucket: Bucket) -> Bucket:
    return nats_bucket


async def test_a_watch_that_begins_while_the_process_lags_behind_waits_for_what_is_written(
    store: NatsStore, other: NatsStore, watch: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watch.started()
    follower, held = store._follower, []
    take = follower._apply_message
    monkeypatch.setattr(follower, "_apply_message", held.append)
    await other.put("later", "1")
    later = Watched(store, "later")
    await consistently(lambda: not later.events, 0.2)
    monkeypatch.setattr(follower, "_apply_message", take)
    for message in held:
        take(message)
    await later.reaches({"later": "1"})
    (event,) = later.events
    assert isinstance(event, Snapshot)


async def test_a_watch_begins_when_the_server_is_back(store: NatsStore, nats: Server, watch: Watched) -> None:
    await watch.started()
    await store.put("later", "1")
    nats.kill()
    later = Watched(store, "later")
    await consistently(lambda: not later.events, 0.2)
    await nats.start_again()
    await later.reaches({"later": "1"})


async def test_a_watch_goes_on_after_an_error_of_the_server_on_which_nats_py_closes_for_good(
    store: NatsStore, other: NatsStore, watch: Watched
) -> None:
    await watch.started()
    client = store._bucket.connection._client
    assert client is not None
    client._transport.write(b"NONSENSE\r\n")
    await eventually(lambda: client.is_closed)
    await other.put("watched/k", "v")
    await watch.reaches({"watched/k": "v"})


async def test_a_bug_while_following_ends_the_watches_with_its_error(
    store: NatsStore, other: NatsStore, watch: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watch.started()

    def fail(_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(store._follower, "_apply_message", fail)
    await other.put("watched/k", "v")
    await eventually(lambda: watch.task.done())
    with pytest.raises(ValueError, match="a bug"):
        watch.task.result()


# Who else reads and writes it


async def test_natss_own_client_reads_keys_by_their_documented_names(
    store: NatsStore, bucket: Bucket
) -> None:
    await store.put("v1/box/planner/decision_id", "7")
    await store.put("/services/box/Worker/generate/1f", "{}")
    await store.put("v1/vllm-agg.2/Größe: 1", "✓")
    assert (await bucket.get("v1.box.planner.decision_id")).value == b"7"
    assert (await bucket.get("=.services.box.Worker.generate.1f")).value == b"{}"
    assert (await bucket.get("v1.vllm-agg=2E2.Gr=C3=B6=C3=9Fe=3A=201")).value == "✓".encode()


async def test_what_natss_own_client_writes_is_read_and_watched(
    store: NatsStore, bucket: Bucket, watch: Watched
) -> None:
    await watch.started()
    await bucket.put("watched.a", b"1")
    await watch.reaches({"watched/a": "1"})
    item = await store.get("watched/a")
    assert item is not None
    assert (item.value, item.lease) == ("1", 0)
    await bucket.update("watched.a", b"2", last=item.revision)
    await watch.reaches({"watched/a": "2"})
    assert not await store.commit(Transaction({"watched/a": item.revision}, {"watched/a": "mine"}))
    await bucket.delete("watched.a")
    await watch.reaches({})
    assert await store.get("watched/a") is None
    assert await store.commit(Transaction({"watched/a": 0}, {"watched/a": "3"}))
    await watch.reaches({"watched/a": "3"})
    await bucket.purge("watched.a")
    await watch.reaches({})


async def test_natss_own_client_sees_deleted_keys_as_deleted(store: NatsStore, bucket: Bucket) -> None:
    await store.put("k", "1")
    await store.delete("k")
    with pytest.raises(nats_py.js.errors.KeyNotFoundError):
        await bucket.get("k")
    await bucket.create("k", b"2")
    item = await store.get("k")
    assert item is not None
    assert item.value == "2"


async def test_the_keys_of_an_ended_lease_are_cleared_away_for_other_clients(
    store: NatsStore, bucket: Bucket, watch: Watched
) -> None:
    await watch.started()
    lease = await store.grant(10)
    await store.put("watched/k", "v", lease)
    await store.put("watched/k2", "v", lease)
    assert (await bucket.get("watched.k")).value == b"v"
    await store.revoke(lease)

    async def are_gone() -> bool:
        try:
            names = await bucket.keys()
        except nats_py.js.errors.NoKeysError:  # the store's own keys, of the lease, are gone as well
            return True
        return not [name for name in names if name.startswith("watched")]

    await eventually(are_gone)
    assert watch.state == {}
    assert watch.snapshots == 1


async def test_names_that_are_no_keys_are_passed_over(store: NatsStore, bucket: Bucket) -> None:
    await bucket.put("a/b", b"not our form")
    await bucket.put("a=2f", b"nor this")
    await store.put("k", "v")
    assert [item.key for item in await store.list("")] == ["k"]


async def test_what_is_too_long_for_nats_is_refused_for_good_and_harms_nothing(store: NatsStore) -> None:
    with pytest.raises(PermanentError, match="longer"):
        await store.put("k" * 4000, "v")
    with pytest.raises(PermanentError):
        await store.put("k", "x" * 9_000_000)
    await store.put("k", "v")
    assert await store.get("k") is not None


# Transactions and leases


async def test_the_keys_of_a_lease_end_in_the_order_in_which_they_were_written(
    store: NatsStore, watch: Watched
) -> None:
    await watch.started()
    lease = await store.grant(10)
    keys = ["watched/b", "watched/a", "watched/c"]
    for key in keys:
        await store.put(key, "v", lease)
    await store.put("watched/a", "w", lease)
    await store.revoke(lease)
    await eventually(lambda: len(watch.events) == 8)
    assert watch.events[5:] == [Deleted("watched/b"), Deleted("watched/c"), Deleted("watched/a")]


async def test_a_writer_killed_in_the_middle_of_a_transaction_has_written_nothing(
    nats: Server, store: NatsStore, watch: Watched
) -> None:
    await store.put("watched/a", "0")
    await watch.started()
    environment = nats.environment
    killed = await nats_py.connect(environment["NATS_SERVER"], token=environment["NATS_AUTH_TOKEN"])
    headers = {"Nats-Batch-Id": "unfinished", "Nats-Batch-Sequence": "1"}
    await killed.request("$KV.dynaplan.watched.a", b"1", headers=headers)
    await killed.close()
    assert await store.commit(Transaction(puts={"watched/b": "2", "watched/c": "2"}))
    await watch.reaches({"watched/a": "0", "watched/b": "2", "watched/c": "2"})
    item = await store.get("watched/a")
    assert item is not None
    assert item.value == "0"


async def test_a_lease_that_the_server_ends_before_its_time_was_not_revoked(
    store: NatsStore, other: NatsStore, bucket: Bucket
) -> None:
    await store.identity()
    lease = await store.grant(2)
    await bucket._js.purge_stream("KV_dynaplan", subject=f"$KV.dynaplan.=lease.{lease:x}")
    with pytest.raises(StoreUnavailable, match="before its time"):
        await store.keep_alive(lease)

    async def has_lapsed() -> bool:
        try:
            return await store.keep_alive(lease) == 0.0
        except StoreUnavailable:
            return False

    await eventually(has_lapsed)


async def test_what_is_known_of_a_lease_is_forgotten_with_it(store: NatsStore, other: NatsStore) -> None:
    own, ended_by_another = await store.grant(10), await store.grant(10)
    await store.revoke(own)
    await other.revoke(ended_by_another)
    assert await store.keep_alive(ended_by_another) == 0.0
    assert store._renewals == {}


async def test_a_bucket_that_is_deleted_is_made_again(nats: Server, store: NatsStore, bucket: Bucket) -> None:
    await store.put("k", "v")
    identity = await store.identity()
    await bucket._js.delete_key_value("dynaplan")
    assert await store.get("k") is None
    assert await store.identity() != identity


async def test_a_bucket_is_made_again_while_the_files_of_the_deleted_one_are_still_in_the_way(
    nats: Server, store: NatsStore, bucket: Bucket, runtime_dir: Path
) -> None:
    await store.put("k", "v")
    streams = _streams(runtime_dir)
    await bucket._js.delete_key_value("dynaplan")
    _put_a_file_in_place_of(streams)
    assert await store.get("k") is None


def _streams(runtime_dir: Path) -> Path:
    (stream,) = runtime_dir.rglob("KV_dynaplan")
    return stream.parent


def _put_a_file_in_place_of(streams: Path) -> None:
    """The server fails once to create a stream then, as while it removes files, and clears the place."""
    streams.rename(streams.with_name("removed"))
    streams.write_text("")


async def test_a_bucket_that_somebody_has_made_is_given_what_it_lacks(nats: Server, store: NatsStore) -> None:
    environment = nats.environment
    client = await nats_py.connect(environment["NATS_SERVER"], token=environment["NATS_AUTH_TOKEN"])
    theirs = await client.jetstream().create_key_value(bucket="dynaplan", description="theirs")
    await theirs.put("k", b"theirs")
    lease = await store.grant(10)
    await store.put("leased", "v", lease)
    assert [item.key for item in await store.list("")] == ["k", "leased"]
    assert await store.commit(Transaction({"k2": 0}, {"k1": "1", "k2": "2"}))
    assert (await theirs.status()).stream_info.config.description == "theirs"
    await client.close()


# What is not a store


@pytest.fixture
def plain_nats(runtime_dir: Path) -> Iterator[Server]:
    """A server without JetStream."""
    server = start_nats(runtime_dir)
    server.kill()
    config = runtime_dir / "nats" / "nats.conf"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith("jetstream")))
    server.spawn()
    yield server
    server.kill()


async def test_a_server_without_jetstream_is_refused_with_one_sentence(plain_nats: Server) -> None:
    store = NatsStore.from_environment(plain_nats.environment)
    refused = await eventually(lambda: _refusal(store))
    assert "no JetStream" in refused
    with pytest.raises(PermanentError, match="no JetStream"):
        async for _ in store.watch(""):
            pass
    await store.close()


async def test_a_wrong_token_is_refused(nats: Server) -> None:
    store = NatsStore.from_environment({**nats.environment, "NATS_AUTH_TOKEN": "guess"})
    assert "uthorization" in await _refusal(store)
    with pytest.raises(PermanentError, match="uthorization"):
        async for _ in store.watch(""):
            pass
    await store.close()


async def _refusal(store: NatsStore) -> str:
    try:
        await store.get("k")
    except StoreUnavailable:
        return ""
    except PermanentError as error:
        return str(error)
    return ""


async def test_a_connect_that_takes_too_long_ends_also_when_a_refusal_comes_with_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nats-py waits by ``wait_for``, which loses such a cancellation in Python 3.11, and tries again."""
    monkeypatch.setattr(nats_connection, "NATS_CONNECT_TIMEOUT_S", 0.05)
    attempts = itertools.count()

    async def refused_at_the_end(*_: Any) -> None:
        is_first = next(attempts) == 0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not is_first:
                raise
        raise ConnectionRefusedError

    monkeypatch.setattr(Client, "_connect_to_server", refused_at_the_end)
    connecting = asyncio.create_task(NatsConnection.from_environment({"NATS_SERVER": "nats://127.0.0.1:1"}))
    await asyncio.wait({connecting}, timeout=5)
    assert connecting.done()
    with pytest.raises(QueueUnavailable, match="cannot be connected to"):
        connecting.result()


async def test_a_close_that_is_cancelled_has_ended_the_connection(
    nats: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await NatsConnection.from_environment(nats.environment)
    is_waiting = asyncio.Event()

    async def unanswered(*_: Any, **__: Any) -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(connection, "_round_trip", unanswered)
    closing = asyncio.create_task(connection.close())
    await is_waiting.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not connection.is_connected


@pytest.mark.parametrize("error", [None, errors.TimeoutError()], ids=["answer", "error"])
async def test_a_call_that_is_cancelled_as_its_answer_comes_ends_its_task(
    nats: Server, error: Exception | None
) -> None:
    """nats-py waits by ``wait_for``, which loses such a cancellation in Python 3.11."""
    connection = await NatsConnection.from_environment(nats.environment)
    loop = asyncio.get_running_loop()

    async def ask() -> None:
        async with connection.call():
            answer: asyncio.Future[None] = loop.create_future()
            end = partial(answer.set_exception, error) if error else partial(answer.set_result, None)
            loop.call_soon(end)
            loop.call_soon(asking.cancel)
            await asyncio.wait_for(answer, 5)

    asking = asyncio.create_task(ask())
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert asking.cancelled()
    await connection.close()
