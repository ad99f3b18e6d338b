"""Meters of one running engine: warm it up, then measure one point at a time."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.lab.profiling.load.answer_times import alone_ttft_ms, are_side_by_side, decoded_together
from dynaplan.lab.profiling.load.completions import Answer, CompletionClient, all_of
from dynaplan.lab.profiling.load.load_generator import LoadGenerator
from dynaplan.lab.profiling.load.prompts import PromptMaker
from dynaplan.lab.profiling.loads import PREFILL_OSL_TOKENS, DecodeLoad
from dynaplan.lab.profiling.measurements import DecodeMeasurement, PrefillMeasurement

SEED = 100
"""The seed of all prompts, as in the original."""

TRIES = 3
"""The number of times that a decode load is sent before its ITL is given up."""

WARM_UP_REQUESTS = 3
"""The number of unmeasured requests at the beginning."""

WARM_UP_TOKENS = 128
"""The length of their prompts."""

LEAST_REQUESTS, MOST_REQUESTS = 3, 10
"""The least and the largest number of prompts that one TTFT is measured by."""

ENOUGH_S = 0.5
"""Seconds of TTFTs together after which no more than the least number of prompts is sent."""

LONG_S = 5.0
"""Seconds of TTFTs together after which not even the least number of prompts is sent."""


async def warm_up(client: CompletionClient) -> None:
    """Send a few unmeasured requests, for the work that an engine does only once."""
    prompts = PromptMaker(SEED - 1)
    for number in range(WARM_UP_REQUESTS):
        await client.complete(prompts.prompt(number, WARM_UP_TOKENS), PREFILL_OSL_TOKENS)


async def measure_prefill(generator: LoadGenerator, load: DecodeLoad) -> PrefillMeasurement:
    """Measure the TTFT of a prompt alone in the engine, with another prompt each time."""
    prompts = PromptMaker(SEED + load.isl_tokens)
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

    Request number n of every load has the beginning of the same prompt, so that the entries of an earlier
    load in the cache are used again.
    """

    def __init__(self, generator: LoadGenerator) -> None:
        self._generator = generator
        self._prompts = PromptMaker(SEED)
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
        """The concurrency to begin with: none that was too many before, for prompts no longer than these."""
        halves = (other.concurrency // 2 for other in self._too_many if other.isl_tokens <= load.isl_tokens)
        return min((load.concurrency, *halves))

    async def _measured(self, load: DecodeLoad, answers: Sequence[Answer]) -> DecodeMeasurement | None:
        """Measure these answers, or new ones of the same load when these tell nothing."""
        for _ in range(TRIES):
            together = decoded_together(answers)
            if together is not None:
                return DecodeMeasurement(*load, together.itl_ms, together.output_tokens_per_s)
            answers = await self._answers(load)
        return None

    async def _answers(self, load: DecodeLoad) -> list[Answer]:
        """Send the whole load at once, its prompts in the prefix cache."""
        prompts = [self._prompts.prompt(number, load.isl_tokens) for number in range(load.concurrency)]
        await all_of(self._generator.prime(prompt) for prompt in prompts)
        return await self._generator.answers(prompts, load.osl_tokens, load.concurrency)
