"""An HTTP client for an engine's own server on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dynaplan.http.client import JSON_BODY, HttpClient, WholeAnswer
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import PermanentError, RequestRefused, TemporaryError

CONNECT_TIMEOUT_S = 5.0

MAX_ERROR_LENGTH = 500
"""The number of characters of an engine's error that are passed on."""

RETRYABLE_STATUSES = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which another attempt may succeed."""

BAD_REQUEST_STATUSES = frozenset({400, 413, 422})
"""HTTP statuses that blame the request itself."""


class UnexpectedStatus(TemporaryError):
    """The server answered with another status than 200."""


class ServerClient:
    """Asks one server at ``url`` with the bearer ``token``. Methods raise TemporaryError when it fails.

    With ``takes_any_status`` an answer to a GET counts whatever its status.
    """

    def __init__(self, url: str, token: str, *, takes_any_status: bool = False) -> None:
        self.url = url
        self._takes_any_status = takes_any_status
        self._token = token
        self._http = self._new_http()

    async def text(self, path: str, timeout_s: float) -> str:
        """Get the text at that path; raises UnexpectedStatus for an answer that does not count."""
        answer = await self._request("GET", path, timeout_s)
        if answer.status != 200 and not self._takes_any_status:
            raise UnexpectedStatus(f"{path} of the engine answered {answer.status}")
        return answer.text

    async def is_ready(self, path: str, timeout_s: float = 2.0) -> bool:
        try:
            await self.text(path, timeout_s)
        except TemporaryError:
            return False
        return True

    async def json(self, path: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """Get the JSON object at that path; raises TemporaryError for anything else."""
        return _object(await self.text(path, timeout_s), path)

    async def ask(
        self, path: str, body: Mapping[str, Any], request_id: str, trace: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        """Post a request and return its answer, however long it takes; ``trace`` are headers of its trace.

        Raises PermanentError when the engine will never answer this request (4xx), and RequestRefused when
        the engine blames the request for that.
        """
        headers = {**JSON_BODY, "X-Request-Id": request_id, **(trace or {})}
        try:
            answer = await self._http.request(
                "POST", self.url + path, json.dumps(body).encode(), headers, timeout_s=None
            )
        except OSError as error:
            raise TemporaryError(f"the engine did not answer {request_id}: {_describe(error)}") from error
        text = answer.text
        if answer.status == 200:
            return _object(text, path)
        message = f"the engine answered {request_id} with {answer.status}: {text[:MAX_ERROR_LENGTH]}"
        if answer.status in BAD_REQUEST_STATUSES:
            raise RequestRefused(f"the engine answered: {text[:MAX_ERROR_LENGTH]}", status=answer.status)
        if 400 <= answer.status < 500 and answer.status not in RETRYABLE_STATUSES:
            raise PermanentError(message)
        raise TemporaryError(message)

    async def command(self, path: str, timeout_s: float) -> int:
        """Post without a body; return the status. Raises TemporaryError without an answer."""
        return (await self._request("POST", path, timeout_s)).status

    async def close(self) -> None:
        """Break off what is being asked; it can be asked again, when the engine has been started again."""
        broken_off, self._http = self._http, self._new_http()
        await broken_off.close()

    def _new_http(self) -> HttpClient:
        """Return a client with a connection for each request: engines close idle ones at bad moments."""
        return HttpClient(self._token, keeps_connections=False, connect_timeout_s=CONNECT_TIMEOUT_S)

    async def _request(self, method: str, path: str, timeout_s: float) -> WholeAnswer:
        try:
            return await self._http.request(method, self.url + path, timeout_s=timeout_s)
        except OSError as error:
            raise TemporaryError(f"{path} of the engine: {_describe(error)}") from error


def _object(text: str, path: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:
        raise TemporaryError(f"{path} of the engine: {error} in {text[:MAX_ERROR_LENGTH]!r}") from None


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
