"""Load as users make it: closed loops of clients that await their answers, open ones at a trace's times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.lab.profiling.load.completions import Answer, AnswerStream, CompletionClient, RequestFailed
from dynaplan.lab.profiling.load.prompts import PromptPool
from dynaplan.util.backoff import Backoff

FIRST_RETRY_S, MAX_RETRY_S = 0.1, 2.0
"""Seconds that a client waits after a failure before it asks again: it must not ask in a busy loop."""


class LoadObserver(Protocol):
    """Counts the requests of a load. Each is ``sent`` once, and then either ``answered`` or ``failed``.

    ``due_s`` is the time of ``time.perf_counter`` at which the request should have been sent.
    """

    def sent(self, stream: AnswerStream, due_s: float) -> None:
        """Take note of a request that is about to be sent; ``stream`` grows with its answer."""

    def answered(self, stream: AnswerStream, due_s: float, answer: Answer, request: TracedRequest) -> None:
        """Take note of a whole answer to that request."""

    def failed(self, stream: AnswerStream, failure: RequestFailed) -> None:
        """Take note of a request without a whole answer."""


class LoadGenerator:
    """Sends requests until ``stop``; those under way are answered and counted."""

    def __init__(self, client: CompletionClient, prompts: PromptPool, observer: LoadObserver) -> None:
        self._client = client
        self._prompts = prompts
        self._observer = observer
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Send no further request."""
        self._stopped.set()

    async def closed_loop(self, clients: int, request: TracedRequest) -> None:
        """Have that many clients send the request again and again, until ``stop`` and their last answer."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._repeat(request))

    async def open_loop(self, requests: Iterable[TracedRequest], began_s: float) -> None:
        """Send each request when it is due, however many are unanswered; wait for the last answer."""
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due_s = began_s + request.arrival_s
                await self._wait(due_s - time.perf_counter())
                if self._stopped.is_set():
                    return
                group.create_task(self._send(due_s, request))

    async def _repeat(self, request: TracedRequest) -> None:
        backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S, self._wait)
        while not self._stopped.is_set():
            if await self._send(time.perf_counter(), request):
                backoff.reset()
            else:
                await backoff.pause()

    async def _wait(self, seconds: float) -> None:
        """Wait that time, or until ``stop``; other tasks get their turn even for 0 s."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stopped.wait()
        except TimeoutError:
            pass

    async def _send(self, due_s: float, request: TracedRequest) -> bool:
        """Send one request and wait for its answer; return whether it was whole."""
        stream, prompt = AnswerStream(), self._prompts.prompt(request)
        self._observer.sent(stream, due_s)
        try:
            answer = await self._client.complete(prompt, request.output_tokens, stream)
        except RequestFailed as failure:
            self._observer.failed(stream, failure)
            return False
        self._observer.answered(stream, due_s, answer, request)
        return True
