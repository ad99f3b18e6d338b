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
    """One answer, as its client saw it."""

    prompt_tokens: int
    answer_tokens: int
    ttft_ms: float
    itl_ms: float


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
        errors += [*itl_errors(learnt(deployment), answers, streams)]
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


def itl_errors(known: LearntTiming | None, answers: list[Measured], streams: int) -> Iterator[float]:
    """A stream's step decodes all streams; now and then it begins another one's prompt, too."""
    assert known
    prompt = mean(each.prompt_tokens for each in answers)
    answer = mean(each.answer_tokens for each in answers)
    decode_ms = known.decode_ms(streams, streams * (prompt + answer / 2))
    prompts_ms = (streams - 1) / answer * (known.line.prompt_ms + known.line.prompt_token_ms * prompt)
    yield abs((decode_ms + prompts_ms) / median(each.itl_ms for each in answers) - 1)


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
    """Return what an answer of so many tokens is measured as; an event may have several of them."""
    prompt = f"{draw.random()} " + "word " * draw.randint(10, 80)
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    begun_s, token_s, usage = time.monotonic(), [], {}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/completions", json=streamed) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                token_s += [time.monotonic()] * bool(event["choices"])
    itl_ms = 1000 * (token_s[-1] - token_s[0]) / (usage["completion_tokens"] - 1)
    ttft_ms = 1000 * (token_s[0] - begun_s)
    return Measured(usage["prompt_tokens"], usage["completion_tokens"], ttft_ms, itl_ms)


def time_of_others(deployment: Deployment) -> float:
    """The processor's seconds of all programs but this deployment's."""
    everybody = psutil.cpu_times()
    ours = [process.cpu_times() for process in deployment.children()]
    return everybody.user + everybody.nice + everybody.system - sum(each.user + each.system for each in ours)
