"""The process that reads large bodies, as the frontend sees it: started, asked, killed.

``process_main`` is its other side, and has the questions and answers. It reads one body at a time; a body
that takes too long to read ends the process, and the next body starts another.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from typing import Any

from dynaplan.gateway.openai_api import ApiError, ApiPath, Call, bad_request
from dynaplan.process.helper import HelperFailed, HelperLimits, HelperProcess, HelperTooSlow

log = logging.getLogger(__name__)

MAIN = "dynaplan.gateway.bodies.process_main"
"""The module that the process runs."""

READ_WITHIN_S = 20.0
"""Time that reading one body may take, the start of the process included."""

KEPT_S = 60.0
"""Time for which the process is kept without work: it holds 15 MB, and gives back what bodies took."""

BASE_MEMORY_BYTES = 512 * 1024 * 1024
MEMORY_PER_BYTE = 48
"""Memory that the process may take: the base, and this for every byte of the largest body.

``[{"":0},{"":0},...]`` takes 34 bytes of memory for each of its own.
"""


class ReadingProcess:
    """Reads bodies of at most ``largest_bytes``; started when needed, ended when idle."""

    def __init__(self, largest_bytes: int) -> None:
        memory_bytes = BASE_MEMORY_BYTES + MEMORY_PER_BYTE * largest_bytes
        self._helper = HelperProcess(MAIN, (), HelperLimits(READ_WITHIN_S, memory_bytes, idle_s=KEPT_S))
        self._turn = asyncio.Lock()

    async def read(self, endpoint: ApiPath, body: bytes) -> Call:
        """Return the checked request, its document without the prompt; raises ApiError with the fault."""
        async with self._turn:
            try:
                answer, prompt = await self._helper.ask({"path": endpoint.path}, body)
            except HelperTooSlow:
                raise bad_request(
                    f"The body could not be read within {READ_WITHIN_S:g} s", code="body_too_complex"
                ) from None
            except HelperFailed as failure:
                log.warning("a large body was not read, its reader has ended: %s", failure)
                raise _reader_ended() from None
            except asyncio.CancelledError:  # nobody waits for this body, and the next one should not
                await self._helper.end()
                raise
        if fault := answer.get("error"):
            raise ApiError(answer["status"], fault.pop("message"), kind=fault.pop("type"), **fault)
        return _call(endpoint, body, answer, prompt)

    async def close(self) -> None:
        """End the process; return when it is gone."""
        await self._helper.close()


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
