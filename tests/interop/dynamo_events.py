"""The event plane of ``ai-dynamo-runtime`` in a process of its own.

``python dynamo_events.py publish|subscribe NAMESPACE`` publishes KV events until its input ends, or
prints the forward-pass metrics that it hears, in hex, a line each.
"""

import asyncio
import sys

from dynamo._core import DistributedRuntime, FpmEventSubscriber, KvEventPublisher


async def publish(runtime: DistributedRuntime, namespace: str) -> None:
    endpoint = runtime.endpoint(f"{namespace}.backend.generate")
    publisher = KvEventPublisher(endpoint, worker_id=7, kv_block_size=4)
    block = 11
    while True:
        publisher.publish_stored([1, 2, 3, 4], [4], [block])
        block += 1
        await asyncio.sleep(0.1)


async def subscribe(runtime: DistributedRuntime, namespace: str) -> None:
    subscriber = FpmEventSubscriber(runtime.endpoint(f"{namespace}.backend.generate"))
    while True:
        print((await asyncio.to_thread(subscriber.recv)).hex(), flush=True)


async def main(what: str, namespace: str) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="nats")
    await {"publish": publish, "subscribe": subscribe}[what](runtime, namespace)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
