"""Receive one request's body: within its size, its time, and the budget of all bodies."""

from __future__ import annotations

import asyncio

from aiohttp import web

from dynaplan.gateway.bodies.budget import BodyShare
from dynaplan.gateway.openai_api import ApiError

_CLOSE = {"Connection": "close"}


async def received_body(
    request: web.BaseRequest, share: BodyShare, *, largest_bytes: int, timeout_s: float
) -> bytes:
    """Return the whole body, decompressed.

    Raises ApiError: 413 for a body that is too large, 408 for one that takes too long, 503 when the bodies of
    other requests leave no room, 400 for one that is not what its headers say. What the headers say of the
    size is judged before anything is received.
    """
    declared_bytes = request.content_length or 0
    if declared_bytes > largest_bytes:
        raise _too_large(largest_bytes)
    share.check(declared_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        if request.content.is_eof():  # it came with its headers: there is nothing to wait for
            return await _received(request, share, largest_bytes)
        async with asyncio.timeout(timeout_s):
            return await _received(request, share, largest_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"The body was not complete after {timeout_s:g} s", code="body_timeout", headers=_CLOSE
        ) from None
    except web.RequestPayloadError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ApiError(
            400,
            f"The body cannot be read ({reason}). Send what Content-Length and Content-Encoding promise.",
            code="invalid_body",
            headers=_CLOSE,
        ) from None


async def _received(request: web.BaseRequest, share: BodyShare, largest_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := await request.content.readany():
        size += len(piece)
        if size > largest_bytes:
            raise _too_large(largest_bytes)
        share.grow_to(size)
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(largest_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {largest_bytes} bytes (Frontend.max-body-bytes)",
        code="body_too_large",
        headers=_CLOSE,
    )
