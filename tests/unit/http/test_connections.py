"""One connection to an engine: framing, ends, failures, back-pressure, and which are kept."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.http import timing
from dynaplan.http.connections import (
    MAX_UNREAD_BYTES,
    MAX_WRITE_BYTES,
    ConnectionPool,
    Origin,
    ServerConnection,
    target_of,
)
from dynaplan.http.stream_batching import StreamBatch
from tests.fakes.polling import eventually

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
HERE = Origin("w", 80, False)


class Wire:
    """A transport: what was written, and whether it is closed or paused."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_paused = self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def connected(batch: StreamBatch | None = None) -> tuple[ServerConnection, Wire]:
    connection, wire = ServerConnection(batch or StreamBatch(), HERE), Wire()
    connection.connection_made(cast(asyncio.Transport, wire))
    return connection, wire


async def exchanged(connection: ServerConnection, body: bytes) -> None:
    """Send a request with that body; return when its answer's head is there."""
    await connection.send(b"HEAD", body)
    await connection.wait_for_head()


async def answered(*pieces: bytes, batch: StreamBatch | None = None) -> tuple[ServerConnection, Wire]:
    """A connection over which a request was sent and these bytes came."""
    connection, wire = connected(batch)
    sending = asyncio.ensure_future(exchanged(connection, b"body"))
    await asyncio.sleep(0)
    assert wire.written == [b"HEADbody"]
    for piece in pieces:
        connection.data_received(piece)
    await sending
    return connection, wire


async def all_of(connection: ServerConnection) -> bytes:
    found = b""
    while piece := await connection.read():
        found += piece
    return found


@pytest.mark.parametrize(
    ("url", "origin", "line"),
    [
        ("http://w:81/v1", Origin("w", 81, False), b"POST /v1 HTTP/1.1\r\nHost: w:81\r\n"),
        ("https://w", Origin("w", 443, True), b"POST / HTTP/1.1\r\nHost: w\r\n"),
        ("http://[::1]:8/a?b", Origin("::1", 8, False), b"POST /a?b HTTP/1.1\r\nHost: [::1]:8\r\n"),
    ],
)
def test_an_address_is_read_once(url: str, origin: Origin, line: bytes) -> None:
    assert target_of(url) == (origin, line)


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_the_framing_is_taken_off_however_an_answer_is_cut(size: int) -> None:
    text = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    connection, _ = await answered(*(text[at : at + size] for at in range(0, len(text), size)))
    assert connection.status == 200
    assert await all_of(connection) == b"abcdefg"
    assert connection.is_reusable


async def test_an_answer_without_a_length_ends_with_its_connection_which_is_not_kept() -> None:
    connection, _ = await answered(b"HTTP/1.1 200 OK\r\n\r\nabc")
    connection.eof_received()
    connection.connection_lost(None)
    assert await all_of(connection) == b"abc"
    assert not connection.is_reusable


async def test_what_has_come_is_read_before_the_failure_is_raised() -> None:
    connection, _ = await answered(CHUNKED + b"3\r\nabc\r\n")
    connection.connection_lost(ConnectionResetError(104, "reset"))
    assert await connection.read() == b"abc"
    with pytest.raises(ConnectionError, match="reset"):
        await connection.read()


async def test_a_connection_that_ends_before_an_answer_is_a_failure() -> None:
    connection, _ = connected()
    sending = asyncio.ensure_future(exchanged(connection, b"body"))
    await asyncio.sleep(0)
    connection.eof_received()
    connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        await sending


@pytest.mark.parametrize("answer", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000])
async def test_what_is_no_answer_is_a_failure_and_closes_the_connection(answer: bytes) -> None:
    connection, wire = connected()
    sending = asyncio.ensure_future(exchanged(connection, b"body"))
    await asyncio.sleep(0)
    connection.data_received(answer)
    with pytest.raises(ConnectionError):
        await sending
    assert wire.is_closed


async def test_a_second_answer_that_nobody_asked_for_is_not_taken_for_the_first() -> None:
    connection, wire = await answered(SIZED + SIZED.replace(b"abc", b"xyz"))
    assert await all_of(connection) == b"abc"
    assert not connection.is_reusable
    assert wire.is_closed


async def test_reading_pauses_while_too_much_waits() -> None:
    connection, wire = await answered(CHUNKED)
    connection.data_received(b"%x\r\n%b\r\n" % (MAX_UNREAD_BYTES + 1, b"x" * (MAX_UNREAD_BYTES + 1)))
    assert wire.is_paused
    await connection.read()
    assert not wire.is_paused


async def test_a_large_body_goes_in_pieces_and_no_further_than_the_answer() -> None:
    connection, wire = connected()
    body = b"x" * (3 * MAX_WRITE_BYTES)
    sending = asyncio.ensure_future(exchanged(connection, body))
    await asyncio.sleep(0)
    connection.data_received(SIZED.replace(b"200", b"413"))
    await sending
    assert wire.written == [b"HEAD", body[:MAX_WRITE_BYTES]]
    assert not connection.is_reusable


class Taking:
    """A sink that keeps what it is given, but for the lines that it leaves, or that it fails over.

    ``takes_chunks``: a read that looks like one whole chunk it keeps as it is, in ``chunks``, too.
    """

    def __init__(self, leaves: bytes = b"", fails_over: bytes = b"", *, takes_chunks: bool = False) -> None:
        self.leaves, self.fails_over, self.takes_chunks = leaves, fails_over, takes_chunks
        self.chunks: list[bytes] = []
        self.taken: list[bytes] = []

    def is_movable(self) -> bool:
        return False

    def pass_chunk(self, chunk: bytes) -> bool:
        size, _, rest = chunk.partition(b"\r\n")
        if self.takes_chunks and self.fails_over and self.fails_over in chunk:
            raise ValueError("of the taker")
        if not (
            self.takes_chunks and size != b"0" and rest[-2:] == b"\r\n" and size == b"%x" % (len(rest) - 2)
        ):
            return False
        self.chunks.append(chunk)
        self.taken.append(rest[:-2])
        return True

    def pass_on(self, lines: bytes) -> bytes:
        if lines == self.fails_over:
            raise ValueError("of the taker")
        if lines == self.leaves:
            return lines
        self.taken.append(lines)
        return b""


async def forwarded(
    sink: Taking, batch: StreamBatch | None = None
) -> tuple[ServerConnection, asyncio.Task[None]]:
    connection, _ = await answered(CHUNKED, batch=batch)
    task = asyncio.create_task(connection.forward(sink))
    await asyncio.sleep(0)
    return connection, task


async def test_whole_lines_are_forwarded_as_they_come_until_one_is_not_taken() -> None:
    sink = Taking(leaves=b"no\n")
    connection, task = await forwarded(sink)
    connection.data_received(b"2\r\na\n\r\n")
    connection.data_received(b"2\r\nb\n\r\n2\r\nc\n\r\n")
    assert sink.taken == [b"a\n", b"b\nc\n"]
    connection.data_received(b"3\r\nno\n\r\n")
    await task
    assert await connection.read() == b"no\n"


async def test_a_read_that_is_a_whole_chunk_is_offered_as_it_is() -> None:
    sink = Taking(takes_chunks=True)
    connection, task = await forwarded(sink)
    for read in (b"2\r\na\n\r\n", b"2\r\nb\n\r\n", b"2\r\nc\n\r\n2\r\nd\n\r\n", b"2\r\ne\n\r\n"):
        connection.data_received(read)
    assert sink.chunks == [b"2\r\nb\n\r\n", b"2\r\ne\n\r\n"], "a chunk's end has to be seen first"
    assert b"".join(sink.taken) == b"a\nb\nc\nd\ne\n"
    connection.data_received(b"0\r\n\r\n")
    await task
    assert connection.is_reusable


CHUNK_LIKE = st.lists(
    st.sampled_from((b"2\r\na\n\r\n", b"2", b"\r\n", b"a\n", b"0\r\n\r\n", b"x")), max_size=4
)
"""Bodies of chunks in which a chunk seems to begin or to end."""


@given(st.lists(CHUNK_LIKE.map(b"".join).filter(bool), max_size=8), st.sets(st.integers(1, 150)))
async def test_however_an_answer_is_cut_into_reads_its_body_is_what_its_chunks_hold(
    bodies: list[bytes], cuts: set[int]
) -> None:
    answer = b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"
    sink = Taking(takes_chunks=True)
    connection, task = await forwarded(sink)
    ends = sorted(cut for cut in cuts if cut < len(answer))
    for begin, end in itertools.pairwise((0, *ends, len(answer))):
        if task.done():
            sink.taken.append(await connection.read())
            task = asyncio.create_task(connection.forward(sink))
            await asyncio.sleep(0)
        connection.data_received(answer[begin:end])
        await asyncio.sleep(0)
    await task
    assert b"".join(sink.taken) + await all_of(connection) == b"".join(bodies)
    assert connection.is_reusable


async def begun(sink: Taking) -> tuple[ServerConnection, asyncio.Task[None]]:
    """A connection that is to forward the answer to a request, of which nothing has come."""
    connection, _ = connected()
    await connection.send(b"HEAD", b"body")
    task = asyncio.create_task(connection.forward(sink))
    await asyncio.sleep(0)
    return connection, task


async def test_a_stream_is_forwarded_from_its_head_on() -> None:
    sink = Taking()
    connection, task = await begun(sink)
    connection.data_received(CHUNKED)
    connection.data_received(b"2\r\na\n\r\n")
    assert sink.taken == [b"a\n"]
    connection.data_received(b"0\r\n\r\n")
    await task


@pytest.mark.parametrize(
    "head", [CHUNKED.replace(b"200", b"500"), CHUNKED[:-2] + b"Content-Type: application/json\r\n\r\n"]
)
async def test_an_answer_that_is_no_stream_is_left_to_be_read(head: bytes) -> None:
    sink = Taking()
    connection, task = await begun(sink)
    connection.data_received(head)
    connection.data_received(b"2\r\na\n\r\n")
    await task
    assert (sink.taken, await connection.read()) == ([], b"a\n")


async def test_what_ends_no_line_is_left_to_be_read() -> None:
    connection, task = await forwarded(Taking())
    connection.data_received(b"2\r\nhe\r\n")
    await task
    assert await connection.read() == b"he"


async def test_what_comes_with_the_answers_end_is_left_to_be_read_so_that_both_are_sent_at_once() -> None:
    connection, task = await forwarded(Taking())
    connection.data_received(b"2\r\na\n\r\n0\r\n\r\n")
    await task
    assert await connection.read() == b"a\n"


async def test_forwarding_ends_with_the_answer_and_with_a_failure_of_either_side() -> None:
    connection, task = await forwarded(Taking())
    connection.data_received(b"0\r\n\r\n")
    await task
    connection, task = await forwarded(Taking())
    connection.connection_lost(None)
    await task
    with pytest.raises(ConnectionError):
        await connection.read()

    connection, task = await forwarded(Taking(fails_over=b"a\n"))
    connection.data_received(b"2\r\na\n\r\n")
    with pytest.raises(ValueError, match="of the taker"):
        await task


async def test_an_error_over_a_whole_chunk_is_raised_in_the_task_too() -> None:
    connection, task = await forwarded(Taking(fails_over=b"b\n", takes_chunks=True))
    connection.data_received(b"2\r\na\n\r\n")
    connection.data_received(b"2\r\nb\n\r\n")
    with pytest.raises(ValueError, match="of the taker"):
        await task


async def test_no_chunk_overtakes_what_a_cancelled_task_has_left_unread() -> None:
    sink = Taking(takes_chunks=True)
    connection, task = await forwarded(sink)
    connection.data_received(b"2\r\na\n\r\n")
    task.cancel()
    connection.data_received(b"2\r\nb\n\r\n2\r\nc\n\r\n")
    connection.data_received(b"2\r\nd\n\r\n")
    assert sink.taken == [b"a\n"]


async def test_of_several_streams_what_one_turn_brings_is_forwarded_at_its_end() -> None:
    batch, sink = StreamBatch(), Taking()
    taken = sink.taken
    first, task = await forwarded(sink, batch)
    first.data_received(b"2\r\n1\n\r\n")
    assert taken == [b"1\n"]  # it is alone
    second, other_task = await forwarded(sink, batch)
    second.data_received(b"2\r\n2\n\r\n")
    first.data_received(b"2\r\n3\n\r\n")
    assert taken == [b"1\n"]
    await asyncio.sleep(0)
    assert taken == [b"1\n", b"2\n", b"3\n"]
    second.data_received(b"0\r\n\r\n")
    await other_task
    first.data_received(b"2\r\n4\n\r\n")
    assert taken[3:] == [b"4\n"]  # alone again
    first.data_received(b"0\r\n\r\n")
    await task


@pytest.mark.parametrize("end", ["connection_lost", "eof_received"])
async def test_what_has_arrived_is_forwarded_before_its_connection_is_lost(end: str) -> None:
    batch, sink = StreamBatch(), Taking()
    taken = sink.taken
    first, task = await forwarded(sink, batch)
    _, other_task = await forwarded(sink, batch)
    first.data_received(b"2\r\na\n\r\n")
    first.data_received(b"2\r\nb\n\r\n0\r\n\r\n")
    first.connection_lost(None) if end == "connection_lost" else first.eof_received()
    assert taken == [b"a\n"]
    await task
    assert await first.read() == b"b\n"
    assert await first.read() == b""
    other_task.cancel()


class Pool:
    """A pool whose connections are opened to nowhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wires: list[Wire] = []
        self.pool = ConnectionPool(False, StreamBatch())
        loop = asyncio.get_running_loop()

        async def connect(make: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
            connection, wire = make(), Wire()
            connection.connection_made(wire)
            self.wires.append(wire)
            return wire, connection

        monkeypatch.setattr(loop, "create_connection", connect)

    async def used(self) -> ServerConnection:
        """A connection whose answer was read to its end."""
        connection = self.pool.pop_idle(HERE) or await self.pool.open(HERE)
        sending = asyncio.ensure_future(exchanged(connection, b""))
        await asyncio.sleep(0)
        connection.data_received(SIZED)
        await sending
        return connection


async def test_a_pool_tells_when_a_connection_is_used_again_whether_it_is_new_or_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(monkeypatch)
    for _ in range(2):
        waiting = asyncio.ensure_future(pool.pool.wait_for_use())
        await asyncio.sleep(0)
        assert not waiting.done()
        connection = await pool.used()
        await waiting
        await pool.pool.wait_for_use()
        pool.pool.give_back(connection, HERE, is_kept=True)
    waiting = asyncio.ensure_future(pool.pool.wait_for_use())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert await pool.used()


async def test_a_whole_answer_gives_its_connection_back_and_a_cut_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Pool(monkeypatch)
    connection = await here.used()
    here.pool.give_back(connection, HERE, is_kept=True)
    here.pool.give_back(connection, HERE, is_kept=True)
    assert await here.used() is connection
    assert here.pool.pop_idle(HERE) is None, "given back twice is there once"
    here.pool.give_back(connection, HERE, is_kept=False)
    assert here.wires[0].is_closed
    cut = await here.pool.open(HERE)
    here.pool.give_back(cut, HERE, is_kept=True)
    assert here.wires[1].is_closed
    here.pool.close()


async def test_a_kept_connection_that_its_engine_ends_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Pool(monkeypatch)
    connection = await here.used()
    here.pool.give_back(connection, HERE, is_kept=True)
    connection.connection_lost(None)
    assert here.pool.pop_idle(HERE) is None
    here.pool.close()


async def test_a_connection_that_is_idle_for_too_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "KEEP_ALIVE_S", 0.0)
    here = Pool(monkeypatch)
    here.pool.give_back(await here.used(), HERE, is_kept=True)
    await eventually(lambda: here.wires[0].is_closed)
    assert here.pool.pop_idle(HERE) is None
    here.pool.close()


async def test_what_comes_for_a_task_that_is_cancelled_is_not_forwarded() -> None:
    connection, task = await forwarded(Taking(fails_over=b"a\n"))
    task.cancel()
    connection.data_received(b"2\r\na\n\r\n")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_request_over_a_connection_that_was_lost_is_a_failure() -> None:
    connection, _ = connected()
    connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        await exchanged(connection, b"")


async def test_an_engine_that_begins_a_long_answer_before_it_takes_a_large_body_is_read() -> None:
    connection, wire = connected()
    sending = asyncio.ensure_future(exchanged(connection, b"x" * (3 * MAX_WRITE_BYTES)))
    connection.pause_writing()
    await asyncio.sleep(0)
    connection.data_received(
        CHUNKED + b"%x\r\n%b\r\n" % (MAX_UNREAD_BYTES + 1, b"x" * (MAX_UNREAD_BYTES + 1))
    )
    await asyncio.wait_for(sending, 5)
    assert len(await connection.read()) == MAX_UNREAD_BYTES + 1
    assert not wire.is_paused
    assert not connection.is_reusable


async def test_an_answer_that_is_no_http_ends_the_sending_of_a_large_body() -> None:
    connection, _ = connected()
    sending = asyncio.ensure_future(exchanged(connection, b"x" * (3 * MAX_WRITE_BYTES)))
    connection.pause_writing()
    await asyncio.sleep(0)
    connection.data_received(b"garbage\r\n\r\n")
    with pytest.raises(ConnectionError, match="no HTTP"):
        await asyncio.wait_for(sending, 5)


async def test_a_second_answer_leaves_the_headers_of_the_first() -> None:
    connection, _ = await answered(SIZED + b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n")
    assert connection.headers == [(b"content-length", b"3")]


async def test_a_connection_that_opens_while_the_pool_closes_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Pool(monkeypatch)
    here.pool.close()
    with pytest.raises(ConnectionError):
        await here.pool.open(HERE)
    assert here.wires[0].is_closed


def test_a_password_in_an_address_is_not_sent_as_its_host() -> None:
    assert target_of("http://me:secret@w:81/v1").line.endswith(b"Host: w:81\r\n")


async def test_the_addresses_that_answer_are_remembered_only_for_who_looks_for_silent_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Pool(monkeypatch)
    origin = Origin("127.0.0.1", 2, is_tls=False)
    here.pool.give_back(await here.used(), origin, is_kept=False)
    assert not any(isinstance(each, set) for each in gc.get_referrers(origin))
    assert here.pool.silent_origins() == set()
    here.pool.give_back(await here.used(), HERE, is_kept=False)
    waiting = await here.pool.open(HERE)
    assert here.pool.silent_origins() == set(), "it has answered another request meanwhile"
    assert here.pool.silent_origins() == {HERE}
    here.pool.give_back(waiting, HERE, is_kept=False)
    here.pool.close()
