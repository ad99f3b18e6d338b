"""Spans of the frontend as an OpenTelemetry collector gets them, by OTLP over HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

pytest.importorskip(
    "opentelemetry.sdk", reason="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
)

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import dynaplan
from dynaplan.gateway.tracing import open_tracer
from dynaplan.util.errors import ConfigError
from tests.fakes.frontend_runtime import body, stage
from tests.integration.test_frontend import CHAT, prefill_worker

TRACE, PARENT = "a" * 32, "b" * 16


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it has got."""
    spans: list[Any] = []

    async def take(request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/v1/traces"
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            spans.extend(span for scope in resource.scope_spans for span in scope.spans)
        return web.Response(headers={"Content-Type": "application/x-protobuf"})

    runner = web.ServerRunner(web.Server(take), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", spans
    finally:
        await runner.cleanup()


async def test_a_traced_request_has_spans_of_frontend_queue_prefill_and_decode() -> None:
    async with collector() as (url, spans):
        async with stage(remote_prefill=True, otlp_traces_endpoint=url) as here:
            worker = await here.worker()
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
            async with (
                prefill_worker(here) as prefills,
                here.client.post(here.url + CHAT, json=body(CHAT), headers=headers) as response,
            ):
                assert response.status == 200
        named = {span.name: span for span in spans}
        assert [*named] == ["queue", "prefill", "decode", f"POST {CHAT}"]
        request = named.pop(f"POST {CHAT}")
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
        assert {span.parent_span_id for span in named.values()} == {request.span_id}
        assert prefills[0].trace["traceparent"] == f"00-{TRACE}-{named['prefill'].span_id.hex()}-01"
        assert worker.headers[0]["traceparent"] == f"00-{TRACE}-{named['decode'].span_id.hex()}-01"
        assert worker.headers[0]["tracestate"] == "vendor=1"
        assert named["prefill"].attributes[0].value.string_value == "remote"
        told = {each.key: each.value for each in request.attributes}
        assert told["gen_ai.usage.output_tokens"].int_value == 5
        assert told["dynaplan.worker"].string_value == worker.name


async def test_every_attempt_has_a_span_and_a_failed_one_its_error() -> None:
    async with collector() as (url, spans):
        async with stage(otlp_traces_endpoint=url + "/v1/traces") as here:
            await here.worker("die_before")
            await here.worker()
            assert (await here.post(CHAT))[0] == 200
        attempts = [span for span in spans if span.name == "decode"]
        assert [span.status.message for span in attempts] == ["WorkerDied", ""]
        assert spans[-1].status.message == ""
        assert len({span.trace_id for span in spans}) == 1


async def test_a_trace_that_the_client_does_not_sample_is_not_sent_and_goes_on_unsampled() -> None:
    async with collector() as (url, spans):
        async with stage(otlp_traces_endpoint=url) as here:
            worker = await here.worker()
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            async with here.client.post(here.url + CHAT, json=body(CHAT), headers=headers) as response:
                assert response.status == 200
        assert spans == []
        assert worker.headers[0]["traceparent"].startswith(f"00-{TRACE}-")
        assert worker.headers[0]["traceparent"].endswith("-00")


async def test_a_collector_that_is_away_costs_requests_nothing() -> None:
    async with stage(otlp_traces_endpoint="http://127.0.0.1:9") as here:
        await here.worker()
        assert (await here.post(CHAT, stream=True))[0] == 200


def test_the_sdk_is_named_in_one_module_imported_when_it_is_asked_for() -> None:
    package = Path(dynaplan.__file__).parent
    named = [file for file in package.rglob("*.py") if b"from opentelemetry" in file.read_bytes()]
    assert named == [package / "gateway" / "otlp.py"]
    named = [file for file in package.rglob("*.py") if b"gateway import otlp" in file.read_bytes()]
    assert named == [package / "gateway" / "tracing.py"]


def test_a_wrong_address_and_a_missing_package_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="otlp-traces-endpoint is 'localhost:4318'"):
        open_tracer("localhost:4318")
    monkeypatch.delitem(sys.modules, "dynaplan.gateway.otlp", raising=False)
    monkeypatch.delattr("dynaplan.gateway.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError) as missing:
        open_tracer("http://127.0.0.1:4318")
    assert missing.value.hint == "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
