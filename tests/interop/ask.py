"""Asks the chain as ``dynamo/ask.py`` does, by dynaplan's own API, and prints answers as lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import dynaplan.runtime
from dynaplan.util.errors import DynaplanError


def show(name: str, answer: Any) -> None:
    print(json.dumps([name, answer], sort_keys=True), flush=True)


async def ask(name: str, answer: AsyncIterator[Any]) -> None:
    """Show the items, and at the end an error as with Dynamo, where every error is a ValueError."""
    items: list[Any] = []
    try:
        async for item in answer:
            items.append(item)
    except DynaplanError as error:
        items.append(["ValueError", "broken on purpose" in str(error), "no instances" in str(error)])
    show(name, items)


async def main() -> None:
    async with dynaplan.runtime.connect() as runtime:
        namespace = runtime.namespace("interop")
        front = await namespace.component("Front").endpoint("generate").client()
        ids = list(await front.wait_for_instances())
        show("ids", [len(ids), list(front.instance_ids()) == ids])
        await ask("round robin", front.round_robin({"text": "a", "times": 2}))
        await ask("generate", front.random({"text": "g"}))
        await ask("random", front.random({"text": "r"}))
        await ask("direct", front.direct({"text": "d"}, ids[0]))
        await ask("text", front.round_robin(json.dumps({"text": "t"})))
        broken = await namespace.component("Backend").endpoint("broken").client()
        await broken.wait_for_instances()
        await ask("broken", broken.round_robin({"text": "x"}))
        await ask("misfit", broken.round_robin({"txt": "x"}))


if __name__ == "__main__":
    asyncio.run(main())
