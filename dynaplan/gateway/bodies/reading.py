"""Make a checked Call of a body: at once when it is small, in another process when it is large.

Python reads JSON in one go and holds the interpreter's lock meanwhile, so that a thread would stall the
streams of others too: 10 MB of token ids take 0.3 s, the same in empty lists several.
"""

from __future__ import annotations

from dynaplan.gateway.bodies.process import ReadingProcess
from dynaplan.gateway.openai_api import ApiPath, Call, read_call

LARGE_BODY_BYTES = 256 * 1024
"""Bodies beyond this size, in bytes, are read by the process. The worst of this size take about 15 ms."""


class CallReader:
    """Reads bodies of at most ``largest_bytes``; the process starts with the first large one."""

    def __init__(self, largest_bytes: int) -> None:
        self._process = ReadingProcess(largest_bytes)

    async def read(self, endpoint: ApiPath, body: bytes) -> Call:
        """Return the checked request; raises ApiError with the fault."""
        if len(body) <= LARGE_BODY_BYTES:
            return read_call(endpoint, body)
        return await self._process.read(endpoint, body)

    async def close(self) -> None:
        """End the process that reads large bodies; requests that wait for it are answered 503."""
        await self._process.close()
