"""Two numbers and no profile on a real engine: a worker comes under load, leaves after it, and is remembered.

On a machine that other programs hold for more than ``OTHERS`` of its time it is not judged how many requests
were in time.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from statistics import mean

import psutil
import pytest

from tests.e2e.llamacpp import aggregated, is_ready, model_of
from tests.e2e.test_targets import is_known, records
from tests.fakes.load import Load
from tests.fakes.polling import eventually
from tests.llm.test_learning import OTHERS, answers_of, time_of_others

TTFT_MS, ITL_MS = 3000, 300
STREAMS = 6
"""More than the four requests that one worker computes at once."""

TWO_NUMBERS = (
    "--Planner.policy=sla",
    f"--Planner.ttft={TTFT_MS}",
    f"--Planner.itl={ITL_MS}",
    "--Planner.no-operation=false",
    "--Planner.adjustment-interval=5",
    "--Planner.slo-window=40",
)


async def test_a_worker_is_added_and_removed_and_the_next_start_plans_by_what_was_learnt(
    tmp_path: Path, model: Path
) -> None:
    with aggregated(tmp_path, model, *TWO_NUMBERS) as deployment:
        await asyncio.to_thread(deployment.start)
        async with Load(deployment.url, model_of(deployment), STREAMS, keeps_connections=False) as load:
            await eventually(lambda: is_ready(deployment, "VllmWorker", 2), 90)
            await eventually(lambda: is_known(records(deployment)[-1]), 180)
            await load.stop()
        assert load.incomplete == []
        others_s, begun_s = time_of_others(deployment), time.monotonic()
        answers = await answers_of(deployment, STREAMS, random.Random(5))
        passed_s = (time.monotonic() - begun_s) * (psutil.cpu_count() or 1)
        others = (time_of_others(deployment) - others_s) / passed_s
        await eventually(lambda: is_ready(deployment, "VllmWorker", 1), 240)
        assert "learnt from" in deployment.run("why", "-n", "50").stdout
        await asyncio.to_thread(deployment.stop)
        await asyncio.to_thread(deployment.start)
        await eventually(lambda: records(deployment) != [], 30)
        assert is_known(records(deployment)[0])
    if others > OTHERS:
        pytest.skip(f"other programs took {others:.0%} of the processor")
    assert mean(each.ttft_ms <= TTFT_MS and each.itl_ms <= ITL_MS for each in answers) >= 0.95
