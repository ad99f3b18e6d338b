"""The name of a request, which every response bears: the client's own where it is usable."""

from __future__ import annotations

import re
from random import Random

from aiohttp import web

REQUEST_ID = "X-Request-Id"
"""The header, of requests and of responses."""

USABLE = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}", re.ASCII)
"""The form of an id that is sent back: nothing that could break a header or a line of a log."""


_RANDOM = Random()  # a tenth of the cost of a UUID, for a name that is no secret


def new_request_id() -> str:
    """Return an id of 128 random bits, as 32 hexadecimal digits."""
    return f"{_RANDOM.getrandbits(128):032x}"


def request_id(given: str | None) -> str:
    """Return the client's id, or a new one when it gave none or one that is not usable."""
    return given if given and USABLE.fullmatch(given) else new_request_id()


async def name_response(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Put the request's id into the response, before its headers are sent."""
    response.headers[REQUEST_ID] = request_id(request.headers.get(REQUEST_ID))


class NamedRequest(web.BaseRequest):
    """A request of a server without an application, whose responses bear its id."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Take the place of an application's ``on_response_prepare``: aiohttp calls it for each response."""
        await name_response(self, response)
