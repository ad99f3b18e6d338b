"""The step of a real engine, learnt while it serves: what is foretold beside what clients measure.

Within the same minute, because other programs on the machine slow the engine down. On a machine that they
hold for more than ``OTHERS`` of its time nothing is judged.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import aiohttp
import psutil
import pytest

from dynaplan.engines.timing_model.learnt_timing import LearntTiming
from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import aggregated, model_of
from tests.e2e.test_targets import is_known, records
from tests.fakes.polling import eventually

STREAMS = (1, 2, 4, 8)
ROUND_S = 20.0
OTHERS = 0.5
TWO_NUMBERS = (
    "--Planner.policy=sla",
    "--Planner.ttft=5000",
    "--Planner.itl=500",
    "--Planner.adjustment-interval=5",
    "--VllmWorker.max-num-seqs=8",
)


@dataclass(frozen=True)
class Measured:
    """One answer, as its client saw it; an event may have several tokens."""

    prompt_tokens: int
    answer_tokens: int
    begun_s: float
    event_s: tuple[float, ...]

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.event_s[0] - self.begun_s)

    @property
    def itl_ms(self) -> float:
        return 1000 * (self.event_s[-1] - self.event_s[0]) / (self.answer_tokens - 1)

    def decoded_between(self, begin_s: float, end_s: float) -> float:
        """Return the tokens that came within that time, but for the first one, which comes of the prompt."""
        events = sum(begin_s < each <= end_s for each in self.event_s[1:])
        return events * (self.answer_tokens - 1) / (len(self.event_s) - 1)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Deployment]:
    with aggregated(tmp_path_factory.mktemp("learning"), model, *TWO_NUMBERS) as made:
        yield made.start()


async def test_what_is_learnt_foretells_what_clients_measure_and_the_next_start_begins_with_it(
    deployment: Deployment,
) -> None:
    draw, errors, others_s, begun_s = random.Random(5), [], time_of_others(deployment), time.monotonic()
    for streams in STREAMS:
        answers = await answers_of(deployment, streams, draw)
        await eventually(lambda: bool(learnt(deployment)), 20)
        errors += [*itl_errors(learnt(deployment), answers)]
        if streams == 1:
            errors += [*ttft_errors(learnt(deployment), answers)]
    passed_s = (time.monotonic() - begun_s) * (psutil.cpu_count() or 1)
    others = (time_of_others(deployment) - others_s) / passed_s
    if others > OTHERS:
        pytest.skip(f"other programs took {others:.0%} of the processor")
    assert median(errors) < 0.15, errors
    await eventually(lambda: is_known(records(deployment)[-1]), 20)
    await asyncio.to_thread(deployment.stop)
    await asyncio.to_thread(deployment.start)
    await eventually(lambda: records(deployment) != [], 30)
    assert is_known(records(deployment)[0])


def learnt(deployment: Deployment) -> LearntTiming | None:
    told = records(deployment)[-1:]
    found = told[0]["observation"].get("learnt", {}).get("decode") if told else None
    return LearntTiming.from_json(found) if found else None


def itl_errors(known: LearntTiming | None, answers: list[Measured]) -> Iterator[float]:
    """The mean time of each answer's steps."""
    assert known
    yield abs(median(foretold_itl_ms(known, each, answers) / each.itl_ms for each in answers) - 1)


def foretold_itl_ms(known: LearntTiming, answer: Measured, answers: list[Measured]) -> float:
    """An answer's steps decode what came beside it, and compute the prompts whose first token did.

    Counted, and not reckoned from the number of streams: these begin at once and end one by one, by which
    8 streams of 20 s have steps a seventh shorter than streams that go on.
    """
    half_a_step_s, steps = answer.itl_ms / 2000, answer.answer_tokens - 1  # of one step they come apart
    begin_s, end_s = answer.event_s[0] + half_a_step_s, answer.event_s[-1] + half_a_step_s
    sequences = sum(each.decoded_between(begin_s, end_s) for each in answers) / steps
    context = mean(each.prompt_tokens + each.answer_tokens / 2 for each in answers)
    prompts_ms = sum(
        known.line.prompt_ms + known.line.prompt_token_ms * each.prompt_tokens
        for each in answers
        if begin_s < each.event_s[0] <= end_s
    )
    return known.decode_ms(sequences, sequences * context) + prompts_ms / steps


def ttft_errors(known: LearntTiming | None, answers: list[Measured]) -> Iterator[float]:
    """The TTFT of a request that has the engine for itself."""
    assert known
    timing = known.timing()
    yield abs(median(timing.prefill_ms(each.prompt_tokens) / each.ttft_ms for each in answers) - 1)


async def answers_of(
    deployment: Deployment, streams: int, draw: random.Random, lengths: tuple[int, int] = (20, 60)
) -> list[Measured]:
    """Stream for a while, so many at once, answers of ``lengths`` from and to so many tokens."""
    answers: list[Measured] = []
    name, end_s = model_of(deployment), time.monotonic() + ROUND_S

    async def client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < end_s:
            answers.append(await one_answer(session, deployment.url, name, draw, draw.randint(*lengths)))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        await asyncio.gather(*(client(session) for _ in range(streams)))
    return answers


async def one_answer(
    session: aiohttp.ClientSession, url: str, model: str, draw: random.Random, tokens: int
) -> Measured:
    """Return what an answer of so many tokens is measured as."""
    prompt = f"{draw.random()} " + "word " * draw.randint(10, 80)
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    begun_s, event_s, usage = time.monotonic(), list[float](), {}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/completions", json=streamed) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                event_s += [time.monotonic()] * bool(event["choices"])
    return Measured(usage["prompt_tokens"], usage["completion_tokens"], begun_s, tuple(event_s))


def time_of_others(deployment: Deployment) -> float:
    """The processor's seconds of all programs but this deployment's."""
    everybody = psutil.cpu_times()
    assert deployment.process
    supervisor = psutil.Process(deployment.process.pid)  # it has the time of those that have ended
    ours = [process.cpu_times() for process in (supervisor, *deployment.children())]
    used_s = sum(each.user + each.system + each.children_user + each.children_system for each in ours)
    return everybody.user + everybody.nice + everybody.system - used_s
