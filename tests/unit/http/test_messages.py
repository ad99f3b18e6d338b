"""Headers, paths and queries as routes see them, and bodies as they arrive."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any, cast

import pytest

from dynaplan.http.messages import (
    MAX_PIECE_BYTES,
    MAX_UNREAD_BYTES,
    Headers,
    InvalidBody,
    Request,
    RequestBody,
    path_of,
)


class Reading:
    """A transport, as far as a body pauses and resumes it."""

    def __init__(self) -> None:
        self.is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return False


def body_of(encoding: str, *pieces: bytes, transport: Reading | None = None) -> RequestBody:
    body = RequestBody(0, encoding, cast(asyncio.Transport, transport or Reading()))
    for piece in pieces:
        body.add(piece)
    body.complete()
    return body


async def pieces_of(body: RequestBody) -> list[bytes]:
    pieces = []
    while piece := await body.read():
        pieces.append(piece)
    return pieces


def test_headers_are_found_in_any_case_and_of_several_the_first() -> None:
    headers = Headers([(b"host", b"a"), (b"x", b"\xff"), (b"host", b"b")])
    assert (headers.get("HOST"), headers.get("none"), headers.get("x")) == ("a", "", "\udcff")
    assert headers.get_all("Host") == ["a", "b"]


def test_replaced_headers_take_the_place_of_all_of_their_name_and_empty_ones_are_left_out() -> None:
    headers = Headers([(b"host", b"a"), (b"cookie", b"c"), (b"host", b"b")])
    changed = headers.replaced({"Host": "z", "Cookie": "", "New": "n"})
    assert changed.get_all("host") == ["z"]
    assert (changed.get("cookie"), changed.get("new")) == ("", "n")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/models?x=/y#z", "/v1/models"),
        ("/v1/models/a%2Fb%20c", "/v1/models/a/b c"),
        ("http://host:8000/live?a", "/live"),
        ("http://host", "/"),
        ("*", "*"),
        ("http://[", "http://["),
    ],
)
def test_the_path_is_decoded_and_without_query_or_host(target: str, path: str) -> None:
    assert path_of(target) == path


def test_of_several_fields_of_a_query_the_first_counts() -> None:
    nothing = cast(Any, None)
    request = Request("GET", "/ui?a=1&b=%20&a=2&c=", "/ui", Headers([]), nothing, nothing, "name")
    assert request.query == {"a": "1", "b": " ", "c": ""}


async def test_a_body_is_read_as_it_came_and_pauses_its_client_while_too_much_waits() -> None:
    transport = Reading()
    body = body_of("", b"a", b"x" * MAX_UNREAD_BYTES, transport=transport)
    assert transport.is_paused
    assert await pieces_of(body) == [b"a" + b"x" * MAX_UNREAD_BYTES]
    assert not transport.is_paused


async def test_what_is_discarded_is_neither_kept_nor_counted() -> None:
    transport = Reading()
    body = RequestBody(0, "", cast(asyncio.Transport, transport))
    body.add(b"x" * 2 * MAX_UNREAD_BYTES)
    body.discard()
    body.add(b"y" * 2 * MAX_UNREAD_BYTES)
    assert not transport.is_paused
    body.complete()
    assert await body.read() == b""


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data, wbits=-15)),
    ],
)
async def test_compressed_bodies_are_read_however_they_are_cut(
    encoding: str, compress: Any, size: int
) -> None:
    data = compress(b"hello " * 1000)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert b"".join(await pieces_of(body_of(encoding, *pieces))) == b"hello " * 1000


async def test_a_small_body_that_becomes_a_large_one_comes_in_pieces() -> None:
    pieces = await pieces_of(body_of("gzip", gzip.compress(b"x" * 5 * MAX_PIECE_BYTES)))
    assert sum(map(len, pieces)) == 5 * MAX_PIECE_BYTES
    assert max(map(len, pieces)) == MAX_PIECE_BYTES


@pytest.mark.parametrize(
    "data",
    [gzip.compress(b"hello")[:-3], gzip.compress(b"hello") + b"more", b"garbage", b"\x1f\x8b\x08"],
    ids=["cut", "followed", "garbage", "head alone"],
)
async def test_a_body_that_is_not_what_its_encoding_says_is_at_fault(data: bytes) -> None:
    with pytest.raises(InvalidBody):
        await pieces_of(body_of("gzip", data))
