"""Load goes out as it was asked for, whatever comes back."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.lab.profiling.load import generator
from dynaplan.lab.profiling.load.completions import Answer, AnswerStream, CompletionClient, RequestFailed
from dynaplan.lab.profiling.load.generator import LoadGenerator
from dynaplan.lab.profiling.load.prompts import PromptPool
from tests.fakes.polling import eventually

REQUEST = TracedRequest(0.0, 20, 3)


class Service(CompletionClient):
    """Copies a service that answers when it is allowed to; ``prompts`` are the requests that it got."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.may_answer = asyncio.Event()
        self.fails = False

    async def complete(self, prompt: bytes, output_tokens: int, stream: AnswerStream | None = None) -> Answer:
        self.prompts.append(json.loads(prompt))
        await self.may_answer.wait()
        await asyncio.sleep(0)
        if self.fails:
            raise RequestFailed("503", "no")
        now_s = time.perf_counter()
        return Answer(now_s, (now_s,), 20, output_tokens)


class Counts:
    """Keeps what a load reports."""

    def __init__(self) -> None:
        self.open: set[AnswerStream] = set()
        self.due_s: list[float] = []
        self.requests: list[TracedRequest] = []
        self.failures = 0

    def sent(self, stream: AnswerStream, due_s: float) -> None:
        self.open.add(stream)
        self.due_s.append(due_s)

    def answered(self, stream: AnswerStream, due_s: float, answer: Answer, request: TracedRequest) -> None:
        self.open.remove(stream)
        assert due_s <= answer.first_s
        self.requests.append(request)

    def failed(self, stream: AnswerStream, failure: RequestFailed) -> None:
        self.open.remove(stream)
        self.failures += 1


def load_on(service: Service) -> tuple[LoadGenerator, Counts]:
    counts = Counts()
    return LoadGenerator(service, PromptPool(is_text=False), counts), counts


async def test_each_client_has_one_request_open_and_sends_the_next_after_it() -> None:
    service = Service()
    load, counts = load_on(service)
    task = asyncio.create_task(load.closed_loop(3, REQUEST))
    await eventually(lambda: len(service.prompts) == 3)
    assert len(counts.open) == 3
    service.may_answer.set()
    await eventually(lambda: len(counts.requests) > 20)
    load.stop()
    await task
    assert len(counts.due_s) == len(counts.requests) == len(service.prompts)
    assert not counts.open
    assert {len(prompt) for prompt in service.prompts} == {20}


async def test_a_client_that_fails_does_not_ask_in_a_busy_loop_and_ends_at_once_when_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generator, "FIRST_RETRY_S", 3600.0)
    service = Service()
    service.fails = True
    service.may_answer.set()
    load, counts = load_on(service)
    task = asyncio.create_task(load.closed_loop(2, REQUEST))
    await eventually(lambda: counts.failures == 2)
    load.stop()
    await task
    assert len(counts.due_s) == 2


async def test_a_trace_is_sent_at_its_times_however_late_the_answers_are() -> None:
    service = Service()
    load, counts = load_on(service)
    trace = [TracedRequest(at_s, 20, 3) for at_s in (0.0, 0.0, 0.01, 0.02)]
    task = asyncio.create_task(load.open_loop(trace, time.perf_counter()))
    await eventually(lambda: len(service.prompts) == 4)
    assert len(counts.open) == 4
    service.may_answer.set()
    await task
    assert sorted(each.arrival_s for each in counts.requests) == [0.0, 0.0, 0.01, 0.02]


async def test_a_late_request_is_reported_with_the_time_at_which_it_was_due() -> None:
    service = Service()
    load, counts = load_on(service)
    service.may_answer.set()
    began_s = time.perf_counter() - 7.0
    await load.open_loop([REQUEST], began_s)
    assert counts.due_s == [began_s]


async def test_a_trace_that_is_stopped_sends_nothing_more() -> None:
    service = Service()
    load, counts = load_on(service)
    task = asyncio.create_task(load.open_loop([REQUEST, TracedRequest(3600.0, 20, 3)], time.perf_counter()))
    await eventually(lambda: len(service.prompts) == 1)
    service.may_answer.set()
    load.stop()
    await task
    assert len(counts.due_s) == 1
