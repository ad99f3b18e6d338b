"""Large bodies neither fill the frontend nor hold up the streams of others."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.gateway.request_bodies import MAX_INLINE_PARSE_BYTES, BodyReader
from tests.fakes.frontend_runtime import Stage, body, stage
from tests.fakes.openai_worker import MODEL
from tests.fakes.polling import eventually

COMPLETIONS = "/v1/completions"
PADDING = "x" * MAX_INLINE_PARSE_BYTES
"""Goes into the field `messages`, which nothing reads in a completion: a prompt needs a context."""


class Sender:
    """A client that sends what it is told, and no more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def begin(cls, here: Stage, headers: str, sent: bytes) -> Sender:
        sender = cls(*await asyncio.open_connection("127.0.0.1", here.frontend.port))
        sender.writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode() + sent
        )
        return sender

    async def answer(self) -> tuple[str, dict[str, Any]]:
        """The head and the document of the answer."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)).decode()
        size = int(head.lower().partition("content-length:")[2].split()[0])
        return head, json.loads(await self.reader.readexactly(size))

    def close(self) -> None:
        self.writer.close()


async def large(here: Stage, **changes: Any) -> tuple[int, str]:
    return await here.post(COMPLETIONS, messages=PADDING, **changes)


def held(here: Stage) -> int:
    return here.frontend._path.bodies.held_bytes


@pytest.mark.parametrize("headers", ["Content-Length: 400000", "Transfer-Encoding: chunked"])
async def test_unfinished_bodies_are_bounded_together_and_small_requests_go_on(headers: str) -> None:
    async with stage(max_bodies_bytes=1_000_000) as here:
        await here.worker()
        piece = b"x" * 300_000
        sent = b"493e0\r\n" + piece + b"\r\n" if "chunked" in headers else piece
        senders = []
        for count in (1, 2, 3):
            senders.append(await Sender.begin(here, headers, sent))
            await eventually(lambda expected=count: held(here) == expected * len(piece))  # type: ignore[misc]
        senders.append(await Sender.begin(here, headers, sent))
        head, document = await senders[-1].answer()
        assert head.startswith("HTTP/1.1 503")
        assert "Retry-After: 2" in head
        assert document["error"]["code"] == "bodies_full"
        assert "max-bodies-bytes" in document["error"]["message"]
        assert (await large(here))[0] == 503
        assert (await here.post(COMPLETIONS))[0] == 200
        for sender in senders:
            sender.close()
        await eventually(lambda: held(here) == 0)
        assert (await large(here))[0] == 200


async def test_a_body_that_is_announced_as_too_large_is_refused_before_it_is_sent() -> None:
    async with stage(max_body_bytes=1000) as here:
        await here.worker()
        sender = await Sender.begin(here, "Content-Length: 1001", b"")
        head, document = await sender.answer()
        sender.close()
    assert head.startswith("HTTP/1.1 413")
    assert "max-body-bytes" in document["error"]["message"]


async def test_a_body_that_never_ends_is_answered_408_and_forgotten() -> None:
    async with stage(body_timeout=0.1) as here:
        await here.worker()
        sender = await Sender.begin(here, "Content-Length: 400000", b"x" * 300_000)
        head, document = await sender.answer()
        assert head.startswith("HTTP/1.1 408")
        assert document["error"]["code"] == "body_timeout"
        await eventually(lambda: held(here) == 0)
        sender.close()


async def test_a_large_body_is_passed_on_byte_for_byte_with_its_parameters() -> None:
    async with stage() as here:
        worker = await here.worker()
        status, _ = await large(here, max_tokens=3, stream=True)
        assert status == 200
        assert worker.bodies == [body(COMPLETIONS, messages=PADDING, max_tokens=3, stream=True)]


async def test_a_large_prompt_is_routed_by_its_prefix_and_counted_whole() -> None:
    async with stage(router="kv") as here:
        workers = [await here.worker(card={"context_tokens": 10**6}) for _ in range(2)]
        ids = [index % 50_000 for index in range(60_000)]
        for _ in range(3):
            status, _ = await here.post(COMPLETIONS, prompt=ids)
            assert status == 200
        assert sorted(len(worker.bodies) for worker in workers) == [0, 3]
        assert await here.sample("dynamo_frontend_input_sequence_tokens_count") == 3


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"prompt": ""}, None), ({"model": "other"}, "model_not_found"), ({"kv_slot_file": "x"}, None)],
)
async def test_a_large_body_with_a_fault_gets_the_same_answer_as_a_small_one(
    changes: dict[str, Any], code: str | None
) -> None:
    async with stage() as here:
        await here.worker()
        assert await large(here, **changes) == await here.post(COMPLETIONS, **changes)
        assert json.loads((await large(here, **changes))[1])["error"]["code"] == code


GENERATE = "/api/generate"


@pytest.mark.parametrize(
    ("changes", "status"),
    [({}, 200), ({"model": "other"}, 404), ({"prompt": 5}, 400), ({"keep_alive": "soon"}, 400)],
)
async def test_a_large_body_for_ollama_is_translated_as_a_small_one_is_by_the_process(
    changes: dict[str, Any], status: int
) -> None:
    asked = {"model": MODEL, "prompt": "hello", "options": {"num_predict": 3}, "stream": False, **changes}
    async with stage() as here:
        worker = await here.worker()
        small, large = await here.post(GENERATE, **asked), await here.post(GENERATE, **asked, padding=PADDING)
        assert reader_of_this_process().is_running()
    assert (small[0], large[0]) == (status, status)
    if status == 200:
        assert worker.bodies[0] == worker.bodies[1]
    else:
        assert small[1] == large[1]


async def test_a_body_for_ollama_that_grows_in_translation_is_translated_whole() -> None:
    reader = BodyReader(8_000_000)
    text = "ä" * 3_500_000
    body = json.dumps({"model": MODEL, "prompt": text, "raw": True}, ensure_ascii=False).encode()
    asked, translated = await reader.translate(GENERATE, body)
    await reader.close()
    assert asked.path == COMPLETIONS
    assert len(translated) > 2**24
    assert json.loads(translated)["prompt"] == text


async def test_a_body_that_is_to_name_a_model_is_not_read_when_it_is_large() -> None:
    async with stage() as here:
        await here.worker()
        status, text = await here.post("/api/show", model=MODEL, padding=PADDING)
        assert (await here.post("/api/show", model=MODEL))[0] == 200
    assert status == 400
    assert "takes the name of a model" in text


async def test_a_large_prompt_goes_to_the_queue_as_it_was_sent() -> None:
    async with stage(remote_prefill=True, max_local_prefill_length=0) as here:
        await here.worker()
        await here.know(await here.workers[0].register(here.store, 99, "PrefillWorker"))
        queue = await here.messenger.queue(prefill_stream("ns"))
        request = asyncio.ensure_future(large(here))
        item = await queue.get(30)
        assert item is not None
        queued = RemotePrefillRequest.from_json(item.payload)
        assert queued.body == body(COMPLETIONS, messages=PADDING)
        refusal = PrefillAnswer(queued.request_id, error="busy", is_retryable=True)
        await here.messenger.publish(queued.reply_to, refusal.to_json())
        assert (await request)[0] == 200


async def cost_s(here: Stage, path: str, body_bytes: bytes) -> float:
    """The processor time of this thread, which runs the frontend, for one body."""
    gc.collect()
    begun_s = time.thread_time()
    async with here.client.post(here.url + path, data=io.BytesIO(body_bytes)) as response:
        assert response.status == 400, await response.text()
    return time.thread_time() - begun_s


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_reading_a_large_body_costs_the_event_loop_no_more_however_it_is_made(path: str) -> None:
    """Processor time is compared, which does not depend on what else the machine does."""
    size = 3_000_000
    fill: dict[str, Callable[[int], bytes]] = {
        "text": lambda length: b'"' + b"x" * length + b'"',
        "lists": lambda length: b"[" + b",".join([b"[]"] * (length // 3)) + b"]",
        "token ids": lambda length: b"[" + b",".join([b"17"] * (length // 3)) + b"]",
    }
    async with stage() as here:
        await here.worker()
        costs_s = {}
        for name, filled in fill.items():
            text = b'{"model":"%b","prompt":%b}' % (MODEL.encode(), filled(size))
            costs_s[name] = min([await cost_s(here, path, text) for _ in range(2)])
    assert max(costs_s.values()) < 3 * costs_s["text"] + 0.05, costs_s


def reader_of_this_process() -> psutil.Process:
    (found,) = [
        child
        for child in psutil.Process().children()
        if any("body_reader_main" in word for word in child.cmdline())
    ]
    return found


async def test_a_reader_that_dies_costs_one_answer_and_the_next_body_gets_another() -> None:
    async with stage() as here:
        await here.worker()
        assert (await large(here))[0] == 200
        reader = reader_of_this_process()
        reader.suspend()
        answer = asyncio.create_task(large(here))
        await eventually(lambda: held(here) > 0)
        os.kill(reader.pid, signal.SIGKILL)
        status, text = await answer
        assert status == 503
        assert json.loads(text)["error"]["code"] == "body_not_read"
        assert (await large(here))[0] == 200


async def test_a_client_that_leaves_while_its_body_is_read_holds_up_nobody() -> None:
    async with stage() as here:
        await here.worker()
        assert (await large(here))[0] == 200
        reader = reader_of_this_process()
        reader.suspend()
        text = json.dumps(body(COMPLETIONS, messages=PADDING)).encode()
        sender = await Sender.begin(here, f"Content-Length: {len(text)}", text)
        await eventually(lambda: held(here) == len(text))
        sender.close()
        await eventually(lambda: held(here) == 0)
        assert (await large(here))[0] == 200


async def test_an_idle_reader_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for it to be there still when it is looked for.
    monkeypatch.setattr("dynaplan.gateway.timing.BODY_READER_IDLE_S", 2.0)
    async with stage() as here:
        await here.worker()
        assert (await large(here))[0] == 200
        reader = reader_of_this_process()
        await eventually(lambda: not psutil.pid_exists(reader.pid))
        assert (await large(here))[0] == 200
