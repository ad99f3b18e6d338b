"""``dynaplan bench`` against a frontend with workers."""

from __future__ import annotations

import asyncio
import os
import signal

from dynaplan.cli.bench_measurement import BenchTarget, OfferedLoad, measure
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.simulation.outcome import Slo
from tests.fakes.frontend_runtime import stage
from tests.fakes.polling import eventually

REQUEST = TracedRequest(0.0, 40, 5)


def load(clients: int = 2, duration_s: float = 0.3) -> OfferedLoad:
    trace = [TracedRequest(at_s, 40, 5) for at_s in (0.0, 0.05, 0.1)]
    return OfferedLoad(clients, REQUEST, lambda: iter(trace), duration_s)


async def test_whole_answers_are_counted_with_their_tokens() -> None:
    async with stage() as here:
        await here.worker()
        service = BenchTarget(here.url, "", False, is_text=True)
        measured = await measure(service, load(), Slo(), 1, None)
    counters = measured.counters
    assert counters.outcome.requests == counters.requests_sent > 2
    assert counters.outcome.output_tokens == 5 * counters.requests_sent
    assert (counters.outcome.lost, counters.answers_of_other_length, measured.is_interrupted) == (0, 0, False)


async def test_a_trace_is_sent_whole() -> None:
    async with stage() as here:
        await here.worker()
        measured = await measure(BenchTarget(here.url, "", False, is_text=True), load(0), Slo(), 1, None)
    assert measured.counters.outcome.requests == 3


async def test_an_answer_that_breaks_off_is_a_failure_with_a_name() -> None:
    async with stage() as here:
        await here.worker("die_within")
        measured = await measure(BenchTarget(here.url, "", False, is_text=True), load(0), Slo(), 1, None)
    (kind,) = measured.counters.failures
    assert kind.startswith("broke off")
    assert measured.counters.outcome.lost == 3


async def test_ctrl_c_ends_with_what_there_is() -> None:
    async with stage() as here:
        worker = await here.worker("hold_within")
        service = BenchTarget(here.url, "", False, is_text=True)
        task = asyncio.create_task(measure(service, load(2, 3600.0), Slo(), 1, None))
        await eventually(lambda: worker.in_flight == 2)
        os.kill(os.getpid(), signal.SIGINT)
        measured = await task
    assert measured.is_interrupted
    assert (len(measured.counters.open), measured.counters.outcome.lost) == (2, 0)
