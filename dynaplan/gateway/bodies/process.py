"""The process that reads large bodies, as the frontend sees it: started, asked, killed.

``process_main`` is its other side, and says what the two tell each other. It reads one body at a time; a body
that takes too long to read ends the process, and the next body starts another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from array import array
from asyncio.subprocess import PIPE, Process
from typing import Any

from dynaplan.gateway.openai_api import ApiError, ApiPath, Call, bad_request
from dynaplan.process.helper_process import end_helper, helper_environment

log = logging.getLogger(__name__)

MAIN = "dynaplan.gateway.bodies.process_main"
"""The module that the process runs."""

READ_WITHIN_S = 20.0
"""Time that reading one body may take, the start of the process included."""

KEPT_S = 60.0
"""Time for which the process is kept without work: it holds 15 MB, and gives back what bodies took."""

PIECE_BYTES = 256 * 1024
"""Bytes of a body that are given to the process at once; other work goes on between two pieces."""

LONGEST_ANSWER_BYTES = 1024 * 1024
"""Bytes of an answer's line at most: the fields of the body without prompt, and an error's message."""

BASE_MEMORY_BYTES = 512 * 1024 * 1024
MEMORY_PER_BYTE = 48
"""Memory that the process may take: the base, and this for every byte of the largest body.

``[{"":0},{"":0},...]`` takes 34 bytes of memory for each of its own.
"""


class ReadingProcess:
    """Reads bodies of at most ``largest_bytes``; started when needed, ended when idle."""

    def __init__(self, largest_bytes: int) -> None:
        self._memory_bytes = BASE_MEMORY_BYTES + MEMORY_PER_BYTE * largest_bytes
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def read(self, endpoint: ApiPath, body: bytes) -> Call:
        """Return the checked request, its document without the prompt; raises ApiError with the fault."""
        async with self._turn:
            if self._idle:
                self._idle.cancel()
            is_well = False
            try:
                async with asyncio.timeout(READ_WITHIN_S):
                    answer, prompt = await self._asked(endpoint, body)
                is_well = True
            except TimeoutError:
                raise bad_request(
                    f"The body could not be read within {READ_WITHIN_S:g} s", code="body_too_complex"
                ) from None
            except (OSError, EOFError, ValueError) as error:
                log.warning("a large body was not read, its reader has ended: %r", error)
                raise _reader_ended() from None
            finally:
                if not is_well:
                    await self._end()
            self._idle = asyncio.get_running_loop().call_later(KEPT_S, self._end_idle)
        if fault := answer.get("error"):
            raise ApiError(answer["status"], fault.pop("message"), kind=fault.pop("type"), **fault)
        return _call(endpoint, body, answer, prompt)

    async def close(self) -> None:
        """End the process; return when it is gone."""
        if self._idle:
            self._idle.cancel()
        await self._end()

    async def _asked(self, endpoint: ApiPath, body: bytes) -> tuple[dict[str, Any], bytes]:
        process = self._process = self._process or await self._started()
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps({"path": endpoint.path, "bytes": len(body)}).encode() + b"\n")
        whole = memoryview(body)
        for begin in range(0, len(body), PIECE_BYTES):
            process.stdin.write(whole[begin : begin + PIECE_BYTES])
            await process.stdin.drain()
        answer: dict[str, Any] = json.loads(await process.stdout.readline())
        return answer, await process.stdout.readexactly(answer.get("prompt_bytes", 0))

    async def _started(self) -> Process:
        command = (sys.executable, "-P", "-m", MAIN, str(os.getpid()), str(self._memory_bytes))
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env=helper_environment(), limit=LONGEST_ANSWER_BYTES
        )

    def _end_idle(self) -> None:
        # Taken now, not by the task: a body that comes meanwhile is not for a process that is ended.
        process, self._process = self._process, None
        if process:
            self._ending = asyncio.ensure_future(end_helper(process))

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process:
            # A cancelled request must not leave a process that nobody waits for.
            await end_helper(process)


def _reader_ended() -> ApiError:
    return ApiError(
        503,
        "The process that reads large bodies has ended. Try again.",
        kind="service_unavailable",
        code="body_not_read",
        metric="internal",
        headers={"Retry-After": "1"},
    )


def _call(endpoint: ApiPath, body: bytes, answer: dict[str, Any], prompt: bytes) -> Call:
    return Call(
        endpoint=endpoint,
        body=body,
        document=answer["document"],
        model=answer["model"],
        is_stream=answer["is_stream"],
        prompt=prompt.decode("utf-8", "surrogatepass") if answer["is_text"] else tuple(array("Q", prompt)),
        prompt_tokens=answer["prompt_tokens"],
        is_whole=False,
        prompts=answer["prompts"],
        address=answer["address"],
        has_media=answer["has_media"],
    )
