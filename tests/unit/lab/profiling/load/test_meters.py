"""One point at a time, on an engine that is a formula."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from dynaplan.lab.profiling.load.completions import Answer, AnswerStream, CompletionClient
from dynaplan.lab.profiling.load.meters import DecodeMeter, are_side_by_side, measure_prefill, shared_itl_ms
from dynaplan.lab.profiling.load.prompts import PromptPool
from dynaplan.lab.profiling.load_points import DecodeLoad
from dynaplan.util.errors import PermanentError

PROMPTS = PromptPool(is_text=False)


@dataclass
class Engine(CompletionClient):
    """Decodes at most ``slots`` requests at once; the others come after them."""

    slots: int = 4
    itl_s: float = 0.01
    ttfts_s: Sequence[float] = (0.2,)
    primed: list[tuple[int, ...]] = field(default_factory=list)
    asked: list[tuple[int, ...]] = field(default_factory=list)

    async def prime(self, prompt: bytes) -> None:
        self.primed.append(tuple(json.loads(prompt)))

    async def complete(self, prompt: bytes, output_tokens: int, stream: AnswerStream | None = None) -> Answer:
        turn, ttft_s = len(self.asked), self.ttfts_s[len(self.asked) % len(self.ttfts_s)]
        self.asked.append(tuple(json.loads(prompt)))
        begun_s = ttft_s + (turn // self.slots) * self.itl_s * output_tokens
        times_s = tuple(begun_s + self.itl_s * number for number in range(output_tokens))
        return Answer(0.0, times_s, len(self.asked[-1]), output_tokens)


async def test_prompts_are_in_the_prefix_cache_when_decoding_is_measured() -> None:
    engine = Engine()
    measurement = await DecodeMeter(engine, PROMPTS).measure(DecodeLoad(100, 50, 3))
    assert measurement is not None
    assert measurement.itl_ms == pytest.approx(10.0)
    assert measurement.output_tokens_per_s == pytest.approx(300.0)
    assert sorted(engine.primed) == sorted(engine.asked)
    assert len(set(engine.asked)) == 3, "no two of them share entries"


async def test_of_more_than_the_engine_takes_at_once_half_are_measured_and_more_are_not_tried_again() -> None:
    engine = Engine(slots=2)
    meter = DecodeMeter(engine, PROMPTS)
    measurement = await meter.measure(DecodeLoad(100, 50, 4))
    assert measurement is not None
    assert (measurement.concurrency, len(engine.asked)) == (2, 4 + 2)
    again = await meter.measure(DecodeLoad(200, 50, 8))
    assert again is not None
    assert (again.concurrency, len(engine.asked)) == (2, 6 + 2)


async def test_tokens_that_come_all_at_once_are_asked_for_again_and_then_left_out() -> None:
    engine = Engine(itl_s=0.0)
    assert await DecodeMeter(engine, PROMPTS).measure(DecodeLoad(100, 50, 1)) is None
    assert len(engine.asked) > 1


async def test_a_ttft_is_that_of_fresh_prompts_and_the_least_of_several() -> None:
    engine = Engine(slots=100, ttfts_s=(0.3, 0.2, 0.4))
    measurement = await measure_prefill(engine, PROMPTS, DecodeLoad(100, 5, 1))
    assert measurement.ttft_ms == pytest.approx(200.0)
    assert len(set(engine.asked)) == len(engine.asked) >= 3
    assert not engine.primed


async def test_a_long_prefill_is_measured_once() -> None:
    engine = Engine(slots=100, ttfts_s=(9.0,))
    assert (await measure_prefill(engine, PROMPTS, DecodeLoad(100, 5, 1))).ttft_ms == pytest.approx(9000.0)
    assert len(engine.asked) == 1


@dataclass
class Miscounting(Engine):
    """States other numbers of tokens than it was sent and asked for."""

    prompt_tokens: int = 100
    output_tokens: int = 5

    async def complete(self, prompt: bytes, output_tokens: int, stream: AnswerStream | None = None) -> Answer:
        return Answer(0.0, (0.1, 0.2), self.prompt_tokens, self.output_tokens)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (Miscounting(prompt_tokens=0), "include_usage"),
        (Miscounting(prompt_tokens=9), "token ids"),
        (Miscounting(output_tokens=1), "ignore_eos"),
    ],
)
async def test_an_answer_that_is_not_what_was_asked_for_is_no_measurement(
    engine: Miscounting, why: str
) -> None:
    with pytest.raises(PermanentError) as caught:
        await measure_prefill(engine, PROMPTS, DecodeLoad(100, 5, 1))
    assert why in f"{caught.value} {caught.value.hint}"


def answer(first_s: float, itl_s: float, tokens: int, *, sent_s: float = 0.0, per_event: int = 1) -> Answer:
    """One whose tokens come at an even pace, so many of them in one event."""
    times_s = tuple(first_s + itl_s * number for number in range(0, tokens, per_event))
    return Answer(sent_s, times_s, prompt_tokens=10, output_tokens=tokens)


def test_one_request_alone_has_the_itl_of_its_tokens() -> None:
    itl_ms = shared_itl_ms([answer(1.0, 0.02, 200)])
    assert itl_ms == pytest.approx(20.0)


def test_what_the_first_ones_did_before_the_last_one_began_does_not_count() -> None:
    # The first one gets a token in 5 ms while it is alone, in 20 ms when the other decodes beside it.
    early = tuple(0.005 * number for number in range(100))
    late = tuple(0.5 + 0.02 * number for number in range(100))
    first = Answer(0.0, (*early, *late), 10, 200)
    itl_ms = shared_itl_ms([first, answer(0.5, 0.02, 200)])
    assert itl_ms == pytest.approx(20.0, rel=0.01)


def test_what_the_last_ones_do_after_the_first_one_has_ended_does_not_count() -> None:
    times_s = (*(0.02 * number for number in range(100)), *(2.0 + 0.005 * number for number in range(100)))
    itl_ms = shared_itl_ms([Answer(0.0, times_s, 10, 200), answer(0.0, 0.02, 100)])
    assert itl_ms == pytest.approx(20.0, rel=0.01)


def test_a_delay_right_after_the_last_prompt_does_not_count() -> None:
    times_s = (0.0, 0.1, *(0.1 + 0.02 * number for number in range(1, 200)))
    itl_ms = shared_itl_ms([Answer(0.0, times_s, 10, len(times_s))])
    assert itl_ms == pytest.approx(20.0, rel=0.01)


def test_events_with_several_tokens_count_as_so_many() -> None:
    itl_ms = shared_itl_ms([answer(0.0, 0.01, 400, per_event=4)])
    assert itl_ms == pytest.approx(10.0, rel=0.01)


def test_requests_that_never_decoded_all_at_once_say_nothing() -> None:
    answers = [answer(0.0, 0.01, 100), answer(2.0, 0.01, 100)]
    assert not are_side_by_side(answers)
    assert shared_itl_ms(answers) is None


def test_an_answer_of_one_token_says_nothing() -> None:
    assert shared_itl_ms([answer(0.0, 0.01, 1)]) is None


def test_one_that_is_alone_counts_from_its_second_token_on_however_they_arrive() -> None:
    """A client that was not scheduled gets tokens in clumps: what is cut off at the ends may be all."""
    times_s = (0.0, *[0.02] * 90, *[0.06] * 109)
    itl_ms = shared_itl_ms([Answer(0.0, times_s, 10, len(times_s))])
    assert itl_ms == pytest.approx(40.0 / 198)
