"""The public port's routes: requests that come at once do not hold the loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.gateway.admission import Admission
from dynaplan.gateway.reports import CANCELLED
from dynaplan.gateway.routes import MAX_STARTS_A_TURN, FrontendRoutes
from dynaplan.http.messages import Headers, Request, Response

CONNECTION = SimpleNamespace(write=None)
CHAT = Request(
    "POST",
    "/v1/chat/completions",
    "/v1/chat/completions",
    Headers(()),
    cast(Any, None),
    cast(Any, CONNECTION),
    "",
)


class CountingPath:
    """Counts the answers that begin in each turn of the loop."""

    def __init__(self) -> None:
        self.admission = Admission(FrontendSettings())
        self.turn = 0
        self.begun: Counter[int] = Counter()
        self.refused: list[tuple[object, ...]] = []
        self.reports = SimpleNamespace(refuse=lambda *request: self.refused.append(request))

    async def answer(self, client: object, endpoint: object) -> None:
        self.begun[self.turn] += 1


async def answer(routes: FrontendRoutes) -> Response | None:
    """Answer the request in a task of its own, as the server does."""
    return await routes.handle(CHAT)


async def test_of_requests_that_come_at_once_some_begin_in_each_turn_of_the_loop_in_their_order() -> None:
    path = CountingPath()
    routes = FrontendRoutes(cast(Any, path), cast(Any, None))
    requests = asyncio.gather(*(answer(routes) for _ in range(100)))
    while not requests.done():
        await asyncio.sleep(0)
        path.turn += 1
    assert path.begun.total() == 100
    assert max(path.begun.values()) <= MAX_STARTS_A_TURN
    assert len(path.begun) < 10


async def test_a_request_whose_client_leaves_while_it_waits_to_begin_keeps_no_other_from_it() -> None:
    path = CountingPath()
    routes = FrontendRoutes(cast(Any, path), cast(Any, None))
    tasks = [asyncio.ensure_future(answer(routes)) for _ in range(3 * MAX_STARTS_A_TURN)]
    await asyncio.sleep(0)
    for each in tasks[MAX_STARTS_A_TURN : 2 * MAX_STARTS_A_TURN]:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert path.begun.total() == 2 * MAX_STARTS_A_TURN
    assert [error_type for _, _, error_type, _ in path.refused] == MAX_STARTS_A_TURN * [CANCELLED]
