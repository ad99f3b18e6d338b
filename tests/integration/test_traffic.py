"""The planner's eyes on traffic: frontends over HTTP, a Prometheus server, and a real frontend's numbers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.engines.timing_model.tokens import count_tokens
from dynaplan.planner.metrics.frontends import FrontendsTraffic
from dynaplan.simulation.traces.reading import read_requests
from dynaplan.store.instances import Instance, public_urls
from dynaplan.util.errors import ConfigError
from tests.fakes.clock import ManualClock
from tests.fakes.counting_frontend import CountingFrontend
from tests.fakes.frontend_runtime import body, stage
from tests.fakes.polling import eventually


class Fleet:
    """Frontends, the addresses that discovery would give, and what looks at them once a second."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.urls: list[str] = []
        self.frontends: list[CountingFrontend] = []
        self.source = FrontendsTraffic(lambda: self.urls, "ns", self.clock, timeout_s=0.5)

    async def frontend(self) -> CountingFrontend:
        frontend = CountingFrontend()
        self.urls.append(await frontend.start())
        self.frontends.append(frontend)
        return frontend

    async def pull(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.advance(1.0)
            await self.source.pull()

    async def close(self) -> None:
        await self.source.close()
        for frontend in self.frontends:
            await frontend.stop()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    yield fleet
    await fleet.close()


async def test_an_interval_has_the_arrivals_of_each_pull(fleet: Fleet) -> None:
    frontend = await fleet.frontend()
    await fleet.pull()
    for requests in (3, 2):
        frontend.answer(requests, isl=100, osl=10, ttft_s=0.1)
        await fleet.pull()
    whole = await fleet.source.traffic(2.0)
    assert (whole.requests, whole.interval_s, whole.arrivals) == (5, 2.0, (3.0, 2.0))
    assert (await fleet.source.traffic(1.0)).requests is None


async def test_a_planner_that_names_its_model_sees_no_other_models_traffic(fleet: Fleet) -> None:
    frontend = await fleet.frontend()
    settings = PlannerSettings(namespace="ns", served_model_name="M")
    source = FrontendsTraffic(
        lambda: fleet.urls, settings.namespace, fleet.clock, model=settings.served_model_name or ""
    )
    await source.pull()
    frontend.answer(3, isl=100)
    frontend.answer(5, isl=900, model="another")
    fleet.clock.advance(1.0)
    await source.pull()
    seen = await source.traffic(1.0)
    await source.close()
    assert (seen.requests, seen.isl_tokens) == (3, 100)


async def test_what_was_counted_before_the_first_pull_or_in_an_earlier_interval_is_not_counted(
    fleet: Fleet,
) -> None:
    frontend = await fleet.frontend()
    frontend.answer(1000)
    fleet.clock.advance(300.0)
    await fleet.pull()
    frontend.answer(2)
    await fleet.pull()
    seen = await fleet.source.traffic(330.0)
    assert (seen.requests, seen.interval_s) == (2, 1.0)
    frontend.answer(3)
    await fleet.pull()
    assert (await fleet.source.traffic(30.0)).requests == 3


async def test_no_frontend_no_answer_and_a_single_look_are_no_data_that_says_why(fleet: Fleet) -> None:
    await fleet.pull(2)
    seen = await fleet.source.traffic(30.0)
    assert (seen.requests, seen.missing) == (None, "no frontend is registered")
    frontend = await fleet.frontend()
    frontend.is_silent = True
    await fleet.pull(2)
    seen = await fleet.source.traffic(30.0)
    assert seen.requests is None
    assert seen.missing.startswith("1 of 1 frontends did not answer: ")
    other = Fleet()
    other.urls = fleet.urls
    frontend.is_silent = False
    await other.pull()
    seen = await other.source.traffic(30.0)
    assert (seen.requests, seen.missing) == (None, "the frontends have not been looked at twice yet")
    await other.close()


async def test_a_frontend_that_began_anew_counts_from_0(fleet: Fleet) -> None:
    frontend = await fleet.frontend()
    frontend.answer(20)
    await fleet.pull()
    frontend.answer(3)
    await fleet.pull()
    frontend.restart()
    frontend.answer(4)
    await fleet.pull()
    assert (await fleet.source.traffic(30.0)).requests == 7


async def test_a_frontend_that_is_registered_later_counts_whole(fleet: Fleet) -> None:
    await fleet.frontend()
    await fleet.pull()
    (await fleet.frontend()).answer(5)
    await fleet.pull()
    assert (await fleet.source.traffic(30.0)).requests == 5


async def test_a_frontend_that_is_gone_leaves_what_was_seen_and_may_come_back(fleet: Fleet) -> None:
    frontend = await fleet.frontend()
    await fleet.frontend()
    await fleet.pull()
    frontend.answer(5)
    await fleet.pull()
    url = fleet.urls.pop(0)
    await fleet.pull()
    fleet.urls.append(url)
    frontend.answer(1)
    await fleet.pull()
    assert (await fleet.source.traffic(30.0)).requests == 6


async def test_what_a_silent_frontend_counted_comes_with_its_next_answer(fleet: Fleet) -> None:
    frontend = await fleet.frontend()
    await fleet.pull()
    frontend.is_silent = True
    frontend.answer(5)
    await fleet.pull(2)
    frontend.is_silent = False
    await fleet.pull()
    assert (await fleet.source.traffic(30.0)).requests == 5


async def test_of_what_a_frontend_counted_in_silence_intervals_that_are_over_are_left_out(
    fleet: Fleet,
) -> None:
    frontend = await fleet.frontend()
    await fleet.pull(10)
    assert (await fleet.source.traffic(10.0)).requests == 0
    frontend.is_silent = True
    frontend.answer(20)
    await fleet.pull(10)
    assert (await fleet.source.traffic(10.0)).requests is None
    frontend.is_silent = False
    await fleet.pull(10)
    # It is the first pull of this interval that brings what was counted in 11 seconds.
    seen = await fleet.source.traffic(10.0)
    assert (seen.requests, seen.interval_s) == (pytest.approx(20 / 11), 10.0)


async def test_an_interval_in_which_nobody_looked_does_not_double_the_next_one(fleet: Fleet) -> None:
    frontend = await fleet.frontend()
    await fleet.pull(10)
    assert (await fleet.source.traffic(10.0)).requests == 0
    frontend.answer(20)
    fleet.clock.advance(10.0)
    assert (await fleet.source.traffic(10.0)).requests is None
    fleet.clock.advance(9.0)
    await fleet.pull()
    seen = await fleet.source.traffic(10.0)
    assert (seen.requests, seen.interval_s) == (pytest.approx(10), 10.0)


async def test_dispersion_waits_for_the_one_that_does_not_answer(fleet: Fleet) -> None:
    steady, shy = await fleet.frontend(), await fleet.frontend()
    await fleet.pull()
    for second in range(12):
        shy.is_silent = second in (3, 4, 7)
        steady.answer(1)
        shy.answer(9)
        await fleet.pull()
    assert (await fleet.source.traffic(12.0)).dispersion == pytest.approx(0)


async def test_a_frontend_that_does_not_answer_is_told_once_until_it_does(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynaplan.planner.metrics.frontends")
    frontend = await fleet.frontend()
    frontend.is_silent = True
    await fleet.pull(3)
    frontend.is_silent = False
    await fleet.pull(2)
    told = [record.getMessage() for record in caplog.records]
    assert [f"{fleet.urls[0]} does not tell" in each for each in told] == [True, False]
    assert told[1].endswith("tells its traffic again")


async def test_a_real_frontend_says_where_its_metrics_are_and_its_requests_are_seen() -> None:
    async with stage() as here:
        await here.worker(tokens=5)
        card = here.runtime.card
        frontends = [
            Instance("ns", "Frontend", "health", number, "http://own", card=card) for number in (1, 2)
        ]
        assert public_urls([*frontends, *here.discovery.all()]) == (here.url,)
        clock = ManualClock()
        source = FrontendsTraffic(lambda: public_urls(frontends), "ns", clock)
        try:
            await source.pull()
            await here.post(stream=True)
            await here.post()
            clock.advance(1.0)
            await source.pull()
            seen = await source.traffic(30.0)
        finally:
            await source.close()
    assert (seen.requests, seen.osl_tokens) == (2, 5)
    assert seen.isl_tokens is not None
    assert seen.ttft_ms is not None
    assert seen.itl_ms is not None


async def test_what_a_frontend_records_is_what_simulate_reads(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    prompt = "once upon a time " * 40
    async with stage(router="kv", record_traffic=str(path)) as here:
        worker = await here.worker(tokens=5)
        for number in range(3):
            await here.post("/v1/completions", prompt=prompt + str(number), stream=number == 1)
        await here.post("/v1/embeddings", input=prompt)
        await here.post("/v1/responses", input=prompt)
        await here.post(model="unknown")
        worker.act = "refuse"
        await here.post()
        worker.act = "hold_within"
        async with here.client.post(
            f"{here.url}/v1/chat/completions", json=body("chat", stream=True)
        ) as response:
            await response.content.readany()
            await eventually(lambda: worker.in_flight == 1)
            response.close()
        await eventually(lambda: here.frontend.in_flight == 0)
        await eventually(path.read_text)
    requests = list(read_requests(str(path), 1.0, 1))
    # Those that were refused are not there; the one that was left has the tokens it got.
    assert [each.output_tokens for each in requests][:4] == [
        5,
        5,
        5,
        5,
    ]  # an embedding is no answer of tokens
    assert [1 <= each.output_tokens <= 2 for each in requests[4:]] == [True]
    # The worker states the lengths of whole answers; a stream's is the frontend's estimate.
    assert [each.prompt_tokens for each in requests[:3]] == [7, count_tokens(prompt + "1"), 7]
    assert requests[0].arrival_s == 0
    assert requests[1].block_tokens == 16
    assert len(requests[1].block_hashes) == count_tokens(prompt + "1") // 16
    assert "once" not in path.read_text()


async def test_a_frontend_that_cannot_record_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Frontend\.record-traffic"):
        async with stage(record_traffic=str(tmp_path)):
            pass
