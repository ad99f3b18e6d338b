"""Requests that no client should send are answered in OpenAI's shape, and cost the log one line."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest

from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL, FakeWorker

COMPLETIONS = "/v1/completions"


async def raw(here: Stage, request: bytes) -> bytes:
    """The answer to these bytes, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def request_with(body: bytes, header: bytes) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
        % (
            COMPLETIONS.encode(),
            header,
            len(body),
            body,
        )
    )


async def post_bytes(here: Stage, body: bytes) -> tuple[int, str]:
    async with here.client.post(here.url + COMPLETIONS, data=body) as response:
        return response.status, await response.text()


async def test_a_body_of_any_depth_gets_an_answer_in_json() -> None:
    """Reading and writing JSON give up at different depths, near Python's limit of 1000 calls."""
    async with stage(remote_prefill=True, max_local_prefill_length=0) as here:
        await here.worker()
        await _answering_prefill_worker(here)
        for depth in [100, *range(900, 1000, 4), 5000, 200_000]:
            nested = b'{"model":"%b","prompt":"hi","x":%b%b}' % (MODEL.encode(), b"[" * depth, b"]" * depth)
            status, text = await post_bytes(here, nested)
            assert status in (200, 400), (depth, text)
            assert status == 200 or json.loads(text)["error"]["code"] == "invalid_json"


async def _answering_prefill_worker(here: Stage) -> None:
    """A prefill worker that refuses: what matters is that the prompt was written to the queue."""
    queue = await here.messenger.queue(prefill_stream("ns"))

    async def answer() -> None:
        while item := await queue.get(5):
            request = RemotePrefillRequest.from_json(item.payload)
            reply = PrefillAnswer(request.request_id, error="busy", is_retryable=True)
            await here.messenger.publish(request.reply_to, reply.to_json())
            await item.ack()

    await here.know(await FakeWorker().register(here.store, 99, "PrefillWorker"))
    here.runtime.spawn(answer(), "prefill worker")


@pytest.mark.parametrize(
    ("encoding", "status", "code"),
    [
        ("deflate", 400, "invalid_body"),
        ("gzip", 400, "invalid_body"),
        ("br", 415, "unknown_encoding"),
        ("zstd", 415, "unknown_encoding"),
        ("gzip, deflate", 415, "unknown_encoding"),
    ],
)
async def test_a_broken_or_unknown_content_encoding_is_answered_in_json(
    encoding: str, status: int, code: str
) -> None:
    async with stage() as here:
        await here.worker()
        header = f"Content-Encoding: {encoding}".encode()
        answer = await raw(here, request_with(b"\x00\x01garbage", header))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status)
    assert json.loads(body)["error"]["code"] == code


async def test_a_small_compressed_body_that_becomes_a_large_one_is_refused_at_the_limit() -> None:
    bomb = gzip.compress(b'{"model":"%b","prompt":"%b"}' % (MODEL.encode(), b"x" * 20_000_000))
    async with stage(max_body_bytes=1_000_000) as here:
        await here.worker()
        answer = await raw(here, request_with(bomb, b"Content-Encoding: gzip"))
    assert answer.startswith(b"HTTP/1.1 413")


async def test_no_byte_of_a_malformed_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with stage({"DYNAPLAN_API_KEY": "secret-key"}) as here:
        await here.worker()
        request = request_with(b"{}", b"Authorization: Bearer secret-key").replace(b"\r\n", b"\n")
        answer = await raw(here, request)
    assert answer.startswith(b"HTTP/1.1 400")
    assert "no HTTP request" in caplog.text
    assert "secret-key" not in caplog.text + answer.decode()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
        b"GET / HTTP/1.1\r\nBad Header: \x00\r\n\r\n",
        request_with(b"\x00\x01garbage", b"Content-Encoding: deflate"),
    ],
    ids=["content length", "header", "content encoding"],
)
async def test_a_malformed_request_logs_lines_and_no_traceback(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stage() as here:
        await here.worker()
        answer = await raw(here, request_bytes)
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert [record for record in caplog.records if record.exc_info] == []
    assert all("\n" not in record.getMessage() for record in caplog.records)
