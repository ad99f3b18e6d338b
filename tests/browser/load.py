"""Streams chats to a frontend, in waves, until it is ended: ``python -m tests.browser.load URL [PER_S]``."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence

import aiohttp

from tests.e2e.deployment import MODEL

PERIOD_S = 160.0
"""Seconds from one wave to the next."""


async def main(arguments: Sequence[str]) -> None:
    url, rate = arguments[0], float(arguments[1]) if len(arguments) > 1 else 2.0
    begun_s, tasks = time.monotonic(), set[asyncio.Task[None]]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(10**9):
            wave = 1 - math.cos(2 * math.pi * (time.monotonic() - begun_s) / PERIOD_S)
            await asyncio.sleep(random.expovariate(rate * (0.3 + wave)))
            task = asyncio.create_task(chat(session, url, number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def chat(session: aiohttp.ClientSession, url: str, number: int) -> None:
    words = "word " * random.randint(200, 1400)
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": random.randint(60, 260),
        "messages": [{"role": "user", "content": f"{number} {words}"}],
    }
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            async for _ in response.content.iter_any():
                pass
    except aiohttp.ClientError:
        pass  # the deployment ends, or a test ends its frontend


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
