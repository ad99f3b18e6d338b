"""What ``status`` says of routing: who is told of and who is predicted, and why."""

from __future__ import annotations

from aiohttp import web
from aiohttp.test_utils import TestServer

from dynaplan.cli.watching.routing import routing, routing_lines
from dynaplan.store.instances import PUBLIC_URL, Instance
from dynaplan.util.http_routes import ROUTING_PATH


def test_workers_that_tell_are_named_together_and_others_with_the_reason() -> None:
    known = {
        "w1": {"f": "events", "g": "events"},
        "w0": {"f": "events"},
        "w2": {"f": "prediction: no tokens", "g": "prediction: no tokens"},
        "w3": {"f": "events", "g": "prediction: events are missing"},
    }
    assert routing_lines(known) == [
        "routed by what its engine says it has cached: w0, w1",
        "w2 is routed by prediction: no tokens",
        "w3 is routed by events (at f); prediction: events are missing (at g)",
    ]


def test_other_modes_say_nothing() -> None:
    assert routing_lines({}) == []


async def test_frontends_are_asked_and_silent_ones_left_out() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"w1": "events"})

    application = web.Application()
    application.router.add_get(ROUTING_PATH, answer)
    async with TestServer(application) as server:
        card = {PUBLIC_URL: "http://127.0.0.1:1"}
        url = str(server.make_url("")).rstrip("/")
        instances = [
            Instance("ns", "Frontend", "generate", 1, url, "f", card=card),
            Instance("ns", "Frontend", "generate", 2, "http://127.0.0.1:9", "g", card=card),
            Instance("ns", "VllmWorker", "generate", 3, "http://127.0.0.1:9", "w1"),
        ]
        assert await routing(instances) == {"w1": {"f": "events"}}
