"""A worker's own server in front of its engine's: for frontends on other hosts.

An engine's server listens on loopback, and not every engine asks for a key. So a worker that other hosts
reach takes their requests itself, asks for the token, and sends them on: one hop more under each piece of an
answer, on the worker's own host.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from dynaplan.util.http_routes import Route
from dynaplan.worker.client import worker_session

PASSED_ON = ("Content-Type", "X-Request-Id")
"""The headers of a request that the engine gets."""

RETURNED = ("Content-Type",)
"""The headers of an answer that the frontend gets."""


class Relay:
    """Sends requests on to the engine at that address, and its answers back, piece by piece."""

    def __init__(self, engine_url: str, token: str) -> None:
        self._engine_url = engine_url
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    def routes(self) -> tuple[Route, ...]:
        """Return the routes of the OpenAI API."""
        return (Route("POST", "/v1/{path:.*}", self.answer),)

    async def close(self) -> None:
        """Close the connections to the engine."""
        if self._session:
            await self._session.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer as the engine does; 503 when it cannot be reached, and has not begun with the request.

        When the engine is lost in the midst of the request, so is the frontend's connection.
        """
        self._session = self._session or worker_session(self._token)
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url = self._engine_url + request.path_qs
        try:
            async with self._session.post(url, data=await request.read(), headers=headers) as upstream:
                return await _sent_on(request, upstream)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return web.json_response({"error": f"the engine does not answer: {error}"}, status=503)
        except (aiohttp.ClientError, asyncio.IncompleteReadError):
            if request.transport:
                request.transport.abort()
            raise


async def _sent_on(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {name: upstream.headers[name] for name in RETURNED if name in upstream.headers}
    response = web.StreamResponse(status=upstream.status, headers=headers)
    await response.prepare(request)
    async for piece in upstream.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response
