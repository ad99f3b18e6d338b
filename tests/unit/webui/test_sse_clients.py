"""The pages of a frontend and the one process that polls for them."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

from dynaplan.process.helper import HelperFailed
from dynaplan.webui.charts import ChartsRequest
from dynaplan.webui.sse_clients import TROUBLE, SseClients

CHARTS = ChartsRequest(900, 1000)


class FakeFeed:
    """A helper process: ``end`` takes a while, as that of a real one does, and it fails when told to."""

    def __init__(self) -> None:
        self.fails = False
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def ask(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        if self.fails:
            raise HelperFailed("it has ended")
        return {"events": [("look", "{}")]}, b""

    async def end(self) -> None:
        await self.may_end.wait()


async def test_a_page_that_is_opened_while_polling_ends_gets_its_events() -> None:
    feed = FakeFeed()
    clients = SseClients(feed, linger_s=0.0)
    async with aclosing(clients.watch(CHARTS)) as first:
        assert await anext(first) == ("look", "{}")
        feed.may_end.clear()
    await asyncio.sleep(0.01)  # the timer of 0 s has cancelled the polling, which waits for the process' end
    async with aclosing(clients.watch(CHARTS)) as second:
        waiting = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        feed.may_end.set()
        async with asyncio.timeout(10):
            assert await waiting == ("look", "{}")
    await clients.close()


async def test_trouble_that_is_over_is_not_shown_to_a_page_that_is_opened_later() -> None:
    feed = FakeFeed()
    feed.fails = True
    clients = SseClients(feed, retry_s=0.0)
    async with aclosing(clients.watch(CHARTS)) as first:
        event, text = await anext(first)
        assert event == TROUBLE
        assert "has ended" in json.loads(text)
        feed.fails = False
        async with asyncio.timeout(10):
            while event != "look":
                event, _ = await anext(first)
            async with aclosing(clients.watch(CHARTS)) as second:
                events = [await anext(second), await anext(second)]
    assert dict(events)[TROUBLE] == '""'
    await clients.close()
