"""The planner's eyes on traffic through a Prometheus server: a stand-in, and a real one if installed."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from dynaplan.planner.metrics.prometheus import PrometheusTraffic, query
from dynaplan.util.errors import ConfigError
from tests.fakes.counting_frontend import CountingFrontend
from tests.fakes.polling import eventually
from tests.fakes.prometheus_server import PrometheusStandIn, find_prometheus, real_prometheus

NS = {"dynamo_namespace": "ns"}


class Asked:
    """A stand-in, and what asks it."""

    def __init__(self) -> None:
        self.server = PrometheusStandIn()

    async def start(self) -> Asked:
        self.source = PrometheusTraffic(await self.server.start(), "ns", timeout_s=0.5)
        return self

    def answers(self, *series: tuple[str, str, dict[str, str]]) -> None:
        """By part: its value and its other labels."""
        self.server.series = [({"is": part, **labels}, value) for part, value, labels in series]


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    asked = await Asked().start()
    yield asked
    await asked.source.close()
    await asked.server.stop()


async def test_sums_over_counts_are_the_means_and_buckets_the_lengths(asked: Asked) -> None:
    asked.answers(
        ("requests", "12.4", NS),
        ("refused", "2", NS),
        ("input_sequence_tokens_sum", "2500", NS),
        ("input_sequence_tokens_count", "10", NS),
        *(
            ("input_sequence_tokens_bucket", count, {**NS, "le": le})
            for le, count in (("+Inf", "10"), ("0", "0"), ("430", "9"), ("210", "6"))
        ),
        ("time_to_first_token_seconds_sum", "5", NS),
        ("time_to_first_token_seconds_count", "10", NS),
        ("output_sequence_tokens_sum", "NaN", NS),
        ("samples", "3", NS),
    )
    seen = await asked.source.traffic(30.0)
    assert (seen.requests, seen.isl_tokens, seen.ttft_ms, seen.osl_tokens) == (14.4, 250, 500, None)
    assert seen.isl is not None
    assert (seen.isl.upper_bounds_tokens, seen.isl.counts) == ((210, 430), (6, 3, 1))
    assert seen.dispersion is None


async def test_series_without_a_namespace_count_too_and_that_is_told_once(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    asked.answers(("requests", "3", NS), ("requests", "4", {}))
    for _ in range(2):
        assert (await asked.source.traffic(30.0)).requests == 7
    assert len([each for each in caplog.records if "without a dynamo_namespace" in each.getMessage()]) == 1


async def test_frontends_that_were_scraped_and_have_no_requests_are_zero_demand(asked: Asked) -> None:
    asked.answers(("samples", "2", NS))
    seen = await asked.source.traffic(30.0)
    assert (seen.requests, seen.isl, seen.missing) == (0, None, "")


async def test_a_model_that_no_frontend_has_served_while_others_were_is_no_data_that_says_so() -> None:
    server = PrometheusStandIn()
    source = PrometheusTraffic(await server.start(), "ns", model="misspelt", timeout_s=0.5)
    others: list[tuple[dict[str, str], str]] = [
        ({"is": "samples", **NS}, "2"),
        ({"is": "models", "model": "mine", **NS}, "1"),
    ]
    server.series = others
    try:
        seen = await source.traffic(30.0)
        assert (seen.requests, seen.missing) == (
            None,
            "Prometheus: served-model-name is 'misspelt', and the frontends have served 'mine' only",
        )
        server.series = [*others, ({"is": "models", "model": "Misspelt", **NS}, "1")]
        seen = await source.traffic(30.0)
        assert (seen.requests, seen.missing) == (0, "")
    finally:
        await source.close()
        await server.stop()


async def test_too_few_scrapes_and_no_frontend_are_no_data_that_says_why(asked: Asked) -> None:
    asked.answers(("samples", "1", NS))
    seen = await asked.source.traffic(30.0)
    assert seen.requests is None
    assert "scraped once in 30 s: a scrape_interval of at most 10 s" in seen.missing
    asked.answers()
    seen = await asked.source.traffic(30.0)
    assert (seen.requests, seen.missing) == (
        None,
        "Prometheus: nothing of a frontend of namespace ns in the last 30 s",
    )


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (
            400,
            json.dumps({"status": "error", "errorType": "bad_data", "error": "parse error"}),
            "400: parse error",
        ),
        (404, "404 page not found", "status 404, and not what Prometheus answers"),
        (200, "[1, 2", "status 200, and not what Prometheus answers"),
        (200, "[]", "status 200, and not what Prometheus answers"),
        (200, '{"status":"success"}', "an answer without"),
        (200, '{"status":"success","data":{"result":[{"metric":{},"value":[1,"2"]}]}}', "without 'is'"),
    ],
)
async def test_an_answer_that_is_none_is_no_data_that_says_why_and_is_told_once(
    asked: Asked, caplog: pytest.LogCaptureFixture, status: int, body: str, why: str
) -> None:
    caplog.set_level(logging.INFO, "dynaplan.planner.metrics.prometheus")
    asked.server.status, asked.server.body = status, body
    for _ in range(2):
        seen = await asked.source.traffic(30.0)
        assert seen.requests is None
        assert why in seen.missing
    asked.server.status, asked.server.body = 200, None
    asked.answers(("requests", "1", NS))
    assert (await asked.source.traffic(30.0)).requests == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]


async def test_a_server_that_is_not_there_is_no_data(asked: Asked) -> None:
    await asked.server.stop()
    seen = await asked.source.traffic(30.0)
    assert seen.requests is None
    assert seen.missing.startswith("Prometheus: ")


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:9090", "ftp://here", "http://", "http://[1"])
async def test_what_is_no_address_is_a_configuration_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="prometheus-endpoint"):
        PrometheusTraffic(endpoint, "ns")


def test_the_query_asks_for_the_namespace_and_for_what_has_none() -> None:
    asked = query("mine", "a.b", 7.5)
    assert 'mine_requests_started_total{dynamo_namespace=~"a\\\\.b|"}[7500ms]' in asked
    assert "dynamo_frontend" not in asked


def test_the_query_asks_for_one_model_and_for_refused_requests_of_unknown_models() -> None:
    asked = query("mine", "ns", 10, model="org/a.b")
    assert 'mine_requests_started_total{dynamo_namespace=~"ns|",model=~"(?i:org/a\\\\.b)|"}' in asked
    assert 'mine_requests_total{dynamo_namespace=~"ns|",model="unknown",error_type="overload"}' in asked
    assert 'mine_model_ready{dynamo_namespace=~"ns|"}' in asked
    assert (
        'count by (dynamo_namespace, model) (mine_requests_started_total{dynamo_namespace=~"ns|"})' in asked
    )


PROMETHEUS = find_prometheus()


@pytest.mark.skipif(not PROMETHEUS, reason="no prometheus on PATH, and DYNAPLAN_PROMETHEUS names none")
async def test_a_real_prometheus_tells_what_the_frontends_counted(tmp_path: Path) -> None:
    assert PROMETHEUS
    one, other = CountingFrontend(), CountingFrontend()
    targets = [(await each.start()).removeprefix("http://") for each in (one, other)]
    one.answer(isl=100)
    async with real_prometheus(PROMETHEUS, tmp_path, targets) as endpoint:
        source = PrometheusTraffic(endpoint, "ns")
        other_namespace = PrometheusTraffic(endpoint, "another")
        misspelt = PrometheusTraffic(endpoint, "ns", model="misspelt")
        try:
            await eventually(lambda: one.scrapes >= 3 and other.scrapes >= 3)
            one.answer(9, isl=100, osl=10)
            before = one.scrapes
            await eventually(lambda: one.scrapes >= before + 3)

            async def seen() -> bool:
                return ((await source.traffic(30.0)).requests or 0) > 8

            await eventually(seen)
            traffic = await source.traffic(30.0)
            # What Prometheus makes of 9 requests: it extrapolates, by no more than a scrape at either end.
            assert traffic.requests == pytest.approx(9, rel=0.5)
            assert traffic.isl_tokens == pytest.approx(100)
            assert traffic.osl_tokens == pytest.approx(10, rel=0.01)
            assert traffic.isl is not None
            assert traffic.isl.upper_bounds_tokens[0] == 100
            assert traffic.isl.counts[0] == pytest.approx(traffic.isl.total)
            assert "another" in (await other_namespace.traffic(30.0)).missing
            assert (await source.traffic(0.1)).requests is None
            assert "served-model-name is 'misspelt'" in (await misspelt.traffic(30.0)).missing
        finally:
            await source.close()
            await misspelt.close()
            await other_namespace.close()
            await one.stop()
            await other.stop()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(endpoint)
