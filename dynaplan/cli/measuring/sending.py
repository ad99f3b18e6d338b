"""Load as clients make it: a number of them that wait for their answers, or requests at a trace's times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynaplan.cli.measuring.answer_stream import AnswerStream, RequestFailed, streamed
from dynaplan.cli.measuring.prompt_pool import PromptPool
from dynaplan.cli.measuring.tally import Tally
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.util.backoff import Backoff

if TYPE_CHECKING:
    import aiohttp

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Seconds that a client waits after a failure before it asks again: it must not ask in a busy loop."""


@dataclass(frozen=True)
class Target:
    """The service that is measured: its base address and the name of its model."""

    url: str
    model: str

    def payload(self, prompt: bytes, output_tokens: int) -> bytes:
        """Return a request's body: streamed, with usage, ended by nothing but its length."""
        rest = {
            "model": self.model,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return b'{"prompt":' + prompt + b"," + json.dumps(rest).encode()[1:]


class Sender:
    """Sends requests to one target, and counts what comes back; ``stop`` ends the sending."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, pool: PromptPool, tally: Tally
    ) -> None:
        self._session = session
        self._target = target
        self._url = f"{target.url}/v1/completions"
        self._pool = pool
        self._tally = tally
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Send no further request; those under way are answered and counted."""
        self._stopped.set()

    async def clients(self, number: int, request: TracedRequest) -> None:
        """Have that many clients send the request again and again, until ``stop`` and their last answer."""
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(self._client(request))

    async def trace(self, requests: Iterable[TracedRequest]) -> None:
        """Send each request when it is due, whatever became of those before; wait for the last answer."""
        began_s = self._tally.began_s
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due_s = began_s + request.arrival_s
                await self._wait(due_s - time.perf_counter())
                if self._stopped.is_set():
                    return
                self._tally.late_s = max(self._tally.late_s, time.perf_counter() - due_s)
                group.create_task(self._send(due_s, request))

    async def _client(self, request: TracedRequest) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._wait)
        while not self._stopped.is_set():
            if await self._send(time.perf_counter(), request):
                backoff.reset()
            else:
                await backoff.pause()

    async def _wait(self, seconds: float) -> None:
        """Wait that time, or for ``stop``; at least once for whatever else is to be done."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stopped.wait()
        except TimeoutError:
            pass

    async def _send(self, due_s: float, request: TracedRequest) -> bool:
        """Send one request and wait for its answer; return whether it was whole."""
        tally, stream = self._tally, AnswerStream()
        payload = self._target.payload(self._pool.prompt(request), request.output_tokens)
        tally.sent += 1
        tally.open.add(stream)
        try:
            answer = await streamed(self._session, self._url, payload, stream)
        except RequestFailed as failure:
            tally.ended(stream)
            tally.failed(failure)
            return False
        tally.ended(stream)
        tally.answered(due_s, answer, (request.prompt_tokens, request.output_tokens))
        return True


Load = Callable[[Sender], Awaitable[None]]
"""Sends a load to its end."""
