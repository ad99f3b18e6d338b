"""An HTTP client for an engine's own server on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynaplan.util.documents import parse_object
from dynaplan.util.errors import PermanentError, RequestRefused, TemporaryError

if TYPE_CHECKING:
    from aiohttp import ClientSession

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
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: ClientSession | None = None

    async def text(self, path: str, timeout_s: float) -> str:
        """Get the text at that path; raises UnexpectedStatus for an answer that does not count."""
        import aiohttp

        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._open_session().get(self.url + path, timeout=timeout) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TemporaryError(f"{path} of the engine: {_describe(error)}") from error
        if response.status != 200 and not self._takes_any_status:
            raise UnexpectedStatus(f"{path} of the engine answered {response.status}")
        return data.decode(errors="replace")

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
        import aiohttp

        headers = {"X-Request-Id": request_id, **(trace or {})}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._open_session().post(
                self.url + path, json=body, headers=headers, timeout=timeout
            ) as response:
                text = (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TemporaryError(f"the engine did not answer {request_id}: {_describe(error)}") from error
        if response.status == 200:
            return _object(text, path)
        message = f"the engine answered {request_id} with {response.status}: {text[:MAX_ERROR_LENGTH]}"
        if response.status in BAD_REQUEST_STATUSES:
            raise RequestRefused(f"the engine answered: {text[:MAX_ERROR_LENGTH]}", status=response.status)
        if 400 <= response.status < 500 and response.status not in RETRYABLE_STATUSES:
            raise PermanentError(message)
        raise TemporaryError(message)

    async def command(self, path: str, timeout_s: float) -> int:
        """Post without a body; return the status. Raises TemporaryError without an answer."""
        import aiohttp

        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._open_session().post(self.url + path, timeout=timeout) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TemporaryError(f"{path} of the engine: {_describe(error)}") from error
        return response.status

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> ClientSession:
        """Open the session, with a connection per request: engines close idle connections at bad moments."""
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session


def _object(text: str, path: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:
        raise TemporaryError(f"{path} of the engine: {error} in {text[:MAX_ERROR_LENGTH]!r}") from None


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
