"""The Frontend over loopback sockets: answers, retries, refusals, limits and metrics."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from dynaplan.contract.absence import ABSENT, Absence
from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.gateway.routes import MAX_STARTS_A_TURN
from dynaplan.http.server import ClientConnection
from tests.fakes.frontend_runtime import Stage, body, stage
from tests.fakes.openai_worker import MODEL, FakeWorker
from tests.fakes.polling import eventually
from tests.fakes.promlint import faults
from tests.integration.test_stream_cuts import Wire

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def texts(stream: str) -> list[str]:
    """The tokens of a chat stream."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return [choice["delta"].get("content", "") for event in events for choice in event.get("choices", ())][1:]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_passes_through_whole(path: str) -> None:
    async with stage() as here:
        await here.worker()
        status, text = await here.post(path)
    assert status == 200
    assert json.loads(text)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_passes_through_to_its_end(path: str) -> None:
    async with stage() as here:
        worker = await here.worker()
        status, text = await here.post(path, stream=True, stream_options={"include_usage": True})
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    assert '"completion_tokens":5' in text
    assert worker.bodies[0]["stream_options"] == {"include_usage": True}


async def test_a_client_of_http_1_0_gets_its_stream_too() -> None:
    async with stage() as here:
        await here.worker()
        reader, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
        document = json.dumps(body(CHAT, stream=True)).encode()
        writer.write(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(document)))
        writer.write(document)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.0 200")
    assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("act", ["drain", "die_before"])
async def test_a_worker_that_refuses_or_dies_before_the_first_byte_is_replaced_silently(
    act: str, is_stream: bool
) -> None:
    async with stage() as here:
        bad, good = await here.worker(act), await here.worker()
        status, _ = await here.post(stream=is_stream)
    assert status == 200
    assert (len(bad.bodies), len(good.bodies)) == (1, 1)


async def test_a_worker_that_dies_before_the_first_token_is_replaced_silently() -> None:
    async with stage() as here:
        await here.worker("die_at_role")
        await here.worker()
        status, text = await here.post(stream=True)
    assert status == 200
    assert text.count('"role"') == 1
    assert texts(text) == ["t0 ", "t1 ", "t2 ", "t3 ", "t4 "]


async def test_a_body_that_waits_for_permission_gets_it_at_once() -> None:
    async with stage() as here:
        await here.worker()
        async with here.client.post(here.url + CHAT, json=body(CHAT), expect100=True) as response:
            assert response.status == 200


async def test_a_worker_that_is_not_there_any_more_is_replaced_silently() -> None:
    async with stage() as here:
        gone = await here.worker()
        await gone.stop()
        await here.worker()
        assert (await here.post())[0] == 200


async def test_a_worker_that_dies_within_a_stream_ends_it_with_an_error_and_without_done() -> None:
    async with stage() as here:
        await here.worker("die_within")
        received = b""
        with pytest.raises(aiohttp.ClientPayloadError):
            async with here.client.post(here.url + CHAT, json=body(CHAT, stream=True)) as response:
                async for chunk in response.content.iter_any():
                    received += chunk
        _, metrics = await here.get("/metrics")
        assert 'error_type="internal"' in metrics
    text = received.decode()
    assert texts(text) == ["t0 ", "t1 "]
    assert '"error"' in text.splitlines()[-2]
    assert "[DONE]" not in text


async def test_a_stream_that_ends_without_done_is_an_error_too() -> None:
    async with stage() as here:
        await here.worker("stop_within")
        with pytest.raises(aiohttp.ClientPayloadError):
            await here.post(stream=True)


async def test_a_request_that_kills_its_workers_is_given_up() -> None:
    async with stage() as here:
        workers = [await here.worker("die_before") for _ in range(4)]
        status, text = await here.post()
    assert status == 500
    assert json.loads(text)["error"]["code"] == "request_kills_workers"
    assert sum(len(worker.bodies) for worker in workers) == 2


async def test_an_error_of_the_worker_is_passed_on() -> None:
    async with stage() as here:
        await here.worker("refuse")
        status, text = await here.post()
    assert (status, json.loads(text)["error"]["message"]) == (400, "no")


async def test_a_client_that_leaves_cancels_its_request_on_the_worker() -> None:
    async with stage() as here:
        worker = await here.worker("hold_within")
        async with here.client.post(here.url + CHAT, json=body(CHAT, stream=True)) as response:
            await response.content.readany()
            response.close()
        await eventually(lambda: worker.cancelled == 1)
        await eventually(lambda: here.frontend.in_flight == 0)
        assert await here.sample("dynamo_frontend_inflight_requests") == 0
        assert await here.sample("dynamo_frontend_disconnected_clients") == 1


async def test_a_client_that_leaves_before_its_request_is_accepted_is_counted_once() -> None:
    async with stage() as here:
        _, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode())
        await eventually(lambda: here.frontend.in_flight == 1)
        writer.close()
        await eventually(lambda: here.frontend.in_flight == 0)
        assert await here.sample("dynamo_frontend_requests_total") == 1
        assert await here.sample("dynamo_frontend_disconnected_clients") == 1


async def test_clients_that_leave_while_their_requests_wait_for_a_turn_are_counted_once_each() -> None:
    asked = json.dumps(body(CHAT)).encode()
    request = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(asked)}\r\n\r\n".encode() + asked
    )
    async with stage() as here:
        await here.worker("hold_before")
        clients = [ClientConnection(here.frontend._server) for _ in range(3 * MAX_STARTS_A_TURN)]
        for each in clients:
            each.connection_made(cast(asyncio.Transport, Wire()))
            each.data_received(request)
        await asyncio.sleep(0)
        assert here.frontend.in_flight == MAX_STARTS_A_TURN
        for each in clients:
            each.connection_lost(None)
        await eventually(lambda: here.frontend.in_flight == 0)
        assert await here.sample("dynamo_frontend_requests_total") == len(clients)
        assert await here.sample("dynamo_frontend_disconnected_clients") == len(clients)


async def test_a_client_that_leaves_while_it_waits_cancels_its_request_too() -> None:
    async with stage() as here:
        worker = await here.worker("hold_before")
        request = asyncio.create_task(here.post())
        await eventually(lambda: worker.in_flight == 1)
        request.cancel()
        await eventually(lambda: worker.cancelled == 1)
        await eventually(lambda: here.frontend.in_flight == 0)


async def test_more_waiting_than_allowed_is_refused_with_retry_after() -> None:
    async with stage(max_waiting_requests=2) as here:
        worker = await here.worker("hold_before")
        waiting = [asyncio.create_task(here.post()) for _ in range(2)]
        await eventually(lambda: worker.in_flight == 2)
        async with here.client.post(here.url + CHAT, json=body(CHAT)) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
        worker.go_on.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_request_that_finds_the_room_full_after_its_body_is_refused_and_leaves_no_gauge() -> None:
    go_on = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        text = json.dumps(body(CHAT)).encode()
        yield text[:5]
        await go_on.wait()
        yield text[5:]

    async with stage(max_waiting_requests=1) as here:
        worker = await here.worker("hold_before")
        slow = asyncio.create_task(here.client.post(here.url + CHAT, data=slow_body()))
        await eventually(lambda: here.frontend.in_flight == 1)
        waiting = asyncio.create_task(here.post())
        await eventually(lambda: worker.in_flight == 1)
        go_on.set()
        assert (await slow).status == 429
        worker.go_on.set()
        assert (await waiting)[0] == 200
        assert await here.sample("dynamo_frontend_inflight_requests") == 0


async def test_a_stream_that_has_begun_does_not_wait_any_more() -> None:
    async with stage(max_waiting_requests=1) as here:
        worker = await here.worker("hold_within")
        async with here.client.post(here.url + CHAT, json=body(CHAT, stream=True)) as response:
            await response.content.readany()
            worker.act = "answer"
            assert (await here.post())[0] == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '{"messages": [{"role": "user", "content": "x"}]}',
        '{"model": 7, "messages": [{"role": "user", "content": "x"}]}',
        '{"model": "sim-8b"}',
        '{"model": "sim-8b", "messages": []}',
        '{"model": "sim-8b", "messages": "x"}',
        '{"model": "sim-8b", "messages": [7]}',
        '{"model": "sim-8b", "messages": [{"role": "user", "content": 7}]}',
        '{"model": "sim-8b", "messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
        '{"model": "sim-8b", "messages": [{"role": "user", "content": "x"}], "max_tokens": -2}',
        '{"model": "sim-8b", "messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {}}',
        '{"model": "sim-8b", "messages": [{"role": "user", "content": "x"}], "bootstrap_host": "10.0.0.1"}',
        "[" * 100_000,
    ],
)
async def test_a_body_that_makes_no_sense_is_answered_400(text: str) -> None:
    async with stage() as here:
        worker = await here.worker()
        async with here.client.post(here.url + CHAT, data=text.encode()) as response:
            assert response.status == 400
            assert json.loads(await response.text())["error"]["type"] == "invalid_request_error"
        assert worker.bodies == []


async def test_a_body_that_is_not_utf8_is_answered_400() -> None:
    async with stage() as here:
        await here.worker()
        for encoded in (b"\xff\xfe\x00{}", json.dumps(body(CHAT)).encode("utf-16")):
            async with here.client.post(here.url + CHAT, data=encoded) as response:
                assert response.status == 400


async def test_a_prompt_longer_than_the_context_is_answered_400() -> None:
    async with stage() as here:
        worker = await here.worker()
        status, text = await here.post(COMPLETIONS, prompt="word " * 8192)
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")
        status, _ = await here.post(COMPLETIONS, prompt=[1] * 8193)
        assert status == 400
        assert worker.bodies == []


async def test_a_body_larger_than_allowed_is_answered_413() -> None:
    async with stage(max_body_bytes=1000) as here:
        await here.worker()
        assert (await here.post(COMPLETIONS, prompt="x" * 2000))[0] == 413


async def test_an_unknown_model_is_answered_404() -> None:
    async with stage() as here:
        await here.worker()
        status, text = await here.post(model="other")
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/files/abc", "/v1/images/generations"])
async def test_a_path_that_no_engine_has_is_answered_501_with_the_reason(path: str) -> None:
    async with stage() as here:
        async with here.client.post(here.url + path, json={}) as response:
            text = await response.text()
        assert (response.status, json.loads(text)["error"]["code"]) == (501, "not_implemented")
        assert response.headers["X-Should-Retry"] == "false"


async def test_an_unknown_path_is_answered_404_and_a_wrong_method_405() -> None:
    async with stage() as here:
        status, text = await here.get("/v2/models")
        assert (status, json.loads(text)["error"]["code"]) == (404, "unknown_url")
        for wrong, meant in (
            ("/v1/chat/completion", CHAT),
            ("/models", "/v1/models"),
        ):
            _, text = await here.get(wrong)
            assert f"Did you mean '{meant}'?" in json.loads(text)["error"]["message"]
        for other in ("/nothing", "/api/nothing"):
            _, text = await here.get(other)
            assert "/metrics/history, /pooling, /rerank, /score, /tokenize, /v1/audio/speech, " in text
            assert f"/v1/audio/translations, {CHAT}, " in text
        assert (await here.get("/v1/embeddings"))[0] == 405


async def test_a_path_that_is_passed_reaches_a_worker_as_it_is_and_is_counted() -> None:
    async with stage() as here:
        worker = await here.worker()
        body_ = {"model": MODEL, "input": ["a", "b"], "dimensions": 8}
        async with here.client.post(f"{here.url}/v1/embeddings", json=body_) as response:
            assert response.status == 200
        assert worker.bodies == [body_]
        assert (
            await here.sample('dynamo_frontend_requests_total{dynamo_namespace="ns",endpoint="embeddings"')
            == 1
        )


async def test_a_model_is_found_by_its_name_and_an_adapter_is_one() -> None:
    async with stage() as here:
        worker = FakeWorker()
        worker.card["loras"] = ["sql"]
        await worker.start()
        await here.know(await worker.register(here.store, 7))
        for name in (MODEL, "sql"):
            status, text = await here.get(f"/v1/models/{name}")
            assert (status, json.loads(text)["id"]) == (200, name)
        assert (await here.get("/v1/models/none"))[0] == 404
        await worker.stop()


async def test_without_a_worker_the_answer_is_503() -> None:
    async with stage(model=MODEL, worker_wait=0.05) as here:
        status, text = await here.post()
    assert (status, json.loads(text)["error"]["code"]) == (503, "no_worker")


async def test_a_frontend_that_has_just_begun_waits_for_the_first_worker() -> None:
    """It may have begun on a store that was wiped, before anybody has registered again."""
    async with stage(model=MODEL) as here:
        request = asyncio.create_task(here.post())
        await eventually(lambda: here.frontend.in_flight == 1)
        await here.worker()
        assert (await request)[0] == 200


async def test_a_worker_that_was_there_a_moment_ago_is_waited_for() -> None:
    async with stage(model=MODEL) as here:
        await here.leave(await here.worker())
        request = asyncio.create_task(here.post())
        await eventually(lambda: here.frontend.in_flight == 1)
        await here.worker()
        assert (await request)[0] == 200


async def test_a_worker_that_is_starting_is_waited_for() -> None:
    async with stage(model=MODEL) as here:
        await here.store.put("v1/ns/fleet", json.dumps({"roles": {"decode": {"starting": 1}}}))
        await eventually(lambda: here.frontend.fleet.is_worker_starting)
        request = asyncio.create_task(here.post())
        await eventually(lambda: here.frontend.in_flight == 1)
        await here.worker()
        assert (await request)[0] == 200


async def test_waiting_for_a_worker_ends() -> None:
    async with stage(model=MODEL, worker_wait=0.05) as here:
        await here.leave(await here.worker())
        assert (await here.post())[0] == 503


async def test_while_crashed_workers_wait_for_a_restart_clients_are_told_why_and_when() -> None:
    """A start that begins after the request's deadline is not waited for."""
    async with stage(model=MODEL, worker_wait=5) as here:
        await here.leave(await here.worker())
        for seconds, why in ((20, "it is started again in"), (None, "VllmWorker_1 has ended")):
            absence = Absence("VllmWorker_1 has ended", seconds and int(time.time()) + seconds)
            fleet = {"roles": {"decode": {"backoff": 1}}, ABSENT: {"VllmWorker": absence.to_json()}}
            await here.store.put("v1/ns/fleet", json.dumps(fleet))
            await eventually(lambda absence=absence: here.frontend.fleet.absence == absence)
            async with here.client.post(here.url + CHAT, json=body(CHAT)) as response:
                assert (response.status, why in await response.text()) == (503, True)
                assert 15 < int(response.headers["Retry-After"]) <= 60


async def test_least_loaded_sends_to_the_one_with_fewer_requests() -> None:
    async with stage(router="least-loaded") as here:
        busy, idle = await here.worker("hold_before"), await here.worker("hold_before")
        held = [asyncio.create_task(here.post())]
        await eventually(lambda: busy.in_flight + idle.in_flight == 1)
        held.append(asyncio.create_task(here.post()))
        await eventually(lambda: (busy.in_flight, idle.in_flight) == (1, 1))
        idle.act = busy.act = "answer"
        idle.go_on.set()
        await eventually(lambda: idle.in_flight == 0)
        for _ in range(3):
            assert (await here.post())[0] == 200
        assert (len(busy.bodies), len(idle.bodies)) == (1, 4)
        busy.go_on.set()
        await asyncio.gather(*held)


async def test_the_api_key_protects_the_api_and_not_the_probes() -> None:
    async with stage({"DYNAPLAN_API_KEY": "secret"}) as here:
        await here.worker()
        assert (await here.post())[0] == 401
        assert (await here.get("/v1/models"))[0] == 401
        assert (await here.get("/health"))[0] == 200
        for key, expected in (("wrong", 401), ("sécret", 401), ("secret", 200)):
            headers = {"Authorization": f"{'bearer' if key == 'secret' else 'Bearer'} {key}"}
            async with here.client.post(here.url + CHAT, json=body(CHAT), headers=headers) as response:
                assert response.status == expected


async def test_each_of_several_keys_is_valid() -> None:
    async with stage({"DYNAPLAN_API_KEY": "secret"}, further_api_key=["second", "third"]) as here:
        for key, expected in (("secret", 200), ("second", 200), ("third", 200), ("fourth", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            async with here.client.get(f"{here.url}/v1/models", headers=headers) as response:
                assert response.status == expected, key


async def test_a_missing_key_is_told_from_a_wrong_one_and_neither_is_repeated() -> None:
    async with stage({"DYNAPLAN_API_KEY": "secret"}) as here:
        told = {}
        for given in ("", "Basic c2VjcmV0", "Bearer ", "Bearer wrong-key"):
            headers = {"Authorization": given} if given else {}
            async with here.client.get(f"{here.url}/v1/models", headers=headers) as response:
                error = (await response.json())["error"]
                told[given] = error["code"]
                assert "Authorization: Bearer <key>" in error["message"]
                assert not {"secret", "wrong-key", "c2VjcmV0"} & set(error["message"].split())
    assert list(told.values()) == ["missing_api_key"] * 3 + ["invalid_api_key"]


@pytest.mark.parametrize(
    "given", ["my-id.7", "x" * 128, "x" * 129, "two words", "tab\there", "umläut", "", "<script>"]
)
async def test_every_answer_bears_the_id_of_its_request_the_clients_own_where_it_is_usable(
    given: str,
) -> None:
    usable = given in ("my-id.7", "x" * 128)
    async with stage() as here:
        await here.worker()
        for method, path, document in (
            ("POST", CHAT, body(CHAT)),
            ("POST", CHAT, body(CHAT, stream=True)),
            ("POST", CHAT, {"model": "unheard-of"}),
            ("GET", "/health", None),
            ("GET", "/nowhere", None),
            ("PUT", CHAT, None),
        ):
            headers = {"X-Request-Id": given}
            async with here.client.request(
                method, here.url + path, json=document, headers=headers
            ) as response:
                (found,) = response.headers.getall("X-Request-Id")
                assert (found == given) is usable
                assert usable or len(bytes.fromhex(found)) == 16


async def test_a_malformed_request_is_answered_with_an_id_too() -> None:
    async with stage() as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
        writer.write(b"NONSENSE\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"X-Request-Id: " in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"


async def test_health_says_what_is_missing() -> None:
    async with stage() as here:
        status, text = await here.get("/health")
        assert (status, json.loads(text)["missing"]) == (503, ["VllmWorker"])
        await here.worker()
        assert (await here.get("/health"))[0] == 200
        assert (await here.get("/live"))[0] == 200


async def test_models_are_those_configured_and_those_the_workers_say() -> None:
    async with stage(served_model_name="mine") as here:
        await here.worker()
        _, text = await here.get("/v1/models")
    assert [model["id"] for model in json.loads(text)["data"]] == ["mine", MODEL]


async def test_a_drain_finishes_what_is_held_and_accepts_no_connection() -> None:
    async with stage() as here:
        worker = await here.worker("hold_within")
        url = here.url
        async with here.client.post(url + CHAT, json=body(CHAT, stream=True)) as response:
            await response.content.readany()
            draining = asyncio.create_task(here.frontend.drain())
            await eventually(lambda: here.frontend._routes.is_draining)
            assert worker.in_flight == 1
            assert not draining.done()
            async with aiohttp.ClientSession() as other:
                with pytest.raises(aiohttp.ClientConnectorError):
                    await other.get(url + "/live")
            worker.go_on.set()
            assert (await response.text()).endswith("data: [DONE]\n\n")
        await asyncio.wait_for(draining, 5)


async def test_a_request_on_the_connection_of_a_stream_that_has_just_ended_is_answered_while_it_drains() -> (
    None
):
    async with stage() as here:
        worker = await here.worker("hold_within")
        async with here.client.post(here.url + CHAT, json=body(CHAT, stream=True)) as response:
            await response.content.readany()
            url, draining = here.url, asyncio.create_task(here.frontend.drain())
            await eventually(lambda: here.frontend._server._acceptor._socket.fileno() < 0)  # type: ignore[union-attr]
            worker.go_on.set()
            assert (await response.text()).endswith("data: [DONE]\n\n")
        async with here.client.post(url + CHAT, json=body(CHAT)) as last:
            assert (last.status, last.headers["Connection"]) == (200, "close")
            await last.read()
        await asyncio.wait_for(draining, 5)


async def test_the_metrics_tell_tokens_requests_and_times() -> None:
    async with stage() as here:
        await here.worker(tokens=5)
        await here.post(stream=True)
        await here.post()
        await here.post(model="other")
        labels = f'dynamo_namespace="ns",model="{MODEL}"'
        assert await here.sample(f"dynamo_frontend_output_sequence_tokens_sum{{{labels}}}") == 10
        assert await here.sample(f"dynamo_frontend_time_to_first_token_seconds_count{{{labels}}}") == 1
        assert await here.sample(f"dynamo_frontend_inter_token_latency_seconds_count{{{labels}}}") == 4
        assert await here.sample(f"dynamo_frontend_request_duration_seconds_count{{{labels}}}") == 2
        assert await here.sample("dynamo_frontend_requests_started_total{") == 2
        assert await here.sample("dynamo_frontend_requests_total{") == 3
        assert await here.sample("dynamo_frontend_inflight_requests{") == 0
        assert await here.sample("dynamo_frontend_queued_requests{") == 0
        assert await here.sample(f"dynamo_frontend_model_context_length{{{labels}}}") == 8192


async def test_the_last_metrics_are_written_before_a_forced_stop_may_cut_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stage() as here:
        written: list[bool] = []
        with monkeypatch.context() as changed:
            changed.setattr(here.frontend._metrics, "write", lambda: written.append(True))
            changed.setattr(
                here.frontend._background, "finish", lambda within_s: asyncio.sleep(within_s * 1e3)
            )
            closing = asyncio.create_task(here.frontend.close())
            try:
                await eventually(lambda: written)
            finally:
                closing.cancel()
                await asyncio.gather(closing, return_exceptions=True)


async def test_a_remote_prefill_reaches_the_decode_worker_as_its_hand_off() -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker()
        async with prefill_worker(here) as prefills:
            status, text = await here.post(stream=True, temperature=0.5)
        assert status == 200
        assert text.endswith("data: [DONE]\n\n")
        request = prefills[0]
        assert (request.path, request.body["temperature"]) == (CHAT, 0.5)
        assert worker.bodies[0]["kv_transfer_params"] == {"remote_request_id": request.request_id}
        assert worker.bodies[0]["messages"] == request.body["messages"]
        assert await here.sample("dynamo_frontend_prefills_total{") == 1


async def test_the_trace_of_a_request_goes_on_to_the_prefill_worker_and_to_the_decode_worker() -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
    async with stage(remote_prefill=True) as here:
        worker = await here.worker()
        async with (
            prefill_worker(here) as prefills,
            here.client.post(
                here.url + CHAT, json=body(CHAT), headers={**trace, "X-Request-Id": "mine"}
            ) as response,
        ):
            assert response.status == 200
        told = dict(prefills[0].trace)
        assert told.pop("X-Request-Id").startswith("mine-")
        assert told == trace
        assert worker.headers[0].items() >= trace.items()


async def test_without_a_messaging_server_every_prefill_is_local() -> None:
    async with stage(remote_prefill=True, without_messenger=True) as here:
        worker = await here.worker()
        await here.know(await FakeWorker().register(here.store, 99, "PrefillWorker"))
        assert (await here.post())[0] == 200
        assert "kv_transfer_params" not in worker.bodies[0]


async def test_two_frontends_share_a_port() -> None:
    async with stage() as here:
        await here.worker()
        environment = {"DYNAMO_PORT": str(here.frontend.port)}
        async with stage(environment) as other:
            assert other.frontend.port == here.frontend.port


RECORD = """
import asyncio, os, signal, sys
from pathlib import Path
from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.gateway.engine_answers import Usage
metrics = FrontendMetrics("ns", lambda: 0.0, Path(sys.argv[1]))
record = metrics.record("m", "completions", True)
record.finish("", 7, Usage(7, 5))
metrics.record("m", "completions", True)
print(metrics.render().decode(), flush=True)
os.kill(os.getpid(), signal.SIGKILL if sys.argv[2] == "die" else signal.SIGCONT)
"""


def test_metrics_of_several_frontends_add_up_and_those_of_a_killed_one_stay(tmp_path: Path) -> None:
    shared = tmp_path / "metrics"
    texts = []
    for end in ("die", "live"):
        run = subprocess.run(
            [sys.executable, "-c", RECORD, str(shared), end], stdout=subprocess.PIPE, text=True, check=False
        )
        texts.append(run.stdout)
    for text, requests in zip(texts, (1, 2), strict=True):
        assert total(text, "dynamo_frontend_requests_total{") == requests
        assert total(text, "dynamo_frontend_output_sequence_tokens_sum{") == 5 * requests
        assert total(text, "dynamo_frontend_inflight_requests{") == 1
        assert faults(text) == []
    assert (shared.stat().st_mode & 0o777) == 0o700


GATHER = """
import os, signal, sys
from pathlib import Path
from dynaplan.gateway.metrics import FrontendMetrics
due = []
shared = Path(sys.argv[1])
metrics = FrontendMetrics("ns", lambda: 0.0, shared, call_later=lambda delay_s, write: due.append(write))
first, *others = [metrics.record("m", "completions", True) for _ in range(9)]
for record in others:
    record.finish("", 7)
(write,) = due
write()
first.finish("", 7)
write, again = due
again()
assert len(due) == 2
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_frontends_that_share_a_directory_write_once_for_many_requests_and_until_the_last_has_ended(
    tmp_path: Path,
) -> None:
    killed = subprocess.run([sys.executable, "-c", GATHER, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    other = subprocess.run(
        [sys.executable, "-c", RECORD, str(tmp_path), "live"], stdout=subprocess.PIPE, text=True, check=True
    )
    assert total(other.stdout, "dynamo_frontend_request_duration_seconds_count{") == 9 + 1


def total(metrics: str, beginning: str) -> float:
    """The sum of the samples whose line begins so."""
    return sum(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(beginning))


@asynccontextmanager
async def prefill_worker(here: Stage) -> AsyncIterator[list[RemotePrefillRequest]]:
    """A prefill worker that answers at once; it acknowledges after its answer, as the real one does."""
    await here.know(await FakeWorker().register(here.store, 99, "PrefillWorker"))
    taken: list[RemotePrefillRequest] = []
    queue = await here.messenger.queue(prefill_stream("ns"))

    async def work() -> None:
        while True:
            item = await queue.get(1.0)
            if item:
                request = RemotePrefillRequest.from_json(item.payload)
                taken.append(request)
                params = {"kv_transfer_params": {"remote_request_id": request.request_id}}
                answer = PrefillAnswer(request.request_id, "ns_PrefillWorker", params)
                await here.messenger.publish(request.reply_to, answer.to_json())
                await item.ack()

    await eventually(lambda: here.frontend.prefill.is_connected)
    task = asyncio.create_task(work())
    try:
        yield taken
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
