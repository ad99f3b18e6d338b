"""Streamed completions as their client sees them: the time of each piece, and the number of tokens.

Prompts are token ids, so that they have exactly the requested length with any tokenizer. The simulated engine
gets a text that its tokenizer cuts into as many tokens: reading a long list of numbers takes milliseconds,
which its timing has no room for.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import aiohttp

from dynaplan.util.errors import PermanentError, TemporaryError

Result = TypeVar("Result")

REQUEST_TIMEOUT_S = 1800.0
"""Seconds that a whole answer may take."""

JSON_HEADERS = {"Content-Type": "application/json"}

LAST_EVENTS = 3
"""The number of events at a stream's end that are parsed: the last token, an empty piece with the reason, and
the usage."""


@dataclass(frozen=True)
class Answer:
    """A whole answer. Times are seconds of this process's clock, one per event that brought tokens.

    ``prompt_tokens``, ``output_tokens`` and ``cached_tokens`` (of the prompt, from the engine's prefix
    cache) are stated by the engine, which may put several tokens into one event.
    """

    sent_s: float
    event_times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """The time from sending the request to its first token."""
        return (self.event_times_s[0] - self.sent_s) * 1000.0

    @property
    def tokens_per_event(self) -> float:
        """The mean number of tokens in one event."""
        return self.output_tokens / len(self.event_times_s)


class CompletionClient:
    """A client of one deployment's ``/v1/completions``; use it as a context manager.

    ``takes_text`` is for engines with the simulated engine's tokenizer.
    """

    requests_at_a_time = 1

    def __init__(self, url: str, model: str, *, takes_text: bool = False) -> None:
        self.base_url = url
        self.model = model
        self._takes_text = takes_text
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CompletionClient:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def answers(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int
    ) -> list[Answer]:
        """Return the answer to each prompt, ``concurrency`` of them at a time; raises as ``complete``."""
        places = asyncio.Semaphore(concurrency)

        async def answer(prompt: Sequence[int]) -> Answer:
            async with places:
                return await self.complete(prompt, output_tokens)

        return await all_of(answer(prompt) for prompt in prompts)

    async def complete(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        """Stream an answer of exactly ``output_tokens``.

        Raises PermanentError when the answer is an error, is cut short, or has other token counts than
        asked for; TemporaryError when there is none within half an hour.
        """
        reading = _Reading()
        sent_s = await self._post(self.request(prompt, output_tokens), reading)
        answer = reading.answer(sent_s)
        check(answer, len(prompt), output_tokens)
        return answer

    async def prime(self, prompt: Sequence[int]) -> None:
        """Have the prompt computed, and wait for it; raises as ``complete`` does.

        Not streamed: the text of one single token may be part of a character, and never be sent.
        """
        request = self.request(prompt, 1) | {"stream": False}
        del request["stream_options"]
        await self._post(request, _Reading())

    def request(self, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        """Return the body of a request: streamed, with usage, ended by nothing but its length."""
        return {
            "model": self.model,
            "prompt": _text(prompt) if self._takes_text else list(prompt),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _post(self, request: dict[str, Any], reading: _Reading) -> float:
        """Send the request and read its answer; return the time at which it was sent."""
        if self._session is None:
            raise RuntimeError("the client was not entered")
        payload = json.dumps(request).encode()
        sent_s = perf_counter()
        try:
            url = f"{self.base_url}/v1/completions"
            async with self._session.post(url, data=payload, headers=JSON_HEADERS) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise PermanentError(f"the deployment answered {response.status}: {text}")
                async for data in response.content.iter_any():
                    reading.take(data, perf_counter())
        except TimeoutError:
            raise TemporaryError(f"no complete answer within {REQUEST_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise PermanentError(f"an answer broke off: {type(error).__name__}: {error}") from error
        return sent_s


def _text(prompt: Sequence[int]) -> str:
    """Return a text of four bytes for each token, as the simulated engine counts them."""
    return "".join(f"{token % 1000:03} " for token in prompt)


def check(answer: Answer, prompt_tokens: int, output_tokens: int) -> None:
    """Raise PermanentError when the engine counts other tokens than were sent and asked for."""
    if answer.prompt_tokens != prompt_tokens:
        raise PermanentError(
            f"the engine counts {answer.prompt_tokens} tokens in a prompt of {prompt_tokens} token ids",
            hint="Expected it to take token ids as they are.",
        )
    if answer.output_tokens != output_tokens:
        raise PermanentError(
            f"the engine answered {answer.output_tokens} tokens where {output_tokens} were asked for",
            hint="Expected it to heed ignore_eos.",
        )


class _Reading:
    """A stream of server-sent events as it arrives; only its last events are parsed, the others counted."""

    def __init__(self) -> None:
        self._rest = b""
        self._times_s: list[float] = []
        self._last: deque[bytes] = deque(maxlen=LAST_EVENTS)
        self._is_done = False

    def take(self, data: bytes, now_s: float) -> None:
        """Add the data that arrived at that time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._times_s.append(now_s)
                self._last.append(line)
            elif line.startswith(b"data: [DONE]"):
                self._is_done = True

    def answer(self, sent_s: float) -> Answer:
        """Return the whole answer; raises PermanentError when it is cut short, or is an error."""
        last = [json.loads(line[len(b"data: ") :]) for line in self._last]
        error = next((event["error"] for event in last if "error" in event), None)
        if error is not None or not self._is_done:
            raise PermanentError(f"an answer broke off: {error or 'the stream has no end'}")
        usage = next((event["usage"] for event in reversed(last) if event.get("usage")), None)
        times_s = self._times_s[: len(self._times_s) - _without_token(last)]
        if usage is None or not times_s:
            raise PermanentError("an answer has no tokens, or does not say how many: include_usage is needed")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            sent_s,
            tuple(times_s),
            int(usage["prompt_tokens"]),
            int(usage["completion_tokens"]),
            int(details.get("cached_tokens") or 0),
        )


def _without_token(last: Sequence[dict[str, Any]]) -> int:
    """Count the last events without a token: the usage, and an empty piece with the reason for the end."""
    count = 0
    for event in reversed(last):
        choices = event.get("choices") or []
        if any(choice.get("text") or not choice.get("finish_reason") for choice in choices):
            break
        count += 1
    return count


async def all_of(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls at once; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
