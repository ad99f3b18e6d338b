"""Measure one running engine, one point at a time."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.core.profiling.loads import PREFILL_OSL_TOKENS, DecodeLoad
from dynaplan.domain.measurements import DecodeMeasurement, PrefillMeasurement
from dynaplan.profiler.answer_times import alone_ttft_ms, are_side_by_side, decoded_together
from dynaplan.profiler.completions import Answer, CompletionClient, all_of
from dynaplan.profiler.load_generator import LoadGenerator
from dynaplan.profiler.prompts import Prompts

SEED = 100
TRIES = 3
WARM_UP_REQUESTS = 3
WARM_UP_TOKENS = 128
LEAST_REQUESTS, MOST_REQUESTS = 3, 10
ENOUGH_S = 0.5
LONG_S = 5.0
"""A TTFT is measured again until there are three, or more in half a second; a long one is not repeated."""


async def warm_up(client: CompletionClient) -> None:
    """A few requests that are not measured: what an engine does only once, it does in them."""
    prompts = Prompts(SEED - 1)
    for number in range(WARM_UP_REQUESTS):
        await client.complete(prompts.prompt(number, WARM_UP_TOKENS), PREFILL_OSL_TOKENS)


async def measure_prefill(generator: LoadGenerator, load: DecodeLoad) -> PrefillMeasurement:
    """The TTFT of a prompt of that length alone in the engine, every time another one."""
    prompts = Prompts(SEED + load.isl_tokens)
    answers: list[Answer] = []
    while not _is_enough([answer.ttft_ms / 1000 for answer in answers]):
        numbers = range(len(answers), len(answers) + generator.requests_at_a_time)
        fresh = [prompts.prompt(number, load.isl_tokens) for number in numbers]
        answers += await generator.answers(fresh, load.osl_tokens, concurrency=1)
    return PrefillMeasurement(load.isl_tokens, alone_ttft_ms(answers))


def _is_enough(ttfts_s: Sequence[float]) -> bool:
    if len(ttfts_s) < LEAST_REQUESTS:
        return sum(ttfts_s) > LONG_S
    return len(ttfts_s) >= MOST_REQUESTS or sum(ttfts_s) > ENOUGH_S


class DecodeMeter:
    """Measures ITL with prompts that the engine has in its prefix cache.

    Request number n of every load has the beginning of the same prompt, so what an earlier load has left in
    the cache is not computed again.
    """

    def __init__(self, generator: LoadGenerator) -> None:
        self._generator = generator
        self._prompts = Prompts(SEED)
        self._too_many: list[DecodeLoad] = []

    async def measure(self, load: DecodeLoad) -> DecodeMeasurement | None:
        """The ITL while so many requests decode; half of them, and so on, when they never do so all at once.

        None when that cannot be told at all: every token of an answer comes at the same moment.
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
        """What was too many once is not tried again with prompts of that length or longer."""
        halves = (each.concurrency // 2 for each in self._too_many if each.isl_tokens <= load.isl_tokens)
        return min((load.concurrency, *halves))

    async def _measured(self, load: DecodeLoad, answers: Sequence[Answer]) -> DecodeMeasurement | None:
        """What these answers say, or others of that load, when these say nothing."""
        for _ in range(TRIES):
            together = decoded_together(answers)
            if together is not None:
                return DecodeMeasurement(*load, together.itl_ms, together.output_tokens_per_s)
            answers = await self._answers(load)
        return None

    async def _answers(self, load: DecodeLoad) -> list[Answer]:
        """All at once, their prompts in the prefix cache."""
        prompts = [self._prompts.prompt(number, load.isl_tokens) for number in range(load.concurrency)]
        await all_of(self._generator.prime(prompt) for prompt in prompts)
        return await self._generator.answers(prompts, load.osl_tokens, load.concurrency)
