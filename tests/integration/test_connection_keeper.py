"""A frontend that is killed with clients' connections open: what becomes of each of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from dynaplan.gateway.kept_connections import KeptConnections, KeptSlot
from dynaplan.http.limits import ConnectionLimits
from dynaplan.http.messages import Request, Response
from dynaplan.http.server import Handler, HttpServer
from dynaplan.process.kernel import isolated_command
from tests.fakes.polling import PATIENCE_S, wait_until

REQUEST = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def keeper(runtime_dir: Path) -> Iterator[str]:
    path = str(runtime_dir / "keeper.sock")
    process = subprocess.Popen(isolated_command("connection_keeper", path))
    wait_until(lambda: Path(path).exists(), PATIENCE_S)
    yield path
    process.kill()
    process.wait()


class Public:
    """The public port, which stays while frontends come and go."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(PATIENCE_S)
        self.address: tuple[str, int] = self.listening.getsockname()
        self.open = [self.listening]

    def client(self) -> socket.socket:
        self.open.append(socket.create_connection(self.address, timeout=PATIENCE_S))
        return self.open[-1]

    def accepted(self) -> socket.socket:
        connection, _ = self.listening.accept()
        connection.settimeout(PATIENCE_S)
        self.open.append(connection)
        return connection

    def close(self) -> None:
        for each in self.open:
            each.close()


@pytest.fixture
def public() -> Iterator[Public]:
    public = Public()
    yield public
    public.close()


Run = Callable[[Coroutine[Any, Any, None]], None]
Act = Callable[[KeptSlot, socket.socket], Any]


def frontend_that_dies(keeper: str, public: Public, act: Act, *, is_killed: bool = True) -> None:
    """Accept one connection in another process, do this with it, and end: by a kill or in order."""
    pid = os.fork()
    if pid == 0:
        try:
            kept = KeptConnections(keeper, public.address)
            connection = public.accepted()
            slot = kept.keep(connection.fileno())
            assert slot
            act(slot, connection)
            if not is_killed:
                kept.close()
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) is is_killed, status


def read_request(slot: KeptSlot, connection: socket.socket) -> None:
    data = connection.recv(65536)
    slot.received(data, is_answer_sent=True)


def all_of(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(65536):
        data += piece
    return data


def test_a_request_that_waited_is_answered_by_the_next_frontend_on_the_same_connection(
    keeper: str, public: Public
) -> None:
    client = public.client()
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, read_request)
    with public.accepted() as other:
        assert other.recv(65536) == REQUEST
        other.sendall(ANSWER)
        assert client.recv(65536) == ANSWER
        client.sendall(REQUEST)  # the connection goes on
        assert other.recv(65536) == REQUEST
        client.close()
        assert other.recv(65536) == b""


def test_a_connection_that_was_only_just_accepted_is_passed_on(keeper: str, public: Public) -> None:
    """The frontend is killed before the loop's next turn, in which it would read the request."""
    client = public.client()
    client.sendall(REQUEST)

    def prepare(server: HttpServer) -> None:
        welcome = server.limited.welcome

        def welcome_and_die(accepted: socket.socket) -> asyncio.Protocol:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGKILL)
            return welcome(accepted)

        server.limited.welcome = welcome_and_die  # type: ignore[method-assign]

    server_that_dies(keeper, public, answer_nothing, prepare)
    with public.accepted() as other:
        assert other.recv(65536) == REQUEST
        other.sendall(ANSWER)
    assert all_of(client) == ANSWER


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_whose_answer_is_sent_goes_on_two_turns_of_the_loop_later(
    keeper: str, public: Public, run: Run
) -> None:
    client = public.client()
    client.sendall(REQUEST)

    def die_in(turns: int) -> None:
        if not turns:
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.get_running_loop().call_soon(die_in, turns - 1)

    async def answer_and_die(request: Request) -> Response:
        asyncio.get_running_loop().call_soon(die_in, 2)
        return Response(200, {}, b"ok")

    server_that_dies(keeper, public, answer_and_die, run=run)
    assert client.recv(65536).endswith(b"ok")
    client.sendall(REQUEST)
    with public.accepted() as other:
        assert other.recv(65536) == REQUEST


async def answer_nothing(request: Request) -> None:
    await asyncio.sleep(PATIENCE_S)


def server_that_dies(
    keeper: str,
    public: Public,
    handler: Handler,
    prepare: Callable[[HttpServer], None] = lambda _: None,
    run: Run = asyncio.run,
) -> None:
    """Serve in another process until that is killed."""

    async def serve() -> None:
        server = HttpServer(handler, ConnectionLimits())
        server.keep = KeptConnections(keeper, public.address).keep
        prepare(server)
        server.listen(public.listening)
        await asyncio.sleep(PATIENCE_S)

    pid = os.fork()
    if pid == 0:
        run(serve())
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_the_rest_of_a_body_that_had_come_in_part_follows(keeper: str, public: Public) -> None:
    client = public.client()
    client.sendall(REQUEST[:-2])
    frontend_that_dies(keeper, public, read_request)
    client.sendall(REQUEST[-2:])
    with public.accepted() as other:
        assert _of_length(other, len(REQUEST)) == REQUEST
        other.sendall(ANSWER)
        other.close()
    assert all_of(client) == ANSWER


def test_a_connection_without_a_request_goes_on_with_its_first_byte(keeper: str, public: Public) -> None:
    client = public.client()
    frontend_that_dies(keeper, public, lambda slot, connection: None)
    client.sendall(REQUEST)
    with public.accepted() as other:
        assert other.recv(65536) == REQUEST


def test_an_answer_that_has_begun_ends_with_its_last_words(keeper: str, public: Public) -> None:
    def act(slot: KeptSlot, connection: socket.socket) -> None:
        read_request(slot, connection)
        slot.begin_answer(b"retry\n")
        connection.sendall(b"begun ")

    client = public.client()
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, act)
    assert all_of(client) == b"begun retry\n"


def test_after_an_answer_the_connection_goes_on_only_when_the_kernel_has_all_of_it(
    keeper: str, public: Public
) -> None:
    def answer(slot: KeptSlot, connection: socket.socket, *, is_sent: bool) -> None:
        read_request(slot, connection)
        slot.begin_answer()
        slot.end_answer(is_more_coming=False)
        if is_sent:
            slot.settle()

    client = public.client()
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, partial(answer, is_sent=False))
    assert all_of(client) == b""
    client = public.client()
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, partial(answer, is_sent=True))
    client.sendall(REQUEST)
    with public.accepted() as other:
        assert other.recv(65536) == REQUEST


def test_pipelined_requests_are_not_asked_again(keeper: str, public: Public) -> None:
    def act(slot: KeptSlot, connection: socket.socket) -> None:
        read_request(slot, connection)
        slot.begin_answer()
        slot.received(REQUEST, is_answer_sent=True)
        slot.end_answer(is_more_coming=True)
        slot.settle()

    client = public.client()
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, act)
    assert all_of(client) == b""


def test_the_rest_of_a_request_that_came_with_the_one_before_is_not_asked_as_one(
    keeper: str, public: Public
) -> None:
    def act(slot: KeptSlot, connection: socket.socket) -> None:
        slot.received(REQUEST + REQUEST[:-2], is_answer_sent=True)
        slot.begin_answer()
        slot.end_answer(is_more_coming=True)
        slot.settle()
        slot.received(REQUEST[-2:], is_answer_sent=True)

    client = public.client()
    frontend_that_dies(keeper, public, act)
    assert all_of(client) == b""


def test_a_request_that_is_too_large_to_keep_is_answered_503(keeper: str, public: Public) -> None:
    client = public.client()
    client.sendall(REQUEST)

    def act(slot: KeptSlot, connection: socket.socket) -> None:
        read_request(slot, connection)
        slot.received(bytes(2 * 1024 * 1024), is_answer_sent=True)

    frontend_that_dies(keeper, public, act)
    assert all_of(client).startswith(b"HTTP/1.1 503 ")


def test_what_follows_a_request_that_was_too_large_makes_no_request_with_a_hole_of_it(
    keeper: str, public: Public
) -> None:
    client = public.client()
    client.sendall(REQUEST)

    def act(slot: KeptSlot, connection: socket.socket) -> None:
        read_request(slot, connection)
        for size in (900_000, 200_000, 10):
            slot.received(bytes(size), is_answer_sent=True)

    frontend_that_dies(keeper, public, act)
    assert all_of(client).startswith(b"HTTP/1.1 503 ")


def test_an_idle_connection_that_was_passed_on_once_is_closed_without_a_word(
    keeper: str, public: Public
) -> None:
    client = public.client()
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, read_request)

    def answer(slot: KeptSlot, connection: socket.socket) -> None:
        read_request(slot, connection)
        slot.begin_answer()
        connection.sendall(ANSWER)
        slot.end_answer(is_more_coming=False)
        slot.settle()

    frontend_that_dies(keeper, public, answer)
    assert all_of(client) == ANSWER


def test_no_message_ends_the_keeper(keeper: str, public: Public) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(keeper)
        for message in (b"T\0\0\0\0", b"T", b"H", b"Hx", b"?" * 200):  # a descriptor that did not come
            stranger.send(message)
    client = public.client()
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, read_request)
    assert public.accepted().recv(65536) == REQUEST


def test_a_request_that_has_ended_two_frontends_is_not_asked_of_a_third(keeper: str, public: Public) -> None:
    client = public.client()
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, read_request)
    frontend_that_dies(keeper, public, read_request)
    assert b"503" in all_of(client)


def test_a_frontend_that_ends_in_order_leaves_nothing_open(keeper: str, public: Public) -> None:
    client = public.client()
    frontend_that_dies(keeper, public, lambda slot, connection: connection.close(), is_killed=False)
    assert all_of(client) == b""


def test_a_connection_that_the_frontend_closes_is_closed_while_it_lives(keeper: str, public: Public) -> None:
    kept = KeptConnections(keeper, public.address)
    clients = [public.client() for _ in range(3)]
    slots = []
    for _ in clients:
        connection = public.accepted()
        slots.append(kept.keep(connection.fileno()))
        connection.close()
    for client, slot in zip(clients, slots, strict=True):
        assert slot
        slot.release()
        assert all_of(client) == b""
    kept.close()


def test_without_a_keeper_connections_are_those_of_the_frontend_alone(
    runtime_dir: Path, public: Public, keeper: str
) -> None:
    kept = KeptConnections(str(runtime_dir / "none.sock"), public.address)
    public.client()
    assert kept.keep(public.accepted().fileno()) is None


def test_what_a_large_answer_takes_time_to_say_passes_whole(keeper: str, public: Public) -> None:
    client, large = public.client(), os.urandom(8 * 1024 * 1024)
    client.sendall(REQUEST)
    frontend_that_dies(keeper, public, read_request)
    other = public.accepted()
    assert other.recv(65536) == REQUEST  # closing with this unread would reset the connection
    sending = threading.Thread(target=lambda: (other.sendall(large), other.close()))
    sending.start()
    assert all_of(client) == large
    sending.join()


def _of_length(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (piece := connection.recv(65536)):
        data += piece
    return data
