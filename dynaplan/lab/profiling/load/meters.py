"""TTFT and ITL of one running engine: warm it up, then measure one point at a time.

TTFT is that of a prompt alone in the engine. ITL is measured over the time in which all requests of a load
decode and no prompt is computed::

    request 1   prompt|1 2 3 4 5 6 7 8 9 ...............|
    request 2      prompt|1 2 3 4 5 6 7 8 9 ...............|
    request 3         prompt|1 2 3 4 5 6 7 8 9 ...............|
                             |trimmed| measured |trimmed|
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from dynaplan.lab.profiling.load.completions import Answer, CompletionClient
from dynaplan.lab.profiling.load.prompts import PromptPool
from dynaplan.lab.profiling.load_points import PREFILL_OSL_TOKENS, DecodeLoad
from dynaplan.lab.profiling.measurements import DecodeMeasurement, PrefillMeasurement
from dynaplan.util.errors import PermanentError

Result = TypeVar("Result")

MAX_ATTEMPTS = 3
"""The number of times that a decode load is sent before its ITL is given up."""

WARM_UP_REQUESTS = 3
"""The number of unmeasured requests at the beginning."""

WARM_UP_TOKENS = 128
"""The length of their prompts."""

WARM_UP_NUMBER = 1 << 60
"""The number of their first prompt; those of decoding are numbered from 0 on."""

PREFILL_NUMBER = 1 << 32
"""The number of the first prompt of one token whose TTFT is measured; of n tokens it is n times that."""

MIN_REQUESTS, MAX_REQUESTS = 3, 10
"""The least and the largest number of prompts that one TTFT is measured by."""

PREFILL_MEASURED_S = 0.5
"""Seconds of TTFTs together after which no more than the least number of prompts is sent."""

LONG_PREFILL_S = 5.0
"""Seconds of TTFTs together after which not even the least number of prompts is sent."""

TRIMMED = 0.15
"""The part of the shared time that is left out at its beginning: prompts computed just before may delay it.

An equal part is left out at its end, so that the mean context stays the same.
"""

MIN_SHARED = 0.1
"""The least part of each answer's tokens that must have come in the remaining time."""


async def warm_up(client: CompletionClient, prompts: PromptPool) -> None:
    """Send a few unmeasured requests, for the work that an engine does only once."""
    for number in range(WARM_UP_REQUESTS):
        await _answer(client, prompts, WARM_UP_NUMBER + number, WARM_UP_TOKENS, PREFILL_OSL_TOKENS)


async def measure_prefill(
    client: CompletionClient, prompts: PromptPool, load: DecodeLoad
) -> PrefillMeasurement:
    """Measure the TTFT of a prompt alone in the engine, with another prompt each time.

    Of several requests the fastest counts: what delays the others is not the engine's. Raises PermanentError
    when an answer fails, or has other numbers of tokens than were sent and asked for.
    """
    first = PREFILL_NUMBER * load.isl_tokens
    ttfts_s: list[float] = []
    while not _is_enough(ttfts_s):
        answer = await _answer(client, prompts, first + len(ttfts_s), load.isl_tokens, load.osl_tokens)
        ttfts_s.append(answer.ttft_ms / 1000)
    return PrefillMeasurement(load.isl_tokens, min(ttfts_s) * 1000)


def _is_enough(ttfts_s: Sequence[float]) -> bool:
    if len(ttfts_s) < MIN_REQUESTS:
        return sum(ttfts_s) > LONG_PREFILL_S
    return len(ttfts_s) >= MAX_REQUESTS or sum(ttfts_s) > PREFILL_MEASURED_S


class DecodeMeter:
    """Measures ITL with prompts that the engine has in its prefix cache.

    Request number n of every load has the beginning of the same prompt, so that the entries of an earlier
    load in the cache are used again. Raises PermanentError as ``measure_prefill`` does.
    """

    def __init__(self, client: CompletionClient, prompts: PromptPool) -> None:
        self._client = client
        self._prompts = prompts
        self._too_many: list[DecodeLoad] = []

    async def measure(self, load: DecodeLoad) -> DecodeMeasurement | None:
        """Measure the ITL while all requests of the load decode together.

        When they never do, half as many are measured, and so on. None when the ITL cannot be known at all:
        every token of an answer comes at the same moment.
        """
        concurrency = self._most_concurrent(load)
        while concurrency:
            smaller = load._replace(concurrency=concurrency)
            answers = await self._answers(smaller)
            if are_side_by_side(answers):
                return await self._measured(smaller, answers)
            self._too_many.append(smaller)
            concurrency //= 2
        return None

    def _most_concurrent(self, load: DecodeLoad) -> int:
        """The concurrency to begin with: below all that were too many for prompts no longer than these."""
        halves = (other.concurrency // 2 for other in self._too_many if other.isl_tokens <= load.isl_tokens)
        return min((load.concurrency, *halves))

    async def _measured(self, load: DecodeLoad, answers: Sequence[Answer]) -> DecodeMeasurement | None:
        """Measure these answers, or new ones of the same load when they tell nothing; None if none do."""
        for _ in range(MAX_ATTEMPTS):
            itl_ms = shared_itl_ms(answers)
            if itl_ms is not None:
                return DecodeMeasurement(*load, itl_ms, 1000 * load.concurrency / itl_ms)
            answers = await self._answers(load)
        return None

    async def _answers(self, load: DecodeLoad) -> list[Answer]:
        """Send the whole load at once, its prompts in the prefix cache."""
        numbers, lengths = range(load.concurrency), (load.isl_tokens, load.osl_tokens)
        fresh = [self._prompts.numbered(number, load.isl_tokens) for number in numbers]
        await _all_of(self._client.prime(prompt) for prompt in fresh)
        return await _all_of(_answer(self._client, self._prompts, number, *lengths) for number in numbers)


async def _answer(
    client: CompletionClient, prompts: PromptPool, number: int, isl_tokens: int, osl_tokens: int
) -> Answer:
    """Return the answer to that prompt; raises PermanentError when it has other numbers of tokens."""
    answer = await client.complete(prompts.numbered(number, isl_tokens), osl_tokens)
    if not answer.prompt_tokens:
        raise PermanentError("an answer does not say how many tokens it has: include_usage is needed")
    if answer.prompt_tokens != isl_tokens:
        raise PermanentError(
            f"the engine counts {answer.prompt_tokens} tokens in a prompt of {isl_tokens} token ids",
            hint="Expected it to take token ids as they are.",
        )
    if answer.output_tokens != osl_tokens:
        raise PermanentError(
            f"the engine answered {answer.output_tokens} tokens where {osl_tokens} were asked for",
            hint="Expected it to heed ignore_eos.",
        )
    return answer


async def _all_of(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls at once; the first failure cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def are_side_by_side(answers: Sequence[Answer]) -> bool:
    """Tell whether all answers had begun before the first one ended."""
    return _begun_s(answers) <= _ended_s(answers)


def shared_itl_ms(answers: Sequence[Answer]) -> float | None:
    """Return the ITL from the last answer's first token to the first answer's last token.

    Before and after, fewer answers decode than the load has, and prompts may be computed beside them. A
    single answer is measured from its second token on. None when an answer has less than a tenth of its
    tokens in that time, or all tokens came at the same moment.
    """
    from_s, to_s = _shared_time_s(answers)
    duration_s = tokens = 0.0
    for answer in answers:
        times_s = answer.event_times_s
        first, last = bisect_left(times_s, from_s), bisect_right(times_s, to_s) - 1
        steps = max(last - first, 0) * answer.tokens_per_event
        if steps < MIN_SHARED * max(answer.output_tokens - 1, 1):
            return None
        tokens += steps
        duration_s += times_s[last] - times_s[first]
    return duration_s / tokens * 1000.0 if duration_s > 0.0 else None


def _shared_time_s(answers: Sequence[Answer]) -> tuple[float, float]:
    """Return the beginning and the end of the time in which all answers are generated, trimmed at both."""
    begun_s, ended_s = _begun_s(answers), _ended_s(answers)
    if len(answers) == 1:
        times_s = answers[0].event_times_s
        return times_s[min(1, len(times_s) - 1)], ended_s
    margin_s = TRIMMED * max(ended_s - begun_s, 0.0)
    return begun_s + margin_s, ended_s - margin_s


def _begun_s(answers: Sequence[Answer]) -> float:
    return max(answer.first_s for answer in answers)


def _ended_s(answers: Sequence[Answer]) -> float:
    return min(answer.last_s for answer in answers)
