"""What bytes are a request is judged as aiohttp's server judges it, or more strictly.

Two servers that read the same bytes as different requests can be played against each other (request
smuggling). Both read a corpus of requests, good ones and known attacks, and thousands of mutations of it, in
memory. Whatever reaches our routes reaches aiohttp's handler, in the same order and with the same body; and
however the bytes are cut into reads, ours reads the same.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import re
import zlib
from random import Random
from typing import Any

import pytest
from aiohttp import web

from dynaplan.http.limits import ConnectionLimits
from dynaplan.http.messages import InvalidBody, Request, Response
from dynaplan.http.server import ClientConnection, HttpServer

MUTATIONS = 30_000 if os.environ.get("DYNAPLAN_TORTURE") else 100
TURNS = 30
"""Turns of the loop in which what was sent is answered: nothing but the loop has to be waited for."""

Seen = list[tuple[str, str, bytes]]
"""The requests that reached a handler: method, target and body."""

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
SIZED = POST + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


def compressed(encoding: bytes, data: bytes) -> bytes:
    return POST + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, len(data)) + data


GOOD = {
    "get": GET,
    "sized": SIZED,
    "chunked": CHUNKED,
    "pipelined": GET + SIZED + CHUNKED + GET,
    "chunk extension": CHUNKED.replace(b"3\r\n", b"3;name=value\r\n"),
    "trailers": CHUNKED[:-2] + b"X-Sum: 7\r\n\r\n" + GET,
    "HTTP/1.0": b"POST / HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello",
    "empty lines first": b"\r\n\r\n" + SIZED,
    "whole address": b"GET http://x/live?a=b HTTP/1.1\r\nHost: x\r\n\r\n",
    "upgrade": b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "upgrade with a body": SIZED.replace(b"Host: x", b"Host: x\r\nConnection: Upgrade\r\nUpgrade: h2c"),
    "gzip": compressed(b"gzip", gzip.compress(b"hello")),
    "deflate": compressed(b"deflate", zlib.compress(b"hello")),
    "deflate without its head": compressed(b"deflate", zlib.compress(b"hello", wbits=-15)),
    "close": GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
}

REFUSED = {
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "other lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nhello",
    "signed length": POST + b"Content-Length: +5\r\n\r\nhello",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + GET,
    "space before colon": POST + b"Content-Length : 5\r\n\r\nhello",
    "chunked is not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "almost chunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked of HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0"),
    "folded header": POST + b"X: a\r\n b\r\nContent-Length: 5\r\n\r\nhello",
    "no host": GET.replace(b"Host: x\r\n", b""),
    "two hosts": GET.replace(b"Host: x\r\n", b"Host: x\r\nHost: y\r\n"),
    "bare LF": GET.replace(b"\r\n", b"\n"),
    "bare LF in chunks": CHUNKED.replace(b"3\r\n", b"3\n"),
    "length behind the body": CHUNKED[:-2] + b"Content-Length: 7\r\n\r\n" + GET,
    "NUL": GET.replace(b": x", b": x\0"),
    "signed chunk": CHUNKED.replace(b"3\r\n", b"+3\r\n"),
    "huge chunk": CHUNKED.replace(b"3\r\n", b"F" * 20 + b"\r\n"),
    "longer chunk": CHUNKED.replace(b"hel\r\n", b"help\r\n"),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /live\r\n\r\n",
    "torn gzip": compressed(b"gzip", gzip.compress(b"hello")[:-4]),
    "broken deflate": compressed(b"deflate", b"\x00\x01garbage"),
    "unknown compression": compressed(b"br", b"\x0b\x02\x80hello\x03"),
    "zstd": compressed(b"zstd", b"\x28\xb5\x2f\xfd\x04\x00"),
    "compressed twice": compressed(b"gzip, gzip", gzip.compress(gzip.compress(b"hello"))),
}


def answers(written: bytes) -> int:
    return len(re.findall(rb"HTTP/1\.[01] \d\d\d ", written))


class MemoryTransport(asyncio.Transport):
    """A connection whose other end is this test; it copies what asyncio's does for a protocol."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.written = b""
        self._protocol = protocol
        self._is_closing = False
        protocol.connection_made(self)

    def receive(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self.written += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_reading(self) -> bool:
        return True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Both:
    """Our server and aiohttp's, each with a handler that reads the body and notes the request."""

    def __init__(self) -> None:
        self._seen: Seen = []
        self._ours = HttpServer(self._handle, ConnectionLimits())
        quiet = logging.getLogger("aiohttp.quiet")
        quiet.disabled = True
        self._theirs = web.Server(self._handle_theirs, access_log=None, logger=quiet, lingering_time=0.0)

    async def _handle(self, request: Request) -> Response:
        body = b""
        try:
            while piece := await request.body.read():
                body += piece
        except InvalidBody:
            return Response(400, {"Connection": "close"}, b"")
        self._seen.append((request.method, request.target, body))
        return Response.json({})

    async def _handle_theirs(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.RequestPayloadError:
            return web.Response(status=400, headers={"Connection": "close"})
        self._seen.append((request.method, request._message.path, body))
        return web.json_response({})

    async def read(self, data: bytes, *, theirs: bool = False, size: int = 0) -> tuple[Seen, bytes]:
        """What reached the handler of these bytes, and what was answered; ``size`` bytes at once."""
        self._seen = []
        transport = MemoryTransport(self._theirs() if theirs else ClientConnection(self._ours))
        await asyncio.sleep(0)
        for at in range(0, len(data), size or len(data)):
            transport.receive(data[at : at + (size or len(data))])
            if not theirs and size:
                await asyncio.sleep(0)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        seen, answered = self._seen, transport.written
        transport.close()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return seen, answered


@pytest.mark.parametrize("name", GOOD)
async def test_good_requests_are_read_as_aiohttp_reads_them_however_they_are_cut(name: str) -> None:
    both = Both()
    expected, _ = await both.read(GOOD[name], theirs=True)
    assert expected
    for size in (0, 1, 7):
        seen, answered = await both.read(GOOD[name], size=size)
        assert seen == expected
        assert answers(answered) == len(seen)


@pytest.mark.parametrize("name", REFUSED)
async def test_what_may_be_read_in_two_ways_reaches_no_route_and_is_answered(name: str) -> None:
    both = Both()
    for size in (0, 1):
        seen, answered = await both.read(REFUSED[name], size=size)
        assert seen == []
        assert answered.split(b" ")[1] in (b"400", b"415", b"505")
        assert answers(answered) == 1
        assert b"onnection: close" in answered


PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b"\xff", b"0\r\n\r\n", b"5\r\nhello\r\n"),
    *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"),
    *(b"Content-Length: 0\r\n", b"Transfer-Encoding: identity\r\n", b"Expect: 100-continue\r\n"),
    *(b"HTTP/1.0", b"HTTP/1.1", b"\r\n\r\n", GET, b"GET ", b"FFFFFFFF", b"-1", b"x" * 9000),
)


def mutated(dice: Random) -> bytes:
    """A request or some of the corpus, with pieces replaced, added or left out.

    What follows a request for another protocol we read as HTTP, and aiohttp not at all.
    """
    corpus = [text for text in (*GOOD.values(), *REFUSED.values()) if b"Upgrade" not in text]
    data = b"".join(dice.choice(corpus) for _ in range(dice.randint(1, 2)))
    for _ in range(dice.randint(1, 3)):
        begin = dice.randrange(len(data) + 1)
        end = dice.choice((begin, begin, min(len(data), begin + dice.randint(1, 12))))
        data = data[:begin] + dice.choice((*PIECES, b"")) + data[end:]
    return data


EMPTY_ENCODING = re.compile(rb"content-encoding:\s*,", re.IGNORECASE)
"""An empty element of a list is none (RFC 9110, 5.6.1.2); aiohttp takes such a list for no encoding."""


async def test_whatever_reaches_our_routes_reaches_aiohttps_too() -> None:
    both, dice = Both(), Random(33)
    for _ in range(MUTATIONS):
        data = mutated(dice)
        if not data or EMPTY_ENCODING.search(data):
            continue
        # A byte at once: of bytes that come together aiohttp drops good requests before a bad one.
        theirs, _ = await both.read(data, theirs=True, size=1)
        ours, answered = await both.read(data)
        assert ours == theirs[: len(ours)], data
        assert answers(answered) >= len(ours), data
        cut, _ = await both.read(data, size=dice.randint(1, 40))
        assert cut == ours, data
