"""The worker's HTTP server and the client that calls it, over real sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from dynaplan.http.client import HttpClient
from dynaplan.http.limits import ConnectionLimits
from dynaplan.http.messages import Request, Response
from dynaplan.http.routes import Route
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.errors import PermanentError, RequestRefused, TemporaryError
from dynaplan.util.sockets import bound_socket
from dynaplan.worker.endpoints import ServedEndpoint, internal_route, public_route
from dynaplan.worker.hosting import DependencyClient
from dynaplan.worker.server import DRAINING_HEADER, WORKER_LIMITS, WorkerServer
from tests.fakes.polling import PATIENCE_S, eventually, lasting
from tests.fakes.store import FakeStore

TOKEN = "secret"


@dataclass
class Question:
    text: str


class Backend:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.was_cancelled = False

    async def generate(self, question: Question) -> AsyncIterator[str]:
        for word in question.text.split():
            yield word

    async def slow(self, _: Any) -> AsyncIterator[int]:
        try:
            yield 1
            await self.gate.wait()
            yield 2
        except (asyncio.CancelledError, GeneratorExit):
            self.was_cancelled = True
            raise

    async def plain(self, number: int) -> dict[str, int]:
        return {"number": number + 1}

    async def broken(self, after: int) -> AsyncIterator[int]:
        for number in range(after):
            yield number
        raise ValueError("broken")

    async def large(self, size: int) -> AsyncIterator[str]:
        yield "x" * size


class Plant:
    """Servers of one service, registered in a fake store, and a client for them."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.discovery = Discovery(self.store, "ns")
        self.http = HttpClient(TOKEN)
        self.session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
        self.servers: list[WorkerServer] = []
        self.client = DependencyClient(
            "Backend",
            ("generate", "slow", "plain", "broken", "large"),
            self.discovery,
            self.http,
            find_instance_s=0.5,
        )

    async def add(self, backend: Backend, routes: tuple[Route, ...] = ()) -> WorkerServer:
        server = WorkerServer(bound_socket("127.0.0.1", 0), TOKEN)
        endpoints = [
            ServedEndpoint(name, getattr(backend, name), Question if name == "generate" else None)
            for name in ("generate", "slow", "plain", "broken", "large")
        ]
        await server.start([*map(internal_route, endpoints), *routes])
        self.servers.append(server)
        await self.register(server.url)
        return server

    async def register(self, url: str) -> None:
        number = len(self.discovery.all()) + 1
        for name in ("generate", "slow", "plain", "broken", "large"):
            instance = Instance("ns", "Backend", name, number, url)
            await self.store.put(instance.key, instance.to_json())
        await eventually(lambda: len(self.discovery.instances("Backend", "large")) >= 1)


@pytest.fixture
async def plant() -> AsyncIterator[Plant]:
    made = Plant()
    await made.discovery.start()
    yield made
    await made.http.close()
    await made.session.close()
    for server in made.servers:
        await server.stop()
    await made.discovery.close()


async def collected(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_a_generator_streams_its_items_and_a_plain_result_is_one_item(plant: Plant) -> None:
    await plant.add(Backend())
    assert await collected(plant.client.generate({"text": "a b"})) == ["a", "b"]
    assert await collected(plant.client.generate(Question("c"))) == ["c"]
    assert await collected(plant.client.generate(Question(""))) == []
    assert await collected(plant.client.plain(1)) == [{"number": 2}]


async def test_an_item_may_be_of_any_size(plant: Plant) -> None:
    await plant.add(Backend())
    assert await collected(plant.client.large(3_000_000)) == ["x" * 3_000_000]


async def test_an_error_before_the_first_item_is_a_status_and_later_a_last_line(plant: Plant) -> None:
    await plant.add(Backend())
    with pytest.raises(PermanentError, match="broken"):
        await collected(plant.client.broken(0))
    seen = []
    with pytest.raises(PermanentError, match="ValueError: broken"):
        async for item in plant.client.broken(2):
            seen.append(item)
    assert seen == [0, 1]


async def test_a_request_that_does_not_fit_is_answered_400(plant: Plant) -> None:
    server = await plant.add(Backend())
    for body in (b"{", b'{"wrong": 1}'):
        async with plant.session.post(f"{server.url}/generate", data=body) as response:
            assert response.status == 400
            assert "error" in await response.json()


@pytest.mark.parametrize(
    ("body", "charset", "status"),
    [
        (b'"\xff"', "utf-8", 400),
        (b"1", "nonsense", 400),
        (b"[" * 200_000, "utf-8", 400),
        (b'"' + b"x" * 300_000 + b'"', "utf-8", 413),
    ],
)
async def test_a_body_that_cannot_be_read_is_the_clients_fault(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, body: bytes, charset: str, status: int
) -> None:
    monkeypatch.setattr("dynaplan.http.messages.MAX_BODY_BYTES", 250_000)
    server = await plant.add(Backend())
    headers = {"Content-Type": f"application/json; charset={charset}"}
    async with plant.session.post(f"{server.url}/plain", data=body, headers=headers) as response:
        assert response.status == status
        assert (await response.json())["error"].startswith("the request ")


async def test_a_request_that_is_too_large_is_refused_for_good(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynaplan.http.messages.MAX_BODY_BYTES", 1000)
    await plant.add(Backend())
    with pytest.raises(RequestRefused, match="larger than 1000 bytes") as raised:
        await collected(plant.client.plain("x" * 2000))
    assert raised.value.status == 413


async def test_a_request_that_a_dependency_refuses_is_the_clients_fault_too(plant: Plant) -> None:
    """A missing field is answered 400 by the service that is asked, wherever it is missed."""
    await plant.add(Backend())

    async def ask(request: Any) -> AsyncIterator[str]:
        async for word in plant.client.generate(request):
            yield word

    front = WorkerServer(bound_socket("127.0.0.1", 0), TOKEN)
    await front.start([public_route(ServedEndpoint("ask", ask))])
    plant.servers.append(front)
    async with plant.session.post(f"{front.url}/ask", json={"txt": "hi"}) as response:
        assert response.status == 400
        assert "Backend.generate: the request does not fit generate" in (await response.json())["error"]


async def test_an_unknown_endpoint_names_those_that_exist(plant: Plant) -> None:
    with pytest.raises(AttributeError) as caught:
        plant.client.nothing({})
    assert str(caught.value) == (
        "No Dynamo endpoint 'nothing' found on service 'Backend'. "
        "Available endpoints: ['generate', 'slow', 'plain', 'broken', 'large']"
    )


async def test_without_the_token_only_open_routes_answer(plant: Plant) -> None:
    async def hello(_: Request) -> Response:
        return Response.text("hello")

    open_route = Route("GET", "/health", hello, is_open=True, is_work=False)
    server = await plant.add(Backend(), (open_route, Route("GET", "/kv", hello, is_work=False)))
    async with aiohttp.ClientSession() as anybody:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for call in (
                anybody.post(f"{server.url}/plain", json=1, headers=headers),
                anybody.get(f"{server.url}/kv"),
            ):
                async with call as response:
                    assert response.status == 401
        async with anybody.get(f"{server.url}/health") as response:
            assert response.status == 200


async def test_a_draining_instance_refuses_and_the_call_goes_to_another(plant: Plant) -> None:
    leaving = await plant.add(Backend())
    await plant.add(Backend())
    await leaving.drain()
    async with plant.session.post(f"{leaving.url}/plain", json=1) as response:
        assert response.status == 503
        assert response.headers[DRAINING_HEADER] == "1"
    for _ in range(4):
        assert await collected(plant.client.plain(1)) == [{"number": 2}]


async def test_a_draining_server_still_serves_what_finishing_needs(plant: Plant) -> None:
    async def take(request: Request) -> Response:
        return Response.text(request.fields["id"])

    server = await plant.add(Backend(), (Route("POST", "/kv/{id}/take", take, is_work=False),))
    await server.drain()
    async with plant.session.post(f"{server.url}/kv/7/take") as response:
        assert (response.status, await response.text()) == (200, "7")


async def test_work_that_somebody_else_counts_is_not_in_flight_here_and_is_refused_by_who_drains(
    plant: Plant,
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_: Request) -> Response:
        begun.set()
        await go_on.wait()
        return Response.text("")

    server = await plant.add(Backend(), (Route("POST", "/reserve", wait, is_counted=False),))

    async def reserve() -> int:
        async with plant.session.post(f"{server.url}/reserve") as response:
            return response.status

    waiting = asyncio.create_task(reserve())
    await asyncio.wait_for(begun.wait(), 5)
    assert server.in_flight.count == 0
    await server.drain()
    assert await reserve() == 503
    go_on.set()
    assert await waiting == 200


async def test_routes_can_be_added_while_it_serves(plant: Plant) -> None:
    async def take(request: Request) -> Response:
        return Response.text(request.fields["id"])

    server = await plant.add(Backend())
    async with plant.session.post(f"{server.url}/kv/a%2Fb/take") as response:
        assert response.status == 404
    server.add([Route("POST", "/kv/{id}/take", take)])
    async with plant.session.post(f"{server.url}/kv/a%2Fb/take") as response:
        assert await response.text() == "a/b"
    async with plant.session.get(f"{server.url}/kv/7/take") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"] == "/kv/7/take takes POST only"
    async with aiohttp.ClientSession() as anybody, anybody.post(f"{server.url}/kv/7/take") as response:
        assert response.status == 401


async def test_a_path_that_is_not_served_is_answered_with_those_that_are(plant: Plant) -> None:
    server = await plant.add(Backend())
    async with plant.session.post(f"{server.url}/plian") as response:
        assert "Did you mean '/plain'?" in (await response.json())["error"]
        assert len(response.headers["X-Request-Id"]) == 32
    async with plant.session.post(f"{server.url}/xyzzy") as response:
        assert "/plain" in (await response.json())["error"]
    async with aiohttp.ClientSession() as anybody, anybody.post(f"{server.url}/xyzzy") as response:
        assert response.status == 404
        assert "/plain" not in await response.text()


async def test_a_call_whose_instance_is_dead_goes_to_another(plant: Plant) -> None:
    unused = bound_socket("127.0.0.1", 0)
    await plant.register(f"http://127.0.0.1:{unused.getsockname()[1]}")
    await plant.add(Backend())
    await eventually(lambda: len(plant.discovery.instances("Backend", "large")) == 2)
    for _ in range(4):
        assert await collected(plant.client.plain(1)) == [{"number": 2}]
    unused.close()


async def test_a_connection_that_died_while_idle_fails_no_request(plant: Plant) -> None:
    server = await plant.add(Backend())
    assert await collected(plant.client.plain(1)) == [{"number": 2}]
    port = int(server.url.rpartition(":")[2])
    await server.stop()
    again = WorkerServer(bound_socket("127.0.0.1", port), TOKEN)
    plant.servers.append(again)
    await again.start([internal_route(ServedEndpoint("plain", Backend().plain))])
    assert await collected(plant.client.plain(1)) == [{"number": 2}]


async def test_an_instance_that_dies_in_the_middle_of_its_answer_is_an_error_and_not_a_short_answer(
    plant: Plant,
) -> None:
    server = await plant.add(Backend())
    seen = []
    with pytest.raises(TemporaryError, match="broke off"):
        async for item in plant.client.slow(0):
            seen.append(item)
            stopping = asyncio.create_task(server.stop())
    await stopping
    assert seen == [1]


async def test_a_request_is_in_flight_until_its_answer_is_sent(plant: Plant) -> None:
    backend = Backend()
    server = await plant.add(backend)
    answer = plant.client.slow(0)
    assert await anext(answer) == 1
    assert server.in_flight.count == 1
    backend.gate.set()
    assert await collected(answer) == [2]
    await asyncio.wait_for(server.in_flight.wait_idle(), 5)


async def test_a_client_that_leaves_cancels_the_endpoint(plant: Plant) -> None:
    backend = Backend()
    server = await plant.add(backend)
    answer = plant.client.slow(0)
    assert await anext(answer) == 1
    await answer.aclose()
    await asyncio.wait_for(server.in_flight.wait_idle(), 5)
    assert backend.was_cancelled


async def test_an_answer_that_the_client_reads_slowly_is_in_flight_until_it_is_sent(plant: Plant) -> None:
    async def big(_: Request) -> Response:
        return Response(200, {}, b"x" * 20_000_000)

    server = await plant.add(Backend(), (Route("GET", "/big", big),))
    async with plant.session.get(f"{server.url}/big") as response:
        assert server.in_flight.count == 1
        assert len(await response.read()) == 20_000_000
    await asyncio.wait_for(server.in_flight.wait_idle(), 5)


async def test_a_public_endpoint_streams_text_as_it_is_and_other_items_as_lines_of_json() -> None:
    async def mixed(_: Any) -> AsyncIterator[Any]:
        yield "Frontend: "
        yield {"a": 1}

    server = WorkerServer(bound_socket("127.0.0.1", 0, is_shared=True), "", ConnectionLimits())
    await server.start([public_route(ServedEndpoint("generate", mixed))])
    async with aiohttp.ClientSession() as user:
        async with user.post(f"{server.url}/generate", json={"text": "test"}) as response:
            assert await response.text() == 'Frontend: {"a":1}\n'
        await server.drain()
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as other:
                await other.post(f"{server.url}/generate", json={})
    await server.stop()


@asynccontextmanager
async def public_server(limits: ConnectionLimits) -> AsyncIterator[WorkerServer]:
    """A server of public endpoints, whose clients nobody knows."""
    server = WorkerServer(bound_socket("127.0.0.1", 0), "", limits)
    await server.start([public_route(ServedEndpoint("large", Backend().large))])
    try:
        yield server
    finally:
        await server.stop()


async def raw(server: WorkerServer, sent: bytes) -> bytes:
    """What a client that sends these bytes, and no more, is answered until its connection is closed."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


async def test_slow_headers_and_idle_connections_of_public_endpoints_are_ended(plant: Plant) -> None:
    async with public_server(ConnectionLimits(head_s=0.1)) as server:
        assert (await raw(server, b"POST /large HTTP/1.1\r\nHost:")).startswith(b"HTTP/1.1 408 ")
    async with public_server(ConnectionLimits(idle_s=0.1)) as server:
        head = b"POST /large HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        answer = await raw(server, head + b"Content-Length: 1\r\n\r\n5")
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"xxxxx" in answer
        async with plant.session.post(f"{server.url}/large", json=7) as response:
            assert await response.text() == "xxxxxxx"


async def test_a_head_in_two_parts_is_not_taken_for_a_slow_one_while_its_body_is_on_its_way() -> None:
    async with public_server(ConnectionLimits(head_s=0.1)) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        first, second = b"POST /large HTTP/1.1\r\nHost:", b" x\r\nContent-Type: application/json\r\n"
        for part in (first, second + b"Content-Length: 1\r\nConnection: close\r\n\r\n"):
            await lasting(0.05)
            writer.write(part)
        await lasting(0.3)
        writer.write(b"5")
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 200 OK")
        writer.close()


async def test_more_connections_to_public_endpoints_than_allowed_are_answered_503() -> None:
    async with public_server(ConnectionLimits(most=1, option="ulimit -n")) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        _, busy = await asyncio.open_connection(host, int(port))
        busy.write(b"POST /large HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1")
        await eventually(lambda: server.in_flight.count == 1)
        answer = await raw(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"no more may be (ulimit -n)" in answer
        busy.close()


async def test_a_workers_own_server_has_the_limits_of_public_ones_but_waits_for_slow_readers(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await plant.add(Backend())
    fields = b"".join(b"X%d: %s\r\n" % (number, b"x" * 1000) for number in range(70))
    assert (await raw(server, b"GET /health HTTP/1.1\r\n" + fields)).startswith(b"HTTP/1.1 431 ")
    assert replace(WORKER_LIMITS, write_s=60.0) == ConnectionLimits(option="ulimit -n")
    assert WORKER_LIMITS.write_s == math.inf
    monkeypatch.setattr("dynaplan.worker.server.WORKER_LIMITS", replace(WORKER_LIMITS, head_s=0.1))
    slow = WorkerServer(bound_socket("127.0.0.1", 0), TOKEN)
    await slow.start([])
    assert (await raw(slow, b"GET /health HTTP/1.1\r\nHost:")).startswith(b"HTTP/1.1 408 ")
    await slow.stop()
