"""The runtime of Dynamo 1.6.1 in a process of its own: ``python dynamo_runtime.py COMMAND ARGUMENT``.

Needs ``ai-dynamo-runtime`` and ``ETCD_ENDPOINTS``; imports nothing of dynaplan. Each command prints one line
of JSON. ``list ns.component.endpoint`` tells the instances that its client sees there, and what calling the
first one ends with; ``card JSON`` what its reader makes of a model card; ``serve ns.component.endpoint``
registers an instance, and keeps it until this process is killed.
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


def main(command: str, argument: str) -> None:
    if command == "card":
        print(_core.ModelDeploymentCard.from_json_str(argument).to_json_str(), flush=True)
        return
    asyncio.run(serve(argument) if command == "serve" else list_instances(argument))


if __name__ == "__main__":
    main(*sys.argv[1:])
