"""The runtime of Dynamo 1.6.1 in a process of its own: ``python dynamo_runtime.py COMMAND ARGUMENT``.

Needs ``ai-dynamo-runtime`` and ``ETCD_ENDPOINTS``; imports nothing of dynaplan. Each command prints one line
of JSON. ``list ns.component.endpoint`` tells the instances that its client sees there, and what calling the
first one ends with; ``card JSON`` what its reader makes of a model card; ``serve ns.component.endpoint``
registers an instance, and keeps it until this process is killed. ``decide ns`` is a planner's coordinator:
for each line ``PREFILL DECODE`` of its input it decides that, and tells its state. ``carry ns`` carries one
decision out, tells it, and keeps its acknowledgement, which is under its lease, until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo import _core  # type: ignore[import-not-found]

LOOK_S = 1.0


def runtime() -> Any:
    return _core.DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="zmq")


async def list_instances(place: str) -> None:
    joined = runtime()
    client = await joined.endpoint(place).client()
    await asyncio.sleep(LOOK_S)
    found = [(each.instance_id, each.transport.kind, each.transport.address) for each in client.instances()]
    try:
        await client.direct({}, found[0][0])
        outcome = "answered"
    except Exception as error:
        outcome = str(error)
    print(json.dumps({"ids": client.instance_ids(), "instances": found, "called": outcome}), flush=True)
    joined.shutdown()


async def serve(place: str) -> None:
    async def handler(request: object) -> AsyncIterator[object]:
        yield request

    joined = runtime()
    serving = asyncio.ensure_future(joined.endpoint(place).serve_endpoint(handler))
    print(json.dumps("serving"), flush=True)
    await serving


async def decide(namespace: str) -> None:
    joined = runtime()
    coordinator = _core.VirtualConnectorCoordinator(joined, namespace, 1, 60, 60)
    await coordinator.async_init()
    while line := await asyncio.to_thread(sys.stdin.readline):
        await coordinator.update_scaling_decision(*map(int, line.split()))
        print(json.dumps(_numbers(coordinator.read_state())), flush=True)
    joined.shutdown()


async def carry(namespace: str) -> None:
    joined = runtime()
    client = _core.VirtualConnectorClient(joined, namespace)
    await client.wait()
    decision = await client.get()
    await client.complete(decision)
    print(json.dumps(_numbers(decision)), flush=True)
    await asyncio.Event().wait()


def _numbers(decision: Any) -> list[int]:
    return [decision.num_prefill_workers, decision.num_decode_workers, decision.decision_id]


COMMANDS = {"list": list_instances, "serve": serve, "decide": decide, "carry": carry}


def main(command: str, argument: str) -> None:
    if command == "card":
        print(_core.ModelDeploymentCard.from_json_str(argument).to_json_str(), flush=True)
        return
    asyncio.run(COMMANDS[command](argument))


if __name__ == "__main__":
    main(*sys.argv[1:])
