"""The HTTP client beside the HTTP server, over real sockets: what a failure is, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynaplan.http.client import HttpClient, NotConnected, get, try_get
from dynaplan.http.limits import ConnectionLimits
from dynaplan.http.messages import Request, Response
from dynaplan.http.server import HttpServer
from dynaplan.util.sockets import bound_socket, url_of
from tests.fakes.polling import eventually


async def answer(request: Request) -> Response | None:
    if request.path == "/hangs":
        await asyncio.Event().wait()
    if request.path == "/streams":
        request.connection.start_stream(request, {})
        await request.connection.write(b"one\ntwo")
        await request.connection.write(b"\nrest")
        if request.query.get("whole"):
            return await request.connection.end_stream()
        raise ConnectionError("cut")
    if request.path == "/refuses":
        return Response.json({"error": "no"}, 404)
    given = await request.read()
    return Response.json([request.method, request.headers.get("Authorization"), given.decode()])


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    made = HttpServer(answer, ConnectionLimits())
    made.listen(bound_socket("127.0.0.1", 0))
    yield made
    await made.close()


@pytest.fixture
async def url(server: HttpServer) -> str:
    return url_of(*server.address)


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    async with HttpClient("secret") as made:
        yield made


async def test_a_request_bears_token_and_body_and_its_connection_is_kept(
    server: HttpServer, url: str, client: HttpClient
) -> None:
    for _ in range(2):
        sent = await client.request("POST", f"{url}/x", b"body", timeout_s=5)
        assert (sent.status, sent.json()) == (200, ["POST", "Bearer secret", "body"])
    assert len(server.limited.open) == 1


async def test_a_get_whose_kept_connection_was_closed_meanwhile_is_sent_again(
    server: HttpServer, url: str, client: HttpClient
) -> None:
    await client.get(url, timeout_s=5)
    server.limited.close_idle(0.0)
    assert (await client.get(url, timeout_s=5)).status == 200


async def test_only_status_200_is_an_answer_to_get(url: str) -> None:
    assert (await get(url, "t", timeout_s=5)).json() == ["GET", "Bearer t", ""]
    with pytest.raises(ConnectionError, match="404"):
        await get(f"{url}/refuses", timeout_s=5)


async def test_where_nobody_listens_nothing_has_left() -> None:
    with bound_socket("127.0.0.1", 0) as unused, pytest.raises(NotConnected):
        await get(url_of(*unused.getsockname()), timeout_s=5)


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:many/",
        "http://[::1/",
        "http://127.0.0.1:99999/",
        "",
        "http://box..lan:9090/",
        f"http://{'a' * 64}.lan/",
        "https://box..lan/",
        "http://bo\0x/",
    ],
)
async def test_a_malformed_address_is_a_failure_like_any_other(address: str) -> None:
    with pytest.raises(NotConnected):
        await get(address, timeout_s=5)


async def test_a_try_returns_any_answer_over_a_unix_socket_too_and_none_for_silence_and_absence(
    url: str, runtime_dir: Path
) -> None:
    assert (await try_get(f"{url}/refuses", timeout_s=5)).status == 404  # type: ignore[union-attr]
    assert await try_get(f"{url}/hangs", timeout_s=0.05) is None
    assert await try_get("http://127.0.0.1:1/health", timeout_s=5) is None
    assert await try_get("", timeout_s=5) is None

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\ntrue")
        writer.close()

    async with await asyncio.start_unix_server(answer, runtime_dir / "s"):
        said = await try_get("http://any/health", timeout_s=5, unix_socket=str(runtime_dir / "s"))
    assert said and said.text == "true"

    async def never_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ntrue")
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(never_end, runtime_dir / "e"):
        said = await try_get("http://any/health", timeout_s=0.5, unix_socket=str(runtime_dir / "e"))
    assert said and (said.status, said.text) == (200, "true")
    assert await try_get("http://any/", timeout_s=5, unix_socket=str(runtime_dir / "nobody")) is None


async def test_an_answer_that_does_not_come_in_time_is_a_timeout_and_its_connection_is_closed(
    server: HttpServer, url: str, client: HttpClient
) -> None:
    with pytest.raises(TimeoutError):
        await client.get(f"{url}/hangs", timeout_s=0.05)
    await eventually(lambda: not server.limited.open)


async def test_a_stream_is_read_by_lines_and_one_that_is_cut_does_not_look_whole(
    url: str, client: HttpClient
) -> None:
    with await client.send("GET", f"{url}/streams?whole=1") as whole:
        assert [line async for line in whole.lines()] == [b"one", b"two"]
    with await client.send("GET", f"{url}/streams") as cut, pytest.raises(ConnectionError):
        await cut.read()


async def test_closing_breaks_off_what_is_being_read_and_nothing_is_sent_any_more(url: str) -> None:
    client = HttpClient()
    asking = asyncio.create_task(client.get(f"{url}/hangs", timeout_s=None))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(asking, 5)
    with pytest.raises(NotConnected, match="closed"):
        await client.get(url, timeout_s=5)
