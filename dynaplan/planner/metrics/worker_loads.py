"""Asks every worker for its load over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.http.client import HttpClient
from dynaplan.http.tls import ClientTls
from dynaplan.planner.timing import WORKER_TIMEOUT_S
from dynaplan.util.documents import parse_object

log = logging.getLogger(__name__)


class HttpWorkerLoads:
    """``GET {url}/load_metrics`` of every worker at once; see ``dynaplan.planner.ports.WorkerLoadSource``.

    ``tls`` is what workers that speak https are verified by.
    """

    def __init__(self, timeout_s: float = WORKER_TIMEOUT_S, tls: ClientTls = True) -> None:
        self._http = HttpClient(tls=tls)
        self._timeout_s = timeout_s

    async def loads(self, urls: Sequence[str]) -> tuple[WorkerLoad | None, ...]:
        """Read the load at each address; None for one that does not answer in time, or not with a load."""
        return tuple(await asyncio.gather(*(self._load(url) for url in urls)))

    async def close(self) -> None:
        """Close the connections to the workers, if any were opened."""
        await self._http.close()

    async def _load(self, url: str) -> WorkerLoad | None:
        try:
            answer = await self._http.get(f"{url}/load_metrics", timeout_s=self._timeout_s)
            return WorkerLoad.from_json(parse_object(answer.body))
        except (OSError, ValueError) as error:
            log.debug("no load from %s: %s: %s", url, type(error).__name__, error)
            return None
