"""However an engine's bytes are cut into reads, its client gets the same stream, and the same is counted.

Engine and client are transports without a socket, so that a read ends exactly where the test says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.http.connections import ConnectionPool, Origin, ServerConnection
from dynaplan.http.server import ClientConnection
from dynaplan.store.instances import ASLEEP, Instance
from tests.fakes.frontend_runtime import Stage, body, stage

PATH = "/v1/chat/completions"
CARD = {"model": "m", "context_tokens": 8192, "kv_block_tokens": 16, "engine": "vllm"}
TEXTS = ("a", " word", '"', "\\", "\n", "ö", "🙂", '","content":"', "data: {", '"error"', "[DONE]", "")
FAILURE = b'data: {"error":{"message":"broken","type":"server_error","code":500}}'
COUNTED = ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "output_tokens_total")
TURNS = 100
"""Turns of the loop after which whatever has been read has been passed on."""


def event(choice: object, **more: object) -> bytes:
    return b"data: " + json.dumps({"id": "c", "choices": [choice], **more}, separators=(",", ":")).encode()


def token(text: str) -> bytes:
    return event({"index": 0, "delta": {"content": text}, "finish_reason": None})


ROLE = event({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
STOP = event({"index": 0, "delta": {}, "finish_reason": "stop"})
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7,"total_tokens":10}}'
DONE = b"data: [DONE]"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@dataclass
class Engine:
    """Stands in for the pool's opening of connections; ``opened`` has them, with their wires."""

    opened: list[tuple[ServerConnection, Wire]] = field(default_factory=list)

    async def open(self, pool: ConnectionPool, origin: Origin) -> ServerConnection:
        connection, wire = ServerConnection(pool._batch, origin), Wire()
        connection.connection_made(cast(asyncio.Transport, wire))
        pool._used.add(connection)
        self.opened.append((connection, wire))
        return connection

    async def asked(self) -> ServerConnection:
        """The connection over which a request has come."""
        while True:
            for connection, wire in self.opened:
                if wire.written:
                    wire.written = b""
                    return connection
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Read:
    """One read of an engine's answer, and what happens after it."""

    data: bytes
    ends_turn: bool = True
    client_is_slow: bool = False


@dataclass(frozen=True)
class Seen:
    """What a client got, what was counted, and whether the engine's connection can have a next request.

    One that was broken off can where all of it had come.
    """

    content: bytes
    is_whole: bool
    counted: list[float]
    is_reusable: bool = field(compare=False)


def ask(here: Stage) -> tuple[ClientConnection, Wire]:
    """Connect a client, which asks for a stream."""
    client, wire = ClientConnection(here.frontend._server), Wire()
    client.connection_made(cast(asyncio.Transport, wire))
    asked = json.dumps(body(PATH, model="m", stream=True)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(asked)}\r\n\r\n"
    client.data_received(head.encode() + asked)
    return client, wire


async def answer(here: Stage, engine: Engine, reads: Sequence[Read]) -> Seen:
    """Ask once; the engine answers with these reads."""
    before = counts(here)
    client, wire = ask(here)
    connection = await engine.asked()
    for read in reads:
        if read.client_is_slow:
            client.pause_writing()
        connection.data_received(read.data)
        await turns(3 if read.ends_turn else 0)
        client.resume_writing()
    await turns(TURNS)
    assert here.frontend.in_flight == 0
    is_reusable = connection.is_reusable
    client.connection_lost(None)
    content, is_whole = joined(wire.written.partition(b"\r\n\r\n")[2])
    counted = [new - old for new, old in zip(counts(here), before, strict=True)]
    return Seen(content, is_whole, counted, is_reusable)


@contextmanager
def beside_another(here: Stage) -> Iterator[None]:
    """Another stream runs meanwhile: what arrives in one turn of the loop is passed on together."""
    here.frontend._batch.begin_stream()
    yield
    here.frontend._batch.end_stream()


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def counts(here: Stage) -> list[float]:
    """The sums of ``COUNTED`` in the frontend's metrics."""
    text = here.frontend._metrics.render().decode()
    lines = [line.rpartition(" ") for line in text.splitlines()]
    return [sum(float(value) for name, _, value in lines if f"_{each}{{" in name) for each in COUNTED]


def joined(chunked: bytes) -> tuple[bytes, bool]:
    """The content of a chunked body, and whether it has its end."""
    content = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        length = int(size, 16)
        content, chunked = content + rest[:length], rest[length + 2 :]
        if not length:
            return content, True
    return content, False


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    ends = sorted({cut % len(data) for cut in cuts if data} - {0})
    for begin, end in zip([0, *ends], [*ends, len(data)], strict=True):
        yield data[begin:end]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Stream:
    """An engine's answer: ``first`` are its events up to the first token, ``rest`` those behind it."""

    first: bytes
    rest: list[bytes]

    def whole(self) -> list[Read]:
        """The answer as engines send it: each event in a chunk and a read of its own."""
        return [Read(HEAD + chunk(self.first)), *(Read(chunk(each)) for each in self.rest), Read(END)]


@st.composite
def streams(draw: st.DrawFn, *, fails: bool) -> Stream:
    newline = draw(st.sampled_from([b"\n", b"\r\n"]))
    texts = draw(st.lists(st.sampled_from(TEXTS), max_size=12))
    lines = [token(each) + newline for each in texts]
    for at in draw(st.lists(st.integers(0, 12), max_size=2)):
        lines.insert(at, draw(st.sampled_from([b": keep-alive" + newline, b"event: token", b""])))
    ends = [[FAILURE], [FAILURE, DONE], [STOP], []] if fails else [[DONE], [STOP, USAGE, DONE]]
    lines += [each + newline for each in draw(st.sampled_from(ends))]
    rest = [each + newline for each in lines]
    return Stream(b"".join(each + 2 * newline for each in (ROLE, token("first"))), rest)


@st.composite
def cut(draw: st.DrawFn, stream: Stream) -> list[Read]:
    """The same answer, cut into chunks anywhere, and the chunks into reads anywhere.

    Its first token has a read of its own: a failure in that is answered otherwise.
    """
    cuts = st.lists(st.integers(1, 5000), max_size=30)
    chunks = pieces(b"".join(stream.rest), draw(cuts)) if draw(st.booleans()) else stream.rest
    wire = b"".join([*map(chunk, chunks), END])
    rest = [Read(each, draw(st.booleans()), draw(st.booleans())) for each in pieces(wire, draw(cuts))]
    return [Read(HEAD + chunk(stream.first)), *rest]


@asynccontextmanager
async def staged(migration_limit: int) -> AsyncIterator[tuple[Stage, Engine]]:
    engine = Engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConnectionPool, "open", lambda pool, origin: engine.open(pool, origin))
        async with stage(migration_limit=migration_limit) as here:
            instance = Instance("ns", "VllmWorker", "generate", 1, "http://w", "w", 0, CARD, "http://w")
            await here.store.put(instance.key, instance.to_json())
            await here.know(instance)
            yield here, engine


async def test_a_first_token_that_comes_when_its_engine_has_fallen_asleep_is_not_passed_on() -> None:
    async with staged(migration_limit=3) as (here, engine):
        client, wire = ask(here)
        connection = await engine.asked()
        here.frontend._sleeping.follow({ASLEEP.key("ns", 1): ""})
        connection.data_received(HEAD + chunk(token("a") + b"\n\n" + DONE + b"\n\n") + END)
        await turns(TURNS)
        assert wire.written == b""
        here.frontend._sleeping.follow({})
        (await engine.asked()).data_received(HEAD + chunk(token("b") + b"\n\n" + DONE + b"\n\n") + END)
        await turns(TURNS)
        assert joined(wire.written.partition(b"\r\n\r\n")[2])[0] == token("b") + b"\n\n" + DONE + b"\n\n"
        client.connection_lost(None)


@pytest.mark.parametrize(("fails", "migration_limit"), [(False, 3), (False, 0), (True, 0)])
def test_any_cutting_gives_the_client_the_same_stream_and_the_metrics_the_same_counts(
    fails: bool, migration_limit: int
) -> None:
    with asyncio.Runner() as runner:
        stage_of_all = staged(migration_limit)
        here, engine = runner.run(stage_of_all.__aenter__())

        @given(st.data())
        def compare(data: st.DataObject) -> None:
            stream = data.draw(streams(fails=fails))
            reads = data.draw(cut(stream))
            expected = runner.run(answer(here, engine, stream.whole()))
            with beside_another(here) if data.draw(st.booleans()) else nullcontext():
                seen = runner.run(answer(here, engine, reads))
            assert seen == expected
            assert seen.is_whole is not fails
            assert fails or (seen.content == stream.first + b"".join(stream.rest) and seen.is_reusable)

        try:
            compare()
        finally:
            runner.run(stage_of_all.__aexit__(None, None, None))
