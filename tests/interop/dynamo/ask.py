"""A program written against the original's runtime: asks the chain, and prints answers as lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dynamo.runtime import DistributedRuntime, dynamo_worker


def show(name: str, answer: Any) -> None:
    print(json.dumps([name, answer], sort_keys=True), flush=True)


async def collected(answer: AsyncIterator[Any]) -> list[Any]:
    """The items, and at the end the error's type, if there is one: the texts of the two systems differ."""
    items: list[Any] = []
    try:
        async for item in answer:
            items.append(item.data())
    except ValueError as error:
        items.append([type(error).__name__, "broken on purpose" in str(error), "no instances" in str(error)])
    return items


async def ask(name: str, call: Callable[[], Awaitable[AsyncIterator[Any]]]) -> None:
    """Show the answer. The original's clients, new ones for each call, find no instance now and then."""
    for _ in range(100):
        items = await collected(await call())
        if not (items and items[-1] == ["ValueError", False, True]):
            break
        await asyncio.sleep(0.1)
    show(name, items)


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    namespace = runtime.namespace("interop")
    front = await namespace.component("Front").endpoint("generate").client()
    ids = await front.wait_for_instances()
    show("ids", [len(ids), front.instance_ids() == ids])
    await ask("round robin", lambda: front.round_robin({"text": "a", "times": 2}))
    await ask("generate", lambda: front.generate({"text": "g"}))
    await ask("random", lambda: front.random({"text": "r"}))
    await ask("direct", lambda: front.direct({"text": "d"}, ids[0]))
    await ask("text", lambda: front.round_robin(json.dumps({"text": "t"})))
    broken = await namespace.component("Backend").endpoint("broken").client()
    await broken.wait_for_instances()
    await ask("broken", lambda: broken.round_robin({"text": "x"}))
    await ask("misfit", lambda: broken.round_robin({"txt": "x"}))


if __name__ == "__main__":
    asyncio.run(main())
