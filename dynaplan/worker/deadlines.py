"""Deadlines: the time at which an answer is not worth waiting for any more.

A call hands on what is left of its time with the request, so that the process that answers gives up too,
also when the caller cannot cancel it any more; a call made while a request is answered never outlasts that
request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any

from dynaplan.util.errors import DeadlineExceeded, UserError

TIMEOUT_HEADER = "X-Dynaplan-Timeout-Ms"
"""Milliseconds that the sender of a request waits for the end of its answer."""

NEVER = math.inf

_deadline_s: ContextVar[float] = ContextVar("deadline_s", default=NEVER)


def deadline_after(timeout_s: float | None) -> float:
    """Return the time of the running loop at which a call ends that may take ``timeout_s`` seconds.

    Never later than the deadline of the request that is being answered; ``NEVER`` without either.
    """
    own_s = NEVER if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    return min(own_s, _deadline_s.get())


def timeout_headers(deadline_s: float) -> dict[str, str]:
    """Return the headers that hand a deadline on: none when there is none."""
    if deadline_s == NEVER:
        return {}
    left_s = deadline_s - asyncio.get_running_loop().time()
    return {TIMEOUT_HEADER: str(max(1, math.ceil(1000 * left_s)))}


def parse_deadline(text: str) -> float:
    """Return the deadline of a request by its header TIMEOUT_HEADER; NEVER when ``text`` is empty.

    It is a time of the running loop. Raises UserError unless the text is whole milliseconds.
    """
    if not text:
        return NEVER
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{TIMEOUT_HEADER} is {text[:20]!r}: expected whole milliseconds")
    return asyncio.get_running_loop().time() + min(int(text[:15]), 10**12) / 1000


@contextmanager
def deadline_scope(deadline_s: float) -> Iterator[None]:
    """Let no call that is made inside the block outlast this deadline, or that of an outer block."""
    token = _deadline_s.set(min(deadline_s, _deadline_s.get()))
    try:
        yield
    finally:
        _deadline_s.reset(token)


async def iterate_until(
    deadline_s: float, items: AsyncGenerator[Any, None], subject: str
) -> AsyncGenerator[Any, None]:
    """Yield the items; raise DeadlineExceeded, and end them, when the next is not there at the deadline.

    ``subject`` begins the error's sentence. While the consumer handles an item nothing is interrupted.
    """
    async with aclosing(items):
        while True:
            try:
                item = await _next(deadline_s, items, subject)
            except StopAsyncIteration:
                return
            yield item


async def _next(deadline_s: float, items: AsyncIterator[Any], subject: str) -> Any:
    try:
        async with asyncio.timeout_at(None if deadline_s == NEVER else deadline_s) as limit:
            return await anext(items)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded(
            f"{subject} has not answered in time", hint="Another try may be faster; or allow more time."
        ) from error
