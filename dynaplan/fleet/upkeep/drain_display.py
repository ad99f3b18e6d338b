"""Shows the requests in flight, and the time that they have left, while ``serve`` ends."""

from __future__ import annotations

import asyncio
import io
import os
import re
import time
from collections.abc import Sequence

from dynaplan.util.durations import clock
from dynaplan.util.probe import whole_answer
from dynaplan.util.progress import ProgressLine
from dynaplan.util.terminal import offer

LOOK_EVERY_S = 0.5
"""Seconds between two looks."""

EVERY_S = 5.0
"""Seconds between two lines where there is no terminal."""

_IN_FLIGHT = re.compile(rb"^dynamo_component_inflight_requests\{[^}]*\} ([0-9.e+]+)$", re.M)


class StandardError(io.TextIOBase):
    """Standard error, which drops a text that nobody reads: the end of ``serve`` does not wait for it."""

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return os.isatty(2)

    def write(self, text: str) -> int:
        """Write it, if it is taken at once; return its length."""
        offer(text, 2)
        return len(text)


async def show_drain(urls: Sequence[str], timeout_s: float, line: ProgressLine | None = None) -> None:
    """Show it until cancelled; ``urls`` are the processes that take requests, drained within ``timeout_s``.

    Shows nothing while none of them answers.
    """
    deadline_s = time.monotonic() + timeout_s
    with line or ProgressLine(StandardError(), EVERY_S) as shown:
        while True:
            requests = await requests_in_flight(urls)
            if requests:
                left = clock(deadline_s - time.monotonic())
                noun = "request" if requests == 1 else "requests"
                shown.show(f"{requests} {noun} in flight, at most {left} left")
            await asyncio.sleep(LOOK_EVERY_S)


async def requests_in_flight(urls: Sequence[str]) -> int:
    """Return the requests that these processes have accepted and not answered, by their ``/metrics``."""
    answers = await asyncio.gather(*(whole_answer(url, "/metrics", LOOK_EVERY_S) for url in urls))
    return sum(int(float(found[1])) for answer in answers if (found := _IN_FLIGHT.search(answer)))
