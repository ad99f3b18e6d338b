"""The answer to one request while the simulated engine computes it."""

from __future__ import annotations

import asyncio

from dynaplan.engines.timing_model.request import EngineRequest, RequestState


class LiveAnswer:
    """One request on its way: the tokens that the model has emitted, and a waiter for more."""

    __slots__ = ("failure", "is_finished", "is_streamed", "ready_tokens", "request", "transport", "waiter")

    def __init__(
        self, request: EngineRequest, *, is_streamed: bool, transport: asyncio.BaseTransport | None
    ) -> None:
        self.request = request
        self.is_streamed = is_streamed
        self.transport = transport
        self.ready_tokens = 0
        self.is_finished = False
        self.failure: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    async def progress(self, seen_tokens: int) -> None:
        """Wait for more tokens than ``seen_tokens`` (a stream), or for all; raises the failure."""
        while not self.is_finished and not (self.is_streamed and self.ready_tokens > seen_tokens):
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.failure is not None:
            raise self.failure

    def advance(self, tokens: int) -> None:
        """Note the number of tokens emitted so far."""
        self.ready_tokens = tokens
        self.is_finished = self.request.state >= RequestState.HELD
        if self.is_finished or self.is_streamed:
            self._wake()

    def fail(self, failure: Exception) -> None:
        """End the answer with that failure."""
        self.failure = failure
        self.is_finished = True
        self._wake()

    def _wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
