"""vLLM's step, learnt from its own metrics while it serves: what is foretold beside what clients measure."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from statistics import median

import psutil
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.test_targets import is_known, records
from tests.fakes.polling import eventually
from tests.llm.test_learning import OTHERS, answers_of, itl_errors, learnt, time_of_others

TWO_NUMBERS = (
    "--Planner.policy=sla",
    "--Planner.ttft=5000",
    "--Planner.itl=500",
    "--Planner.adjustment-interval=5",
    "--Planner.no-operation=true",
)

LENGTHS = 80, 160
"""Tokens of an answer: its engine writes a thousand a second, and several of them arrive at once."""


async def test_vllms_metrics_teach_its_step_and_workers_are_counted_by_it(
    deploy_vllm: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(
        deploy_vllm, "graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), *TWO_NUMBERS
    )
    draw, errors, others_s, begun_s = random.Random(5), [], time_of_others(deployment), time.monotonic()
    for streams in (1, 2, 4, 8):
        answers = await answers_of(deployment, streams, draw, LENGTHS)
        await eventually(lambda: bool(learnt(deployment)), 20)
        errors += itl_errors(learnt(deployment), answers)
    known = learnt(deployment)
    assert known
    assert known.largest_batch > 4
    assert known.kv_tokens > 0
    assert "learnt from" in deployment.run("status").stdout
    passed_s = (time.monotonic() - begun_s) * (psutil.cpu_count() or 1)
    others = (time_of_others(deployment) - others_s) / passed_s
    if others > OTHERS:
        pytest.skip(f"other programs took {others:.0%} of the processor: {errors}")
    assert median(errors) < 0.15, errors
    await eventually(lambda: is_known(records(deployment)[-1]), 20)
