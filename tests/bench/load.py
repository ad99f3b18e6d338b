"""A number of requests to a service, by the load generator of ``dynaplan bench``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.lab.profiling.load.completions import (
    Answer,
    AnswerStream,
    CompletionClient,
    RequestFailed,
    open_client,
)
from dynaplan.lab.profiling.load.generator import LoadGenerator
from dynaplan.lab.profiling.load.prompts import PromptPool

PROMPT_TOKENS = 6
BLOCK_TOKENS = 64


@dataclass
class Result:
    """The counts and times of one run; a failure is a request, too."""

    seconds: float = 0.0
    requests: int = 0
    failures: int = 0
    latencies_s: list[float] = field(default_factory=list)


class _Counter:
    """Stops the load when enough requests were sent."""

    def __init__(self, requests: int, client: CompletionClient) -> None:
        self.result = Result()
        self.load = LoadGenerator(client, PromptPool(is_text=True), self)
        self._left = requests

    def sent(self, stream: AnswerStream, due_s: float) -> None:
        self._left -= 1
        if not self._left:
            self.load.stop()

    def answered(self, stream: AnswerStream, due_s: float, answer: Answer, request: TracedRequest) -> None:
        self.result.requests += 1
        self.result.latencies_s.append(time.perf_counter() - answer.sent_s)

    def failed(self, stream: AnswerStream, failure: RequestFailed) -> None:
        self.result.requests += 1
        self.result.failures += 1


async def generate(
    url: str, model: str, requests: int, concurrency: int, tokens: int, prompt_tokens: int = PROMPT_TOKENS
) -> Result:
    """Send that many streaming completions, some at a time; prompts share all of their whole blocks."""
    blocks = tuple(range(prompt_tokens // BLOCK_TOKENS))
    request = TracedRequest(0.0, prompt_tokens, tokens, blocks, BLOCK_TOKENS)
    async with open_client() as http:
        counter = _Counter(requests, CompletionClient(http, url, model))
        started_s = time.perf_counter()
        await counter.load.closed_loop(min(concurrency, requests), request)
        counter.result.seconds = time.perf_counter() - started_s
    return counter.result
