"""Requests and responses as a handler sees them; ``server`` has the bytes."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

MAX_UNREAD_BYTES = 128 * 1024
"""Bytes of a body that wait for their reader at most, but for those of one more read."""

MAX_PIECE_BYTES = 256 * 1024
"""Bytes that are decompressed at once."""


MAX_BODY_BYTES = 64 * 1024 * 1024
"""Bytes of a body that ``Request.read`` returns at most."""

NO_FIELDS: Mapping[str, str] = {}


class InvalidBody(Exception):
    """The body is not what its headers say."""


class BodyTooLarge(Exception):
    """The body is larger than its reader takes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"the request is larger than {most_bytes} bytes")


class Headers:
    """The headers of a request or an answer; their names in any case."""

    __slots__ = ("_pairs", "first_values")

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Take names in lower case, and values as they came."""
        self._pairs = pairs
        self.first_values = dict(reversed(pairs))
        """Name in lower case -> value, the first of several."""

    def get(self, name: str, default: str = "") -> str:
        """Return the value of a header, the first of several."""
        value = self.first_values.get(name.lower().encode())
        return default if value is None else value.decode("utf-8", "surrogateescape")

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield all of them, names in lower case."""
        for name, value in self._pairs:
            yield name.decode("latin-1"), value.decode("utf-8", "surrogateescape")

    def get_all(self, name: str) -> list[str]:
        wanted = name.lower().encode()
        return [value.decode("utf-8", "surrogateescape") for found, value in self._pairs if found == wanted]

    def replaced(self, values: Mapping[str, str]) -> Headers:
        """Return these headers with others in the place of those of the same names; "" leaves one out."""
        names = {name.lower().encode() for name in values}
        added = [(name.lower().encode(), value.encode()) for name, value in values.items() if value]
        return Headers([*(pair for pair in self._pairs if pair[0] not in names), *added])


@dataclass(frozen=True)
class Response:
    """An answer that is no stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @classmethod
    def json(cls, document: Any, status: int = 200) -> Response:
        return cls(status, {"Content-Type": "application/json"}, json.dumps(document).encode())

    @classmethod
    def text(cls, text: str, status: int = 200, content_type: str = "text/plain; charset=utf-8") -> Response:
        return cls(status, {"Content-Type": content_type}, text.encode())


class Answering(Protocol):
    """The connection of a request, to which its answer is written: ``respond``, or a stream."""

    async def respond(self, request: Request, response: Response) -> None:
        """Send a whole answer; raises ConnectionError, as the others do, when the client has left."""
        ...

    def start_stream(self, request: Request, headers: Mapping[str, str], status: int = 200) -> None:
        """Begin an answer whose length is not known: status and headers, sent with its first part."""
        ...

    async def write(self, data: bytes) -> None:
        """Send a part of the stream; wait while the client reads too slowly."""
        ...

    def write_now(self, data: bytes) -> bool:
        """Send a part of the stream; False, and nothing is sent, when ``write`` would wait or raise."""
        ...

    def write_chunk_now(self, chunk: bytes) -> bool:
        """Send one whole chunk, with its framing, as ``write_now`` sends a part without.

        False, too, where the answer is not sent in chunks.
        """
        ...

    def hold(self, data: bytes) -> bool:
        """Keep a part of the stream that is not empty, to be sent in one write with the next one or the end.

        One of them has to follow at once. False, and it is not kept, when ``write`` would wait or raise.
        """
        ...

    async def end_stream(self) -> None:
        """Send the end of the stream. Without it the client sees that its answer is cut."""
        ...

    async def ask_for_body(self) -> None:
        """Send the interim answer for which a client with ``Expect: 100-continue`` waits."""
        ...

    async def flush(self) -> None:
        """Return when the kernel has all that was written, or the client has left."""
        ...


class Request(Struct, frozen=True):
    """A request whose head has arrived. ``path`` has no query, and its escapes are decoded.

    ``name`` is its id, the client's own where it is usable. ``readable_by`` is the web origin whose scripts
    may read the answer, empty where there is none. ``is_from_browser``: it says
    from what page it comes. ``fields`` are what its route names in the path.
    """

    method: str
    target: str
    path: str
    headers: Headers
    body: RequestBody
    connection: Answering
    name: str
    is_http_10: bool = False
    is_kept: bool = True
    readable_by: str = ""
    is_from_browser: bool = False
    fields: Mapping[str, str] = NO_FIELDS

    @property
    def query(self) -> dict[str, str]:
        """The fields of the query; of several of a name the first."""
        return dict(reversed(parse_qsl(urlsplit(self.target).query, keep_blank_values=True)))

    async def read(self) -> bytes:
        """Return the whole body, decompressed; raises InvalidBody, BodyTooLarge, or ConnectionError."""
        most_bytes = MAX_BODY_BYTES
        if self.body.declared_bytes > most_bytes:
            raise BodyTooLarge(most_bytes)
        if self.headers.get("expect").lower() == "100-continue":
            await self.connection.ask_for_body()
        pieces, size = [], 0
        while piece := await self.body.read():
            pieces.append(piece)
            if (size := size + len(piece)) > most_bytes:
                raise BodyTooLarge(most_bytes)
        return b"".join(pieces)

    def with_fields(self, fields: Mapping[str, str]) -> Request:
        return replace(self, fields=fields)

    def redirected(self, path: str, headers: Headers) -> Request:
        """Return the same request for another path, with other headers."""
        return replace(self, path=path, headers=headers)


@lru_cache(maxsize=256)
def path_of(target: str) -> str:
    """Return the decoded path of a request's target, which may be a whole address."""
    if not target.startswith("/"):
        try:
            target = urlsplit(target).path or "/"
        except ValueError:
            return target
    path = target.partition("?")[0].partition("#")[0]
    return unquote(path) if "%" in path else path


class RequestBody:
    """The body of a request as it arrives. ``declared_bytes`` is its length, 0 where it is not known.

    ``transport`` is paused while too much of it waits.
    """

    __slots__ = (
        *("_decompressor", "_fault", "_is_discarded", "_pieces", "_reader", "_transport", "_unread_bytes"),
        *("declared_bytes", "is_complete", "is_paused"),
    )

    def __init__(self, declared_bytes: int, encoding: str, transport: asyncio.Transport) -> None:
        self.declared_bytes = declared_bytes
        self.is_complete = False
        self._transport = transport
        self._pieces: deque[bytes] = deque()
        self._unread_bytes = 0
        self.is_paused = False
        self._is_discarded = False
        self._fault = ""
        self._reader: asyncio.Future[None] | None = None
        self._decompressor = _Decompressor(encoding) if encoding else None

    async def read(self) -> bytes:
        """Return what has arrived since the last call, decompressed; empty at the end; raises InvalidBody."""
        if self._decompressor:
            return await self._decompressor.read(self)
        return await self.read_raw()

    async def read_raw(self) -> bytes:
        """Return what has arrived since the last call, as it was sent; empty at the end; raises
        InvalidBody."""
        while not self._pieces:
            if self._fault:
                raise InvalidBody(self._fault)
            if self.is_complete:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._take()

    def take_whole(self) -> bytes:
        """Return all of a complete body that nobody has begun to read.

        Empty where only ``read`` will do: for a compressed body, and for a faulty one.
        """
        return b"" if self._decompressor or self._fault else self._take()

    def _take(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._unread_bytes = 0
        if self.is_paused:
            self._read_on()
        return data

    def add(self, data: bytes) -> None:
        """Take what has arrived, unless it is discarded."""
        if self._is_discarded:
            return
        self._pieces.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()
        if self._reader is not None:
            self._wake()

    def complete(self) -> None:
        self.is_complete = True
        if self._reader is not None:
            self._wake()

    def fail(self, reason: str) -> None:
        """Have the reader hear that nothing more comes, and why."""
        self._fault = reason
        self._wake()

    def discard(self) -> None:
        """Drop what arrives of the body from now on: nobody reads it."""
        self._is_discarded = True
        self._take()

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self.is_paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


class WholeBody(RequestBody):
    """A body that is there already."""

    def __init__(self, data: bytes) -> None:
        super().__init__(len(data), "", cast(asyncio.Transport, None))
        self.is_complete = True
        self._pieces.append(data)


ENCODINGS = ("gzip", "x-gzip", "deflate", "identity")
"""The values of ``Content-Encoding`` that are understood."""


class _Decompressor:
    """Reads a compressed body in pieces of bounded size, so that a small one cannot become a huge one."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: Any = None
        self._compressed = b""

    async def read(self, body: RequestBody) -> bytes:
        while True:
            if not self._compressed:
                self._compressed = await body.read_raw()
                if not self._compressed:
                    self._check_end()
                    return b""
            if piece := self._decompress():
                await asyncio.sleep(0)  # others go on meanwhile
                return piece

    def _decompress(self) -> bytes:
        if self._stream is None:
            self._stream = zlib.decompressobj(self._window_bits())
        try:
            piece: bytes = self._stream.decompress(self._compressed, MAX_PIECE_BYTES)
        except zlib.error as error:
            raise InvalidBody(f"it is no {self._encoding}: {error}") from None
        self._compressed = self._stream.unconsumed_tail
        if self._stream.unused_data:
            raise InvalidBody(f"bytes follow the end of its {self._encoding}")
        return piece

    def _window_bits(self) -> int:
        if self._encoding != "deflate":
            return 16 + zlib.MAX_WBITS
        # HTTP's "deflate" has zlib's head; many clients leave it out.
        has_head = self._compressed[0] & 0x0F == 8
        return zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS

    def _check_end(self) -> None:
        if self._stream is not None and not self._stream.eof:
            raise InvalidBody(f"its {self._encoding} is cut")
