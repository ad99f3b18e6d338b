"""Asks every worker for its load over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.http.tls import ClientTls
from dynaplan.planner.timing import WORKER_TIMEOUT_S
from dynaplan.util.documents import parse_object

log = logging.getLogger(__name__)


class HttpWorkerLoads:
    """``GET {url}/load_metrics`` of every worker at once; see ``dynaplan.planner.ports.WorkerLoadSource``.

    ``tls`` is what workers that speak https are verified by.
    """

    def __init__(self, timeout_s: float = WORKER_TIMEOUT_S, tls: ClientTls = True) -> None:
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def loads(self, urls: Sequence[str]) -> tuple[WorkerLoad | None, ...]:
        """Read the load at each address; None for one that does not answer in time, or not with a load."""
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._tls)
            self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        session = self._session
        return tuple(await asyncio.gather(*(self._load(session, url) for url in urls)))

    async def close(self) -> None:
        """Close the connections to the workers, if any were opened."""
        if self._session:
            await self._session.close()

    async def _load(self, session: aiohttp.ClientSession, url: str) -> WorkerLoad | None:
        try:
            async with session.get(f"{url}/load_metrics", raise_for_status=True) as response:
                return WorkerLoad.from_json(parse_object(await response.read()))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.debug("no load from %s: %s: %s", url, type(error).__name__, error)
            return None
