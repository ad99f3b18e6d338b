"""Load goes out as it was told, whatever comes back."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from dynaplan.cli.measuring import sending
from dynaplan.cli.measuring.answer_stream import AnswerStream, RequestFailed, TimedAnswer
from dynaplan.cli.measuring.prompt_pool import PromptPool
from dynaplan.cli.measuring.sending import Sender, Target
from dynaplan.cli.measuring.tally import Tally
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.simulation.outcome import Slo
from tests.fakes.polling import eventually

REQUEST = TracedRequest(0.0, 20, 3)


class Service:
    """Answers when it is told to; ``payloads`` are the requests that it got."""

    def __init__(self) -> None:
        self.payloads: list[dict[str, Any]] = []
        self.go_on = asyncio.Event()
        self.fails = False

    async def streamed(self, session: Any, url: str, payload: bytes, stream: AnswerStream) -> TimedAnswer:
        self.payloads.append(json.loads(payload))
        await self.go_on.wait()
        await asyncio.sleep(0)
        if self.fails:
            raise RequestFailed("503", "no")
        now_s = time.perf_counter()
        return TimedAnswer(now_s, now_s, 20, 3, 0)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setattr(sending, "streamed", made.streamed)
    return made


def sender() -> tuple[Sender, Tally]:
    tally = Tally(Slo(), time.perf_counter())
    session: Any = None
    return Sender(session, Target("http://x", "m"), PromptPool(is_text=False), tally), tally


async def test_each_client_has_one_request_open_and_sends_the_next_after_it(service: Service) -> None:
    load, tally = sender()
    task = asyncio.create_task(load.clients(3, REQUEST))
    await eventually(lambda: len(service.payloads) == 3)
    assert len(tally.open) == 3
    service.go_on.set()
    await eventually(lambda: tally.outcome.requests > 20)
    load.stop()
    await task
    assert tally.sent == tally.outcome.requests
    assert not tally.open
    sent = service.payloads[0]
    assert (sent["model"], len(sent["prompt"]), sent["max_tokens"], sent["stream"]) == ("m", 20, 3, True)


async def test_a_client_that_fails_does_not_ask_in_a_busy_loop_and_ends_at_once_when_told(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "FIRST_PAUSE_S", 3600.0)
    service.fails = True
    service.go_on.set()
    load, tally = sender()
    task = asyncio.create_task(load.clients(2, REQUEST))
    await eventually(lambda: tally.failures["503"] == 2)
    load.stop()
    await task
    assert tally.sent == 2


async def test_a_trace_is_sent_at_its_times_however_late_the_answers_are(service: Service) -> None:
    load, tally = sender()
    trace = [TracedRequest(at_s, 20, 3) for at_s in (0.0, 0.0, 0.01, 0.02)]
    task = asyncio.create_task(load.trace(trace))
    await eventually(lambda: len(service.payloads) == 4)
    assert len(tally.open) == 4
    service.go_on.set()
    await task
    assert tally.outcome.requests == 4


async def test_the_latency_of_a_late_request_counts_from_when_it_was_due(service: Service) -> None:
    load, tally = sender()
    tally.began_s -= 7.0
    service.go_on.set()
    await load.trace([REQUEST])
    assert tally.outcome.ttft_ms.highest >= 7000
    assert tally.late_s >= 7


async def test_a_trace_that_is_told_to_stop_sends_nothing_more(service: Service) -> None:
    load, tally = sender()
    task = asyncio.create_task(load.trace([REQUEST, TracedRequest(3600.0, 20, 3)]))
    await eventually(lambda: len(service.payloads) == 1)
    service.go_on.set()
    load.stop()
    await task
    assert tally.sent == 1
