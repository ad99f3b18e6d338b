"""One point at a time, on an engine that is a formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from dynaplan.lab.profiling.load.completions import Answer, CompletionClient
from dynaplan.lab.profiling.load.meters import DecodeMeter, measure_prefill
from dynaplan.lab.profiling.loads import DecodeLoad


@dataclass
class Engine(CompletionClient):
    """Decodes at most ``slots`` requests at once; the others come after them."""

    slots: int = 4
    itl_s: float = 0.01
    ttfts_s: Sequence[float] = (0.2,)
    primed: list[tuple[int, ...]] = field(default_factory=list)
    asked: list[tuple[int, ...]] = field(default_factory=list)

    async def prime(self, prompt: Sequence[int]) -> None:
        self.primed.append(tuple(prompt))

    async def complete(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        turn, ttft_s = len(self.asked), self.ttfts_s[len(self.asked) % len(self.ttfts_s)]
        self.asked.append(tuple(prompt))
        begun_s = ttft_s + (turn // self.slots) * self.itl_s * output_tokens
        times_s = tuple(begun_s + self.itl_s * number for number in range(output_tokens))
        return Answer(0.0, times_s, len(prompt), output_tokens)


async def test_prompts_are_in_the_prefix_cache_when_decoding_is_measured() -> None:
    engine = Engine()
    measurement = await DecodeMeter(engine).measure(DecodeLoad(100, 50, 3))
    assert measurement is not None
    assert measurement.itl_ms == pytest.approx(10.0)
    assert measurement.output_tokens_per_s == pytest.approx(300.0)
    assert sorted(engine.primed) == sorted(engine.asked)
    assert len(set(engine.asked)) == 3, "no two of them share entries"


async def test_of_more_than_the_engine_takes_at_once_half_are_measured_and_more_are_not_tried_again() -> None:
    engine = Engine(slots=2)
    meter = DecodeMeter(engine)
    measurement = await meter.measure(DecodeLoad(100, 50, 4))
    assert measurement is not None
    assert (measurement.concurrency, len(engine.asked)) == (2, 4 + 2)
    again = await meter.measure(DecodeLoad(200, 50, 8))
    assert again is not None
    assert (again.concurrency, len(engine.asked)) == (2, 6 + 2)


async def test_tokens_that_come_all_at_once_are_asked_for_again_and_then_left_out() -> None:
    engine = Engine(itl_s=0.0)
    assert await DecodeMeter(engine).measure(DecodeLoad(100, 50, 1)) is None
    assert len(engine.asked) > 1


async def test_a_ttft_is_that_of_fresh_prompts_and_the_least_of_several() -> None:
    engine = Engine(slots=100, ttfts_s=(0.3, 0.2, 0.4))
    measurement = await measure_prefill(engine, DecodeLoad(100, 5, 1))
    assert measurement.ttft_ms == pytest.approx(200.0)
    assert len(set(engine.asked)) == len(engine.asked) >= 3
    assert not engine.primed


async def test_a_long_prefill_is_measured_once() -> None:
    engine = Engine(slots=100, ttfts_s=(9.0,))
    assert (await measure_prefill(engine, DecodeLoad(100, 5, 1))).ttft_ms == pytest.approx(9000.0)
    assert len(engine.asked) == 1
