"""The Frontend before real engines: failures within answers, hand-offs, reservations, connections, routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.util.sockets import bound_socket
from dynaplan.worker.server import WorkerServer
from tests.fakes.frontend_runtime import Stage, body, stage
from tests.fakes.openai_worker import MODEL, TOKEN, FakeWorker
from tests.fakes.polling import eventually

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESERVES = {"reserves": True}


# -- failures within answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("act", ["abort", "error"])
async def test_a_stream_that_fails_before_its_first_token_is_begun_anew(act: str, path: str) -> None:
    async with stage() as here:
        bad, good = await here.worker(act), await here.worker()
        status, text = await here.post(path, stream=True)
    assert status == 200
    assert "t4 " in text
    assert "abort" not in text
    assert (len(bad.bodies), len(good.bodies)) == (1, 1)


async def test_a_whole_answer_that_was_aborted_is_none() -> None:
    async with stage() as here:
        bad, good = await here.worker("abort"), await here.worker()
        status, text = await here.post()
    assert (status, json.loads(text)["choices"][0]["finish_reason"]) == (200, "length")
    assert (len(bad.bodies), len(good.bodies)) == (1, 1)


@pytest.mark.parametrize(("act", "words"), [("abort_within", "aborted"), ("error_within", "cannot go on")])
async def test_a_stream_that_fails_within_ends_with_the_reason_and_without_done(act: str, words: str) -> None:
    async with stage() as here:
        worker = await here.worker(act)
        received = b""
        with pytest.raises(aiohttp.ClientPayloadError):
            async with here.client.post(here.url + CHAT, json=body(CHAT, stream=True)) as response:
                received += await response.content.readany()
                worker.go_on.set()
                async for chunk in response.content.iter_any():
                    received += chunk
        assert await here.sample("dynamo_frontend_requests_total{") == 1
        assert 'error_type="internal"' in (await here.get("/metrics"))[1]
    last = received.decode().splitlines()[-2]
    assert last.startswith('data: {"error"')
    assert words in last
    assert b"t1 " in received
    assert b"[DONE]" not in received
    assert b'"abort"' not in received


async def test_an_error_event_at_the_start_that_blames_the_request_is_an_answer() -> None:
    async with stage() as here:
        workers = [await here.worker("error") for _ in range(2)]
        for worker in workers:
            worker.error_code = 400
        status, text = await here.post(stream=True)
    assert (status, json.loads(text)["error"]["message"]) == (400, "cannot go on")
    assert sum(len(worker.bodies) for worker in workers) == 1


async def test_status_500_is_tried_once_at_another_worker() -> None:
    async with stage() as here:
        bad, good = await here.worker("error_500"), await here.worker()
        assert (await here.post())[0] == 200
        good.act = "error_500"
        assert (await here.post())[0] == 500
    assert len(bad.bodies) + len(good.bodies) == 4


async def test_status_500_of_the_only_worker_is_passed_on() -> None:
    async with stage() as here:
        worker = await here.worker("error_500")
        status, text = await here.post()
    assert (status, json.loads(text)["error"]["message"]) == (500, "shut down")
    assert len(worker.bodies) == 1


@pytest.mark.parametrize(("message", "code"), [("nothing", "unknown_url"), ({"code": "its"}, "its")])
async def test_a_path_that_the_engine_lacks_is_an_error_in_openais_form(message: object, code: str) -> None:
    async with stage() as here:
        worker = await here.worker("lack")
        worker.lacks = {"error": message}
        status, text = await here.post("/v1/rerank", query="x", documents=["y"])
        assert (status, json.loads(text)["error"]["code"]) == (404, code)


@pytest.mark.parametrize(
    ("says", "status", "answer"),
    [
        ("Failed to parse tools: Missing tool type", 400, "Missing tool type"),
        ("This server does not support embeddings. Start it with `--embeddings`", 501, "embedding: true"),
    ],
)
async def test_an_engines_error_is_told_as_the_clients_fault_or_with_our_own_advice(
    says: str, status: int, answer: str
) -> None:
    async with stage() as here:
        workers = [await here.worker("error_500", {"engine": "llamacpp"}) for _ in range(2)]
        for worker in workers:
            worker.error_message = says
        code, text = await here.post()
    assert code == status
    assert answer in json.loads(text)["error"]["message"]
    assert sum(len(worker.bodies) for worker in workers) == 1  # it is no death, and not tried elsewhere


async def test_a_sound_reaches_the_engine_as_the_form_that_it_came_in() -> None:
    form = aiohttp.FormData()
    form.add_field("model", MODEL)
    form.add_field("file", bytes(range(256)) * 2000, filename="a.wav", content_type="audio/wav")
    async with stage() as here:
        worker = await here.worker(card={"engine": "vllm"})
        async with here.client.post(f"{here.url}/v1/audio/transcriptions", data=form) as response:
            assert response.status == 200, await response.text()
            received = await response.read()
    assert bytes(range(256)) * 2000 in received
    (head,) = worker.headers
    assert head["content-type"].startswith("multipart/form-data; boundary=")


@pytest.mark.parametrize("path", ["/v1/audio/translations", "/v1/audio/speech"])
async def test_whether_an_engine_has_a_path_is_its_own_affair(path: str) -> None:
    form = aiohttp.FormData({"model": MODEL})
    form.add_field("file", b"RIFF", filename="a.wav")
    asked = {"json": {"model": MODEL, "input": "hi"}} if path.endswith("speech") else {"data": form}
    async with stage() as here:
        worker = await here.worker(card={"engine": "llamacpp"})
        async with here.client.post(here.url + path, **asked) as response:
            await response.read()
    assert worker.headers


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_tool_that_must_be_called_is_refused_where_the_template_has_none(choice: object) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with stage() as here:
        worker = await here.worker(card={"engine": "llamacpp", "lacks_tools": True})
        status, text = await here.post(tools=tools, tool_choice=choice)
        assert (status, json.loads(text)["error"]["code"]) == (400, "no_tools")
        assert (await here.post(tools=tools))[0] == 200  # which may answer without
    assert len(worker.bodies) == 1


# -- connections ---------------------------------------------------------------------------------------


async def test_a_request_goes_to_the_engines_own_address() -> None:
    async with stage() as here:
        worker, engine = await here.worker(), FakeWorker()
        worker.engine_url = await engine.start()
        here.workers.append(engine)
        instance = await worker.register(here.store, 1)
        await eventually(lambda: instance in here.discovery.all())
        assert (await here.post())[0] == 200
    assert (len(worker.bodies), len(engine.bodies)) == (0, 1)


async def test_a_kept_connection_that_was_closed_is_replaced_and_nobody_is_blamed() -> None:
    async with stage() as here:
        worker = await here.worker("cut_kept")
        for _ in range(3):
            assert (await here.post())[0] == 200
    assert len(set(worker.connections)) >= 2


async def test_an_engine_that_keeps_no_connections_gets_a_new_one_each_time() -> None:
    async with stage() as here:
        worker = await here.worker(card={"keep_alive": False})
        for is_stream in (True, False, True):
            assert (await here.post(stream=is_stream))[0] == 200
    assert len(set(worker.connections)) == 3


# -- hand-offs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_hand_off_is_let_go_once_the_decode_worker_answers(is_stream: bool) -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker("hold_within" if is_stream else "answer")
        async with prefill_worker(here) as prefills:
            request = asyncio.create_task(here.post(stream=is_stream))
            await eventually(lambda: bool(prefills.released))
            worker.go_on.set()
            assert (await request)[0] == 200
            assert prefills.released == [prefills.taken[0].request_id]
    assert worker.bodies[0]["kv_transfer_params"] == {"remote": prefills.taken[0].request_id}


async def test_a_decode_worker_that_dies_takes_the_hand_off_with_it() -> None:
    async with stage(remote_prefill=True) as here:
        dead = await here.worker("die_before")
        worker = await here.worker()
        async with prefill_worker(here) as prefills:
            assert (await here.post())[0] == 200
            await eventually(lambda: len(prefills.released) == 1)
        assert len(prefills.taken) == 1
    assert "kv_transfer_params" in dead.bodies[0]
    assert "kv_transfer_params" not in worker.bodies[0]


async def test_a_decode_worker_that_refuses_leaves_the_hand_off_to_the_next() -> None:
    async with stage(remote_prefill=True) as here:
        await here.worker("drain")
        worker = await here.worker()
        async with prefill_worker(here) as prefills:
            assert (await here.post())[0] == 200
            await eventually(lambda: len(prefills.released) == 1)
    assert "kv_transfer_params" in worker.bodies[0]


async def test_a_decode_worker_that_needs_a_hand_off_gets_a_new_one_after_another_died() -> None:
    async with stage(remote_prefill=True) as here:
        dead = await here.worker("die_before", card={"requires_remote_prefill": True})
        worker = await here.worker(card={"requires_remote_prefill": True})
        async with prefill_worker(here) as prefills:
            assert (await here.post())[0] == 200
            await eventually(lambda: len(prefills.released) == 2)
    assert dead.bodies[0]["kv_transfer_params"] != worker.bodies[0]["kv_transfer_params"]


async def test_a_decode_worker_that_needs_a_hand_off_gets_no_request_without_one() -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker(card={"requires_remote_prefill": True})
        status, text = await here.post()
    assert (status, json.loads(text)["error"]["code"]) == (503, "no_worker")
    assert worker.bodies == []


async def test_status_500_of_the_only_worker_as_it_leaves_is_tried_at_the_next_one() -> None:
    """As an engine answers that stops at its drain's deadline: its worker has deregistered before."""
    async with stage() as here:
        leaving = await here.worker("hold_error_500")
        asking = asyncio.create_task(here.post())
        await eventually(lambda: leaving.bodies)
        await here.leave(leaving)
        leaving.go_on.set()
        good = await here.worker()
        assert (await asking)[0] == 200
        assert len(good.bodies) == 1


async def test_status_500_after_a_hand_off_is_tried_again_without_it_at_the_only_worker() -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker("error_500")
        async with prefill_worker(here):
            assert (await here.post())[0] == 500
    assert ["kv_transfer_params" in each for each in worker.bodies] == [True, False]


async def test_the_hand_off_of_a_client_that_leaves_is_let_go() -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker("hold_before")
        async with prefill_worker(here) as prefills:
            request = asyncio.create_task(here.post())
            await eventually(lambda: worker.in_flight == 1)
            assert prefills.released == []
            request.cancel()
            await eventually(lambda: prefills.released == [prefills.taken[0].request_id])


async def test_a_frontend_that_ends_lets_its_hand_offs_go_first() -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker("hold_before")
        async with prefill_worker(here) as prefills:
            request = asyncio.create_task(here.post())
            await eventually(lambda: worker.in_flight == 1)
            await here.frontend.close()
            assert prefills.released == [prefills.taken[0].request_id]
            await asyncio.gather(request, return_exceptions=True)


async def test_a_decode_worker_that_cannot_compute_prompts_gets_none_without_a_hand_off() -> None:
    async with stage(remote_prefill=True, conditional_disagg=True) as here:
        worker = await here.worker(card={"requires_remote_prefill": True})
        status, text = await here.post()
        assert (status, json.loads(text)["error"]["code"]) == (503, "no_worker")
        async with prefill_worker(here) as prefills:
            assert (await here.post())[0] == 200  # however short the prompt
            worker.act = "die_before"
            assert (await here.post())[0] == 502
            assert len(prefills.taken) == 4  # once, and anew for each of the three deaths
            await eventually(lambda: len(prefills.released) == 4)
    assert all("kv_transfer_params" in each for each in worker.bodies)


# -- reservations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False])
async def test_what_was_reserved_is_in_the_request_and_given_back_after_it(is_stream: bool) -> None:
    async with stage() as here:
        worker = await here.worker(card=RESERVES)
        assert (await here.post(stream=is_stream))[0] == 200
        await eventually(lambda: len(worker.released) == 1)
    assert worker.released == [each["request_id"] for each in worker.reserved]
    assert worker.reserved[0]["hand_off"] is None
    assert (worker.bodies[0]["id_slot"], worker.bodies[0]["cache_prompt"]) == (2, True)


async def test_a_hand_off_goes_to_the_reservation_and_not_to_the_engine() -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker(card=RESERVES)
        async with prefill_worker(here) as prefills:
            assert (await here.post())[0] == 200
        expected = {"kv_transfer_params": {"remote": prefills.taken[0].request_id}}
    assert worker.reserved[0]["hand_off"] == expected
    assert "kv_transfer_params" not in worker.bodies[0]


async def test_a_hand_off_that_a_reservation_has_taken_over_is_let_go_before_the_answer() -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker("hold_before", card=RESERVES)
        async with prefill_worker(here) as prefills:
            request = asyncio.create_task(here.post())
            await eventually(lambda: worker.in_flight == 1)
            await eventually(lambda: prefills.released == [prefills.taken[0].request_id])
            assert not request.done()
            worker.go_on.set()
            assert (await request)[0] == 200


async def test_a_status_500_after_a_hand_off_was_taken_over_is_tried_again_without_it() -> None:
    async with stage(remote_prefill=True) as here:
        worker = await here.worker("error_500", card=RESERVES)
        async with prefill_worker(here):
            assert (await here.post())[0] == 500
    assert [bool(each["hand_off"]) for each in worker.reserved] == [True, False]


async def test_a_worker_that_refuses_to_reserve_is_replaced() -> None:
    async with stage(remote_prefill=True) as here:
        bad, good = await here.worker(card=RESERVES), await here.worker(card=RESERVES)
        bad.reserve_act = "drain"
        async with prefill_worker(here):
            assert (await here.post())[0] == 200
    assert (len(bad.bodies), bad.released) == (0, [])
    assert good.reserved[0]["hand_off"]


async def test_a_worker_that_fails_to_reserve_is_replaced_and_has_the_hand_off() -> None:
    async with stage(remote_prefill=True) as here:
        bad, good = await here.worker(card=RESERVES), await here.worker(card=RESERVES)
        bad.reserve_act = "error_500"
        async with prefill_worker(here):
            assert (await here.post())[0] == 200
        await eventually(lambda: bad.released == [bad.reserved[0]["request_id"]])
    assert good.reserved[0]["hand_off"] is None


async def test_a_client_that_leaves_while_no_slot_is_free_gives_its_place_back() -> None:
    async with stage() as here:
        worker = await here.worker(card=RESERVES)
        worker.reserve_act = "hold_before"
        request = asyncio.create_task(here.post())
        await eventually(lambda: len(worker.reserved) == 1)
        request.cancel()
        await eventually(lambda: worker.released == [worker.reserved[0]["request_id"]])
        assert worker.bodies == []


async def test_an_engine_that_dies_after_the_reservation_does_not_keep_it() -> None:
    async with stage() as here:
        bad, _ = await here.worker("die_within", card=RESERVES), await here.worker(card=RESERVES)
        with pytest.raises(aiohttp.ClientPayloadError):
            await here.post(stream=True)
        await eventually(lambda: len(bad.released) == 1)


# -- what a draining worker asks -----------------------------------------------------------------------


async def test_a_draining_worker_hears_when_nothing_is_left_here_for_it() -> None:
    async with stage() as here:
        worker = await here.worker("hold_before")
        async with routes(here) as url:
            request = asyncio.create_task(here.post())
            await eventually(lambda: worker.in_flight == 1)
            await here.leave(worker)
            await here.worker()  # one more change of the instances
            assert await ask(here, url, 1) == {"in_flight": 1}
            worker.go_on.set()
            assert (await request)[0] == 200
            assert await ask(here, url, 1) == {"in_flight": 0}
            assert await ask(here, url, 0xABC) == {"in_flight": 0}


async def test_a_worker_that_asks_gets_nothing_more_although_discovery_still_has_it() -> None:
    async with stage() as here:
        leaving, staying = await here.worker(), await here.worker()
        async with routes(here) as url:
            assert await ask(here, url, 1) == {"in_flight": 0}
            for _ in range(4):
                assert (await here.post())[0] == 200
        assert (len(leaving.bodies), len(staying.bodies)) == (0, 4)


async def test_only_the_workers_may_ask_and_only_for_a_number() -> None:
    async with stage() as here, routes(here) as url:
        async with here.client.post(f"{url}/leaving/1") as response:
            assert response.status == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with here.client.post(f"{url}/leaving/me", headers=headers) as response:
            assert response.status == 400
        assert here.runtime.card["routes_to"] == "VllmWorker"


async def test_the_tokens_that_the_engine_states_are_in_the_metrics() -> None:
    async with stage() as here:
        await here.worker(tokens=5)
        await here.post(stream=True, stream_options={"include_usage": True})
        labels = f'dynamo_namespace="ns",model="{MODEL}"'
        assert await here.sample(f"dynamo_frontend_input_sequence_tokens_sum{{{labels}}}") == 7
        assert await here.sample(f"dynamo_frontend_output_sequence_tokens_sum{{{labels}}}") == 5


@asynccontextmanager
async def routes(here: Stage) -> AsyncIterator[str]:
    """The frontend's worker server: the address."""
    server = WorkerServer(bound_socket("127.0.0.1", 0), TOKEN)
    await server.start(here.runtime.routes)
    await server.drain()  # it answers on
    try:
        yield server.url
    finally:
        await server.stop()


async def ask(here: Stage, url: str, instance_id: int) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with here.client.post(f"{url}/leaving/{instance_id:x}", headers=headers) as response:
        document: dict[str, object] = await response.json()
        return document


class Prefills:
    """A prefill worker that answers at once; it acknowledges after its answer, as the real one does."""

    def __init__(self) -> None:
        self.taken: list[RemotePrefillRequest] = []
        self.released: list[str] = []

    async def work(self, here: Stage) -> None:
        queue = await here.messenger.queue(prefill_stream("ns"))
        while True:
            item = await queue.get(1.0)
            if item:
                request = RemotePrefillRequest.from_json(item.payload)
                self.taken.append(request)
                fields = {"kv_transfer_params": {"remote": request.request_id}}
                answer = PrefillAnswer(request.request_id, "p", fields, release_to="ns.kv_hand_offs.p")
                await here.messenger.publish(request.reply_to, answer.to_json())
                await item.ack()


@asynccontextmanager
async def prefill_worker(here: Stage) -> AsyncIterator[Prefills]:
    await here.know(await FakeWorker().register(here.store, 99, "PrefillWorker"))
    prefills = Prefills()
    await here.messenger.subscribe(
        "ns.kv_hand_offs.p", lambda _, payload: prefills.released.append(payload.decode())
    )
    await eventually(lambda: here.frontend.prefill.is_connected)
    task = asyncio.create_task(prefills.work(here))
    try:
        yield prefills
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
